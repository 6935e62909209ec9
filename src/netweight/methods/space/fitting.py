"""The three ways a space is fitted: from inner products, through a sketch of changes, and as rows of numbers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, final

from torch import Tensor

from netweight.core.engines import Engine
from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.generate.adapter import Adapter
from netweight.generate.basis import MOST_DUAL, BasisFit, fit_matrix, orthonormality
from netweight.generate.dual_fit import fit_gram
from netweight.generate.fan_out import fit_shards
from netweight.generate.halves import halves_of
from netweight.generate.shard_sum import ShardSum
from netweight.generate.stack import AdapterStack
from netweight.generate.streaming_fit import fit_streaming
from netweight.methods.space.accuracy import Accuracy
from netweight.methods.space.bank import Bank
from netweight.methods.space.combinations import Combinations
from netweight.methods.space.config import FitConfig
from netweight.methods.space.gram import gram_of
from netweight.methods.space.sketch import Sketch, SketchRows, sketch_error
from netweight.methods.space.tasks import RowKind, bank_shards, make_block_rows
from netweight.methods.space.vector_basis import VectorBasis
from netweight.methods.space.vectors import AdapterRows, Layout

__all__ = ["Basis", "Fitted", "Work", "fit_bank"]


class Basis(Protocol):
    """Mean and components of a space, in one of the representations."""

    def project(self, stack: AdapterStack) -> tuple[Tensor, Tensor]:
        """Scores of m adapters, shape `(m, k)`, and squared distances from the mean, shape `(m,)`; both fp32.

        What lies outside of the space is in the distances alone.

        Args:
            stack: The adapters.

        Returns:
            Scores and squared distances.
        """
        ...

    def changes(self, scores: Tensor) -> dict[str, Tensor]:
        """Changes at points.

        Args:
            scores: Shape `(m, k)`.

        Returns:
            Module name → ΔW, shape `(m, rows, columns)`.
        """
        ...

    def adapter(self, scores: Tensor) -> Adapter:
        """A point as an adapter.

        Args:
            scores: Shape `(k,)`.
        """
        ...


@final
@dataclass(frozen=True)
class Work:
    """How a fit is carried out; it does not change what is found.

    Attributes:
        folder: Where to keep what was done, to go on after a kill; None for nowhere.
        workers: Who else takes part.
        engine: Where tasks run, for a bank on disk and with a folder; None for in this process.
        progress: Where to show it.

    Raises:
        UsageError: There is an engine and no folder.
    """

    folder: Path | None
    workers: ShardSum
    engine: Engine | None
    progress: Progress

    def __post_init__(self) -> None:
        """Refuse an engine that has nowhere to put what it makes."""
        if self.engine is not None and self.folder is None:
            raise UsageError("Work that is shared with other processes needs a folder.", cure="Name one, or --work.")


@final
@dataclass(frozen=True, eq=False)
class Fitted:
    """What was found: see `WeightSpace` for `scores`; `variances` are theirs."""

    basis: Basis
    scores: Tensor
    variances: Tensor
    accuracy: Accuracy


def fit_bank(bank: Bank, config: FitConfig, work: Work) -> Fitted:
    """Fit a bank as a configuration says.

    Raises:
        UsageError: See `WeightSpace.fit`.
    """
    if config.representation != "delta":
        return _fit_vectors(bank, config, work)
    return _fit_products(bank, config, work) if _is_dual(bank, config) else _fit_sketch(bank, config, work)


def _is_dual(bank: Bank, config: FitConfig) -> bool:
    return config.solver == "dual" or (config.solver == "auto" and len(bank) <= MOST_DUAL)


def _fit_products(bank: Bank, config: FitConfig, work: Work) -> Fitted:
    if work.engine is not None and work.folder is not None:
        make_block_rows(bank, work.folder, work.engine, work.progress)
    gram, precision = gram_of(bank, folder=work.folder, workers=work.workers, progress=work.progress)
    halves = None
    if config.halves:
        halves = halves_of(gram, config.components, precision=precision, seed=config.seed)
    found = fit_gram(gram, config.components, precision=precision)
    directions = found.scores / found.scores.norm(dim=0)
    error = directions.T @ directions
    error.diagonal().sub_(1)
    accuracy = Accuracy("dual", float(found.variances.sum()) / found.total, float(error.abs().max()), halves=halves)
    basis = Combinations(bank, found.weights, found.offsets, found.mean_square)
    return Fitted(basis, found.scores.float(), found.variances, accuracy)


def _fit_sketch(bank: Bank, config: FitConfig, work: Work) -> Fitted:
    sketch = Sketch(dict(bank.shapes), config.sketch, config.seed)
    start, stop = _share(len(bank), work.workers)
    fit, scores = _streamed(SketchRows(bank, sketch, start, stop), "sketch", config, work)
    weights = scores.double() / (fit.basis.variances * (len(bank) - 1))
    basis = Combinations(bank, weights, weights.new_zeros(weights.shape[1]), 0.0, (fit.basis, sketch))
    accuracy = Accuracy(
        "streaming", fit.captured, None, fit.passes, sketch=sketch_error(bank, sketch, weights.shape[1])
    )  # fmt: skip
    return Fitted(basis, scores, fit.basis.variances, accuracy)


def _fit_vectors(bank: Bank, config: FitConfig, work: Work) -> Fitted:
    assert config.representation != "delta"
    layout = Layout.of(config.representation, bank)
    standardize = config.standardize and config.representation == "factors"
    start, stop = (0, len(bank)) if _is_dual(bank, config) else _share(len(bank), work.workers)
    rows = AdapterRows(bank, layout, start, stop)
    if _is_dual(bank, config):
        fit = fit_matrix(
            rows, config.components, standardize=standardize, solver="dual", halves=config.halves,
            progress=work.progress,
        )  # fmt: skip
        scores = fit.scores
    else:
        fit, scores = _streamed(rows, config.representation, config, work, standardize=standardize)
    accuracy = Accuracy(fit.solver, fit.captured, orthonormality(fit.basis.components), fit.passes, fit.halves)
    return Fitted(VectorBasis(layout, fit.basis), scores, fit.basis.variances, accuracy)


def _streamed(
    rows: AdapterRows | SketchRows, kind: RowKind, config: FitConfig, work: Work, *, standardize: bool = False
) -> tuple[BasisFit, Tensor]:
    """The streaming fit, and the scores of all adapters."""
    bank = rows.bank
    how: dict[str, Any] = {
        "standardize": standardize, "most": config.passes, "tolerance": config.tolerance, "seed": config.seed,
        "progress": work.progress,
    }  # fmt: skip
    if work.engine is not None and work.folder is not None:
        shards = bank_shards(bank, kind, side=config.sketch, seed=config.seed)
        fit = fit_shards(shards, config.components, folder=work.folder, engine=work.engine, **how)
        return fit, fit.scores
    digest = f"{bank.digest} {kind} {config.sketch}"
    fit = fit_streaming(rows, config.components, workers=work.workers, folder=work.folder, digest=digest, **how)
    return fit, _gathered(fit.scores, rows.start, len(bank), work.workers)


def _share(count: int, workers: ShardSum) -> tuple[int, int]:
    """A worker's range of adapters."""
    return count * workers.number // workers.count, count * (workers.number + 1) // workers.count


def _gathered(own: Tensor, start: int, count: int, workers: ShardSum) -> Tensor:
    """Scores of all workers' adapters."""
    whole = own.new_zeros(count, own.shape[1])
    whole[start : start + len(own)] = own
    workers.add([whole])
    return whole
