"""Leading components of a matrix, without all of its singular values.

A Krylov space of blocks, (A Aᵀ)ʲ A Ω for j = 0, 1, …, contains the leading left singular vectors nearly exactly after
a few products with A, also where singular values lie close together. It grows until another block would no longer
matter; where it would become large, the Gram matrix is decomposed instead.
"""

# Source: Musco and Musco, arXiv 1504.05477.

from __future__ import annotations

import math

import torch
from torch import Tensor

# Columns of a block beyond the rank.
_OVER = 8
# The space has at most this part of the smaller side.
_SHARE = 3
# The search stops if the last two blocks predict a space of more than this multiple of the limit.
_HOPELESS = 1.5
# The search ends when further blocks would reduce the omitted square by less than this share.
_ENOUGH = 1e-7
# If less than this share of the whole square is left out, a ten-millionth of it is below rounding.
_FLOOR = 1e-2


def leading_components(matrix: Tensor, rank: int, energy: float = 1.0) -> tuple[Tensor, Tensor, Tensor, float]:
    """Find the leading singular components of a matrix.

    Args:
        matrix: Shape `(rows, columns)`, floating point.
        rank: How many components, at least 1.
        energy: The share of the matrix's square, at most 1, that is enough, so that fewer are returned.

    Returns:
        Left vectors, shape `(rows, rank)`, singular values, shape `(rank,)`, and right vectors, shape
        `(columns, rank)`, all in fp64; fewer where the matrix has a lower rank, at least one. Then the square of what
        they leave out: above the least possible one by at most a ten-millionth of it.
    """
    tall = len(matrix) > matrix.shape[1]
    wide = matrix.T if tall else matrix
    space = _krylov_space(wide, rank) if energy == 1 else None
    exact = wide.double()
    within = exact if space is None else space.T @ exact
    squares, vectors = torch.linalg.eigh(within @ within.T)
    if energy < 1:
        # Entry i is what is lost without the components from i on.
        left_out = squares.clamp_min(0).cumsum(0).flip(0)
        rank = max(1, min(rank, int((left_out > (1 - energy) * left_out[0]).sum())))
    squares, vectors = squares.flip(0)[:rank].clamp_min(0), vectors.flip(1)[:, :rank]
    count = max(1, int((squares > squares[0] * torch.finfo(torch.float64).eps * max(matrix.shape)).sum()))
    left, values = vectors[:, :count], squares[:count].sqrt()
    right = within.T @ left / values.clamp_min(1e-150)
    if space is not None:
        left = space @ left
    lost = max(0.0, float(exact.square().sum() - squares[:count].sum()))
    return (right, values, left, lost) if tall else (left, values, right, lost)


def _krylov_space(wide: Tensor, rank: int) -> Tensor | None:
    """An orthonormal basis, shape `(rows, size)` in fp64, of a space with the leading left vectors; None if large."""
    rows, size = len(wide), rank + _OVER
    work = wide if wide.dtype == torch.float64 else wide.float()
    scale = float(work.abs().max())
    limit = rows // _SHARE
    if not scale or 3 * size > limit:
        return None
    work = work / scale
    whole = float(work.square().sum(dtype=torch.float64))
    draw = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(work @ torch.randn(work.shape[1], size, generator=draw).to(work)).Q
    products = basis.T @ work
    taken, gain = _taken(products, rank), 0.0
    while basis.shape[1] + size <= limit:
        block = work @ products[-size:].T
        # A single projection would leave errors of rounding.
        for _ in range(2):
            block = block - basis @ (basis.T @ block)
        block = torch.linalg.qr(block).Q
        block = torch.linalg.qr(block - basis @ (basis.T @ block)).Q
        basis, products = torch.cat([basis, block], 1), torch.cat([products, block.T @ work])
        before, last = taken, gain
        taken = _taken(products, rank)
        gain = taken - before
        ratio = min(max(gain, 0.0) / last, 0.9) if last > 0 else 0.9
        enough = _ENOUGH * max(whole - taken, _FLOOR * whole) * (1 - ratio) / ratio if ratio else gain
        if gain <= enough:
            orthonormal: Tensor = torch.linalg.qr(basis.double()).Q
            return orthonormal
        if last > 0 and basis.shape[1] + size * math.log(enough / gain) / math.log(ratio) > _HOPELESS * limit:
            return None
    return None


def _taken(products: Tensor, rank: int) -> float:
    """The square of the leading components within a space."""
    values = torch.linalg.eigvalsh(products.double() @ products.double().T)
    return float(values[-rank:].sum())
