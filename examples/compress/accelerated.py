r"""Train a compressed language model, layer by layer, in as many processes as accelerate finds itself in.

    accelerate launch --num-processes 2 examples/compress/accelerated.py /tmp/trained         # two GPUs
    ACCELERATE_USE_CPU=true torchrun --nproc-per-node 2 examples/compress/accelerated.py /tmp/trained

On a CPU `accelerate launch` starts a single process, however many are asked for, unless MPI starts them; torchrun
starts two. Every process holds the whole model, compressed, and sees its own batches; gradients are averaged layer by
layer, as soon as they exist. Put a model and data of your own in place of the world's.
"""

import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

import netweight
from netweight.data.tokens import Example, collate
from netweight.toys.language import cipher_world


def batches(count: int) -> DataLoader[Example]:
    """Prompts with answers of the world's new domain, four at a time."""
    examples = cipher_world().examples("new", count, seed=0)
    return DataLoader(examples, batch_size=4, collate_fn=lambda rows: vars(collate(rows, pad_id=0)))  # type: ignore[arg-type]


def main() -> None:
    """Every process runs this."""
    accelerator = Accelerator()
    model = cipher_world().base().to(accelerator.device)
    report = netweight.compress_(model)
    # The model is not prepared: a wrapper that reduces gradients itself would come too late, and is refused.
    together = accelerator.num_processes > 1
    optimizer = netweight.LayerwiseOptimizer(
        model, torch.optim.AdamW, lr=1e-3, reduce=netweight.average_gradient if together else None
    )
    loader = accelerator.prepare(batches(48))
    model.train()
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
    if accelerator.is_main_process:
        netweight.save_checkpoint(Path(sys.argv[1]) / "training.safetensors", model, optimizer)
        print(
            f"{optimizer.steps} steps, loss {loss.item():.4f}, the weights take {report.share:.1%} of their dense size"
        )
    accelerator.end_training()


if __name__ == "__main__":
    main()
