"""What measurements at the paper's size share: the device, its clock, and how large the measurement is.

They run on a GPU, or as a trial on a CPU with tiny models, where the times mean nothing. Used by the other `at_size_…`
modules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, final

from netweight_experiments.toys.decoder import MINIATURE, made

from netweight.core.seeds import derive
from netweight.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "PAPER",
    "SEED",
    "TRIAL",
    "Extent",
    "Run",
    "chosen_device",
    "in_turns",
    "random_model",
    "runs_of",
    "synchronize",
]

SEED = 20241031


@final
@dataclass(frozen=True)
class Extent:
    """How large a measurement is.

    Attributes:
        shapes: Keys of `zoo.shapes.SHAPES`.
        changes: Fields of a shape's configuration to be otherwise.
        sides: Matrix sides, for throughput.
        window: Tokens of a forward pass, and of a training example.
        batch: Training examples per update.
        updates: Updates of a training; the first is not timed.
        batches: Batch sizes of generation.
        prompt: Tokens before those generated.
        tokens: Tokens generated.
        rounds: Timed rounds.
    """

    shapes: tuple[str, ...]
    changes: tuple[tuple[str, int], ...]
    sides: tuple[int, ...]
    window: int
    batch: int
    updates: int
    batches: tuple[int, ...]
    prompt: int
    tokens: int
    rounds: int


PAPER = Extent(
    shapes=("Llama-3 8B", "GPT-Neo-XL 2.7B", "Llama-2 13B"),
    changes=(),
    sides=(1024, 2048, 4096, 8192, 16384),
    window=1024,
    batch=8,
    updates=4,
    batches=(1, 32),
    prompt=128,
    tokens=16,
    rounds=7,
)
"""The paper's shapes; Llama-3 8B first, for which targets are set."""
_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 128,
}
TRIAL = Extent(
    shapes=(MINIATURE,),
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
"""Shows that everything runs, in seconds on a CPU."""


@final
@dataclass(frozen=True)
class Run:
    """One way of training one model, or of holding its weights.

    Attributes:
        shape: A key of `zoo.shapes.SHAPES`.
        way: The way, by its row's name.
        device: "cuda" or "cpu".
        trial: Whether it is the tiny one.
    """

    shape: str
    way: str
    device: str
    trial: bool

    @property
    def extent(self) -> Extent:
        """How large the measurement is."""
        return TRIAL if self.trial else PAPER


def runs_of(ways: Sequence[str], device: str, *, trial: bool) -> list[Run]:
    """Return the runs of every way on every shape, shape by shape.

    Args:
        ways: Names of rows, the most important ones first.
        device: "cuda" or "cpu".
        trial: Whether to take tiny models.
    """
    return [Run(shape, way, device, trial) for shape in (TRIAL if trial else PAPER).shapes for way in ways]


def chosen_device(name: str | None) -> torch.device:
    """Return the device to measure on.

    Args:
        name: "cuda", "cuda:1", "cpu"; None for the GPU.

    Raises:
        UsageError: A GPU was asked for and torch sees none.
    """
    import torch

    device = torch.device(name or "cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "torch sees no GPU on this machine.", cure="Run it where there is one, or try it out with --trial."
        )
    return device


def synchronize(device: torch.device) -> None:
    """Wait until a device is idle."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)


def in_turns(
    runs: Mapping[str, Callable[[], object]], device: torch.device, *, rounds: int, inner: int = 1
) -> dict[str, tuple[float, ...]]:
    """Time several things round by round, the device idle before and after each.

    Args:
        runs: What to time, by name.
        device: Where they run.
        rounds: Rounds, one entry of the result each.
        inner: How often each runs within a round, so that waiting for the device does not count.

    Returns:
        Seconds of one run, by name.
    """
    from netweight.metrics.timing import Case, interleave

    def repeated(run: Callable[[], object]) -> Callable[[Any], object]:
        def go(_: Any) -> None:
            for _ in range(inner):
                run()
            synchronize(device)

        return go

    cases = [Case(name, repeated(run), partial(synchronize, device)) for name, run in runs.items()]
    samples = interleave(cases, repeats=rounds, seed=SEED, again_below=0, steady=0)
    return {name: tuple(wall / inner for wall in samples[name].wall) for name in runs}


def random_model(shape: str, extent: Extent, device: torch.device) -> nn.Module:
    """Make a model of a shape with random bf16 weights on a device, as transformers initializes it.

    Args:
        shape: A key of `zoo.shapes.SHAPES`.
        extent: Says what of the shape is to be otherwise.
        device: Where the weights are drawn; nothing of them passes through the host.
    """
    import torch

    gpus = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=gpus), torch.device(device):
        torch.manual_seed(derive(SEED, "initialization"))
        torch.set_default_dtype(torch.bfloat16)
        try:
            return made(shape, **dict(extent.changes))
        finally:
            torch.set_default_dtype(torch.float32)
