"""What NeuZip's tables of training share: the ways of training, runs in processes of their own, and their comparison.

Plain, layer by layer in the manner of LOMO, and compressed. A run happens in a process of its own, so that what is
sampled of its memory is the training's; what takes turns in one process is timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import netweight
from netweight.core.digests import digest_file, digest_tensor
from netweight.data.public import text_file
from netweight.metrics.intervals import Interval, paired_ratio
from netweight.report.finding import Finding
from netweight_experiments.memory import PrivateMemory, TensorLedger, in_fresh_process
from netweight_experiments.tables.grid import R, run_each
from netweight_experiments.tables.registry import required
from netweight_experiments.timing import in_turns

VANILLA, LOMO, COMPRESSED = "Vanilla", "LOMO", "LOMO + NeuZip lossless"
# Names of rows, as the paper has them.
WAYS = (VANILLA, LOMO, COMPRESSED)
FIXED = "LOMO + fixed length"  # which the paper has not
SEED = 20241031
GIB, MIB = 1 << 30, 1 << 20
_WATCHED = 3  # updates during which the process' memory is sampled


def arrange(way: str, model: nn.Module, optimizer: Any, **options: Any) -> torch.optim.Optimizer:
    """Make a dense model ready to be trained one way by an optimizer's class."""
    if way == VANILLA:
        plain: torch.optim.Optimizer = optimizer(model.parameters(), **options)
        return plain
    if way in (COMPRESSED, FIXED):
        netweight.compress_(model, prefer="speed" if way == FIXED else "memory")
    layerwise: torch.optim.Optimizer = netweight.LayerwiseOptimizer(model, optimizer, **options)
    return layerwise


# ---- runs ------------------------------------------------------------------------------------------------------------


def run_in_processes(run: Callable[[dict[str, Any]], Any], configs: Sequence[R], out: Path) -> list[Any]:
    """Run each configuration in a fresh process; those that an earlier call finished are remembered."""
    return run_each(lambda config: in_fresh_process(run, asdict(config)), configs, folder=out)  # type: ignore[call-overload]


def first_steps(trainee: Any, before: int) -> tuple[list[float], dict[str, Any]]:
    """Make five updates; return their losses, and the memory: the second is counted, the next three are sampled."""
    losses = [trainee.step()]
    with TensorLedger(trainee.model, trainee.optimizer) as ledger:
        losses.append(trainee.step())
    with PrivateMemory() as memory:
        losses += [trainee.step() for _ in range(_WATCHED)]
    peak = ledger.peak
    return losses, {"counted": peak.nbytes, "parts": dict(peak.parts), "sampled": memory.highest - before}


def digests(model: nn.Module) -> dict[str, str]:
    """Return the digest of every parameter's bits, decoded if it is compressed."""
    return {
        name: digest_tensor(tensor.dense() if hasattr(tensor, "dense") else tensor.detach())
        for name, tensor in model.named_parameters()
    }


def cpu_seconds(trainees: Mapping[str, Any], rounds: int) -> dict[str, list[float]]:
    """CPU seconds per update of each trainee, all in this process, round by round."""
    times = in_turns({way: trainee.step for way, trainee in trainees.items()}, rounds, seed=SEED)
    return {way: list(seconds) for way, seconds in times.items()}


def seconds_in_turns(take_turns: Callable[[Any], Any], given: Any, out: Path) -> dict[str, list[float]]:
    """Seconds per update by way, in a fresh process with one thread, unless an earlier run here has measured them."""
    timed = partial(in_fresh_process, take_turns)
    (seconds,) = run_each(timed, [given], folder=out, name="speed")
    return cast("dict[str, list[float]]", seconds)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Within the block new tensors have this dtype."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


# ---- comparison ------------------------------------------------------------------------------------------------------


def differing_steps(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the steps whose loss differs in any bit; a missing step differs."""
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


def same_training(what: str, one: Mapping[str, Any], other: Mapping[str, Any]) -> list[Finding]:
    """That two runs are the same training, bit for bit."""
    steps = differing_steps(one["losses"], other["losses"])
    ours, theirs = one["digests"], other["digests"]  # a missing one differs
    weights = sum(ours.get(name) != theirs.get(name) for name in ours.keys() | theirs.keys())
    return [
        Finding(f"{what}: updates whose loss differs", steps, target=0, n=len(other["losses"]), seeds=(SEED,)),
        Finding(f"{what}: parameters that differ", weights, target=0, n=len(other["digests"]), seeds=(SEED,)),
    ]


def speed_ratio(base: Sequence[float], contender: Sequence[float]) -> Interval:
    """Speed of a contender over that of a base, by their seconds."""
    return paired_ratio(base, contender, seed=SEED)


def published_number(table_id: str, column: str, way: str) -> float:
    """A number of a published table; 0 where the paper has none."""
    numbers = required(table_id)
    index = [each.name for each in numbers.columns].index(column)
    return float(next(row.values[index] for row in numbers.rows if row.name == way) or 0)


def against_paper(paper: float, better: str, model: str) -> dict[str, Any]:
    """What a finding says that is held against the same ratio in the paper."""
    detail = {"baseline": f"the same ratio in the paper, for {model} on a GPU", "bound": "the paper's own ratio"}
    return {"better": better, "target": paper, "baseline": paper, "detail": detail}


def sampled_note(found: Mapping[str, Any], besides: str = "") -> str:
    """Peaks of the processes, in words."""
    peaks = {way: result["sampled"] / MIB for way, result in found.items() if "sampled" in result}
    sizes = ", ".join(f"{way} {size:.0f} MiB" for way, size in peaks.items())
    return f"Peak of what the process held for itself{besides}, sampled during three updates: {sizes}."


def digests_of_texts(*names: str) -> dict[str, str]:
    """Digests of the texts that runs read, by file name."""
    return {name: digest_file(text_file(name)) for name in names}
