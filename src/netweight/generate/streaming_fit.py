"""The streaming fit of one worker: passes over its rows, sums with the other workers, and what survives a kill."""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.generate.basis import BasisFit
from netweight.generate.kept_sums import KeptSums
from netweight.generate.matrix import Rows
from netweight.generate.shard_sum import Alone, ShardSum
from netweight.generate.subspace_iteration import Iteration, Plan, begin, blank, empty, finish, pass_over, result

__all__ = ["fit_streaming", "wanted"]

_ALONE = Alone()


def wanted(components: int | None, count: int, length: int) -> int:
    """Number of components of a fit: what was asked for, or as many as there are, at most 1,000.

    Args:
        components: What was asked for; None for as many as there are.
        count: Number of rows.
        length: Length of a row.

    Raises:
        UsageError: There are fewer than 2 rows.
    """
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
    workers: ShardSum = _ALONE,
    folder: str | Path | None = None,
    digest: str = "",
    save_every: float = 60.0,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of rows by block subspace iteration, for any number of rows.

    Memory holds a block of rows and 2.5 times the components (Q and Z of a quarter more), in fp32; while Z is made
    orthonormal, three quarters more. A pass computes 5 · rows · columns · components operations.

    Args:
        rows: This worker's rows.
        components: How many; None for as many as there are, at most 1,000.
        standardize: Whether to divide columns by their standard deviation.
        most: Passes of iteration at most, besides one for the mean and one for the scores.
        tolerance: A pass that adds less than this share to the captured variance is the last.
        seed: Of the sampled rows that it starts from.
        workers: Who else takes part; `ProcessGroup()` under torch.distributed. All end with the same basis.
        folder: Where to keep what was done; the same call goes on from there. Each worker has a part of it.
        digest: What the rows are, to refuse other ones in that folder.
        save_every: Seconds between two writes there.
        progress: Where to show it.

    Returns:
        The fit; scores are those of this worker's rows.

    Raises:
        UsageError: A number is not finite, all rows are the same, there are fewer components than asked for, or the
            folder holds another fit.
        CorruptBlob: The folder is damaged.

    Source: Halko, Martinsson and Tropp, arXiv 0909.4061, algorithm 4.4, on centered rows and started from a sample.
    """
    first, total = _place(rows, workers)
    plan = Plan(
        total, rows.shape[1], wanted(components, total, rows.shape[1]), standardize, most, tolerance, seed
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
        keep = _nothing if kept is None else functools.partial(kept.keep_sums, iteration, found)
        pass_over(rows, plan, iteration, first=first, sums=found, start=row, kept=keep, progress=progress)
        workers.add([value for name, value in found.items() if name != "own"])
        if iteration.last:
            return result(plan, iteration, found)
        standing, sums, row = finish(plan, iteration, found), None, 0
        if kept is not None:
            kept.keep_iteration(standing)


def _nothing(row: int) -> None:
    """Keep nothing."""


def _place(rows: Rows, workers: ShardSum) -> tuple[int, int]:
    """The number of a worker's first row, and that of all rows."""
    counts = torch.zeros(workers.count, dtype=torch.float64)
    counts[workers.number] = rows.shape[0]
    workers.add([counts])
    return int(counts[: workers.number].sum()), int(counts.sum())


def _agreed(plan: Plan, mine: Iteration | None, rows: Rows, workers: ShardSum) -> Iteration:
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
