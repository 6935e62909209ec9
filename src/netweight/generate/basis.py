"""A linear basis of rows of numbers: mean, components, and the way to coordinates and back.

`fit_matrix` is the door to both ways of finding one: from the Gram matrix, exactly, while that fits memory, and by
subspace iteration beyond.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.generate.halves import Halves
from netweight.generate.matrix import Columns, Rows

__all__ = ["MOST_DUAL", "Basis", "BasisFit", "Solver", "fit_matrix", "orthonormality"]

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
        from netweight.generate.matrix_gram import fit_by_columns, fit_by_rows

        if isinstance(matrix, Columns):
            return fit_by_columns(matrix, components, standardize=standardize, halves=halves, progress=progress)
        return fit_by_rows(matrix, components, standardize=standardize, halves=halves, progress=progress)
    from netweight.generate.streaming_fit import fit_streaming

    return fit_streaming(matrix, components, standardize=standardize, progress=progress)
