"""Block subspace iteration, pass by pass: what a pass over rows adds up, and what the next pass works with.

All that a pass adds up is a sum over rows, so workers that share the rows exchange these sums and nothing else.
"""

# Stage 0 finds mean and deviation, and keeps p sampled rows, whose span is the first guess Q. Each further stage makes
# Z = XᵀX Q; the eigenvalues of QᵀZ say what Q had captured, and an orthonormal basis of Z is the next Q. The last stage
# makes Y = X Q and turns Q by the eigenvectors of YᵀY (Rayleigh–Ritz), which gives components and scores.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.nn.matrix import MatrixRows, Moments, blocks, check_finite
from netweight.nn.pca import BasisFit, RowBasis

# What a pass adds up, by name.
Sums = dict[str, Tensor]
_OVERSAMPLING = 1.25
_EPS = torch.finfo(torch.float32).eps


@final
@dataclass(frozen=True)
class IterationPlan:
    """Size and stopping rule of an iteration."""

    count: int
    """Number of rows of all workers together."""
    length: int
    """Number of columns."""
    components: int
    """Number of components."""
    standardize: bool = False
    """True to divide columns by their standard deviation."""
    most_passes: int = 6
    """Passes of iteration at most."""
    tolerance: float = 2e-3
    """A pass that adds less than this share to the captured variance is the last."""
    seed: int = 0
    """Seed of the first block of vectors."""

    @property
    def width(self) -> int:
        """Dimensions of the subspace, p: a quarter more than components, which is what they converge by."""
        width = max(int(self.components * _OVERSAMPLING), self.components + 8)
        return min(width, self.count, self.length)

    def sampled(self) -> Tensor:
        """Numbers of the rows that the first guess is the span of, rising."""
        draw = torch_generator(self.seed, "sampled rows")
        return torch.randperm(self.count, generator=draw)[: self.width].sort().values


@final
@dataclass(frozen=True, eq=False)
class Iteration:
    """State of a fit between two passes."""

    stage: int
    """0 before anything, then the number of the pass to make."""
    last: bool
    """True if that pass is the last."""
    fixed: Sums
    """Fixed values of the pass: `mean`, `deviation`, and `basis`, shape `(p, d)`; from stage 1."""
    captured: tuple[float, ...] = ()
    """Share of the variance that the components had captured, pass by pass."""


def begin(pilot: Tensor) -> Iteration:
    """Start; `pilot` is a row near the mean, shape `(d,)`, the same for all workers."""
    return Iteration(0, False, {"pilot": pilot})


def empty(plan: IterationPlan, iteration: Iteration, rows: int) -> Sums:
    """Zeros that a pass over a number of rows adds to."""
    if iteration.stage == 0:
        zeros = torch.zeros(plan.length, dtype=torch.float64)
        return {"sums": zeros, "squares": zeros.clone(), "sampled": torch.zeros(plan.width, plan.length)}
    if iteration.last:
        squares = torch.zeros(plan.width, plan.width, dtype=torch.float64)
        return {"squares": squares, "own": torch.empty(rows, plan.width)}
    return {"products": torch.zeros(plan.width, plan.length)}


def pass_over(
    rows: MatrixRows, plan: IterationPlan, iteration: Iteration, *, first: int, sums: Sums, start: int = 0,
    keep: Callable[[int], None] | None = None, progress: Progress = QUIET,
) -> None:  # fmt: skip
    """Add what a worker's rows contribute to a pass."""
    names = "mean and deviation" if iteration.stage == 0 else "scores" if iteration.last else "iteration"
    add = _add_moments if iteration.stage == 0 else _add_scores if iteration.last else _add_products
    with progress.task(f"Pass {iteration.stage + 1}, {names}", rows.shape[0], unit="rows") as task:
        task.update(start)
        for here, stop in blocks(rows, start):
            add(plan, iteration, sums, rows.rows(here, stop), here, first)
            if keep is not None:
                keep(stop)
            task.update(stop - here)


def _add_moments(plan: IterationPlan, iteration: Iteration, sums: Sums, block: Tensor, here: int, first: int) -> None:
    check_finite(block, first + here)
    chosen = plan.sampled()
    places = ((chosen >= first + here) & (chosen < first + here + len(block))).nonzero()[:, 0]
    sums["sampled"][places] = block[chosen[places] - first - here]
    Moments(iteration.fixed["pilot"], sums["sums"], sums["squares"]).add(block)


def _prepared(iteration: Iteration, block: Tensor) -> Tensor:
    block -= iteration.fixed["mean"]
    if "deviation" in iteration.fixed:
        block /= iteration.fixed["deviation"]
    return block


def _add_products(plan: IterationPlan, iteration: Iteration, sums: Sums, block: Tensor, here: int, first: int) -> None:
    block = _prepared(iteration, block)
    sums["products"].addmm_((block @ iteration.fixed["basis"].T).T, block)


def _add_scores(plan: IterationPlan, iteration: Iteration, sums: Sums, block: Tensor, here: int, first: int) -> None:
    scores = _prepared(iteration, block) @ iteration.fixed["basis"].T
    wide = scores.double()
    sums["squares"] += wide.T @ wide
    sums["own"][here : here + len(block)] = scores


def finish(plan: IterationPlan, iteration: Iteration, sums: Sums) -> Iteration:
    """Make of a pass's sums, over all workers, what the next pass works with. Both are used up, for their memory."""
    if iteration.stage == 0:
        moments = Moments(iteration.fixed["pilot"], sums["sums"], sums["squares"])
        variance = moments.variance(plan.count)
        if not variance.any():
            raise UsageError(
                f"All {plan.count} rows are the same, so there are no principal components.",
                cure="Fit rows that differ.",
            )
        fixed = {"mean": moments.mean(plan.count).float()}
        if plan.standardize:
            fixed["deviation"] = moments.deviation(plan.count)
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
    return Iteration(iteration.stage + 1, settled or len(captured) >= plan.most_passes, fixed, captured)


def result(plan: IterationPlan, iteration: Iteration, sums: Sums) -> BasisFit:
    """Make the fit of the last pass's sums, over all workers, and the worker's own scores."""
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
    basis = RowBasis(
        fixed["mean"], fixed.get("deviation"), components.mul_(signs), values / (plan.count - 1), float(fixed["total"])
    )
    scores = sums["own"] @ vectors * signs[:, 0]
    return BasisFit(basis, scores, "streaming", (*iteration.captured, float(basis.variances.sum()) / basis.total))


def _products(one: Tensor, other: Tensor) -> Tensor:
    """Inner products of rows, fp64, symmetric up to rounding and made so."""
    products = (one @ other.T).double()
    return (products + products.T) / 2


def _orthonormal(rows: Tensor) -> Tensor:
    """An orthonormal basis of the span of rows, as rows; by Householder reflections, whatever their rank."""
    scale = rows.norm(dim=1, keepdim=True)
    rows /= torch.where(scale > 0, scale, 1.0)
    basis: Tensor = torch.linalg.qr(rows.T).Q.T
    return basis
