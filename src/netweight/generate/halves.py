"""What of a fit would come back from other data: two halves are fitted apart, by their inner products, and compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.generate.dual_fit import DualFit, fit_gram

__all__ = ["Halves", "halves_of"]


@final
@dataclass(frozen=True)
class Halves:
    """How well two halves agree; single trailing components seldom come back, subspaces do.

    Attributes:
        components: Number that each half was fitted with.
        agreement: Number of leading components j → mean squared cosine of the principal angles between both halves'
            subspaces of j components: 1 for the same, about j / dimensions for chance.
        fitted: Share of a half's variance that its own components capture, mean of both.
        held_out: Share of the other half's variance, about the first's mean, that they capture, mean of both.
    """

    components: int
    agreement: dict[int, float]
    fitted: float
    held_out: float


def halves_of(gram: Tensor, components: int | None, *, precision: float, seed: int = 0) -> Halves | None:
    """Fit two random halves.

    Args:
        gram: Shape `(n, n)`, fp64: inner products, which stay as they are.
        components: See `fit_gram`; less where a half has fewer.
        precision: See `fit_gram`.
        seed: Of the division.

    Returns:
        None where there are fewer than 8 points, or all points of a half are the same.
    """
    count = len(gram)
    if count < 8:
        return None
    order = torch.randperm(count, generator=torch_generator(seed, "halves"))
    parts = order[: count // 2], order[count // 2 :]
    wanted = min(1000 if components is None else components, count // 2 - 1)
    try:
        fits = [fit_gram(gram[one][:, one], None, precision=precision) for one in parts]
    except UsageError:
        return None
    wanted = min(wanted, *(fit.weights.shape[1] for fit in fits))
    weights = [fit.weights[:, :wanted] for fit in fits]
    overlap = weights[0].T @ gram[parts[0]][:, parts[1]] @ weights[1]
    agreement = {
        number: float(torch.linalg.svdvals(overlap[:number, :number]).square().mean())
        for number in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
        if number < wanted
    }
    agreement[wanted] = float(torch.linalg.svdvals(overlap).square().mean())
    fitted = sum(float(fit.variances[:wanted].sum()) / fit.total for fit in fits) / 2
    held = sum(_held_out(gram, parts[i], parts[1 - i], fits[i], wanted) for i in (0, 1)) / 2
    return Halves(wanted, agreement, fitted, held)


def _held_out(gram: Tensor, own: Tensor, other: Tensor, fit: DualFit, wanted: int) -> float:
    """Share of the variance of other points about a half's mean that the half's components capture."""
    across = gram[other][:, own]
    whole = gram.diagonal()[other] - 2 * across.mean(dim=1) + gram[own][:, own].mean()
    scores = across @ fit.weights[:, :wanted] - fit.offsets[:wanted]
    return float(scores.square().sum() / whole.sum())
