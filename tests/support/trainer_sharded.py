"""transformers' own `Trainer` with FSDP2 in two processes on the CPU, dense beside compressed.

Usage: trainer_sharded.py FOLDER, in both processes; the first process prints what is the same, as JSON.
"""

import json
import os
import sys
import warnings

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor
from trainer_under_test import arguments, data, llama
from transformers import Trainer

import netweight


def run(folder, model):
    """Losses of the steps, and the weights at the end: whole, and how many are shards that are compressed."""
    options = arguments(folder, max_steps=4, learning_rate=0.05, optim="adamw_torch", ddp_backend="gloo")
    trainer = Trainer(model, options, train_dataset=data())
    # On the CPU accelerate shards nothing, whatever its configuration says: it is told that it does.
    state = trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
        cpu_ram_efficient_loading=False,
    )  # fmt: skip
    PartialState._shared_state["distributed_type"] = state.distributed_type = DistributedType.FSDP
    trainer.is_fsdp_enabled = True
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    shards = [value for value in trainer.model.parameters() if isinstance(value, DTensor)]
    weights = [value.full_tensor() for value in shards]
    compressed = sum(isinstance(value.to_local(), netweight.CompressedTensor) for value in shards)
    PartialState._shared_state["distributed_type"] = state.distributed_type = DistributedType.MULTI_CPU
    return losses, weights, compressed


def main(folder):
    losses, weights, _ = run(f"{folder}/dense", llama().bfloat16())
    model = llama().bfloat16()
    done = netweight.compress_(model)
    ours, found, compressed = run(f"{folder}/ours", model)
    same = len(weights) == len(found) and all(torch.equal(a, b) for a, b in zip(weights, found, strict=True))
    result = {"losses": ours == losses and len(losses) == 4, "weights": same and bool(weights)}
    result["compressed"] = compressed == len(done.compressed)
    if os.environ["RANK"] == "0":
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(sys.argv[1])
