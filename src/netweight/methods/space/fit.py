"""Fitting a bank: exactly from all inner products, or by streaming over rows; and how good the fit is.

Streaming makes passes over more rows than a Gram matrix has room for, in this process or as tasks of an engine; what
was added up is kept in a job, so a fit continues where it was killed. `fit_matrix` takes any matrix.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, final

import torch
from torch import Tensor

from netweight.core.digests import digest_file
from netweight.core.engines import Engine, local_processes
from netweight.core.progress import QUIET, Progress
from netweight.errors import NetweightError, UsageError
from netweight.job import Job
from netweight.methods.space.basis import BankRows, Basis, Combinations, RowLayout, Sketch
from netweight.methods.space.gram import (
    Bank,
    NormalizedBank,
    block_rows,
    gram_of,
    inner_products,
    keep_block_row,
    read_tensors,
    stack_of,
)
from netweight.methods.space.settings import FitSettings
from netweight.nn.lora import AdapterStack
from netweight.nn.matrix import Columns, MatrixFile, MatrixRows
from netweight.nn.pca import (
    MOST_DUAL,
    BasisFit,
    HalfAgreement,
    Solver,
    fit_exactly,
    fit_gram,
    halves_of,
    orthonormality,
)
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
from netweight.store.bank.bank import AdapterBank
from netweight.store.checkpoint import write_checkpoint

_STATE = "state.safetensors"
# If a space explains less than this share of the variance of adapters that it was not fitted to, it does not describe
# them.
_EXPLAINED = 0.5
# How the adapters of a shard are written as rows.
_RowKind = Literal["sketch", "factors"]


@final
@dataclass(frozen=True)
class Accuracy:
    """Quality of a fit."""

    solver: Literal["dual", "streaming", "published"]
    """"dual" captures the most that this many components can; "streaming" nearly; "published" was found by others."""
    captured: float
    """Share of the variance along the components, from 0 to 1."""
    orthonormality: float | None
    """The greatest magnitude in C Cᵀ − I of the components C, or by inner products of the eigenvectors that they
    are made of; None through a sketch, where components are orthonormal in the sketch only.
    """
    passes: tuple[float, ...] = ()
    """Streaming: the captured share after each pass; where growth has stopped it is near the best."""
    halves: HalfAgreement | None = None
    """Agreement of two fits to one half of the adapters each; None if they were not made."""
    sketch: SketchError | None = None
    """Error of the sketch; None without one."""

    @property
    def warning(self) -> str | None:
        """That the components explain little of adapters that they were not fitted to, where halves show that."""
        if self.halves is None or self.halves.held_out >= _EXPLAINED:
            return None
        return (
            f"The components explain {self.halves.held_out:.0%} of adapters that they were not fitted to (half of the "
            "collection, explained by the other half). An adapter from elsewhere loses most of its change when it "
            "becomes a point of this space; points between models of the collection are not affected. More adapters "
            "make a space that explains more."
        )

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        parts = {"halves": self.halves, "sketch": self.sketch}
        return {**vars(self), **{name: None if part is None else vars(part) for name, part in parts.items()}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read what `to_json` wrote."""
        halves, sketch = values["halves"], values["sketch"]
        if halves is not None:
            agreement = {int(number): share for number, share in halves["agreement"].items()}
            halves = HalfAgreement(**{**halves, "agreement": agreement})
        sketch = None if sketch is None else SketchError(**sketch)
        return cls(**{**values, "passes": tuple(values["passes"]), "halves": halves, "sketch": sketch})


@final
@dataclass(frozen=True)
class SketchError:
    """Error of a sketch, measured against exact inner products on some adapters."""

    adapters: int
    """Number of adapters that were compared."""
    products: float
    """Root mean squared error of their inner products about the mean, relative to the root mean square."""
    captured: float
    """Variance along the leading components by the sketch, relative to that along the exact ones."""
    components: int
    """Number of leading components."""


@final
@dataclass(frozen=True)
class Work:
    """Execution of a fit; it does not change the result."""

    folder: Path | None
    """Folder for intermediate results, from which an interrupted fit continues; None for none."""
    engine: Engine | None
    """Engine that runs the tasks, for a bank on disk and with a folder; None for this process."""
    progress: Progress
    """Receiver of the progress."""

    def __post_init__(self) -> None:
        if self.engine is not None and self.folder is None:
            raise UsageError("Work that is shared with other processes needs a folder.", cure="Name one, or --work.")


@final
@dataclass(frozen=True, eq=False)
class FitResult:
    """A fitted basis with the scores of all adapters."""

    basis: Basis
    """The mean and the components."""
    scores: Tensor
    """Scores of the adapters, shape `(n, k)`, fp32."""
    variances: Tensor
    """Variances of the components, shape `(k,)`."""
    accuracy: Accuracy
    """Exactness of the components, and their generalization."""


def fit_bank(bank: Bank, config: FitSettings, work: Work) -> FitResult:
    """Fit a bank."""
    dual = config.solver == "dual" or (config.solver == "auto" and len(bank) <= MOST_DUAL)
    if config.representation != "delta":
        return _fit_rows(bank, config, work, dual)
    return _fit_products(bank, config, work) if dual else _fit_sketch(bank, config, work)


def _fit_products(bank: Bank, config: FitSettings, work: Work) -> FitResult:
    """Exactly, from the inner products of all pairs."""
    if work.engine is not None and work.folder is not None:
        _share_gram(bank, work.folder, work.engine, work.progress)
    gram, precision = gram_of(bank, folder=work.folder, progress=work.progress)
    halves = None
    if config.halves:
        halves = halves_of(gram, config.components, precision=precision, seed=config.seed)
    solution = fit_gram(gram, config.components, precision=precision)
    error = orthonormality((solution.scores / solution.scores.norm(dim=0)).T)
    accuracy = Accuracy("dual", float(solution.variances.sum()) / solution.total, error, halves=halves)
    basis = Basis(Combinations(bank, solution.weights, solution.offsets, solution.mean_square))
    return FitResult(basis, solution.scores.float(), solution.variances, accuracy)


def _fit_sketch(bank: Bank, config: FitSettings, work: Work) -> FitResult:
    """By streaming over sketches of the changes."""
    sketch = Sketch(dict(bank.shapes), config.sketch, config.seed)
    fit = _streamed(bank, sketch, "sketch", config, work)
    weights = fit.scores.double() / (fit.basis.variances * (len(bank) - 1))
    basis = Basis(Combinations(bank, weights, weights.new_zeros(weights.shape[1]), 0.0), fit.basis, sketch)
    error = sketch_error(bank, sketch, weights.shape[1])
    return FitResult(
        basis, fit.scores, fit.basis.variances, Accuracy("streaming", fit.captured, None, fit.passes, sketch=error)
    )


def _fit_rows(bank: Bank, config: FitSettings, work: Work, dual: bool) -> FitResult:
    """By the numbers of the factors, exactly or by streaming."""
    layout, standardize = RowLayout.of(bank), config.standardize
    if dual:
        how: Any = {"standardize": standardize, "halves": config.halves, "progress": work.progress}
        fit = fit_exactly(BankRows(bank, layout, 0, len(bank)), config.components, **how)
    else:
        fit = _streamed(bank, layout, "factors", config, work, standardize=standardize)
    accuracy = Accuracy(fit.solver, fit.captured, orthonormality(fit.basis.components), fit.passes, fit.halves)
    return FitResult(Basis(None, fit.basis, layout), fit.scores, fit.basis.variances, accuracy)


def _streamed(
    bank: Bank, writer: RowLayout | Sketch, kind: _RowKind, config: FitSettings, work: Work, standardize: bool = False
) -> BasisFit:
    """The streaming fit."""
    how: dict[str, Any] = {
        "standardize": standardize, "most_passes": config.passes, "tolerance": config.tolerance, "seed": config.seed,
        "progress": work.progress, "folder": work.folder,
    }  # fmt: skip
    if work.engine is not None:
        shards = _bank_shards(bank, kind, side=config.sketch, seed=config.seed)
        return fit_shards(shards, config.components, engine=work.engine, **how)
    digest = f"{bank.digest} {kind} {config.sketch}"
    return fit_streaming(BankRows(bank, writer, 0, len(bank)), config.components, digest=digest, **how)


def sketch_error(bank: Bank, sketch: Sketch, components: int, *, most_adapters: int = 512) -> SketchError:
    """Compare a sketch with exact inner products on adapters evenly taken from a bank."""
    step = -(-len(bank) // most_adapters)
    taken = AdapterStack.of([stack_of(bank, number, number + 1).adapter(0) for number in range(0, len(bank), step)])
    exact, rows = inner_products(taken, taken), sketch.rows(taken).double()
    center = torch.eye(len(taken), dtype=torch.float64) - 1 / len(taken)
    exact, drawn = center @ exact @ center, center @ (rows @ rows.T) @ center
    error = float((drawn - exact).norm() / exact.norm())
    count = min(components, len(taken) // 2)
    best = fit_gram(exact.clone(), count, precision=1e-7)
    own = fit_gram(drawn, count, precision=1e-7)
    # Both Gram matrices are written in this basis of the adapters.
    vectors = torch.linalg.qr(own.scores).Q
    share = float((vectors * (exact @ vectors)).sum() / (best.variances.sum() * (len(taken) - 1)))
    return SketchError(len(taken), error, share, count)


@final
@dataclass(frozen=True)
class BankShard:
    """Some adapters of a bank on disk, as rows; what another process is sent."""

    path: str
    """The bank's folder."""
    digest: str
    """Digest of the bank."""
    start: int
    """Number of the first adapter."""
    stop: int
    """Number after the last."""
    kind: _RowKind
    """Conversion of an adapter to a row."""
    side: int
    """Number of rows and columns of a sketch. The seed belongs to the sketch, too."""
    seed: int

    def open(self) -> BankRows:
        """Open the rows."""
        bank = AdapterBank.open(self.path)
        if bank.digest != self.digest:
            raise UsageError(f"The bank {self.path} has changed since the fit began.", cure="Begin in another folder.")
        if self.kind == "sketch":
            return BankRows(bank, Sketch(dict(bank.shapes), self.side, self.seed), self.start, self.stop)
        return BankRows(bank, RowLayout.of(bank), self.start, self.stop)


def _bank_shards(bank: Bank, kind: _RowKind, *, side: int, seed: int) -> list[BankShard]:
    """Divide a bank into shards, of 4,096 adapters at most and 8 at least."""
    path, count = _bank_path(bank), len(bank)
    parts = min(count, max(8, -(-count // 4096)))
    edges = [count * number // parts for number in range(parts + 1)]
    return [BankShard(path, bank.digest, start, stop, kind, side, seed) for start, stop in itertools.pairwise(edges)]


@final
@dataclass(frozen=True)
class _GramTask:
    """A block row of the Gram matrix to make."""

    path: str
    """The bank's folder."""
    digest: str
    start: int
    """Number of the first adapter of the block row."""
    folder: str
    """Folder in which the block row is stored."""


def _share_gram(bank: Bank, folder: Path, engine: Engine, progress: Progress) -> None:
    """Make the block rows of a Gram matrix, to be kept in a folder."""
    path = _bank_path(bank)
    folder.mkdir(parents=True, exist_ok=True)
    longest_first = reversed(block_rows(bank))
    tasks = [_GramTask(path, bank.digest, start, str(folder.resolve())) for start in longest_first]
    with Job.open(folder, shared=True) as job:
        runs = job.map(_run_block_row, tasks, name="gram", engine=engine)
        for run in progress.track(runs, "Block rows", len(tasks), unit="rows"):
            if not run.ok:
                raise NetweightError(
                    f"The inner products from adapter {run.config.start} on failed: {run.reason}",
                    cure="Once the reason is gone, the same call continues from there.",
                )


def _run_block_row(task: _GramTask) -> int:
    keep_block_row(AdapterBank.open(task.path), task.start, Path(task.folder))
    return task.start


def _bank_path(bank: Bank) -> str:
    if isinstance(bank, NormalizedBank):
        raise UsageError("Strengths are normalized in one process only.", cure="Leave --processes out.")
    if not isinstance(bank, AdapterBank):
        raise UsageError("Only a bank on disk can be shared with other processes.", cure="Write it with BankWriter.")
    return str(bank.path.resolve())


def fit_matrix(
    matrix: Columns,
    components: int | None = None,
    *,
    standardize: bool = False,
    solver: Solver = "auto",
    halves: bool = False,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of a matrix's rows.

    `components`: number of components; None for as many as there are, at most 1,000. `standardize`: whether to divide
    every column by its standard deviation (n − 1 in the denominator) first. `solver`: "dual" is exact and holds an n
    × n matrix in fp64; "streaming" holds 2.5 components in fp32; "auto" takes the first up to 10,000 rows.
    """
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
    most_passes: int = 6,
    tolerance: float = 2e-3,
    seed: int = 0,
    folder: str | Path | None = None,
    digest: str = "",
    save_every: float = 60.0,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of rows by block subspace iteration, for any number of rows.

    Memory holds a block of rows and 2.5 times the components (Q and Z of a quarter more), in fp32; while Z is made
    orthonormal, three quarters more. A pass computes 5 · rows · columns · components operations.

    `most_passes`: passes of iteration at most, besides one for the mean and one for the scores. `folder`, `digest`:
    where to keep what was added up, every `save_every` seconds, and which rows these are.

    Source: Halko, Martinsson and Tropp, arXiv 0909.4061, algorithm 4.4, on centered rows and started from a sample.
    """
    plan = _planned(components, *rows.shape, standardize, most_passes, tolerance, seed)
    with ExitStack() as stack:
        job = None
        if folder is not None:
            key = {"plan": plan, "rows": digest}
            job = stack.enter_context(Job.open(folder, key=key, of="a fit"))

        def here(iteration: Iteration, begun: tuple[Sums, int] | None) -> Sums:
            sums, row = begun or (empty(plan, iteration, rows.shape[0]), 0)
            keep = None if job is None else _Keeper(job, iteration, sums, save_every)
            if keep is not None and begun is None:
                keep.save(0)
            pass_over(rows, plan, iteration, first=0, sums=sums, start=row, keep=keep, progress=progress)
            return sums

        return _reduced(plan, job, rows, here)


def _reduced(
    plan: IterationPlan,
    job: Job | None,
    rows: MatrixRows,
    added: Callable[[Iteration, tuple[Sums, int] | None], Sums],
) -> BasisFit:
    """Pass by pass, from where a job stood: what is added up over all rows gives what the next pass works with.

    `rows`: the first of them, at least. `added`: makes a pass, given what a killed one had added up before a row.
    """
    loaded, begun = None if job is None else job.load(), None
    if loaded is None:
        iteration = begin(rows.rows(0, 1)[0])
    else:
        about, tensors = loaded
        sums = {name.removeprefix("sums."): tensors.pop(name) for name in list(tensors) if name.startswith("sums.")}
        iteration, begun = _iteration(about, tensors), (sums, about["row"]) if sums else None
    while True:
        sums, begun = added(iteration, begun), None
        if iteration.last:
            return result(plan, iteration, sums)
        iteration = finish(plan, iteration, sums)


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


def _planned(
    components: int | None, count: int, length: int, standardize: bool, most_passes: int, tolerance: float, seed: int
) -> IterationPlan:
    if count < 2:
        raise UsageError(f"{count} row has no principal components.", cure="Fit 2 or more; hundreds to be of use.")
    number = min(1000, count - 1, length) if components is None else components
    return IterationPlan(count, length, number, standardize, most_passes, tolerance, seed)


class Shard(Protocol):
    """Some of the rows; a frozen dataclass of JSON values, so that it can be sent and remembered."""

    def open(self) -> MatrixRows:
        """Open the rows, in the process that reads them."""
        ...


@final
@dataclass(frozen=True)
class MatrixShard:
    """Rows of a `.npy` file."""

    path: str
    """Path of the file."""
    start: int = 0
    """The first row."""
    stop: int | None = None
    """The row after the last; None for all."""

    def open(self) -> MatrixFile:
        """Open the rows."""
        return MatrixFile(self.path, self.start, self.stop)


@final
@dataclass(frozen=True)
class ShardTask:
    """One pass over one shard."""

    shard: Shard
    """Rows of the pass."""
    first: int
    """Number of the shard's first row among all rows."""
    plan: IterationPlan
    """Size and stopping rule of the iteration."""
    state: str
    """File with the arrays that the pass works with."""
    digest: str
    """Digest of that file, which identifies a finished pass."""
    target: str
    """File to write."""


def fit_shards(
    shards: Sequence[Shard],
    components: int | None = None,
    *,
    folder: str | Path,
    standardize: bool = False,
    most_passes: int = 6,
    tolerance: float = 2e-3,
    seed: int = 0,
    engine: Engine = local_processes,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of rows in several shards, in their order; otherwise as `fit_streaming`."""
    opened = [shard.open() for shard in shards]
    shapes = [rows.shape for rows in opened]
    if len({length for _, length in shapes}) != 1:
        raise UsageError(f"Shards of shapes {shapes} are not parts of one matrix.", cure="Give rows of one length.")
    plan = _planned(
        components, sum(rows for rows, _ in shapes), shapes[0][1], standardize, most_passes, tolerance, seed
    )
    with Job.open(folder, key={"plan": plan, "rows": list(shards)}, of="a fit") as job:

        def shared(iteration: Iteration, begun: tuple[Sums, int] | None) -> Sums:
            job.save(_about(iteration), iteration.fixed)
            for file in job.folder.glob("pass-*.safetensors"):
                if not file.name.startswith(f"pass-{iteration.stage}-"):
                    file.unlink()
            files = [job.folder / f"pass-{iteration.stage}-{number}.safetensors" for number in range(len(shards))]
            digest, first, tasks = digest_file(job.folder / _STATE), 0, []
            for shard, (count, _), file in zip(shards, shapes, files, strict=True):
                tasks.append(ShardTask(shard, first, plan, str(job.folder / _STATE), digest, str(file)))
                first += count
            _carry_out(tasks, job, engine, progress)
            return _summed(files)

        return _reduced(plan, job, opened[0], shared)


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
