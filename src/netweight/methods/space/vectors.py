"""Adapters as rows of numbers, and rows as adapters again: the representations "factors" and "shared-down".

Both need adapters of one rank per module. What a row holds and what stays outside of it, the same for all adapters, is
a `Layout`, made from the bank's first adapter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.generate.adapter import Adapter, LowRank
from netweight.generate.stack import AdapterStack
from netweight.methods.space.bank import Bank, stack_of

__all__ = ["AdapterRows", "Layout"]

_TOLERANCE = 1e-5  # of what a down factor may have outside of the shared rows, relative to its norm


@final
@dataclass(frozen=True, eq=False)
class Layout:
    """How adapters of one bank are written as rows.

    Attributes:
        kind: "factors": per module down then up, row by row, modules sorted, as the reference; "shared-down": per
            module the up factor over an orthonormal basis of the shared down factor's rows, so that inner products of
            rows are those of the changes.
        shapes: Module name → rows and columns of its change.
        ranks: Module name → rank.
        scales: Module name → what changes are multiplied with; 1 in "shared-down", whose rows hold it.
        downs: "shared-down": module name → orthonormal rows, shape `(rank, columns)`, fp32; else empty.
    """

    kind: Literal["factors", "shared-down"]
    shapes: Mapping[str, tuple[int, int]]
    ranks: Mapping[str, int]
    scales: Mapping[str, float]
    downs: Mapping[str, Tensor]

    @classmethod
    def of(cls, kind: Literal["factors", "shared-down"], bank: Bank) -> Layout:
        """Make the layout of a bank from its first adapter.

        Args:
            kind: What rows hold.
            bank: At least one adapter.
        """
        first = stack_of(bank, 0, 1).adapter(0)
        shapes = {name: bank.shapes[name] for name in sorted(bank.shapes)}
        ranks = {name: first.factors[name].rank for name in shapes}
        if kind == "factors":
            return cls(kind, shapes, ranks, {name: first.factors[name].scale for name in shapes}, {})
        downs = {name: _row_space(name, first.factors[name].down) for name in shapes}
        return cls(kind, shapes, ranks, dict.fromkeys(shapes, 1.0), downs)

    @property
    def length(self) -> int:
        """Numbers in a row."""
        return sum(self._sizes(name)[0] + self._sizes(name)[1] for name in self.shapes)

    def _sizes(self, name: str) -> tuple[int, int]:
        """Numbers of a module's down and up factor in a row."""
        rows, columns = self.shapes[name]
        rank = self.ranks[name]
        return (0 if self.downs else rank * columns), rows * rank

    def rows(self, stack: AdapterStack, names: list[str]) -> Tensor:
        """Write adapters as rows, shape `(n, length)`, fp32.

        Args:
            stack: n adapters.
            names: What to call them in messages.

        Returns:
            Rows.

        Raises:
            UsageError: An adapter has another rank, or another down factor than the shared one.
        """
        parts = []
        for name in self.shapes:
            other = (stack.ranks[name] != self.ranks[name]).nonzero()
            if len(other):
                number = int(other[0])
                raise UsageError(
                    f"The adapter {names[number]!r} has rank {int(stack.ranks[name][number])} in {name}, others "
                    f"{self.ranks[name]}: as rows of numbers they cannot be compared.",
                    cure='Use representation="delta", which takes any ranks.',
                )
            down, up = stack.down[name][:, : self.ranks[name]], stack.up[name][:, :, : self.ranks[name]]
            scale = stack.scale[name] / self.scales[name]
            if self.downs:
                up = self._over_shared(name, down, up, names)
            else:
                parts.append(down.float().flatten(1))
            scaled = up.float() if (scale == 1).all() else (up * scale[:, None, None]).float()
            parts.append(scaled.flatten(1))
        return torch.cat(parts, dim=1)

    def _over_shared(self, name: str, down: Tensor, up: Tensor, names: list[str]) -> Tensor:
        """Write up @ down as (up @ turn) @ shared rows."""
        shared, down = self.downs[name].double(), down.double()
        turn = down @ shared.T
        outside = (down - turn @ shared).flatten(1).norm(dim=1)
        bad = (outside > _TOLERANCE * down.flatten(1).norm(dim=1)).nonzero()
        if len(bad):
            raise UsageError(
                f"The adapter {names[int(bad[0])]!r} does not share the down factor of {name} with {names[0]!r}.",
                cure='Use representation="delta", or train with frozen down factors from one seed.',
            )
        return up.double() @ turn

    def factors(self, row: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Read down and up factors from rows, shape `(…, length)`; views, differentiable.

        Args:
            row: Any floating dtype.

        Returns:
            Module → down and up factor, shapes `(…, rank, columns)` and `(…, rows, rank)`.
        """
        found, place = {}, 0
        for name, (rows, columns) in self.shapes.items():
            of_down, of_up = self._sizes(name)
            rank = self.ranks[name]
            if self.downs:
                down = self.downs[name].to(row)
            else:
                down = row[..., place : place + of_down].reshape(*row.shape[:-1], rank, columns)
            up = row[..., place + of_down : place + of_down + of_up].reshape(*row.shape[:-1], rows, rank)
            found[name] = down, up
            place += of_down + of_up
        return found

    def changes(self, row: Tensor) -> dict[str, Tensor]:
        """Return the changes of rows, shape `(…, rows, columns)` per module.

        Args:
            row: Shape `(…, length)`.
        """
        return {name: self.scales[name] * (up @ down) for name, (down, up) in self.factors(row).items()}

    def adapter(self, row: Tensor) -> Adapter:
        """Return the adapter of a row, shape `(length,)`.

        Args:
            row: Shape `(length,)`.
        """
        found = self.factors(row).items()
        return Adapter({name: LowRank(down.clone(), up.clone(), self.scales[name]) for name, (down, up) in found})


@final
@dataclass(frozen=True, eq=False)
class AdapterRows:
    """A bank's adapters as a matrix that is read by rows.

    Attributes:
        bank: The adapters.
        layout: How they are written.
        start: Number of the first.
        stop: Number after the last.
    """

    bank: Bank
    layout: Layout
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Adapters and numbers of each."""
        return self.stop - self.start, self.layout.length

    def rows(self, start: int, stop: int) -> Tensor:
        """Read adapters as rows, fp32."""
        first, last = self.start + start, self.start + stop
        return self.layout.rows(stack_of(self.bank, first, last), list(self.bank.names[first:last]))


def _row_space(name: str, down: Tensor) -> Tensor:
    """Orthonormal rows with the span of a down factor's."""
    basis = torch.linalg.qr(down.double().T)
    diagonal = basis.R.diagonal().abs()
    if len(down) > down.shape[1] or not (diagonal > 1e-9 * diagonal.max()).all():
        raise UsageError(f"The down factor of {name} has dependent rows.", cure='Use representation="delta".')
    rows: Tensor = basis.Q.T.float().contiguous()
    return rows
