"""Principal components of more rows than a Gram matrix has room for: block subspace iteration over blocks of rows.

A stage is one pass over the rows; what it adds up is a sum over them, so that several workers share it and exchange
nothing else. What was added so far is kept in a folder, so that a fit goes on where it was killed.

Stage 0 finds mean and deviation, and keeps p sampled rows, whose span is the first guess Q. Each further stage makes
Z = XᵀX Q; the eigenvalues of QᵀZ say what Q had captured, and an orthonormal basis of Z is the next Q. The last stage
makes Y = X Q and turns Q by the eigenvectors of YᵀY (Rayleigh–Ritz), which gives components and scores.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from netweight.core.seeds import torch_generator
from netweight.errors import CorruptBlob, NetweightError, UsageError
from netweight.nn.basis import Basis, BasisFit
from netweight.nn.matrix import MatrixFile, Moments, Rows, blocks, check_finite

Sums = dict[str, Tensor]
"""What a pass adds up, by name."""
_OVERSAMPLING = 1.25
_EPS = torch.finfo(torch.float32).eps


@final
@dataclass(frozen=True)
class Plan:
    """What is asked for.

    Attributes:
        count: Number of rows of all workers together.
        length: Columns.
        components: How many are wanted.
        standardize: Whether to divide columns by their standard deviation.
        most: Passes of iteration at most.
        tolerance: A pass that adds less than this share to the captured variance is the last.
        seed: Of the sampled rows.
    """

    count: int
    length: int
    components: int
    standardize: bool = False
    most: int = 6
    tolerance: float = 2e-3
    seed: int = 0

    @property
    def width(self) -> int:
        """Dimensions of the subspace, p: a quarter more than components, which is what they converge by."""
        wanted = max(int(self.components * _OVERSAMPLING), self.components + 8)
        return min(wanted, self.count, self.length)

    def sampled(self) -> Tensor:
        """Numbers of the rows that the first guess is the span of, rising.

        Returns:
            Row numbers, int64.
        """
        draw = torch_generator(self.seed, "sampled rows")
        return torch.randperm(self.count, generator=draw)[: self.width].sort().values


@final
@dataclass(frozen=True, eq=False)
class Iteration:
    """Where a fit stands between two passes.

    Attributes:
        stage: 0 before anything, then the number of the pass to make.
        last: Whether that pass is the last.
        fixed: What the pass works with: `mean`, `deviation`, and `basis`, shape `(p, d)`; from stage 1.
        captured: Share of the variance that the components had captured, pass by pass.
    """

    stage: int
    last: bool
    fixed: Sums
    captured: tuple[float, ...] = ()


def begin(pilot: Tensor) -> Iteration:
    """Start; `pilot` is a row near the mean, shape `(d,)`, the same for all workers.

    Returns:
        What the first pass works with.
    """
    return Iteration(0, False, {"pilot": pilot})


def blank(plan: Plan, stage: int) -> Sums:
    """Zeros of the shapes that a stage works with.

    Args:
        plan: The fit's settings.
        stage: Which pass, from 0.

    Returns:
        Tensors by name.
    """
    if stage == 0:
        return {"pilot": torch.zeros(plan.length)}
    scale = {"deviation": torch.zeros(plan.length)} if plan.standardize else {}
    basis, total = torch.zeros(plan.width, plan.length), torch.zeros((), dtype=torch.float64)
    return {"mean": torch.zeros(plan.length), **scale, "basis": basis, "total": total}


def empty(plan: Plan, iteration: Iteration, rows: int) -> Sums:
    """What a pass over so many rows adds to.

    Args:
        plan: The fit's settings.
        iteration: What the pass works with.
        rows: How many rows this worker reads.

    Returns:
        Tensors by name, all 0.
    """
    if iteration.stage == 0:
        zeros = torch.zeros(plan.length, dtype=torch.float64)
        return {"sums": zeros, "squares": zeros.clone(), "sampled": torch.zeros(plan.width, plan.length)}
    if iteration.last:
        return {
            "squares": torch.zeros(plan.width, plan.width, dtype=torch.float64),
            "own": torch.empty(rows, plan.width),
        }
    return {"products": torch.zeros(plan.width, plan.length)}


def pass_over(
    rows: Rows, plan: Plan, iteration: Iteration, *, first: int, sums: Sums, start: int = 0,
    kept: Callable[[int], None] = lambda row: None, progress: Progress = QUIET,
) -> None:  # fmt: skip
    """Add what a worker's rows contribute to a pass.

    Args:
        rows: The worker's rows.
        plan: What is asked for.
        iteration: Where the fit stands.
        first: Number of the worker's first row among all rows.
        sums: What to add to, from `empty`.
        start: The worker's row to go on from.
        kept: Called with the next row after each block.
        progress: Where to show it.

    Raises:
        UsageError: A number is not finite.
    """
    names = "mean and deviation" if iteration.stage == 0 else "scores" if iteration.last else "iteration"
    add = _add_moments if iteration.stage == 0 else _add_scores if iteration.last else _add_products
    with progress.task(f"Pass {iteration.stage + 1}, {names}", rows.shape[0], unit="rows") as task:
        task.update(start)
        for here, stop in blocks(rows, start):
            add(plan, iteration, sums, rows.rows(here, stop), here, first)
            kept(stop)
            task.update(stop - here)


def _add_moments(plan: Plan, iteration: Iteration, sums: Sums, block: Tensor, here: int, first: int) -> None:
    check_finite(block, first + here)
    chosen = plan.sampled()
    places = ((chosen >= first + here) & (chosen < first + here + len(block))).nonzero()[:, 0]
    sums["sampled"][places] = block[chosen[places] - first - here]
    Moments(iteration.fixed["pilot"], sums["sums"], sums["squares"]).take(block)


def _prepared(iteration: Iteration, block: Tensor) -> Tensor:
    block -= iteration.fixed["mean"]
    if "deviation" in iteration.fixed:
        block /= iteration.fixed["deviation"]
    return block


def _add_products(plan: Plan, iteration: Iteration, sums: Sums, block: Tensor, here: int, first: int) -> None:
    block = _prepared(iteration, block)
    sums["products"].addmm_((block @ iteration.fixed["basis"].T).T, block)


def _add_scores(plan: Plan, iteration: Iteration, sums: Sums, block: Tensor, here: int, first: int) -> None:
    found = _prepared(iteration, block) @ iteration.fixed["basis"].T
    wide = found.double()
    sums["squares"] += wide.T @ wide
    sums["own"][here : here + len(block)] = found


def finish(plan: Plan, iteration: Iteration, sums: Sums) -> Iteration:
    """Make of a pass's sums, over all workers, what the next pass works with. Both are used up, for their memory.

    Args:
        plan: The fit's settings.
        iteration: What the pass worked with.
        sums: What it added up.

    Returns:
        What the next pass works with.

    Raises:
        UsageError: All rows are the same.
    """
    if iteration.stage == 0:
        moments = Moments(iteration.fixed["pilot"], sums["sums"], sums["squares"])
        variance = moments.variance(plan.count)
        if not variance.any():
            raise UsageError(
                f"All {plan.count} rows are the same: there is nothing to find.", cure="Fit rows that differ."
            )
        fixed = {"mean": moments.mean(plan.count).float()}
        if plan.standardize:
            fixed["deviation"] = torch.where(variance > 0, variance.sqrt(), 1.0).float()
        total = (variance > 0).sum() if plan.standardize else variance.sum()
        started = replace(iteration, stage=1, fixed=fixed)
        guess = _orthonormal(_prepared(started, sums.pop("sampled")))
        return replace(started, fixed={**fixed, "basis": guess, "total": total.double()})
    fixed = iteration.fixed
    held = torch.linalg.eigvalsh(_products(fixed.pop("basis"), sums["products"])).flip(0)[: plan.components]
    share = float(held.sum() / (plan.count - 1) / fixed["total"])
    captured = (*iteration.captured, share)
    fixed["basis"] = _orthonormal(sums.pop("products"))
    settled = len(captured) > 1 and share - captured[-2] < plan.tolerance * share
    return Iteration(iteration.stage + 1, settled or len(captured) >= plan.most, fixed, captured)


def result(plan: Plan, iteration: Iteration, sums: Sums) -> BasisFit:
    """Make the fit of the last pass's sums, over all workers, and the worker's own scores.

    Args:
        plan: The fit's settings.
        iteration: What the last pass worked with.
        sums: What it added up.

    Returns:
        The fit; scores are those of this worker's rows.

    Raises:
        UsageError: The rows have fewer components than asked for.
    """
    values, vectors = torch.linalg.eigh(sums["squares"])
    rank = int((values > _EPS * values[-1]).sum())
    if rank < plan.components:
        raise UsageError(
            f"{plan.count} rows have {rank} principal components, not {plan.components}.",
            cure=f"Ask for {rank} or fewer; repeated rows add none.",
        )
    values, vectors = values.flip(0)[: plan.components], vectors.flip(1)[:, : plan.components].float()
    fixed = iteration.fixed
    components = vectors.T @ fixed["basis"]
    signs = components.gather(1, components.abs().argmax(dim=1, keepdim=True)).sign()
    basis = Basis(
        fixed["mean"], fixed.get("deviation"), components.mul_(signs), values / (plan.count - 1), float(fixed["total"])
    )
    scores = sums["own"] @ vectors * signs[:, 0]
    return BasisFit(basis, scores, "streaming", (*iteration.captured, float(basis.variances.sum()) / basis.total))


def _products(one: Tensor, other: Tensor) -> Tensor:
    """Inner products of rows, fp64, symmetric up to rounding and made so."""
    found = (one @ other.T).double()
    return (found + found.T) / 2


def _orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of the span of rows, as rows; by Householder reflections, whatever their rank."""
    scale = rows.norm(dim=1, keepdim=True)
    rows /= torch.where(scale > 0, scale, 1.0)
    basis: Tensor = torch.linalg.qr(rows.T).Q.T
    return basis


class ShardSum(Protocol):
    """Adds up tensors over workers."""

    @property
    def number(self) -> int:
        """This worker's, from 0."""
        ...

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over all workers, which call this with the same shapes.

        Args:
            tensors: Of any shapes and of a dtype that can be summed; changed in place.
        """
        ...


@final
class Alone:
    """A single worker."""

    number = 0
    count = 1

    def add(self, tensors: Sequence[Tensor]) -> None:
        """Leave them as they are."""


@final
class ProcessGroup:
    """The processes of `torch.distributed`, which must be initialized; gloo or NCCL.

    Raises:
        UsageError: It is not initialized.
    """

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


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and an account of them, JSON values, over what is there; whole or not at all, without a copy.

    Args:
        path: The file.
        tensors: Tensors of any dtype by name.
        about: JSON values.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    with naming_failures(path):
        whole = {name: value.contiguous() for name, value in tensors.items()}
        safetensors.torch.save_file(whole, part, metadata={"about": json.dumps(about)})
        sync(part)
        os.replace(part, path)
        sync(path.parent)


def read_tensors(path: Path) -> tuple[Sums, dict[str, Any]]:
    """Read tensors and their account.

    Args:
        path: The file.

    Returns:
        Tensors by name, and the account of them.

    Raises:
        CorruptBlob: The file was not written by `write_tensors`, or is damaged.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})["about"])
            return {name: file.get_tensor(name) for name in file.keys()}, about
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CorruptBlob(f"{path} is no part of a fit: {error}.", cure="Delete its folder to begin anew.") from error


def read_iteration(path: Path) -> Iteration:
    """Read where a fit stands.

    Args:
        path: The file.

    Returns:
        What the next pass works with.

    Raises:
        CorruptBlob: The file is damaged.
    """
    fixed, about = read_tensors(path)
    return Iteration(about["stage"], about["last"], fixed, tuple(about["captured"]))


@final
class KeptSums:
    """What a worker of a fit keeps.

    Args:
        folder: The worker's own, made if it is not there.
        plan: What is asked for; a folder serves one plan and one set of rows.
        rows: What the rows are, such as a digest; other ones are refused.
        seconds: Least time between two writes of what was added up.
    """

    def __init__(self, folder: Path, plan: Plan, *, rows: str = "", seconds: float = 60.0) -> None:
        self._iteration, self._sums = folder / "iteration.safetensors", folder / "sums.safetensors"
        self._digest = of_config({"plan": plan, "rows": rows})
        self._seconds, self._last = seconds, time.monotonic()

    @property
    def file(self) -> Path:
        """The file with what the pass under way works with."""
        return self._iteration

    def load(self) -> tuple[Iteration | None, Sums | None, int]:
        """Return where the fit stood, what its pass had added up, and the row to go on from.

        Raises:
            UsageError: The folder holds another fit.
            CorruptBlob: A file is damaged.
        """
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
        """Write what the next pass works with.

        Args:
            iteration: What a pass begins with.
        """
        about = {
            "digest": self._digest, "stage": iteration.stage, "last": iteration.last, "captured": iteration.captured,
        }  # fmt: skip
        write_tensors(self._iteration, iteration.fixed, about)

    def keep_sums(self, iteration: Iteration, sums: Sums, row: int) -> None:
        """Write what the pass has added up before a row, if the last time was long enough ago.

        Args:
            iteration: What this pass began with.
            sums: What it has added up.
            row: The first row that it has not seen.
        """
        if time.monotonic() - self._last >= self._seconds:
            write_tensors(self._sums, sums, {"digest": self._digest, "stage": iteration.stage, "row": row})
            self._last = time.monotonic()


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
