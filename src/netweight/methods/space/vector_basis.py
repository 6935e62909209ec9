"""Components of adapters that are written as rows of numbers. Points need no bank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.generate.adapter import Adapter
from netweight.generate.basis import Basis
from netweight.generate.stack import AdapterStack
from netweight.methods.space.vectors import Layout

__all__ = ["VectorBasis"]


@final
@dataclass(frozen=True, eq=False)
class VectorBasis:
    """Principal components of rows.

    Attributes:
        layout: What the numbers of a row are.
        basis: Mean, deviations and components of rows.
    """

    layout: Layout
    basis: Basis

    def project(self, stack: AdapterStack) -> tuple[Tensor, Tensor]:
        """Return m adapters' scores, and their squared distances from the mean; see `fitting.Basis`."""
        rows = self.layout.rows(stack, [f"number {number}" for number in range(len(stack))])
        return self.basis.project(rows), self.basis.squares(rows)

    def changes(self, scores: Tensor) -> dict[str, Tensor]:
        """Return the changes at points; see `WeightSpace.changes`."""
        return self.layout.changes(self.basis.point(scores.to(torch.promote_types(scores.dtype, torch.float32))))

    def adapter(self, scores: Tensor) -> Adapter:
        """Return a point as an adapter; see `WeightSpace.adapter`."""
        return self.layout.adapter(self.basis.point(scores.float()))
