"""The streaming fit over shards that other processes or machines read: each pass is one task per shard, by any engine.

A task adds up what its shard contributes and writes it to a file; here the files are summed. What is done is remembered
task by task, so that a fit that was killed goes on. Workers see the same files under the same paths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import torch

from netweight.core.digest import of_config, of_file
from netweight.core.engines import Engine, local_processes
from netweight.core.progress import QUIET, Progress
from netweight.core.runs import map_runs
from netweight.errors import NetweightError, UsageError
from netweight.generate.basis import BasisFit
from netweight.generate.kept_sums import KeptSums, read_iteration, read_tensors, write_tensors
from netweight.generate.matrix import MatrixFile, Rows
from netweight.generate.streaming_fit import wanted
from netweight.generate.subspace_iteration import Plan, Sums, begin, empty, finish, pass_over, result

__all__ = ["MatrixShard", "Shard", "ShardTask", "fit_shards"]


class Shard(Protocol):
    """Some of the rows; a frozen dataclass of JSON values, so that it can be sent and remembered."""

    def open(self) -> Rows:
        """Open the rows, in the process that reads them.

        Returns:
            The rows.
        """
        ...


@final
@dataclass(frozen=True)
class MatrixShard:
    """Rows of a `.npy` file.

    Attributes:
        path: The file.
        start: The first row.
        stop: The row after the last; None for all.
    """

    path: str
    start: int = 0
    stop: int | None = None

    def open(self) -> MatrixFile:
        """Open the rows."""
        return MatrixFile(self.path, self.start, self.stop)


@final
@dataclass(frozen=True)
class ShardTask:
    """One pass over one shard.

    Attributes:
        shard: The shard.
        first: Number of its first row among all.
        plan: What is asked for.
        iteration: The file that says where the fit stands.
        digest: Of that file.
        target: The file to write what was added up to.
    """

    shard: Shard
    first: int
    plan: Plan
    iteration: str
    digest: str
    target: str


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
    """Find the principal components of rows in several shards; see `fit_streaming` for what is not said here.

    Args:
        shards: The shards, in the order of the rows; as many as there are workers, or a few times that.
        components: How many; None for as many as there are, at most 1,000.
        folder: Where passes, their sums (components × columns in fp32 per shard) and a ledger are kept.
        standardize: Whether to divide columns by their standard deviation.
        most: Passes of iteration at most.
        tolerance: A pass that adds less than this share to the captured variance is the last.
        seed: Of the sampled rows.
        engine: Where tasks run: `local_processes`, or that of `integrations.ray.ray_cluster`.
        progress: Where to show it.

    Returns:
        The fit, with the scores of all rows.

    Raises:
        UsageError: See `fit_streaming`; or shards have different numbers of columns.
        NetweightError: A task failed; what it said is in the message. The same call tries it again.
    """
    opened = [shard.open() for shard in shards]
    shapes = [rows.shape for rows in opened]
    if len({length for _, length in shapes}) != 1:
        raise UsageError(f"Shards of shapes {shapes} are no parts of one matrix.", cure="Give rows of one length.")
    count, length = sum(rows for rows, _ in shapes), shapes[0][1]
    plan = Plan(count, length, wanted(components, count, length), standardize, most, tolerance, seed)
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
