"""NeuZip's table 3(a) at the paper's size: memory and speed of ways to hold a decoder's weights, on random weights.

Four speeds stand side by side: forward passes over windows, as in the paper; generation token by token with a cache;
one such step under a CUDA graph, without what Python takes; under a graph too, the products with the weights alone.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import nn

import netweight
from netweight.core.seeds import torch_generator
from netweight.errors import MissingExtra, Unsupported
from netweight.report.finding import Finding, Table
from netweight_experiments.cuda_graphs import captured
from netweight_experiments.tables.neuzip.paper_scale_models import (
    PAPER,
    Extent,
    Found,
    Run,
    by_shape,
    chosen_device,
    dense_model,
    in_turns,
)
from netweight_experiments.tables.neuzip.quantizers import held_bytes, linear_layers, quantize_, quantizers
from netweight_experiments.tables.neuzip.training import GIB, SEED
from netweight_experiments.tables.registry import MeasuredTable

VANILLA, LOSSLESS, FIXED = "Vanilla", "NeuZip 7-bit (lossless)", "netweight, fixed length"
RELOADED, THREE_BITS = "Offload and reload", "NeuZip 3-bit"
# Names of rows, as the paper has them where it does; the most important ones first.
WAYS = (LOSSLESS, FIXED, VANILLA, RELOADED, "Quant NF4", "Quant INT8", THREE_BITS)
_TARGETS = {  # speed over bf16's
    (FIXED, "step 1"): 1.0, (FIXED, "step 32"): 0.95, (LOSSLESS, "step 1"): 0.33, (LOSSLESS, "step 32"): 0.8,
}  # fmt: skip
_SAVED = {FIXED: 0.24, LOSSLESS: 0.32}  # of the converted weights' bytes, as the driver sees it
_ALLOCATED = 200e6  # bytes for a step at batch 1
_STEPS = 64  # room in a cache for steps that are timed


@dataclass(frozen=True)
class _Task:
    """What is timed."""

    bind: Callable[[Any], Callable[[], Any]]
    """A model → what runs it."""
    graph: bool = False
    """Whether it is replayed from a CUDA graph."""


def infer(run: Run, extent: Extent | None = None, wanted: Callable[[str], bool] = lambda task: True) -> dict[str, Any]:
    """Measure one way beside the dense model, in the same rounds; those of its tasks that are wanted."""
    extent, device = extent or run.extent, chosen_device(run.device)
    dense: Any = dense_model(run.shape, run.device, run.trial)
    layers = linear_layers(dense)
    try:
        if run.way in (LOSSLESS, FIXED):  # kernels take memory where they are loaded, once
            apply_way(run.way, nn.Sequential(nn.Linear(1024, 1024, dtype=torch.bfloat16, device=device)), ["0"], device)
        converted = sum(dense.get_submodule(name).weight.nbytes for name in layers)
        model: Any = dense if run.way == VANILLA else copy.deepcopy(dense)
        used = _used(device)
        apply_way(run.way, model, layers, device)
        found: dict[str, Any] = {"held": held_bytes(model), "saved": (used - _used(device)) / converted}
        seconds: dict[str, Any] = {}
        for name, task in tasks_of(dense, layers, extent, device).items():
            if not wanted(name):
                continue
            both = {"way": task.bind(model), "vanilla": task.bind(dense)}
            if name == "window":
                found["same"] = bool(torch.equal(both["way"](), both["vanilla"]()))
                found["peak"] = found["held"] + _allocated(both["way"], device)
            if name == "step 1":
                found["allocated"] = _allocated(both["way"], device)
            if task.graph:
                try:
                    both = {who: captured(call, device) for who, call in both.items()}
                except RuntimeError as error:  # of both or of none: eager against eager is fair, too
                    found["eager"] = {**found.get("eager", {}), name: str(error).splitlines()[0]}
            seconds[name] = in_turns(both, device, rounds=extent.rounds)
        return {**found, "seconds": seconds}
    except (Unsupported, MissingExtra) as error:
        return {"missing": error.reason.removesuffix(".")}
    except RuntimeError as error:  # out of memory, or what another library refuses: the other ways are measured
        return {"missing": str(error).splitlines()[0].removesuffix(".")}


def apply_way(way: str, model: nn.Module, layers: Sequence[str], device: torch.device) -> None:
    """Put some layers of a dense model into the form that a way keeps them in, in place."""
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


def tasks_of(dense: Any, layers: Sequence[str], extent: Any, device: torch.device) -> dict[str, _Task]:
    """Return what is timed, by name: a window, one step and the products at every batch, and generation."""
    from transformers import StaticCache

    vocabulary = dense.config.vocab_size

    def ids(rows: int, length: int) -> torch.Tensor:
        return torch.randint(vocabulary, (rows, length), generator=torch_generator(SEED, "ids", rows)).to(device)

    def forward(rows: torch.Tensor, **options: Any) -> Callable[[Any], Callable[[], Any]]:
        @torch.inference_mode()
        def run(model: Any) -> Any:
            return model(input_ids=rows, **options).logits

        return lambda model: lambda: run(model)

    def generate(rows: torch.Tensor) -> Callable[[Any], Callable[[], Any]]:
        count = extent.tokens
        attended = torch.ones_like(rows)

        @torch.inference_mode()
        def run(model: Any) -> Any:
            return model.generate(
                rows, attention_mask=attended, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                pad_token_id=0,
            )  # fmt: skip

        return lambda model: lambda: run(model)

    def step(batch: int) -> Callable[[Any], Callable[[], Any]]:
        def bind(model: Any) -> Callable[[], Any]:
            cache = StaticCache(config=model.config, max_cache_len=extent.prompt + _STEPS)
            forward(ids(batch, extent.prompt), past_key_values=cache, use_cache=True)(model)()
            return forward(ids(batch, 1), past_key_values=cache, use_cache=True)(model)

        return bind

    def products(batch: int) -> Callable[[Any], Callable[[], Any]]:
        widths = {dense.get_submodule(name).in_features for name in layers}
        given = {
            width: torch.randn(batch, width, generator=torch_generator(SEED, "x", width)).bfloat16().to(device)
            for width in widths
        }
        inputs = [(name, given[dense.get_submodule(name).in_features]) for name in layers]

        @torch.inference_mode()
        def run(model: Any) -> None:
            for name, x in inputs:
                model.get_submodule(name)(x)

        return lambda model: lambda: run(model)

    tasks = {"window": _Task(forward(ids(1, extent.window), use_cache=False))}
    for batch in extent.batches:
        tasks[f"step {batch}"] = _Task(step(batch), graph=True)
        tasks[f"products {batch}"] = _Task(products(batch), graph=True)
    for batch in (min(extent.batches), max(extent.batches)):
        tasks[f"generate {batch}"] = _Task(generate(ids(batch, extent.prompt)))
    return tasks


def _used(device: torch.device) -> int:
    """Bytes of a GPU that are in use, as the driver says; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.synchronize(device)
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _allocated(run: Callable[[], Any], device: torch.device) -> int:
    """The most bytes that a run allocated on a GPU beyond what was there before; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run()
    return torch.cuda.max_memory_allocated(device) - before


def measured_inference(found: Found) -> MeasuredTable:
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
        [(way, *(_ratio(value, task) for task in tasks), value["peak"] / GIB) for way, value in rows],
        [
            "Medians over rounds. Generation includes the prompt; products are those with the converted weights alone.",
            *(
                f"{way}, {task} ran without a CUDA graph: {reason}"
                for way, value in rows
                for task, reason in value.get("eager", {}).items()
            ),
        ],
    )


def _findings(shape: str, way: str, value: Mapping[str, Any]) -> list[Finding]:
    tasks = value["seconds"]
    aimed = shape == PAPER.shapes[0]
    return [
        *(
            Finding(
                f"{shape}, {way}: speed of {task} over bf16", _ratio(value, task), better="higher",
                target=_TARGETS.get((way, task)) if aimed else None, n=len(tasks[task]["way"]), seeds=(SEED,),
            )
            for task in tasks
        ),
        Finding(
            f"{shape}, {way}: converted weights saved, as the driver sees it", value["saved"], better="higher",
            target=_SAVED[way] if aimed else None, n=1, seeds=(SEED,),
        ),
        Finding(
            f"{shape}, {way}: allocated by a step at batch 1", value["allocated"], unit="bytes", better="lower",
            target=_ALLOCATED if aimed else None, n=1, seeds=(SEED,),
        ),
    ]  # fmt: skip
