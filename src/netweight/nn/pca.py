"""Principal components from a Gram matrix alone, whatever the points are, and a basis of components as rows.

A component is a combination of the points, Σ_i weights_i x_i. Rows of a matrix go on with `fit_exactly`: blocks of
columns give mean, deviation and Gram matrix in one pass, with products in fp32 that are added up in fp64; adapters,
whose inner products are cheaper than they are long, with the weights.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.nn.matrix import Columns, Moments, check_finite

# Largest size of a block of columns, in bytes.
_BYTES = 1 << 24
# Rows of the Gram matrix that are made at a time.
_PANEL = 512
_EPS = torch.finfo(torch.float32).eps


@final
@dataclass(frozen=True, eq=False)
class DualFit:
    """Principal components of n points, as combinations of them."""

    weights: Tensor
    """Shape `(n, k)`, fp64. Component j is Σ_i weights[i, j] x_i; it has norm 1, and columns sum to 0."""
    scores: Tensor
    """Shape `(n, k)`, fp64: coordinates of the n points, uncorrelated and of mean 0."""
    variances: Tensor
    """Shape `(k,)`, fp64, falling: of the scores, with n − 1 in the denominator."""
    total: float
    """The variance along all directions, in the same units."""
    offsets: Tensor
    """Shape `(k,)`, fp64: ⟨mean, component j⟩."""
    mean_square: float


def fit_gram(gram: Tensor, components: int | None = None, *, precision: float) -> DualFit:
    """Find the principal components of points from their inner products.

    Args:
        gram: Shape `(n, n)`, fp64, symmetric; of the points as they are or with any constant taken off. Overwritten.
        components: Number; None for as many as the data have, at most 1,000.
        precision: Relative rounding error of the entries, such as `torch.finfo(torch.float32).eps` where products were
            made in fp32: variances that rounding alone could make are not taken for components.

    Source: With H = I − 11ᵀ/n and HGH = U Λ Uᵀ, weights are H U Λ^(−1/2) and scores U Λ^(1/2).
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
    number = min(1000 if components is None else components, count - 1)
    values, vectors = _largest(gram, number)
    rank = int((values > noise).sum())
    if components is not None and components > rank:
        raise UsageError(
            f"{count} points have {rank} principal components, not {components}.",
            cure=f"Ask for {rank} or fewer; repeated points add none." if rank else "All points are the same.",
        )
    if not rank:
        raise UsageError(
            f"All {count} points are the same, so there are no principal components.", cure="Fit points that differ."
        )
    values, vectors = values[:rank], vectors[:, :rank]
    signs = vectors.gather(0, vectors.abs().argmax(dim=0, keepdim=True)).sign()
    vectors *= signs
    weights = (vectors - vectors.mean(dim=0)).div_(values.sqrt())
    return DualFit(
        weights, vectors.mul_(values.sqrt()), values / (count - 1), total, means @ weights, float(means.mean())
    )


def _largest(matrix: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues, falling, of a symmetric fp64 matrix that may be overwritten, and their vectors."""
    # SciPy, where it is installed, works in place and makes the wanted vectors only, which halves the memory.
    size = len(matrix)
    if importlib.util.find_spec("scipy") is None:
        values, vectors = torch.linalg.eigh(matrix)
        return values.flip(0)[:count], vectors.flip(1)[:, :count]
    linalg = importlib.import_module("scipy.linalg")

    eigenvalues, columns = linalg.eigh(
        matrix.numpy().T, overwrite_a=True, check_finite=False, driver="evr", subset_by_index=(size - count, size - 1)
    )
    return torch.from_numpy(eigenvalues[::-1].copy()), torch.from_numpy(columns[:, ::-1].copy())


@final
@dataclass(frozen=True)
class HalfAgreement:
    """Agreement of two halves; single trailing components are seldom reproduced, subspaces are."""

    components: int
    """Number that each half was fitted with."""
    agreement: dict[int, float]
    """Number of leading components j → mean squared cosine of the principal angles between both halves' subspaces
    of j components: 1 for the same, about j / dimensions for chance.
    """
    fitted: float
    """Share of a half's variance that its own components capture, mean of both."""
    held_out: float
    """Share of the other half's variance, about the first's mean, that they capture, mean of both."""


def halves_of(gram: Tensor, components: int | None, *, precision: float, seed: int = 0) -> HalfAgreement | None:
    """Fit two random halves.

    `gram`: shape `(n, n)`, fp64: inner products, which stay as they are.

    Returns:
        None where there are fewer than 8 points, or all points of a half are the same.
    """
    count = len(gram)
    if count < 8:
        return None
    order = torch.randperm(count, generator=torch_generator(seed, "halves"))
    parts = order[: count // 2], order[count // 2 :]
    size = min(1000 if components is None else components, count // 2 - 1)
    try:
        fits = [fit_gram(gram[one][:, one], None, precision=precision) for one in parts]
    except UsageError:
        return None
    size = min(size, *(fit.weights.shape[1] for fit in fits))
    weights = [fit.weights[:, :size] for fit in fits]
    overlap = weights[0].T @ gram[parts[0]][:, parts[1]] @ weights[1]
    agreement = {
        number: float(torch.linalg.svdvals(overlap[:number, :number]).square().mean())
        for number in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
        if number < size
    }
    agreement[size] = float(torch.linalg.svdvals(overlap).square().mean())
    fitted = sum(float(fit.variances[:size].sum()) / fit.total for fit in fits) / 2
    held = sum(_held_out(gram, parts[i], parts[1 - i], fits[i], size) for i in (0, 1)) / 2
    return HalfAgreement(size, agreement, fitted, held)


def _held_out(gram: Tensor, own: Tensor, other: Tensor, fit: DualFit, size: int) -> float:
    """Share of the variance of other points about a half's mean that the half's components capture."""
    across = gram[other][:, own]
    whole = gram.diagonal()[other] - 2 * across.mean(dim=1) + gram[own][:, own].mean()
    scores = across @ fit.weights[:, :size] - fit.offsets[:size]
    return float(scores.square().sum() / whole.sum())


# Rows up to which the Gram matrix is used: 800 MB of it.
MOST_DUAL = 10_000
Solver = Literal["auto", "dual", "streaming"]


@final
@dataclass(frozen=True, eq=False)
class RowBasis:
    """Mean and components of rows."""

    mean: Tensor
    """Shape `(d,)`, fp32."""
    deviation: Tensor | None
    """Shape `(d,)`, fp32: what each number is divided by; None for nothing. 1 where it does not vary."""
    components: Tensor
    """Shape `(k, d)`, fp32, orthonormal rows."""
    variances: Tensor
    """Shape `(k,)`, fp64, falling: of the scores, with n − 1 in the denominator."""
    total: float
    """The variance along all directions, in the same units."""

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Scores of rows, shape `(…, d)` to `(…, k)`, and their squared distances from the mean, shape `(…)`."""
        centered = rows.to(self.components) - self.mean
        centered = centered if self.deviation is None else centered / self.deviation
        return centered @ self.components.T, centered.square().sum(dim=-1)

    def point(self, scores: Tensor) -> Tensor:
        """The row at scores, shape `(…, k)` to `(…, d)`, on their device; differentiable."""
        moved = scores @ self.components.to(scores)
        if self.deviation is not None:
            moved = moved * self.deviation.to(scores)
        return self.mean.to(scores) + moved


@final
@dataclass(frozen=True, eq=False)
class BasisFit:
    """A basis, and what is known of its fit."""

    basis: RowBasis
    scores: Tensor
    """Shape `(n, k)`, fp32, of the rows that this worker read."""
    solver: Literal["dual", "streaming"]
    """"dual", which is exact, or "streaming"."""
    passes: tuple[float, ...] = ()
    """Streaming: the variance that the components had captured after each pass over the rows, a share of all."""
    halves: HalfAgreement | None = None
    """Dual, where asked for: how well the fits of two halves of the rows agree."""

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


def fit_exactly(
    matrix: Columns,
    components: int | None = None,
    *,
    standardize: bool = False,
    halves: bool = False,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of a matrix's rows in two passes over its columns."""
    # Memory holds an n × n matrix in fp64 twice at most, and the components.
    count, length = matrix.shape
    mean, deviation = torch.empty(length), torch.ones(length)
    gram = torch.zeros(count, count, dtype=torch.float64)
    with progress.task("Gram matrix", length, unit="columns") as task:
        for start, stop, block in _columns(matrix):
            check_finite(block, 0, start)
            moments = Moments.begin(block[0].clone())
            moments.add(block)
            mean[start:stop] = moments.mean(count)
            block -= (moments.sums / count).float()
            if standardize:
                deviation[start:stop] = moments.deviation(count)
                block /= deviation[start:stop]
            _add_products(gram, block)
            task.update(stop - start)
    _mirror(gram)
    compared = halves_of(gram, components, precision=_EPS) if halves else None
    fit = fit_gram(gram, components, precision=_EPS)
    del gram
    scores, variances, total = fit.scores.float(), fit.variances, fit.total
    weights = fit.weights.float().T.contiguous()
    del fit
    made = torch.empty(len(weights), length)
    with progress.task("Components", length, unit="columns") as task:
        for start, stop, block in _columns(matrix):
            block -= mean[start:stop]
            if standardize:
                block /= deviation[start:stop]
            torch.mm(weights, block, out=made[:, start:stop])
            task.update(stop - start)
    return BasisFit(
        RowBasis(mean, deviation if standardize else None, made, variances, total), scores, "dual", halves=compared
    )


def _columns(matrix: Columns) -> Iterator[tuple[int, int, Tensor]]:
    """Blocks of columns, each with its range; all in the same memory, so that there is no more of it than one."""
    count, length = matrix.shape
    step = min(length, max(64, _BYTES // (4 * count)))
    memory = torch.empty(count * step)
    for start in range(0, length, step):
        stop = min(start + step, length)
        block = memory[: count * (stop - start)].view(count, stop - start)
        matrix.columns(start, stop, block)
        yield start, stop, block


def _add_products(gram: Tensor, block: Tensor) -> None:
    """Add the inner products of a block's rows to the lower half of a Gram matrix, panel by panel."""
    memory = torch.empty(_PANEL * len(block))
    for start in range(0, len(block), _PANEL):
        stop = min(start + _PANEL, len(block))
        products = memory[: (stop - start) * stop].view(stop - start, stop)
        gram[start:stop, :stop] += torch.mm(block[start:stop], block[:stop].T, out=products)


def _mirror(gram: Tensor) -> None:
    """Fill the upper half from the lower one."""
    for start in range(0, len(gram), _PANEL):
        stop = min(start + _PANEL, len(gram))
        gram[:start, start:stop] = gram[start:stop, :start].T
