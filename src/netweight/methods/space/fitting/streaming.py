"""Principal components of more rows than a Gram matrix has room for, in this process or as tasks of an engine.

What was added up is kept in a job, so a fit continues where it was killed. `fit_matrix` chooses between exact and
streaming.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch

from netweight.core.engines import Engine, local_processes
from netweight.core.files import digest_file
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, NetweightError, UsageError
from netweight.job import Job
from netweight.nn.matrix import MatrixFile, MatrixRows
from netweight.nn.pca import MOST_DUAL, BasisFit, Solver, fit_exactly
from netweight.nn.subspace_iteration import (
    Iteration,
    IterationPlan,
    Sums,
    begin,
    empty,
    finish,
    pass_over,
    result,
)
from netweight.store.writer import open_checkpoint, write_checkpoint

_STATE = "state.safetensors"


def fit_matrix(
    matrix: MatrixRows,
    components: int | None = None,
    *,
    standardize: bool = False,
    solver: Solver = "auto",
    halves: bool = False,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of a matrix's rows."""
    # `components`: how many; None for as many as there are, at most 1,000
    # `standardize`: whether to divide every column by its standard deviation (n − 1 in the denominator) first
    # `solver`: "dual" is exact and holds an n × n matrix in fp64; "streaming" holds 2.5 components in fp32; "auto"
    # takes the first up to 10,000 rows
    count, length = matrix.shape
    if components is not None and components >= min(count, length + 1):
        raise UsageError(
            f"{count} rows of {length} numbers have at most {min(count - 1, length)} components, not {components}.",
            cure="Ask for fewer.",
        )
    if solver == "streaming" or (solver == "auto" and count > MOST_DUAL):
        return fit_streaming(matrix, components, standardize=standardize, progress=progress)
    return fit_exactly(matrix, components, standardize=standardize, halves=halves, progress=progress)


def fit_streaming(
    rows: MatrixRows,
    components: int | None = None,
    *,
    standardize: bool = False,
    most: int = 6,
    tolerance: float = 2e-3,
    seed: int = 0,
    folder: str | Path | None = None,
    digest: str = "",
    save_every: float = 60.0,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of rows by block subspace iteration, for any number of rows."""
    # Memory holds a block of rows and 2.5 times the components (Q and Z of a quarter more), in fp32; while Z is made
    # orthonormal, three quarters more. A pass computes 5 · rows · columns · components operations.
    # Source: Halko, Martinsson and Tropp, arXiv 0909.4061, algorithm 4.4, on centered rows and started from a sample.
    # `most`: passes of iteration at most, besides one for the mean and one for the scores
    # `folder`, `digest`: where to keep what was added up, every `save_every` seconds, and which rows these are
    plan = _planned(components, *rows.shape, standardize, most, tolerance, seed)
    with ExitStack() as stack:
        job = None
        if folder is not None:
            key = {"plan": plan, "rows": digest}
            job = stack.enter_context(Job.open(folder, key=key, of="a fit"))
        known, sums, row = _continued(job)
        iteration = begin(rows.rows(0, 1)[0]) if known is None else known
        while True:
            found = empty(plan, iteration, rows.shape[0]) if sums is None else sums
            keep = None if job is None else _Keeper(job, iteration, found, save_every)
            if keep is not None and sums is None:
                keep.save(0)
            pass_over(rows, plan, iteration, first=0, sums=found, start=row, keep=keep, progress=progress)
            if iteration.last:
                return result(plan, iteration, found)
            iteration, sums, row = finish(plan, iteration, found), None, 0


@final
class _Keeper:
    """Saves what a pass has added up now and then."""

    def __init__(self, job: Job, iteration: Iteration, sums: Sums, seconds: float) -> None:
        self._job, self._iteration, self._sums = job, iteration, sums
        self._seconds, self._last = seconds, time.monotonic()

    def __call__(self, row: int) -> None:
        if time.monotonic() - self._last >= self._seconds:
            self.save(row)

    def save(self, row: int) -> None:
        """Save what was added up before a row."""
        sums = {f"sums.{name}": value for name, value in self._sums.items()}
        self._job.save({**_about(self._iteration), "row": row}, {**self._iteration.fixed, **sums})
        self._last = time.monotonic()


def _about(iteration: Iteration) -> dict[str, Any]:
    return {"stage": iteration.stage, "last": iteration.last, "captured": iteration.captured}


def _iteration(about: Mapping[str, Any], fixed: Sums) -> Iteration:
    return Iteration(about["stage"], about["last"], fixed, tuple(about["captured"]))


def _continued(job: Job | None) -> tuple[Iteration | None, Sums | None, int]:
    """Where a fit stood, what its pass had added up, and the row to continue from."""
    loaded = None if job is None else job.load()
    if loaded is None:
        return None, None, 0
    about, tensors = loaded
    sums = {name.removeprefix("sums."): tensors.pop(name) for name in list(tensors) if name.startswith("sums.")}
    return _iteration(about, tensors), sums, about["row"]


def _planned(
    components: int | None, count: int, length: int, standardize: bool, most: int, tolerance: float, seed: int
) -> IterationPlan:
    if count < 2:
        raise UsageError(f"{count} row has no principal components.", cure="Fit 2 or more; hundreds to be of use.")
    wanted = min(1000, count - 1, length) if components is None else components
    return IterationPlan(count, length, wanted, standardize, most, tolerance, seed)


class Shard(Protocol):
    """Some of the rows; a frozen dataclass of JSON values, so that it can be sent and remembered."""

    def open(self) -> MatrixRows:
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
    plan: IterationPlan
    state: str  # the file with what the pass works with
    digest: str  # of that file, by which a pass that was done is known
    target: str  # the file to write


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
    """Find the principal components of rows in several shards, in their order; otherwise as `fit_streaming`."""
    opened = [shard.open() for shard in shards]
    shapes = [rows.shape for rows in opened]
    if len({length for _, length in shapes}) != 1:
        raise UsageError(f"Shards of shapes {shapes} are no parts of one matrix.", cure="Give rows of one length.")
    plan = _planned(components, sum(rows for rows, _ in shapes), shapes[0][1], standardize, most, tolerance, seed)
    with Job.open(folder, key={"plan": plan, "rows": list(shards)}, of="a fit") as job:
        loaded = job.load()
        if loaded is None:
            iteration = begin(opened[0].rows(0, 1)[0])
            job.save(_about(iteration), iteration.fixed)
        else:
            iteration = _iteration(*loaded)
        while True:
            files = [job.folder / f"pass-{iteration.stage}-{number}.safetensors" for number in range(len(shards))]
            digest, first, tasks = digest_file(job.folder / _STATE), 0, []
            for shard, (rows, _), file in zip(shards, shapes, files, strict=True):
                tasks.append(ShardTask(shard, first, plan, str(job.folder / _STATE), digest, str(file)))
                first += rows
            _carry_out(tasks, job, engine, progress)
            sums = _summed(files)
            if iteration.last:
                return result(plan, iteration, sums)
            iteration = finish(plan, iteration, sums)
            job.save(_about(iteration), iteration.fixed)
            for file in files:
                file.unlink()


def _carry_out(tasks: Sequence[ShardTask], job: Job, engine: Engine, progress: Progress) -> None:
    runs = job.map(_run, tasks, name="passes", engine=engine)
    for run in progress.track(runs, "Shards", len(tasks), unit="shards"):
        if not run.ok:
            raise NetweightError(
                f"A pass over {run.config.shard} failed: {run.reason}",
                cure="Once the reason is gone, the same call continues from there.",
            )


def _run(task: ShardTask) -> str:
    """Make a pass over a shard in a worker; returns the digest of what was written."""
    rows, iteration = task.shard.open(), _iteration(*read_tensors(Path(task.state)))
    sums = empty(task.plan, iteration, rows.shape[0])
    pass_over(rows, task.plan, iteration, first=task.first, sums=sums)
    write_checkpoint(Path(task.target), {"stage": iteration.stage}, sums.items())
    return digest_file(task.target)


def _summed(files: Sequence[Path]) -> Sums:
    """Sums of all tasks, and their own scores concatenated."""
    total: Sums = {}
    own = []
    for file in files:
        _, sums = read_tensors(file)
        own += [sums.pop("own")] if "own" in sums else []
        for name, value in sums.items():
            total[name] = total[name].add_(value) if name in total else value
    return {**total, "own": torch.cat(own)} if own else total


def read_tensors(path: Path) -> tuple[dict[str, Any], Sums]:
    """Read a part of a fit: its account, and its tensors."""
    try:
        with open_checkpoint(path) as (about, store, names):
            return about, {name: store.get(name, check=True) for name in names}
    except CorruptBlob as error:
        raise CorruptBlob(
            f"{error.reason} It is a part of a fit.", cure=f"Delete {path.parent} to begin anew."
        ) from error
