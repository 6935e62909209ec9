"""Principal components from inner products alone: n things whose Gram matrix fits memory, however large they are.

A component is a combination of the things, Σ_i weights_i x_i. Nothing here knows what the x_i are; callers that have
them as rows of a matrix go on with `generate/basis.py`, those that have adapters with the weights.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.nn.matrix import Columns, Rows


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


MOST_DUAL = 10_000
"""Rows up to which the Gram matrix is used: 800 MB of it."""
Solver = Literal["auto", "dual", "streaming"]


@final
@dataclass(frozen=True, eq=False)
class Basis:
    """Mean and components.

    Attributes:
        mean: Shape `(d,)`, fp32.
        deviation: Shape `(d,)`, fp32: what each number is divided by; None for nothing. 1 where it does not vary.
        components: Shape `(k, d)`, fp32, orthonormal rows.
        variances: Shape `(k,)`, fp64, falling: of the scores, with n − 1 in the denominator.
        total: The variance along all directions, in the same units.
    """

    mean: Tensor
    deviation: Tensor | None
    components: Tensor
    variances: Tensor
    total: float

    def project(self, rows: Tensor) -> Tensor:
        """Return the scores of rows, shape `(…, d)` to `(…, k)`.

        Args:
            rows: Of the basis's dtype, on any device.
        """
        centered = rows.to(self.components) - self.mean
        return (centered if self.deviation is None else centered / self.deviation) @ self.components.T

    def squares(self, rows: Tensor) -> Tensor:
        """Return the squared distances of rows from the mean, shape `(…, d)` to `(…)`.

        Args:
            rows: Shape `(…, d)`, as for `project`.
        """
        centered = rows.to(self.components) - self.mean
        return (centered if self.deviation is None else centered / self.deviation).square().sum(dim=-1)

    def point(self, scores: Tensor) -> Tensor:
        """Return the row at scores, shape `(…, k)` to `(…, d)`, on their device; differentiable.

        Args:
            scores: One number per component.
        """
        moved = scores @ self.components.to(scores)
        if self.deviation is not None:
            moved = moved * self.deviation.to(scores)
        return self.mean.to(scores) + moved


@final
@dataclass(frozen=True, eq=False)
class BasisFit:
    """A basis, and what is known of its fit.

    Attributes:
        basis: The basis.
        scores: Shape `(n, k)`, fp32, of the rows that this worker read.
        solver: "dual", which is exact, or "streaming".
        passes: Streaming: the variance that the components had captured after each pass over the rows, a share of all.
        halves: Dual, where asked for: how well the fits of two halves of the rows agree.
    """

    basis: Basis
    scores: Tensor
    solver: Literal["dual", "streaming"]
    passes: tuple[float, ...] = ()
    halves: Halves | None = None

    @property
    def captured(self) -> float:
        """Share of the variance that the components capture."""
        return float(self.basis.variances.sum()) / self.basis.total


def orthonormality(components: Tensor) -> float:
    """Return how far components are from orthonormal: the greatest magnitude in C Cᵀ − I.

    Args:
        components: Shape `(k, d)`, fp32.
    """
    count, length = components.shape
    products = torch.zeros(count, count, dtype=torch.float64)
    step = max(1, (1 << 24) // count)
    for start in range(0, length, step):
        part = components[:, start : start + step]
        products += part @ part.T
    products.diagonal().sub_(1)
    return float(products.abs().max())


def fit_matrix(
    matrix: Rows,
    components: int | None = None,
    *,
    standardize: bool = False,
    solver: Solver = "auto",
    halves: bool = False,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of a matrix's rows.

    Args:
        matrix: n rows of d numbers, finite.
        components: How many; None for as many as there are, at most 1,000.
        standardize: Whether to divide every column by its standard deviation (n − 1 in the denominator) first.
        solver: "dual" is exact and holds an n × n matrix in fp64; "streaming" holds 2.5 components in fp32; "auto"
            takes the first up to 10,000 rows.
        halves: Whether to fit two halves of the rows, too; "dual" only.
        progress: Where to show it.

    Returns:
        The basis, with the rows' scores and how much of the variance it holds.

    Raises:
        UsageError: There are fewer than 2 rows, fewer components than asked for, or a number is not finite.
    """
    count, length = matrix.shape
    if components is not None and components >= min(count, length + 1):
        raise UsageError(
            f"{count} rows of {length} numbers have at most {min(count - 1, length)} components, not {components}.",
            cure="Ask for fewer.",
        )
    if solver == "dual" or (solver == "auto" and count <= MOST_DUAL):
        from netweight.nn.gram_pca import fit_by_columns, fit_by_rows

        if isinstance(matrix, Columns):
            return fit_by_columns(matrix, components, standardize=standardize, halves=halves, progress=progress)
        return fit_by_rows(matrix, components, standardize=standardize, halves=halves, progress=progress)
    from netweight.nn.streaming_pca import fit_streaming

    return fit_streaming(matrix, components, standardize=standardize, progress=progress)
