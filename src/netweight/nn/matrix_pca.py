"""Exact principal components of a matrix's rows through their Gram matrix: for many more columns than rows.

Blocks of columns give mean, deviation and Gram matrix in one pass; products are made in fp32 and added up in fp64.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.nn.matrix import Columns, MatrixRows, Moments, blocks, check_finite
from netweight.nn.pca import Basis, BasisFit, fit_gram, halves_of

_BYTES = 1 << 24  # of a block of columns
_PANEL = 512  # rows of the Gram matrix that are made at a time
_EPS = torch.finfo(torch.float32).eps


def fit_exactly(
    matrix: MatrixRows,
    components: int | None = None,
    *,
    standardize: bool = False,
    halves: bool = False,
    progress: Progress = QUIET,
) -> BasisFit:
    """Find the principal components of a matrix's rows, by columns if it can be read so."""
    if isinstance(matrix, Columns):
        return _fit_by_columns(matrix, components, standardize, halves, progress)
    return _fit_by_rows(matrix, components, standardize, halves, progress)


def _fit_by_columns(
    matrix: Columns, components: int | None, standardize: bool, halves: bool, progress: Progress
) -> BasisFit:
    """Fit in two passes over the columns; memory holds an n × n matrix in fp64 twice at most, and the components."""
    count, length = matrix.shape
    mean, deviation = torch.empty(length), torch.ones(length)
    gram = torch.zeros(count, count, dtype=torch.float64)
    with progress.task("Gram matrix", length, unit="columns") as task:
        for start, stop, block in _columns(matrix):
            check_finite(block, 0, start)
            moments = Moments.begin(block[0].clone())
            moments.take(block)
            mean[start:stop] = moments.mean(count)
            block -= (moments.sums / count).float()
            if standardize:
                deviation[start:stop] = moments.deviation(count)
                block /= deviation[start:stop]
            _add_products(gram, block)
            task.update(stop - start)
    _mirror(gram)
    compared = halves_of(gram, components, precision=_EPS) if halves else None
    found = fit_gram(gram, components, precision=_EPS)
    del gram
    scores, variances, total = found.scores.float(), found.variances, found.total
    weights = found.weights.float().T.contiguous()
    del found
    made = torch.empty(len(weights), length)
    with progress.task("Components", length, unit="columns") as task:
        for start, stop, block in _columns(matrix):
            block -= mean[start:stop]
            if standardize:
                block /= deviation[start:stop]
            torch.mm(weights, block, out=made[:, start:stop])
            task.update(stop - start)
    return BasisFit(
        Basis(mean, deviation if standardize else None, made, variances, total), scores, "dual", halves=compared
    )


def _fit_by_rows(
    matrix: MatrixRows, components: int | None, standardize: bool, halves: bool, progress: Progress
) -> BasisFit:
    """Fit a matrix that can be read by rows only, such as adapters; each block of rows meets every earlier one."""
    count, length = matrix.shape
    moments = Moments.begin(matrix.rows(0, 1)[0])
    for start, stop in blocks(matrix):
        block = matrix.rows(start, stop)
        check_finite(block, start)
        moments.take(block)
    mean, deviation = moments.mean(count).float(), torch.ones(length)
    if standardize:
        deviation = moments.deviation(count)

    def prepared(start: int, stop: int) -> Tensor:
        return matrix.rows(start, stop).sub_(mean).div_(deviation)

    gram = torch.zeros(count, count, dtype=torch.float64)
    with progress.task("Gram matrix", count * count, unit="pairs") as task:
        for start, stop in blocks(matrix):
            later = prepared(start, stop)
            for first, last in blocks(matrix):
                if first <= start:
                    earlier = later if first == start else prepared(first, last)
                    gram[start:stop, first:last] = later @ earlier.T
                    if first < start:
                        gram[first:last, start:stop] = gram[start:stop, first:last].T
                    task.update((stop - start) * (last - first) * (1 if first == start else 2))
    compared = halves_of(gram, components, precision=_EPS) if halves else None
    found = fit_gram(gram, components, precision=_EPS)
    made = torch.zeros(found.weights.shape[1], length)
    for start, stop in blocks(matrix):
        made.addmm_(found.weights[start:stop].float().T, prepared(start, stop))
    basis = Basis(mean, deviation if standardize else None, made, found.variances, found.total)
    return BasisFit(basis, found.scores.float(), "dual", halves=compared)


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
