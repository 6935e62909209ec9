"""Principal components from inner products alone: n things whose Gram matrix fits memory, however large they are.

A component is a combination of the things, Σ_i weights_i x_i. Nothing here knows what the x_i are; callers that have
them as rows of a matrix go on with `generate/basis.py`, those that have adapters with the weights.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.errors import UsageError

__all__ = ["DualFit", "fit_gram"]


@final
@dataclass(frozen=True, eq=False)
class DualFit:
    """Principal components of n things, as combinations of them.

    Attributes:
        weights: Shape `(n, k)`, fp64. Component j is Σ_i weights[i, j] x_i; it has norm 1, and columns sum to 0.
        scores: Shape `(n, k)`, fp64: coordinates of the n things, uncorrelated and of mean 0.
        variances: Shape `(k,)`, fp64, falling: of the scores, with n − 1 in the denominator.
        total: The variance along all directions, in the same units.
        offsets: Shape `(k,)`, fp64: ⟨mean, component j⟩. A thing whose inner products with the n are g has the scores
            `g @ weights − offsets`.
        mean_square: ⟨mean, mean⟩.
    """

    weights: Tensor
    scores: Tensor
    variances: Tensor
    total: float
    offsets: Tensor
    mean_square: float


def fit_gram(gram: Tensor, components: int | None = None, *, precision: float) -> DualFit:
    """Find the principal components of things from their inner products.

    Args:
        gram: Shape `(n, n)`, fp64, symmetric; of the things as they are or with any constant taken off. Overwritten.
        components: How many; None for as many as the data have, at most 1,000.
        precision: Relative rounding error of the entries, such as `torch.finfo(torch.float32).eps` where products were
            made in fp32: variances that rounding alone could make are not taken for components.

    Returns:
        The fit, each component's sign such that its score of greatest magnitude is positive.

    Raises:
        UsageError: There are fewer than 2 things, the matrix is not finite, or the data have fewer components than
            asked for.

    Source: with H = I − 11ᵀ/n and HGH = U Λ Uᵀ, weights are H U Λ^(−1/2) and scores U Λ^(1/2).
    """
    count = len(gram)
    if count < 2:
        raise UsageError(f"{count} point has no principal components.", cure="Fit 2 or more; hundreds to be of use.")
    largest = float(gram.diagonal().abs().max())
    means = gram.mean(dim=0)
    if not torch.isfinite(means).all():
        raise UsageError("The inner products are not finite: a value is NaN, infinite or too large to be squared.")
    gram -= means
    gram -= (means - means.mean())[:, None]
    total = float(gram.diagonal().sum()) / (count - 1)
    noise = precision * count**0.5 * largest
    wanted = min(1000 if components is None else components, count - 1)
    values, vectors = _largest(gram, wanted)
    rank = int((values > noise).sum())
    if components is not None and components > rank:
        raise UsageError(
            f"{count} points have {rank} principal components, not {components}.",
            cure=f"Ask for {rank} or fewer; repeated points add none." if rank else "All points are the same.",
        )
    if not rank:
        raise UsageError(f"All {count} points are the same: there is nothing to find.", cure="Fit points that differ.")
    values, vectors = values[:rank], vectors[:, :rank]
    signs = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True)).sign()
    vectors *= signs
    weights = (vectors - vectors.mean(dim=0)).div_(values.sqrt())
    return DualFit(
        weights, vectors.mul_(values.sqrt()), values / (count - 1), total, means @ weights, float(means.mean())
    )


def _largest(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, falling, of a symmetric fp64 matrix that may be overwritten, and their vectors.

    SciPy, where it is installed, works in place and makes the wanted vectors only, which halves the memory.
    """
    size = len(matrix)
    if importlib.util.find_spec("scipy") is None:
        values, vectors = torch.linalg.eigh(matrix)
        return values.flip(0)[:count], vectors.flip(1)[:, :count]
    linalg = importlib.import_module("scipy.linalg")

    found, columns = linalg.eigh(
        matrix.numpy().T, overwrite_a=True, check_finite=False, driver="evr", subset_by_index=(size - count, size - 1)
    )
    return torch.from_numpy(found[::-1].copy()), torch.from_numpy(columns[:, ::-1].copy())
