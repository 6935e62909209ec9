"""Principal components of more rows than a Gram matrix has room for, over any number of workers.

Workers are processes of `torch.distributed` (`fit_streaming`), or tasks of an engine, one per shard (`fit_shards`).
What was added up so far is kept in a folder, so a fit continues where it was killed.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from netweight.core.digest import of_config, of_file
from netweight.core.engines import Engine, local_processes
from netweight.core.files import naming_failures, part_of, sync
from netweight.core.progress import QUIET, Progress
from netweight.core.runs import map_runs
from netweight.errors import CorruptBlob, NetweightError, UsageError
from netweight.nn.matrix import MatrixFile, Rows
from netweight.nn.pca import BasisFit
from netweight.nn.subspace_iteration import (
    Iteration,
    IterationPlan,
    Sums,
    begin,
    blank,
    empty,
    finish,
    pass_over,
    result,
)


class Workers:
    """Who shares the rows of a fit: this process alone, unless a subclass adds others."""

    number = 0  # of this worker
    count = 1

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all workers, which call this with the same shapes."""


@final
class ProcessGroup(Workers):
    """The processes of `torch.distributed`, which must be initialized; gloo or NCCL."""

    def __init__(self) -> None:
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            raise UsageError(
                "torch.distributed is not initialized.", cure="Start with torchrun and call init_process_group."
            )
        self.number = torch.distributed.get_rank()
        self.count = torch.distributed.get_world_size()

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Sum each over all processes."""
        for tensor in tensors:
            torch.distributed.all_reduce(tensor)


ALONE = Workers()


def _wanted(components: int | None, count: int, length: int) -> int:
    """Number of components of a fit: what was asked for, or as many as there are, at most 1,000."""
    if count < 2:
        raise UsageError(f"{count} row has no principal components.", cure="Fit 2 or more; hundreds to be of use.")
    return min(1000, count - 1, length) if components is None else components


def fit_streaming(
    rows: Rows,
    components: int | None = None,
    *,
    standardize: bool = False,
    most: int = 6,
    tolerance: float = 2e-3,
    seed: int = 0,
    workers: Workers = ALONE,
    folder: str | Path | None = None,
    digest: str = "",
    save_every: float = 60.0,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of rows by block subspace iteration, for any number of rows."""
    # Memory holds a block of rows and 2.5 times the components (Q and Z of a quarter more), in fp32; while Z is made
    # orthonormal, three quarters more. A pass computes 5 · rows · columns · components operations.
    # Source: Halko, Martinsson and Tropp, arXiv 0909.4061, algorithm 4.4, on centered rows and started from a sample.
    # `components`: how many; None for as many as there are, at most 1,000
    # `most`: passes of iteration at most, besides one for the mean and one for the scores
    # `save_every`: seconds between two writes there
    first, total = _place(rows, workers)
    plan = IterationPlan(
        total, rows.shape[1], _wanted(components, total, rows.shape[1]), standardize, most, tolerance, seed
    )  # fmt: skip
    kept = None
    if folder is not None:
        kept = KeptSums(Path(folder) / f"worker-{workers.number}", plan, rows=digest, seconds=save_every)
    iteration, sums, row = kept.load() if kept is not None else (None, None, 0)
    standing = _agreed(plan, iteration, rows, workers)
    if iteration is None or iteration.stage != standing.stage:
        sums, row = None, 0
        if kept is not None:
            kept.keep_iteration(standing)
    while True:
        iteration = standing
        found = empty(plan, iteration, rows.shape[0]) if sums is None else sums
        keep = None if kept is None else functools.partial(kept.keep_sums, iteration, found)
        pass_over(rows, plan, iteration, first=first, sums=found, start=row, keep=keep, progress=progress)
        workers.add([value for name, value in found.items() if name != "own"])
        if iteration.last:
            return result(plan, iteration, found)
        standing, sums, row = finish(plan, iteration, found), None, 0
        if kept is not None:
            kept.keep_iteration(standing)


def _place(rows: Rows, workers: Workers) -> tuple[int, int]:
    """The number of a worker's first row, and that of all rows."""
    counts = torch.zeros(workers.count, dtype=torch.float64)
    counts[workers.number] = rows.shape[0]
    workers.add([counts])
    return int(counts[: workers.number].sum()), int(counts.sum())


def _agreed(plan: IterationPlan, mine: Iteration | None, rows: Rows, workers: Workers) -> Iteration:
    """Where all workers go on: a kill may have come when some had written the next stage and others had not."""
    stages = torch.zeros(workers.count)
    stages[workers.number] = -1 if mine is None else mine.stage
    workers.add([stages])
    if stages.max() < 0:
        pilot = rows.rows(0, 1)[0] / workers.count
        workers.add([pilot])
        return begin(pilot)
    if mine is not None and (stages == mine.stage).all():
        return mine
    leader = int(stages.argmax())
    stage, said = int(stages[leader]), torch.zeros(plan.most + 1, dtype=torch.float64)
    fixed = blank(plan, stage)
    if mine is not None and workers.number == leader:
        fixed = {name: mine.fixed[name] for name in fixed}
        said[0], said[1 : 1 + len(mine.captured)] = mine.last, torch.tensor(mine.captured, dtype=torch.float64)
    workers.add([*fixed.values(), said])
    return Iteration(stage, bool(said[0]), fixed, tuple(said[1 : max(stage, 1)].tolist()))


class Shard(Protocol):
    """Some of the rows; a frozen dataclass of JSON values, so that it can be sent and remembered."""

    def open(self) -> Rows:
        """Open the rows, in the process that reads them."""
        ...


@final
@dataclass(frozen=True)
class MatrixShard:
    """Rows of a `.npy` file."""

    path: str  # the file
    start: int = 0  # the first row
    stop: int | None = None  # the row after the last; None for all

    def open(self) -> MatrixFile:
        """Open the rows."""
        return MatrixFile(self.path, self.start, self.stop)


@final
@dataclass(frozen=True)
class ShardTask:
    """One pass over one shard."""

    shard: Shard
    first: int  # number of its first row among all
    plan: IterationPlan  # what is asked for
    iteration: str  # the file that says where the fit stands
    digest: str
    target: str  # the file to write what was added up to


def _run(task: ShardTask) -> str:
    """Carry out a task, in a worker; returns the digest of what was written."""
    rows, iteration = task.shard.open(), read_iteration(Path(task.iteration))
    sums = empty(task.plan, iteration, rows.shape[0])
    pass_over(rows, task.plan, iteration, first=task.first, sums=sums)
    write_tensors(Path(task.target), sums, {"stage": iteration.stage})
    return of_file(task.target)


def fit_shards(
    shards: Sequence[Shard],
    components: int | None = None,
    *,
    folder: str | Path,
    standardize: bool = False,
    most: int = 6,
    tolerance: float = 2e-3,
    seed: int = 0,
    engine: Engine = local_processes,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of rows in several shards; see `fit_streaming` for what is not said here."""
    # `shards`: the shards, in the order of the rows; as many as there are workers, or a few times that
    # `components`: how many; None for as many as there are, at most 1,000
    # `most`: passes of iteration at most
    opened = [shard.open() for shard in shards]
    shapes = [rows.shape for rows in opened]
    if len({length for _, length in shapes}) != 1:
        raise UsageError(f"Shards of shapes {shapes} are no parts of one matrix.", cure="Give rows of one length.")
    count, length = sum(rows for rows, _ in shapes), shapes[0][1]
    plan = IterationPlan(count, length, _wanted(components, count, length), standardize, most, tolerance, seed)
    kept = KeptSums(Path(folder), plan, rows=of_config(list(shards)))
    iteration, _, _ = kept.load()
    if iteration is None:
        iteration = begin(opened[0].rows(0, 1)[0])
        kept.keep_iteration(iteration)
    while True:
        files = [Path(folder) / f"pass-{iteration.stage}-{number}.safetensors" for number in range(len(shards))]
        digest, first, tasks = of_file(kept.file), 0, []
        for shard, (rows, _), file in zip(shards, shapes, files, strict=True):
            tasks.append(ShardTask(shard, first, plan, str(kept.file), digest, str(file)))
            first += rows
        _carry_out(tasks, Path(folder) / "passes.jsonl", engine, progress)
        sums = _summed(files)
        if iteration.last:
            return result(plan, iteration, sums)
        iteration = finish(plan, iteration, sums)
        kept.keep_iteration(iteration)
        for file in files:
            file.unlink()


def _carry_out(tasks: Sequence[ShardTask], ledger: Path, engine: Engine, progress: Progress) -> None:
    runs = map_runs(_run, tasks, ledger=ledger, engine=engine)
    for run in progress.track(runs, "Shards", len(tasks), unit="shards"):
        if run.error is not None:
            raise NetweightError(
                f"A pass over {run.config.shard} failed: {run.error.strip().splitlines()[-1]}",
                cure="Once the reason is gone, the same call goes on from there.",
            )


def _summed(files: Sequence[Path]) -> Sums:
    """What tasks added up, together; their own scores side by side."""
    total: Sums = {}
    own = []
    for file in files:
        sums, _ = read_tensors(file)
        own += [sums.pop("own")] if "own" in sums else []
        for name, value in sums.items():
            total[name] = total[name].add_(value) if name in total else value
    return {**total, "own": torch.cat(own)} if own else total


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and an account of them, JSON values, over what is there; whole or not at all, without a copy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    with naming_failures(path):
        whole = {name: value.contiguous() for name, value in tensors.items()}
        safetensors.torch.save_file(whole, part, metadata={"about": json.dumps(about)})
        sync(part)
        os.replace(part, path)
        sync(path.parent)


def read_tensors(path: Path) -> tuple[Sums, dict[str, Any]]:
    """Read tensors and their account."""
    try:
        with safetensors.safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})["about"])
            return {name: file.get_tensor(name) for name in file.keys()}, about
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CorruptBlob(f"{path} is no part of a fit: {error}.", cure="Delete its folder to begin anew.") from error


def read_iteration(path: Path) -> Iteration:
    """Read where a fit stands."""
    fixed, about = read_tensors(path)
    return Iteration(about["stage"], about["last"], fixed, tuple(about["captured"]))


@final
class KeptSums:
    """What a worker of a fit keeps."""

    # `seconds`: least time between two writes of what was added up

    def __init__(self, folder: Path, plan: IterationPlan, *, rows: str = "", seconds: float = 60.0) -> None:
        self._iteration, self._sums = folder / "iteration.safetensors", folder / "sums.safetensors"
        self._digest = of_config({"plan": plan, "rows": rows})
        self._seconds, self._last = seconds, time.monotonic()

    @property
    def file(self) -> Path:
        """The file with what the pass under way works with."""
        return self._iteration

    def load(self) -> tuple[Iteration | None, Sums | None, int]:
        """Return where the fit stood, what its pass had added up, and the row to go on from."""
        if not self._iteration.exists():
            return None, None, 0
        if read_tensors(self._iteration)[1]["digest"] != self._digest:
            raise UsageError(
                f"{self._iteration.parent} holds another fit: of other rows, or with other settings.",
                cure="Choose another folder, or delete it to begin anew.",
            )
        iteration = read_iteration(self._iteration)
        if self._sums.exists():
            sums, about = read_tensors(self._sums)
            if about == {"digest": self._digest, "stage": iteration.stage, "row": about.get("row")}:
                return iteration, sums, about["row"]
        return iteration, None, 0

    def keep_iteration(self, iteration: Iteration) -> None:
        """Write what the next pass works with."""
        about = {
            "digest": self._digest, "stage": iteration.stage, "last": iteration.last, "captured": iteration.captured,
        }  # fmt: skip
        write_tensors(self._iteration, iteration.fixed, about)

    def keep_sums(self, iteration: Iteration, sums: Sums, row: int) -> None:
        """Write what the pass has added up before a row, if the last time was long enough ago."""
        if time.monotonic() - self._last >= self._seconds:
            write_tensors(self._sums, sums, {"digest": self._digest, "stage": iteration.stage, "row": row})
            self._last = time.monotonic()
