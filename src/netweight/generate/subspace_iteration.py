"""Principal components of more rows than a Gram matrix has room for: block subspace iteration over blocks of rows.

A stage is one pass over the rows; what it adds up is a sum over them, so that several workers share it and exchange
nothing else. What was added so far is kept in a folder, so that a fit goes on where it was killed.

Stage 0 finds mean and deviation, and keeps p sampled rows, whose span is the first guess Q. Each further stage makes
Z = XᵀX Q; the eigenvalues of QᵀZ say what Q had captured, and an orthonormal basis of Z is the next Q. The last stage
makes Y = X Q and turns Q by the eigenvectors of YᵀY (Rayleigh–Ritz), which gives components and scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.generate.basis import Basis, BasisFit
from netweight.generate.matrix import Rows, blocks
from netweight.generate.moments import Moments, check_finite

__all__ = ["Iteration", "Plan", "Sums", "begin", "blank", "empty", "finish", "pass_over", "result"]

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
