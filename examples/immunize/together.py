"""Immunize the little model of ciphers in several processes, sharded by FSDP2 or replicated by DDP.

    torchrun --nproc-per-node 2 examples/immunize/together.py /tmp/defended
    torchrun --nproc-per-node 2 examples/immunize/together.py /tmp/defended --replicate

Put a model and pairs of your own in place of the world's. On GPUs each process takes the one of its local rank.
"""

import argparse
import os
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from netweight.hf.load_language_model import structure_of
from netweight.methods.immunize.settings import TrainingSettings
from netweight.methods.immunize.train import immunize
from netweight.toys.language import cipher_world


def main() -> None:
    """Every process runs this."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="Where checkpoint and record go; a second start continues.")
    parser.add_argument("--replicate", action="store_true", help="A whole model in every process.")
    parser.add_argument("--pairs", type=int, default=48)
    options = parser.parse_args()

    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")

    world = cipher_world()
    model: torch.nn.Module = world.base().to(device)
    if options.replicate:
        model = DistributedDataParallel(model)
    else:
        for block in structure_of(model).blocks.values():
            fully_shard(block)
        fully_shard(model)
    record = immunize(
        model,
        world.pairs(options.pairs, seed=0),
        world.examples("keep", options.pairs, seed=0, share="defense"),
        settings=TrainingSettings(lr=3e-4, batch_size=24, checkpoint_every=1),
        folder=options.folder,
    )
    if torch.distributed.get_rank() == 0:
        last = record.steps[-1]
        terms = ", ".join(f"{name} {term.value:.3f}" for name, term in last.terms.items())
        print(f"step {last.step + 1} in {record.environment['processes']} processes: {terms}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
