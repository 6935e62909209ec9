"""Fitting a bank: exactly from all inner products, or by streaming over rows; and how good the fit is."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, final

import torch
from torch import Tensor

from netweight.core.engines import Engine
from netweight.core.progress import Progress
from netweight.errors import NetweightError, UsageError
from netweight.job import Job
from netweight.methods.space.fitting.basis import BankRows, CombinationBasis, RowBasis, RowLayout, Sketch, SpaceBasis
from netweight.methods.space.fitting.gram import (
    Bank,
    NormalizedBank,
    block_rows,
    gram_of,
    inner_products,
    keep_block_row,
    stack_of,
)
from netweight.methods.space.fitting.streaming import fit_shards, fit_streaming
from netweight.methods.space.settings import FitSettings
from netweight.nn.lora import AdapterStack
from netweight.nn.pca import MOST_DUAL, BasisFit, Halves, fit_exactly, fit_gram, halves_of, orthonormality
from netweight.store.bank.bank import AdapterBank

# How the adapters of a shard are written as rows.
_RowKind = Literal["sketch", "factors"]


@final
@dataclass(frozen=True)
class Accuracy:
    """How good a fit is."""

    # "dual" captures the most that this many components can; "streaming" nearly; "published" was found by others
    solver: Literal["dual", "streaming", "published"]
    captured: float  # share of the variance along the components
    # The greatest magnitude in C Cᵀ − I of the components C, or by inner products of the eigenvectors that they are
    # made of; None through a sketch, where components are orthonormal in the sketch only.
    orthonormality: float | None
    # Streaming: the captured share after each pass; where growth has stopped it is near the best.
    passes: tuple[float, ...] = ()
    halves: Halves | None = None  # how well two halves agree; None where they were not fitted
    sketch: SketchError | None = None  # error of the sketch; None without one

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
            halves = Halves(**{**halves, "agreement": agreement})
        sketch = None if sketch is None else SketchError(**sketch)
        return cls(**{**values, "passes": tuple(values["passes"]), "halves": halves, "sketch": sketch})


@final
@dataclass(frozen=True)
class SketchError:
    """Error of a sketch, measured against exact inner products on some adapters."""

    adapters: int  # how many
    products: float  # root mean squared error of their inner products about the mean, relative to the root mean square
    captured: float  # variance along the leading components by the sketch, relative to that along the exact ones
    components: int  # how many of them


@final
@dataclass(frozen=True)
class Work:
    """How a fit is carried out; it does not change what is found."""

    folder: Path | None  # where to keep what was done, to continue after a kill; None for nowhere
    engine: Engine | None  # where tasks run, for a bank on disk and with a folder; None for in this process
    progress: Progress

    def __post_init__(self) -> None:
        if self.engine is not None and self.folder is None:
            raise UsageError("Work that is shared with other processes needs a folder.", cure="Name one, or --work.")


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """A fitted basis with the scores of all adapters."""

    basis: SpaceBasis
    scores: Tensor  # shape `(n, k)`, fp32
    variances: Tensor  # theirs, shape `(k,)`
    accuracy: Accuracy


def fit_bank(bank: Bank, config: FitSettings, work: Work) -> Fitted:
    """Fit a bank."""
    dual = config.solver == "dual" or (config.solver == "auto" and len(bank) <= MOST_DUAL)
    if config.representation != "delta":
        return _fit_rows(bank, config, work, dual)
    return _fit_products(bank, config, work) if dual else _fit_sketch(bank, config, work)


def _fit_products(bank: Bank, config: FitSettings, work: Work) -> Fitted:
    """Exactly, from the inner products of all pairs."""
    if work.engine is not None and work.folder is not None:
        _share_gram(bank, work.folder, work.engine, work.progress)
    gram, precision = gram_of(bank, folder=work.folder, progress=work.progress)
    halves = None
    if config.halves:
        halves = halves_of(gram, config.components, precision=precision, seed=config.seed)
    found = fit_gram(gram, config.components, precision=precision)
    error = orthonormality((found.scores / found.scores.norm(dim=0)).T)
    accuracy = Accuracy("dual", float(found.variances.sum()) / found.total, error, halves=halves)
    basis = CombinationBasis(bank, found.weights, found.offsets, found.mean_square)
    return Fitted(basis, found.scores.float(), found.variances, accuracy)


def _fit_sketch(bank: Bank, config: FitSettings, work: Work) -> Fitted:
    """By streaming over sketches of the changes."""
    sketch = Sketch(dict(bank.shapes), config.sketch, config.seed)
    fit = _streamed(bank, sketch, "sketch", config, work)
    weights = fit.scores.double() / (fit.basis.variances * (len(bank) - 1))
    basis = CombinationBasis(bank, weights, weights.new_zeros(weights.shape[1]), 0.0, (fit.basis, sketch))
    error = sketch_error(bank, sketch, weights.shape[1])
    return Fitted(
        basis, fit.scores, fit.basis.variances, Accuracy("streaming", fit.captured, None, fit.passes, sketch=error)
    )


def _fit_rows(bank: Bank, config: FitSettings, work: Work, dual: bool) -> Fitted:
    """By the numbers of the factors, exactly or by streaming."""
    layout, standardize = RowLayout.of(bank), config.standardize
    if dual:
        how: Any = {"standardize": standardize, "halves": config.halves, "progress": work.progress}
        fit = fit_exactly(BankRows(bank, layout, 0, len(bank)), config.components, **how)
    else:
        fit = _streamed(bank, layout, "factors", config, work, standardize=standardize)
    accuracy = Accuracy(fit.solver, fit.captured, orthonormality(fit.basis.components), fit.passes, fit.halves)
    return Fitted(RowBasis(layout, fit.basis), fit.scores, fit.basis.variances, accuracy)


def _streamed(
    bank: Bank, writer: RowLayout | Sketch, kind: _RowKind, config: FitSettings, work: Work, standardize: bool = False
) -> BasisFit:
    """The streaming fit."""
    how: dict[str, Any] = {
        "standardize": standardize, "most": config.passes, "tolerance": config.tolerance, "seed": config.seed,
        "progress": work.progress, "folder": work.folder,
    }  # fmt: skip
    if work.engine is not None:
        shards = _bank_shards(bank, kind, side=config.sketch, seed=config.seed)
        return fit_shards(shards, config.components, engine=work.engine, **how)
    digest = f"{bank.digest} {kind} {config.sketch}"
    return fit_streaming(BankRows(bank, writer, 0, len(bank)), config.components, digest=digest, **how)


def sketch_error(bank: Bank, sketch: Sketch, components: int, *, most: int = 512) -> SketchError:
    """Compare a sketch with exact inner products on adapters evenly taken from a bank."""
    step = -(-len(bank) // most)
    taken = AdapterStack.of([stack_of(bank, number, number + 1).adapter(0) for number in range(0, len(bank), step)])
    exact, rows = inner_products(taken, taken), sketch.rows(taken).double()
    center = torch.eye(len(taken), dtype=torch.float64) - 1 / len(taken)
    exact, drawn = center @ exact @ center, center @ (rows @ rows.T) @ center
    error = float((drawn - exact).norm() / exact.norm())
    wanted = min(components, len(taken) // 2)
    best = fit_gram(exact.clone(), wanted, precision=1e-7)
    own = fit_gram(drawn, wanted, precision=1e-7)
    vectors = torch.linalg.qr(own.scores).Q  # of the adapters, in which both Gram matrices are written
    share = float((vectors * (exact @ vectors)).sum() / (best.variances.sum() * (len(taken) - 1)))
    return SketchError(len(taken), error, share, wanted)


@final
@dataclass(frozen=True)
class BankShard:
    """Some adapters of a bank on disk, as rows; what another process is sent."""

    path: str  # the bank's folder
    digest: str
    start: int  # number of the first adapter
    stop: int  # number after the last
    kind: _RowKind
    side: int  # of a sketch, and so is the seed
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
    path, count = _place(bank), len(bank)
    parts = min(count, max(8, -(-count // 4096)))
    edges = [count * number // parts for number in range(parts + 1)]
    return [BankShard(path, bank.digest, start, stop, kind, side, seed) for start, stop in itertools.pairwise(edges)]


@final
@dataclass(frozen=True)
class _GramTask:
    """A block row of the Gram matrix to make."""

    path: str  # the bank's folder
    digest: str
    start: int  # its first adapter
    folder: str  # where it is kept


def _share_gram(bank: Bank, folder: Path, engine: Engine, progress: Progress) -> None:
    """Make the block rows of a Gram matrix, to be kept in a folder."""
    path = _place(bank)
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


def _place(bank: Bank) -> str:
    if isinstance(bank, NormalizedBank):
        raise UsageError("Strengths are normalized in one process only.", cure="Leave --processes out.")
    if not isinstance(bank, AdapterBank):
        raise UsageError("Only a bank on disk can be shared with other processes.", cure="Write it with BankWriter.")
    return str(bank.path.resolve())
