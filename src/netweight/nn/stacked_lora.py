"""Many adapters of the same modules, stacked: what banks return, trainers train, and inner products are taken of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.nn.lora import Adapter, LowRank


@final
@dataclass(frozen=True, eq=False)
class AdapterStack:
    """n adapters; per module ΔW_i = scale_i · up_i @ down_i. Lower ranks are filled up with zeros.

    Attributes:
        down: Module name → shape `(n, rank, columns)`.
        up: Module name → shape `(n, rows, rank)`.
        scale: Module name → shape `(n,)`, fp64.
        ranks: Module name → shape `(n,)`, int64: the rank that each had.
    """

    down: Mapping[str, Tensor]
    up: Mapping[str, Tensor]
    scale: Mapping[str, Tensor]
    ranks: Mapping[str, Tensor]

    @classmethod
    def of(cls, adapters: Sequence[Adapter]) -> AdapterStack:
        """Stack adapters of the same modules and shapes.

        Args:
            adapters: At least one; ranks may differ.

        Returns:
            The stack, in their order.

        Raises:
            UsageError: There is none, or one has other modules or shapes than the first.
        """
        if not adapters:
            raise UsageError("A stack needs at least one adapter.")
        shapes = {name: change.shape for name, change in adapters[0].factors.items()}
        for number, adapter in enumerate(adapters):
            if {name: change.shape for name, change in adapter.factors.items()} != shapes:
                raise UsageError(f"Adapter {number} has other modules or shapes than adapter 0.")
        names = adapters[0].modules
        changes = {name: [adapter.factors[name] for adapter in adapters] for name in names}
        most = {name: max(change.rank for change in parts) for name, parts in changes.items()}
        return cls(
            {name: torch.stack([_filled(one.down, most[name], 0) for one in changes[name]]) for name in names},
            {name: torch.stack([_filled(one.up, most[name], 1) for one in changes[name]]) for name in names},
            {name: torch.tensor([one.scale for one in changes[name]], dtype=torch.float64) for name in names},
            {name: torch.tensor([one.rank for one in changes[name]]) for name in names},
        )

    def __len__(self) -> int:
        """Number of adapters."""
        return len(next(iter(self.down.values())))

    @property
    def modules(self) -> tuple[str, ...]:
        """Module names, sorted."""
        return tuple(sorted(self.down))

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module name → rows and columns of its change."""
        return {name: (self.up[name].shape[1], self.down[name].shape[2]) for name in self.modules}

    def adapter(self, number: int) -> Adapter:
        """Return one adapter at its own ranks; views of the stack.

        Args:
            number: From 0.
        """
        changes = {}
        for name in self.modules:
            rank = int(self.ranks[name][number])
            down, up = self.down[name][number, :rank], self.up[name][number, :, :rank]
            changes[name] = LowRank(down, up, float(self.scale[name][number]))
        return Adapter(changes)


def _filled(factor: Tensor, rank: int, dim: int) -> Tensor:
    """Fill a factor up with zeros along its rank."""
    missing = rank - factor.shape[dim]
    shape = list(factor.shape)
    shape[dim] = missing
    return torch.cat([factor, factor.new_zeros(shape)], dim=dim) if missing else factor
