"""What measurements at the paper's size share: the device, its clock, and how large the measurement is.

They run on a GPU, or as a trial on a CPU with tiny models, where the times mean nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from statistics import median
from typing import Any

import torch
from torch import nn

from netweight.core.seeds import derive
from netweight.errors import UsageError
from netweight.report.finding import Finding
from netweight_experiments import timing
from netweight_experiments.tables.grid import Cell, grid
from netweight_experiments.tables.neuzip.training import GIB, SEED, default_dtype
from netweight_experiments.tables.registry import Column, MeasuredTable
from netweight_experiments.toys.decoder import MINIATURE, made


@dataclass(frozen=True)
class Extent:
    """How large a measurement is."""

    shapes: tuple[str, ...]
    """Keys of `toys.decoder.SHAPES`."""
    besides: tuple[tuple[str, str], ...]
    """Further shapes that are trained, and the optimizers."""
    changes: tuple[tuple[str, int], ...]
    """Fields of a shape's configuration to be otherwise."""
    sides: tuple[int, ...]
    """Matrix sides, for throughput."""
    window: int
    """Tokens of a forward pass, and of a training example."""
    batch: int
    """Training examples per update."""
    updates: int
    """Updates of a training; the first is not timed."""
    batches: tuple[int, ...]
    """Batch sizes of generation."""
    prompt: int
    """Tokens before those generated."""
    tokens: int
    """Tokens generated."""
    rounds: int
    """Timed rounds."""


# The paper's shapes; Llama-3 8B first, for which targets are set.
PAPER = Extent(
    shapes=("Llama-3 8B", "GPT-Neo-XL 2.7B", "Llama-2 13B"),
    besides=(("Llama-3.2 1B", "SGD"), ("Llama-3.2 1B", "AdamW")),
    changes=(),
    sides=(1024, 2048, 4096, 8192, 16384),
    window=1024,
    batch=1,
    updates=4,
    batches=(1, 8, 32),
    prompt=128,
    tokens=16,
    rounds=7,
)
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 128,
}
# Shows that everything runs, in seconds on a CPU.
TRIAL = Extent(
    shapes=(MINIATURE,),
    besides=((MINIATURE, "AdamW"),),
    changes=tuple(_TINY.items()),
    sides=(64, 128),
    window=32,
    batch=2,
    updates=2,
    batches=(1, 2),
    prompt=4,
    tokens=2,
    rounds=5,
)


@dataclass(frozen=True)
class Run:
    """One way of training one model, or of holding its weights."""

    shape: str
    """A key of `toys.decoder.SHAPES`."""
    way: str
    """The way, by its row's name."""
    device: str
    """"cuda" or "cpu"."""
    trial: bool
    """Whether it is the tiny one."""
    optimizer: str = ""
    """That trains, of torch.optim; the paper's SGD if none is named."""

    @property
    def label(self) -> str:
        """What its columns are called."""
        return f"{self.shape}, {self.optimizer}" if self.optimizer else self.shape

    @property
    def extent(self) -> Extent:
        """How large the measurement is."""
        return TRIAL if self.trial else PAPER


def runs_of(ways: Sequence[str], device: str, *, trial: bool) -> list[Run]:
    """Return the runs of every way on every shape, shape by shape."""
    return [Run(shape, way, device, trial) for shape in (TRIAL if trial else PAPER).shapes for way in ways]


def further_runs(ways: Sequence[str], device: str, *, trial: bool) -> list[Run]:
    """Return the runs of every way of training on the shapes that the paper does not have."""
    besides = (TRIAL if trial else PAPER).besides
    return [Run(shape, way, device, trial, optimizer) for shape, optimizer in besides for way in ways]


def chosen_device(name: str | None) -> torch.device:
    """Return the device to measure on."""
    device = torch.device(name or "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "torch sees no GPU on this machine.", cure="Run it where there is one, or try it out with --trial."
        )
    return device


@lru_cache(maxsize=1)  # shared by the ways of a shape; a second one might not fit beside it
def dense_model(shape: str, device: str, trial: bool) -> nn.Module:
    """A dense model to measure others beside; it stays until `let_go`."""
    model: Any = random_model(shape, TRIAL if trial else PAPER, chosen_device(device))
    model.eval()
    held: nn.Module = model
    return held


def let_go(device: torch.device) -> None:
    """Let go of the models of runs before, also of those that their own hooks hold."""
    dense_model.cache_clear()
    gc.collect()
    if device.type == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that products ran on
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until a device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(
    runs: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int
) -> dict[str, tuple[float, ...]]:
    """Time several things round by round, the device idle before and after each."""

    def waited(run: Callable[[], object]) -> None:
        run()
        synchronize(device)

    return timing.in_turns({name: partial(waited, run) for name, run in runs.items()}, rounds, clock="wall", seed=SEED)


def random_model(shape: str, extent: Extent, device: torch.device) -> nn.Module:
    """Make a model of a shape with random bf16 weights on a device, as transformers initializes it."""
    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.device(device), default_dtype(torch.bfloat16):
        torch.manual_seed(derive(SEED, "initialization"))
        return made(shape, **dict(extent.changes))


Found = Mapping[Run, Mapping[str, Any]]


def by_shape(
    found: Found,
    ways: Sequence[str],
    memory: Callable[[Any], int],
    seconds: Callable[[Any], Sequence[float]],
    findings: Callable[[str, Mapping[str, Any]], Sequence[Finding]],
    *,
    notes: Sequence[str],
    **more: Any,
) -> MeasuredTable:
    """Lay runs out: a row for each way; memory and speed of each shape; what was not measured in the notes."""
    done: dict[str, dict[str, Any]] = {run.label: {} for run in found}
    missing = []
    for run, value in found.items():
        if "missing" in value:
            missing.append(f"{run.label}, {run.way} was not measured: {value['missing']}.")
        else:
            done[run.label][run.way] = value

    def cells(shape: str) -> list[Cell[str]]:
        def of(number: Callable[[Any], float]) -> Callable[[str], float | None]:
            return lambda way: number(done[shape][way]) if way in done[shape] else None

        return [
            (Column(f"{shape} memory", "GiB", "lower"), of(lambda value: memory(value) / GIB)),
            (Column(f"{shape} speed", "iterations/s", "higher"), of(lambda value: 1 / median(seconds(value)))),
        ]

    return grid(
        {way: way for way in ways},
        [cell for shape in done for cell in cells(shape)],
        findings=tuple(finding for shape, of in done.items() for finding in findings(shape, of)),
        notes=(*notes, *missing),
        **more,
    )
