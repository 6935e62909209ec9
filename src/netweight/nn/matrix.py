"""Matrices that need not fit memory: read by blocks of rows or of columns, from a `.npy` file.

Files are read, not mapped, so that memory holds the block that was asked for and nothing else.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import numpy
import torch
from torch import Tensor

from netweight.errors import CorruptBlob, Unsupported, UsageError

# Largest size of a block of rows, in bytes.
_BYTES = 1 << 28


class MatrixRows(Protocol):
    """A matrix that is read by rows."""

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        ...

    def rows(self, start: int, stop: int) -> Tensor:
        """Rows from `start` up to `stop`, fp32, in memory that the caller may overwrite.

        Returns:
            Shape `(stop - start, d)`.
        """
        ...


class Columns(MatrixRows, Protocol):
    """A matrix that is read by columns, too."""

    def columns(self, start: int, stop: int, out: Tensor) -> None:
        """Write columns from `start` up to `stop` into `out`, shape `(rows, stop − start)`, fp32, contiguous."""
        ...


def blocks(matrix: MatrixRows, start: int = 0) -> list[tuple[int, int]]:
    """Ranges of rows, from `start`, of about 256 MB each."""
    count, length = matrix.shape
    step = max(1, _BYTES // (4 * length))
    return [(first, min(first + step, count)) for first in range(start, count, step)]


@final
class MatrixFile:
    """A matrix in a `.npy` file, or some of its rows."""

    def __init__(self, path: str | Path, start: int = 0, stop: int | None = None) -> None:
        # The file contains two dimensions, row by row, of floating-point numbers of 16, 32 or 64 bits.
        self.path = Path(path)
        with open(self.path, "rb") as file:
            try:
                version = numpy.lib.format.read_magic(file)
                read = numpy.lib.format.read_array_header_1_0 if version == (1, 0) else (
                    numpy.lib.format.read_array_header_2_0
                )  # fmt: skip
                shape, by_columns, self._dtype = read(file)
            except ValueError as error:
                raise CorruptBlob(f"{path} is not a .npy file: {error}.") from error
            self._offset = file.tell()
        if len(shape) != 2 or by_columns or self._dtype.str not in ("<f2", "<f4", "<f8"):
            raise Unsupported(
                f"{path} contains {self._dtype} of shape {shape}.",
                cure="Write a matrix of two dimensions, row by row, as float16, float32 or float64.",
            )
        if self.path.stat().st_size < self._offset + self._dtype.itemsize * shape[0] * shape[1]:
            raise CorruptBlob(
                f"{path} is shorter than its header states: {shape[0]} × {shape[1]} numbers do not fit it."
            )
        self._start, self._stop, self._length = start, shape[0] if stop is None else stop, shape[1]
        if not 0 <= self._start < self._stop <= shape[0]:
            raise UsageError(f"{path} has {shape[0]} rows, so rows {start} to {stop} do not exist.")

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self._stop - self._start, self._length

    def rows(self, start: int, stop: int) -> Tensor:
        """See `Rows`."""
        offset = self._offset + (self._start + start) * self._length * self._dtype.itemsize
        values = numpy.fromfile(self.path, self._dtype, (stop - start) * self._length, offset=offset)
        return torch.from_numpy(values.reshape(stop - start, self._length)).float()

    def columns(self, start: int, stop: int, out: Tensor) -> None:
        """See `Columns`."""
        target, size = out.numpy(), self._dtype.itemsize
        row = numpy.empty(stop - start, self._dtype)
        with open(self.path, "rb", buffering=0) as file:
            for number in range(self.shape[0]):
                into = target[number] if target.dtype == self._dtype else row
                place = self._offset + ((self._start + number) * self._length + start) * size
                if os.preadv(file.fileno(), [into.data], place) != into.nbytes:
                    raise CorruptBlob(f"{self.path} could not be read in one piece: it was cut, or is being written.")
                if into is row:
                    target[number] = row


@final
@dataclass(frozen=True, eq=False)
class Moments:
    """Sums from which mean and deviation follow; those of several workers add up."""

    pilot: Tensor
    """Shape `(d,)`, fp32: a row near the mean, taken off before summing, so that nothing cancels."""
    sums: Tensor
    """Shape `(d,)`, fp64."""
    squares: Tensor
    """Shape `(d,)`, fp64."""

    @classmethod
    def begin(cls, pilot: Tensor) -> Moments:
        """Start with nothing.

        Args:
            pilot: A row near the mean, shape `(d,)`, which is taken off before squares are added up.
        """
        return cls(pilot, torch.zeros(len(pilot), dtype=torch.float64), torch.zeros(len(pilot), dtype=torch.float64))

    def add(self, rows: Tensor) -> None:
        """Add rows, shape `(m, d)`, fp32, which are overwritten.

        Args:
            rows: Shape `(m, d)`, fp32.
        """
        rows -= self.pilot
        # Rows are added a few at a time, because their copies in fp64 take memory.
        for start in range(0, len(rows), 64):
            wide = rows[start : start + 64].double()
            self.sums.add_(wide.sum(dim=0))
            self.squares.add_(wide.square_().sum(dim=0))

    def mean(self, count: int) -> Tensor:
        """Mean of the columns of `count` rows, shape `(d,)`, fp64."""
        return self.pilot + self.sums / count

    def variance(self, count: int) -> Tensor:
        """Variance of the columns, with n − 1 in the denominator, shape `(d,)`, fp64."""
        return ((self.squares - self.sums**2 / count) / (count - 1)).clamp_min_(0)

    def deviation(self, count: int) -> Tensor:
        """Return the divisors of columns, shape `(d,)`, fp32: 1 for a constant column, which is 0 without its mean."""
        variance = self.variance(count)
        return torch.where(variance > 0, variance.sqrt(), 1.0).float()


def check_finite(rows: Tensor, first: int, column: int = 0) -> None:
    """Refuse NaN and infinity.

    `rows`: shape `(m, d)`.
    """
    # If all numbers are finite, this takes one pass and no mask.
    if torch.isfinite(rows.sum()):
        return
    bad = (~torch.isfinite(rows)).nonzero()
    if len(bad):
        row, place = bad[0].tolist()
        raise UsageError(
            f"Row {first + row} contains {float(rows[row, place])} in column {column + place}.",
            cure="Leave the row out; principal components of such numbers do not exist.",
        )
