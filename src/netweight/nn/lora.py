"""A low-rank adapter as a value: per module a change ΔW = scale · up @ down, and the algebra that never forms ΔW.

Many ways of writing one adapter mean the same change: `down → G down, up → up G⁻¹` (its gauge). Everything here but
`LowRank` itself depends on the change alone.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor, nn

from netweight.core.names import not_found
from netweight.errors import UsageError
from netweight.nn.leading import leading_components

# From this size on, the matrix of a change of full rank is decomposed instead of its factors.
_WHOLE = 32


@final
@dataclass(frozen=True, eq=False)
class LowRank:
    """One module's change, ΔW = scale · up @ down."""

    down: Tensor
    """Shape `(rank, columns)`: LoRA's A."""
    up: Tensor
    """Shape `(rows, rank)`: LoRA's B, of down's dtype."""
    scale: float = 1.0
    """Alpha / rank, or alpha / √rank for rank-stabilized LoRA."""

    def __post_init__(self) -> None:
        """Refuse shapes that make no matrix."""
        if self.down.ndim != 2 or self.up.ndim != 2 or self.up.shape[1] != self.down.shape[0] or not len(self.down):
            raise UsageError(
                f"Factors of shapes {tuple(self.up.shape)} and {tuple(self.down.shape)} do not make a low-rank matrix.",
                cure="Give up as (rows, rank) and down as (rank, columns), rank at least 1.",
            )

    @classmethod
    def of(cls, change: Tensor) -> LowRank:
        """A matrix as a change of full rank."""
        identity = torch.eye(min(change.shape), dtype=change.dtype)
        return cls(identity, change) if change.shape[1] <= len(change) else cls(change, identity)

    @property
    def rank(self) -> int:
        """Number of rows of `down`; the change may have a lower one."""
        return self.down.shape[0]

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the change."""
        return self.up.shape[0], self.down.shape[1]

    def dense(self) -> Tensor:
        """Return the change, shape `(rows, columns)`, in the factors' dtype."""
        # `of` makes such adapters: one factor is the identity, with which a product takes longest.
        if self.rank == min(self.shape):
            if self.rank == self.down.shape[1] and torch.equal(self.down, torch.eye(self.rank).to(self.down)):
                return self.scale * self.up
            if self.rank == self.up.shape[0] and torch.equal(self.up, torch.eye(self.rank).to(self.up)):
                return self.scale * self.down
        return self.scale * (self.up @ self.down)

    def inner(self, other: LowRank) -> float:
        """Return ⟨ΔW, ΔW'⟩, the sum over the products of their entries, in fp64 and from the factors alone.

        Source: ⟨BA, B'A'⟩ = ⟨BᵀB', AA'ᵀ⟩.
        """
        if self.shape != other.shape:
            raise UsageError(f"Changes of shapes {self.shape} and {other.shape} have no inner product.")
        ups = self.up.double().T @ other.up.double()
        downs = self.down.double() @ other.down.double().T
        return self.scale * other.scale * float((ups * downs).sum())

    def truncated(self, rank: int, energy: float = 1.0) -> tuple[LowRank, float]:
        """Return the nearest change of at most a rank, in canonical factors, and the square of what is left out.

        Args:
            rank: At least 1; where the change has a lower rank, it is kept whole at that rank (at least 1).
            energy: The lowest rank that keeps this share of the change's square, if it is below `rank`.

        Returns:
            Factors with √σ on each side and scale 1, in the dtype of these; and the sum of the squares left out.

        Source: QR of both factors, then a singular value decomposition of rank × rank.
        """
        if rank < 1:
            raise UsageError(f"An adapter cannot have rank {rank}.", cure="Ask for 1 or more.")
        if self.rank == min(self.shape) and self.rank >= _WHOLE and (4 * rank <= self.rank or energy < 1):
            wide = LowRank(self.down.float(), self.up.float(), self.scale) if self.up.itemsize < 4 else self
            left, values, right, lost = leading_components(wide.dense(), rank, energy)
            root = values.sqrt()
            up, down = (left * root).to(self.up.dtype), (right * root).T.to(self.up.dtype)
            return LowRank(down.contiguous(), up.contiguous()), lost
        left, right = torch.linalg.qr(self.up.double()), torch.linalg.qr(self.down.double().T)
        u, values, vh = torch.linalg.svd(self.scale * (left.R @ right.R.T), full_matrices=False)
        noise = values[0] * torch.finfo(torch.float64).eps * max(self.shape)
        count = max(1, min(rank, int((values > noise).sum())))
        if energy < 1:
            # Entry i is what is lost without the components from i on.
            left_out = values.square().flip(0).cumsum(0).flip(0)
            count = max(1, min(count, int((left_out > (1 - energy) * left_out[0]).sum())))
        root = values[:count].sqrt()
        up = (left.Q @ (u[:, :count] * root)).to(self.up.dtype)
        down = ((vh[:count] * root[:, None]) @ right.Q.T).to(self.down.dtype)
        return LowRank(down, up), float((values[count:] ** 2).sum())


@final
@dataclass(frozen=True)
class Truncation:
    """An adapter of a chosen rank, and what that cost."""

    adapter: Adapter
    """The truncated adapter."""
    relative_error: float
    """Norm of the omitted part, divided by the norm of the whole; 0 if nothing was omitted."""


@final
@dataclass(frozen=True, eq=False)
class Adapter:
    """Low-rank changes of a model's modules.

    Attributes:
        factors: Module name → its change. Names are those of the adapted model (`Select` understands them); in a
            pipeline they begin with its component, as in `unet.mid_block.attentions.0.…to_q`.

    Raises:
        UsageError: There is no module.
    """

    factors: Mapping[str, LowRank]
    vectors: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameter name → the change of a bias, norm or other parameter that no factors express; most adapters have
    none. The methods of this class use the factors alone."""

    def __post_init__(self) -> None:
        """Refuse an adapter of nothing."""
        if not self.factors:
            raise UsageError("An adapter needs at least one module.")

    @property
    def modules(self) -> tuple[str, ...]:
        """Module names, sorted."""
        return tuple(sorted(self.factors))

    def inner(self, other: Adapter) -> float:
        """Return the inner product of the two changes, summed over modules; both must have the same modules.

        Args:
            other: An adapter of the same modules; ranks may differ.

        Raises:
            NameNotFound: The other lacks a module, or has one more.
        """
        _same_modules(self, other)
        return sum(change.inner(other.factors[name]) for name, change in self.factors.items())

    def norm(self) -> float:
        """Return the Frobenius norm of the whole change."""
        return math.sqrt(max(self.inner(self), 0.0))

    def scaled(self, factor: float) -> Adapter:
        """Return the adapter whose change is `factor` times this one's."""
        changes = {
            name: LowRank(change.down, change.up, change.scale * factor) for name, change in self.factors.items()
        }
        return Adapter(changes, {name: change * factor for name, change in self.vectors.items()})

    def truncated(self, rank: int) -> Truncation:
        """Return the nearest adapter of at most a rank per module, with the relative error of the whole.

        Args:
            rank: At least 1, for every module.
        """
        return truncate(self.factors.items(), rank)


def truncate(
    changes: Iterable[tuple[str, LowRank]], rank: int | None, energy: float = 1.0, *, keep: bool = False
) -> Truncation:
    """Make an adapter of at most a rank, or each change's own, of changes by module; each is freed when it is done.

    Args:
        changes: The changes, by module.
        rank: The highest rank; None for each one's own.
        energy: The share of each change's square that is enough.
        keep: Keep the factors of changes that are not reduced, bit for bit. Otherwise all get canonical factors, which
            are rounded to their data type.
    """
    factors: dict[str, LowRank] = {}
    lost = whole = 0.0
    for name, change in changes:
        if keep and energy == 1 and (rank is None or rank >= change.rank):
            factors[name], error = change, 0.0
        else:
            factors[name], error = change.truncated(change.rank if rank is None else rank, energy)
        lost, whole = lost + error, whole + max(change.inner(change), 0.0)
    return Truncation(Adapter(factors), (lost / whole) ** 0.5 if whole else 0.0)


def combined(adapters: Sequence[Adapter], weights: Sequence[float] | None = None) -> Adapter:
    """Return the adapter whose change is the weighted sum of others' changes, exactly: factors are put side by side.

    Args:
        adapters: At least one; a module that some of them lack takes no change from these.
        weights: One per adapter; 1 by default.
    """
    chosen = [1.0] * len(adapters) if weights is None else list(weights)
    if not adapters or len(chosen) != len(adapters):
        raise UsageError(f"{len(adapters)} adapters cannot be summed with {len(chosen)} weights.")
    names = sorted({name for adapter in adapters for name in adapter.factors})
    return Adapter({name: side_by_side(name, adapters, chosen) for name in names})


def side_by_side(name: str, adapters: Sequence[Adapter], weights: Sequence[float]) -> LowRank:
    """Put the changes of one module side by side; each one's scale goes into its up factor."""
    parts = [(one.factors[name], weight) for one, weight in zip(adapters, weights, strict=True) if name in one.factors]
    if len({change.shape for change, _ in parts}) > 1:
        raise UsageError(f"The adapters change {name} in different shapes: they are of different models.")
    down = torch.cat([change.down for change, _ in parts])
    up = torch.cat([change.up * (change.scale * weight) for change, weight in parts], dim=1)
    return LowRank(down, up)


def _same_modules(one: Adapter, other: Adapter) -> None:
    """Raise an error that names a module which only one adapter has."""
    for name in sorted(set(one.factors) ^ set(other.factors)):
        raise not_found(f"Only one of the two adapters changes {name!r}.", name, other.factors)


@final
@dataclass(frozen=True, eq=False)
class AdapterStack:
    """n adapters; per module ΔW_i = scale_i · up_i @ down_i. Lower ranks are filled up with zeros."""

    down: Mapping[str, Tensor]
    """Module name → shape `(n, rank, columns)`."""
    up: Mapping[str, Tensor]
    """Module name → shape `(n, rows, rank)`."""
    scale: Mapping[str, Tensor]
    """Module name → shape `(n,)`, fp64."""
    ranks: Mapping[str, Tensor]
    """Module name → rank of each adapter before padding, shape `(n,)`, int64."""

    @classmethod
    def of(cls, adapters: Sequence[Adapter]) -> AdapterStack:
        """Stack adapters of the same modules and shapes.

        Args:
            adapters: At least one; ranks may differ.
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

    def only(self, names: Collection[str]) -> AdapterStack:
        """Return the stack of some modules only."""
        parts = (self.down, self.up, self.scale, self.ranks)
        return AdapterStack(*({name: part[name] for name in self.modules if name in names} for part in parts))

    def adapter(self, number: int) -> Adapter:
        """Return one adapter at its own ranks; views of the stack.

        Args:
            number: From 0.
        """
        changes = {}
        for name in self.modules:
            rank = int(self.ranks[name][number])
            # This occurs in a bank whose adapters do not all change the same modules.
            if not rank:
                continue
            down, up = self.down[name][number, :rank], self.up[name][number, :, :rank]
            changes[name] = LowRank(down, up, float(self.scale[name][number]))
        return Adapter(changes)


def _filled(factor: Tensor, rank: int, dim: int) -> Tensor:
    """Fill a factor up with zeros along its rank."""
    missing = rank - factor.shape[dim]
    shape = list(factor.shape)
    shape[dim] = missing
    return torch.cat([factor, factor.new_zeros(shape)], dim=dim) if missing else factor


@final
class AddedLowRank(nn.Module):
    """A parametrization by `torch.nn.utils.parametrize`: a weight plus scale · up @ down, which is 0 at first."""

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator, scale: float = 1.0) -> None:
        super().__init__()
        rows, columns = weight.shape
        down = torch.randn(rank, columns, generator=generator) / columns**0.5
        self.down, self.up = nn.Parameter(down.to(weight)), nn.Parameter(weight.new_zeros(rows, rank))
        self.scale = scale

    def forward(self, weight: Tensor) -> Tensor:
        """Return the sum."""
        return weight + self.scale * (self.up @ self.down)
