"""Mean and standard deviation of every column of a matrix, in one pass over blocks of its rows, in fp64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.errors import UsageError

__all__ = ["Moments", "check_finite"]


@final
@dataclass(frozen=True, eq=False)
class Moments:
    """Sums from which mean and deviation follow; those of several workers add up.

    Attributes:
        pilot: Shape `(d,)`, fp32: a row near the mean, taken off before summing, so that nothing cancels.
        sums: Shape `(d,)`, fp64.
        squares: Shape `(d,)`, fp64.
    """

    pilot: Tensor
    sums: Tensor
    squares: Tensor

    @classmethod
    def begin(cls, pilot: Tensor) -> Moments:
        """Start with nothing.

        Args:
            pilot: A row near the mean, shape `(d,)`, which is taken off before squares are added up.

        Returns:
            Sums of zero.
        """
        return cls(pilot, torch.zeros(len(pilot), dtype=torch.float64), torch.zeros(len(pilot), dtype=torch.float64))

    def take(self, rows: Tensor) -> None:
        """Add rows, shape `(m, d)`, fp32, which are overwritten.

        Args:
            rows: Shape `(m, d)`, fp32.
        """
        rows -= self.pilot
        for start in range(0, len(rows), 64):  # a few at a time, for their copies in fp64
            wide = rows[start : start + 64].double()
            self.sums.add_(wide.sum(dim=0))
            self.squares.add_(wide.square_().sum(dim=0))

    def mean(self, count: int) -> Tensor:
        """Mean of the columns of `count` rows, shape `(d,)`, fp64.

        Returns:
            The mean.
        """
        return self.pilot + self.sums / count

    def variance(self, count: int) -> Tensor:
        """Variance of the columns, with n − 1 in the denominator, shape `(d,)`, fp64.

        Args:
            count: How many rows were taken, at least 2.

        Returns:
            The variance.
        """
        return ((self.squares - self.sums**2 / count) / (count - 1)).clamp_min_(0)


def check_finite(rows: Tensor, first: int, column: int = 0) -> None:
    """Refuse NaN and infinity.

    Args:
        rows: Shape `(m, d)`.
        first: Number of the first row, for the message.
        column: Number of the first column.

    Raises:
        UsageError: One is there; its row and column are named.
    """
    if torch.isfinite(rows.sum()):  # one pass, and no mask, where all is well
        return
    bad = (~torch.isfinite(rows)).nonzero()
    if len(bad):
        row, place = bad[0].tolist()
        raise UsageError(
            f"Row {first + row} holds {float(rows[row, place])} in column {column + place}.",
            cure="Leave the row out; principal components of such numbers do not exist.",
        )
