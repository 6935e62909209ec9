"""NeuZip's table 3(a) at the paper's size: memory and speed of ways to hold a decoder's weights, on random weights.

Three speeds stand side by side: forward passes over windows, as in the paper; generation token by token with a cache;
and the products with the weights alone, without what a model does around them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from statistics import median
from typing import Any

import torch
from torch import nn

import netweight
from netweight.core.seeds import torch_generator
from netweight.errors import MissingExtra, Unsupported
from netweight.hf.quantizers import held_bytes, linear_layers, quantize_, quantizers
from netweight.report.finding import Finding, Table
from netweight_experiments.tables.neuzip.paper_scale_models import (
    PAPER,
    TRIAL,
    Found,
    Run,
    by_shape,
    chosen_device,
    in_turns,
    random_model,
)
from netweight_experiments.tables.neuzip.training import GIB, SEED
from netweight_experiments.tables.registry import Measured

VANILLA, LOSSLESS, FIXED = "Vanilla", "NeuZip 7-bit (lossless)", "netweight, fixed length"
RELOADED, THREE_BITS = "Offload and reload", "NeuZip 3-bit"
# Names of rows, as the paper has them where it does; the most important ones first.
WAYS = (VANILLA, LOSSLESS, FIXED, RELOADED, "Quant NF4", "Quant INT8", THREE_BITS)
_TARGET = 0.9  # of bf16's speed


def infer(run: Run) -> dict[str, Any]:
    """Measure one way beside the dense model, in the same rounds."""
    extent, device = run.extent, chosen_device(run.device)
    dense: Any = _dense_model(run.shape, run.device, run.trial)
    layers = linear_layers(dense)
    try:
        model: Any = dense if run.way == VANILLA else copy.deepcopy(dense)
        _apply(run.way, model, layers, device)
        tasks = _tasks(dense, layers, extent, device)
        window = tasks["window"]
        same = bool(torch.equal(window(model), window(dense)))
        seconds: dict[str, Any] = {}
        for name, task in tasks.items():
            both = {"way": lambda task=task: task(model), "vanilla": lambda task=task: task(dense)}
            seconds[name] = in_turns(both, device, rounds=extent.rounds)
        peak = _peak(window, model, device)
        return {"held": held_bytes(model), "same": same, "seconds": seconds, **peak}
    except (Unsupported, MissingExtra) as error:
        return {"missing": error.reason.removesuffix(".")}
    except torch.OutOfMemoryError as error:
        return {"missing": f"out of memory: {str(error).splitlines()[0]}"}


@lru_cache(maxsize=1)  # shared by the ways of a shape; a second one might not fit beside it
def _dense_model(shape: str, device: str, trial: bool) -> nn.Module:
    extent = TRIAL if trial else PAPER
    model: Any = random_model(shape, extent, chosen_device(device))
    model.eval()
    held: nn.Module = model
    return held


def _apply(way: str, model: nn.Module, layers: Sequence[str], device: torch.device) -> None:
    if way == VANILLA:
        return
    if way == RELOADED:
        _reload(model, layers, device)
    elif way in (LOSSLESS, FIXED):
        netweight.compress_(model, include=layers, prefer="speed" if way == FIXED else "memory")
    elif way == THREE_BITS:
        netweight.compress_(model, include=layers, mantissa_bits=3, block_size=512)
    else:
        quantize_(model, next(quantizer for quantizer in quantizers() if quantizer.name == way), list(layers))


def _reload(model: nn.Module, layers: Sequence[str], device: torch.device) -> None:
    """Let the weights of some layers wait in pinned memory of the host; each is copied when its layer runs."""
    if device.type != "cuda":
        raise Unsupported("there is no host to offload to from a CPU")

    class Reloaded(nn.Module):
        def __init__(self, dense: nn.Linear) -> None:
            super().__init__()
            self.away = dense.weight.detach().to("cpu").pin_memory()  # no parameter: it must not count as held
            self.bias = dense.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(x, self.away.to(device, non_blocking=True), self.bias)

    for name in layers:
        dense: Any = model.get_submodule(name)
        model.set_submodule(name, Reloaded(dense))


def _tasks(dense: Any, layers: Sequence[str], extent: Any, device: torch.device) -> dict[str, Callable[[Any], Any]]:
    """What is timed: functions of a model."""
    vocabulary = dense.config.vocab_size

    def ids(rows: int, length: int) -> torch.Tensor:
        return torch.randint(vocabulary, (rows, length), generator=torch_generator(SEED, "ids", rows)).to(device)

    def forward(rows: torch.Tensor) -> Callable[[Any], Any]:
        def run(model: Any) -> Any:
            with torch.inference_mode():
                return model(input_ids=rows, use_cache=False).logits

        return run

    def generate(rows: torch.Tensor) -> Callable[[Any], Any]:
        count = extent.tokens
        attended = torch.ones_like(rows)

        def run(model: Any) -> Any:
            with torch.inference_mode():
                return model.generate(
                    rows, attention_mask=attended, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                    pad_token_id=0,
                )  # fmt: skip

        return run

    def products(batch: int) -> Callable[[Any], Any]:
        widths = {dense.get_submodule(name).in_features for name in layers}
        given = {
            width: torch.randn(batch, width, generator=torch_generator(SEED, "x", width)).bfloat16().to(device)
            for width in widths
        }
        inputs = [(name, given[dense.get_submodule(name).in_features]) for name in layers]

        def run(model: Any) -> None:
            with torch.inference_mode():
                for name, x in inputs:
                    model.get_submodule(name)(x)

        return run

    tasks = {"window": forward(ids(1, extent.window))}
    for batch in extent.batches:
        tasks[f"generate {batch}"] = generate(ids(batch, extent.prompt))
        tasks[f"products {batch}"] = products(batch)
    return tasks


def _peak(window: Callable[[Any], Any], model: Any, device: torch.device) -> dict[str, int]:
    """The most bytes that a forward pass held on the GPU beyond what was there before, and the model's own."""
    if device.type != "cuda":
        return {}
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    window(model)
    return {"peak": torch.cuda.max_memory_allocated(device) - before + held_bytes(model)}


def measured_inference(found: Found) -> Measured:
    """Lay runs out as table 3(a) without its perplexities, and further speeds in a table of their own."""
    by = {(run.shape, run.way): value for run, value in found.items() if "missing" not in value}
    return by_shape(
        found,
        WAYS,
        lambda value: int(value["held"]),
        lambda value: value["seconds"]["window"]["way"],
        lambda shape, of: [one for way in (LOSSLESS, FIXED) if way in of for one in _findings(shape, way, of[way])],
        differs=("Weights and tokens are random: there is no perplexity to compare.",),
        tables=tuple(_speeds(shape, by) for shape in dict.fromkeys(run.shape for run in found)),
        notes=("Memory is what parameters and buffers hold. All ways convert the same layers.",),
    )


def _ratio(value: Mapping[str, Any], task: str) -> float:
    """Speed over the dense model's: the median over rounds."""
    seconds = value["seconds"][task]
    return float(median(dense / way for way, dense in zip(seconds["way"], seconds["vanilla"], strict=True)))


def _speeds(shape: str, by: Mapping[tuple[str, str], Mapping[str, Any]]) -> Table:
    rows = [(way, by[shape, way]) for way in WAYS if (shape, way) in by]
    tasks = list(rows[0][1]["seconds"]) if rows else []
    return Table(
        f"{shape}: speed over the dense bf16 model's, and peak",
        ["way", *tasks, "peak, GiB"],
        [
            (way, *(_ratio(value, task) for task in tasks), value["peak"] / GIB if "peak" in value else None)
            for way, value in rows
        ],
        ["Medians over rounds. Generation includes the prompt; products are those with the converted weights alone."],
    )


def _findings(shape: str, way: str, value: Mapping[str, Any]) -> list[Finding]:
    tasks = value["seconds"]
    aimed = {"window"} if way == LOSSLESS else {task for task in tasks if task.startswith("generate")}
    aimed = aimed if shape == PAPER.shapes[0] else set()
    return [
        Finding(
            f"{shape}, {way}: speed of {task} over bf16", _ratio(value, task), better="higher",
            target=_TARGET if task in aimed else None, n=len(tasks[task]["way"]), seeds=(SEED,),
        )
        for task in tasks
    ]  # fmt: skip
