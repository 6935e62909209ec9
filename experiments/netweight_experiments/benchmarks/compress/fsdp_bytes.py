"""How many bytes FSDP2 gathers of a compressed model, against the same model dense: written to results/ as JSON.

    python -m netweight_experiments.benchmarks compress.fsdp_bytes

Two processes on this machine, connected by gloo, train a Llama of random bf16 weights (N(0, 0.02), as transformers
makes them) by AdamW, every decoder layer a group of its own: once dense, once after `netweight.compress_`. Every
collective is counted where torch.distributed is called; bytes are those that one process sends.

gathered            Bytes given to the all-gathers of one step, per step: those of the weights, forward and backward.
agreed              Calls of all-reduce, by which the processes agree on capacities: once per weight.
completed           Second gathers, for shards that had outgrown their capacity.
reduced             Bytes given to the reduce-scatters of one step, for each process that gets a part: gradients, which
                    are dense in both.
headroom            How much larger the capacities are than the longest compressed shards.
held                Bytes of one process's shards between steps.
seconds             Per step, the median. For information: both processes share this machine, and gloo moves the bytes
                    through its memory, so that fewer bytes save next to nothing here, and decoding costs.
"""

import json
import statistics
import tempfile
import time
from argparse import Namespace
from pathlib import Path

import torch
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import netweight
from netweight.core.files import digest_tensor

COUNTED = ("all_gather_single", "all_gather", "all_reduce", "reduce_scatter_single")
TOKENS = 64
PROCESSES = 2


class Counted:
    """A function of torch.distributed, its calls and the bytes that it was given to send."""

    def __init__(self, name):
        self.call = getattr(torch.distributed, name)
        self.calls, self.nbytes = 0, 0
        setattr(torch.distributed, name, self)

    def __call__(self, *arguments, **named):
        # all_reduce(sent), all_gather*(received, sent) and reduce_scatter*(received, sent), by place or by name
        sent = arguments[min(1, len(arguments) - 1)] if arguments else named.get("input_tensor", named.get("input"))
        self.calls += 1
        self.nbytes += sent.nbytes if isinstance(sent, torch.Tensor) else arguments[0].nbytes
        return self.call(*arguments, **named)

    def taken(self):
        found = self.calls, self.nbytes
        self.calls = self.nbytes = 0
        return found


def make(options, compressed):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=options.vocabulary,
            hidden_size=options.hidden,
            intermediate_size=options.hidden * 11 // 4,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // 64,
            tie_word_embeddings=False,
        )
    ).to(torch.bfloat16)
    if compressed:
        netweight.compress_(model)
    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(options, compressed, counted):
    """Train one of the two models; return what was counted in this process."""
    model = make(options, compressed)
    weights = sum(parameter.numel() for parameter in model.parameters())
    held = netweight.memory_footprint(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    tokens = torch.Generator().manual_seed(torch.distributed.get_rank())
    steps, seconds = [], []
    for function in counted.values():
        function.taken()
    for _ in range(options.steps):
        ids = torch.randint(0, options.vocabulary, (1, TOKENS), generator=tokens)
        started = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - started)
        steps.append({name: function.taken() for name, function in counted.items()})
    with torch.no_grad():
        model(input_ids=ids)
    _, once = counted["all_gather_single"].taken()
    model.reshard()
    return {
        "weights": weights,
        "held_bytes": held,
        "steps": steps,
        "seconds": seconds,
        "digests": [digest_tensor(parameter.full_tensor()) for parameter in model.parameters()],
        "headroom": headroom(model, once) if compressed else None,
    }


def headroom(model, gathered):
    """How much more one gather of all compressed weights sent than it had to, as a part of what it had to.

    Args:
        model: Whose weights are compressed and sharded.
        gathered: Bytes that this process sent, with every weight gathered once.
    """
    parts = [parameter.to_local() for parameter in model.parameters()]
    dense = sum(part.nbytes for part in parts if not isinstance(part, netweight.CompressedTensor))
    used = torch.tensor([len(part.stored.blob) for part in parts if isinstance(part, netweight.CompressedTensor)])
    torch.distributed.all_reduce(used, torch.distributed.ReduceOp.MAX)
    return (gathered - dense) / int(used.sum()) - 1


def described(found):
    gathers = [step["all_gather_single"] for step in found["steps"]]
    return {
        "gathered_bytes_per_step": [nbytes for _, nbytes in gathers],
        "gathers_per_step": [calls for calls, _ in gathers],
        "agreed_per_step": [step["all_reduce"][0] for step in found["steps"]],
        "completed_per_step": [step["all_gather"][0] for step in found["steps"]],
        "completed_bytes_per_step": [step["all_gather"][1] for step in found["steps"]],
        "reduced_bytes_per_step": [step["reduce_scatter_single"][1] // PROCESSES for step in found["steps"]],
        "held_bytes": found["held_bytes"],
        "seconds_per_step": [round(value, 3) for value in found["seconds"]],
        "seconds_median": round(statistics.median(found["seconds"]), 3),
    }


def process(rank, folder, options):
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=PROCESSES
    )
    counted = {name: Counted(name) for name in COUNTED}
    dense, compressed = (train(options, which, counted) for which in (False, True))
    if rank == 0:
        one, other = described(dense), described(compressed)
        pairs = zip(one["gathered_bytes_per_step"], other["gathered_bytes_per_step"], strict=True)
        traffic = [sum(part["gathered_bytes_per_step"] + part["reduced_bytes_per_step"]) for part in (one, other)]
        result = {
            "weights": dense["weights"],
            "bit_identical": dense["digests"] == compressed["digests"],
            "dense": one,
            "compressed": other,
            "ratio_gathered_per_step": [round(after / before, 4) for before, after in pairs],
            "ratio_gathered_and_reduced": round(traffic[1] / traffic[0], 4),
            "ratio_held": round(other["held_bytes"] / one["held_bytes"], 4),
            "ratio_seconds": round(other["seconds_median"] / one["seconds_median"], 3),
            "headroom": round(compressed["headroom"], 5),
        }
        Path(folder, "result.json").write_text(json.dumps(result))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main(*, hidden: int = 512, layers: int = 8, vocabulary: int = 16000, steps: int = 6):
    options = Namespace(hidden=hidden, layers=layers, vocabulary=vocabulary, steps=steps)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(  # type: ignore[attr-defined]
            process, (folder, options), nprocs=PROCESSES
        )
        found = json.loads(Path(folder, "result.json").read_text())
    return {"processes": PROCESSES, "backend": "gloo", "tokens": TOKENS, **found}
