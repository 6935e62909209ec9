"""Parts of a fitted space: adapters as rows of numbers, and a basis that turns scores into changes and back.

Components are rows, the numbers of factors, or combinations of a bank's adapters, so that ΔW itself is their coordinate
system and ranks may differ.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.methods.space.gram import Bank, inner_products, norms_of, read_blocks, stack_of
from netweight.nn.lora import Adapter, AdapterStack, LowRank
from netweight.nn.pca import RowBasis

# The most bytes of components that are kept as matrices, and of changes that are summed at a time.
_DENSE_BYTES = 1 << 28
# The most bytes of a bank that are kept in memory to make points.
_KEPT_BYTES = 1 << 25
_ANY_RANKS = 'Use representation="delta", which takes any ranks.'
_Place = tuple[torch.dtype, torch.device]


@final
@dataclass(frozen=True)
class Sketch:
    """Adapters as rows of random projections of their changes, R ΔW Sᵀ, whose inner products are nearly those of ΔW."""

    # Source: for R of m independent rows with E[RᵀR] = I, and S alike, E⟨R X Sᵀ, R Y Sᵀ⟩ = ⟨X, Y⟩; of rank 1 the
    # relative variance is at most about 2/m + 2/m + 4/m², and modules average it out.

    shapes: Mapping[str, tuple[int, int]]
    """Module name → rows and columns of its change."""
    side: int
    """Number of rows and columns that a change is projected to; a shorter side is preserved exactly."""
    seed: int
    """Seed of the random projections."""

    @property
    def length(self) -> int:
        """Numbers in a row."""
        return sum(min(rows, self.side) * min(columns, self.side) for rows, columns in self.shapes.values())

    @cached_property
    def _maps(self) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        return {
            name: (self._map(name, "rows", rows), self._map(name, "columns", columns))
            for name, (rows, columns) in self.shapes.items()
        }

    def _map(self, name: str, end: str, length: int) -> Tensor | None:
        if length <= self.side:
            return None
        draw = torch_generator(self.seed, "sketch", name, end)
        drawn: Tensor = torch.randn(self.side, length, generator=draw) / self.side**0.5
        return drawn

    def rows(self, stack: AdapterStack, names: Sequence[str] = ()) -> Tensor:
        """Adapters as rows, shape `(n, length)`, fp32."""
        parts = []
        for name in sorted(self.shapes):
            left, right = self._maps[name]
            up, down = stack.up[name].float(), stack.down[name].float()
            up = up if left is None else left @ up
            down = down if right is None else down @ right.T
            parts.append(((up * stack.scale[name].float()[:, None, None]) @ down).flatten(1))
        return torch.cat(parts, dim=1)


@final
@dataclass(frozen=True, eq=False)
class RowLayout:
    """Adapters as rows of the numbers of their factors: per module down then up, row by row, modules sorted."""

    shapes: Mapping[str, tuple[int, int]]
    """Module name → rows and columns of its change."""
    ranks: Mapping[str, int]
    """Module name → rank."""
    scales: Mapping[str, float]
    """Module name → factor of its change."""

    @classmethod
    def of(cls, bank: Bank) -> RowLayout:
        """The layout of a bank, from its first adapter."""
        first = stack_of(bank, 0, 1)
        ranks = {name: int(first.ranks[name]) for name in first.modules}
        if lacking := [name for name, rank in ranks.items() if not rank]:
            raise UsageError(
                f"The adapter {bank.names[0]!r} does not change {lacking[0]}, which other adapters change.",
                cure=_ANY_RANKS,
            )
        return cls(first.shapes, ranks, {name: float(first.scale[name]) for name in first.modules})

    @property
    def length(self) -> int:
        """Numbers in a row."""
        return sum(self.ranks[name] * sum(shape) for name, shape in self.shapes.items())

    def within(self, start: int, stop: int) -> tuple[list[str], int]:
        """The modules whose numbers are some of these columns, and the first one's first column."""
        ends = list(itertools.accumulate(self.ranks[name] * sum(shape) for name, shape in self.shapes.items()))
        first, last = bisect.bisect_right(ends, start), bisect.bisect_left(ends, stop)
        return list(self.shapes)[first : last + 1], [0, *ends][first]

    def rows(self, stack: AdapterStack, names: Sequence[str] = ()) -> Tensor:
        """Adapters as rows of the numbers of a stack's modules, fp32; `names` are for messages."""
        parts = []
        names = names or [f"number {number}" for number in range(len(stack))]
        for name in stack.modules:
            other = (stack.ranks[name] != self.ranks[name]).nonzero()
            if len(other):
                number = int(other[0])
                raise UsageError(
                    f"The adapter {names[number]!r} has rank {int(stack.ranks[name][number])} in {name}, but others "
                    f"have rank {self.ranks[name]}: as rows of numbers they cannot be compared.",
                    cure=_ANY_RANKS,
                )
            down, up = stack.down[name][:, : self.ranks[name]], stack.up[name][:, :, : self.ranks[name]]
            scale = stack.scale[name] / self.scales[name]
            scaled = up.float() if (scale == 1).all() else (up * scale[:, None, None]).float()
            parts += [down.float().flatten(1), scaled.flatten(1)]
        return torch.cat(parts, dim=1)

    def factors(self, row: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        """Down and up factors, shapes `(…, rank, columns)` and `(…, rows, rank)`, of rows; views, differentiable."""
        factors, place = {}, 0
        for name, (rows, columns) in self.shapes.items():
            rank = self.ranks[name]
            part = row[..., place : place + rank * (rows + columns)]
            down, up = torch.split(part, [rank * columns, rows * rank], dim=-1)
            lead = part.shape[:-1]
            factors[name] = down.reshape(*lead, rank, columns), up.reshape(*lead, rows, rank)
            place += rank * (rows + columns)
        return factors

    def changes(self, row: Tensor) -> dict[str, Tensor]:
        """Changes of rows, shape `(…, rows, columns)` per module."""
        return {name: self.scales[name] * (up @ down) for name, (down, up) in self.factors(row).items()}

    def adapter(self, row: Tensor) -> Adapter:
        """The adapter of a row, shape `(length,)`."""
        factors = self.factors(row).items()
        return Adapter({name: LowRank(down.clone(), up.clone(), self.scales[name]) for name, (down, up) in factors})


@final
@dataclass(frozen=True, eq=False)
class BankRows:
    """Adapters of a bank as a matrix that is read by rows."""

    bank: Bank
    """The bank of the adapters; only its first n adapters count."""
    writer: RowLayout | Sketch
    """Layout or sketch by which adapters are written as rows."""
    start: int
    """Number of the first."""
    stop: int
    """Number after the last."""

    @property
    def shape(self) -> tuple[int, int]:
        """Adapters and numbers of each."""
        return self.stop - self.start, self.writer.length

    def rows(self, start: int, stop: int) -> Tensor:
        """Adapters as rows, fp32."""
        first, last = self.start + start, self.start + stop
        return self.writer.rows(stack_of(self.bank, first, last), self.bank.names[first:last])

    def columns(self, start: int, stop: int, out: Tensor) -> None:
        """Write the numbers from `start` up to `stop` of all adapters; other modules than theirs are not read."""
        assert isinstance(self.writer, RowLayout)
        modules, first = self.writer.within(start, stop)
        how: Any = {"description": "Reading adapters", "first": self.start, "modules": modules}
        for number, stack in read_blocks(self.bank, self.stop, **how):
            rows = self.writer.rows(stack, self.bank.names[number : number + len(stack)])
            out[number - self.start : number - self.start + len(stack)] = rows[:, start - first : stop - first]


@final
@dataclass(frozen=True, eq=False)
class _Module:
    """All changes of one module side by side: `ups @ (w[owner] ⊙ downs)`."""

    ups: Tensor
    """Factors B side by side, their scales multiplied in; shape `(rows, N)`."""
    downs: Tensor
    """Factors A above each other, shape `(N, columns)`."""
    owner: Tensor
    """Number of the adapter that each rank-one term belongs to, shape `(N,)`."""


@final
@dataclass(frozen=True, eq=False)
class Combinations:
    """Principal components of the changes ΔW, as combinations of adapters."""

    bank: Bank
    """The bank of the adapters; only its first n adapters count."""
    weights: Tensor
    """Shape `(n, k)`, fp64; component j is Σ_i weights[i, j] ΔW_i."""
    offsets: Tensor
    """Shape `(k,)`, fp64: ⟨mean, component j⟩; unused with a sketch."""
    mean_square: float
    """⟨mean, mean⟩; unused with a sketch."""
    _factors: dict[_Place, dict[str, _Module]] = field(default_factory=dict, init=False, repr=False)
    _matrices: dict[_Place, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict, init=False, repr=False)

    def project(self, stack: AdapterStack) -> tuple[Tensor, Tensor]:
        """See `Basis.project`; by inner products with all adapters of the bank."""
        products_with_components = torch.zeros(len(stack), self.weights.shape[1], dtype=torch.float64)
        with_mean = torch.zeros(len(stack), dtype=torch.float64)
        for start, some in read_blocks(self.bank, len(self.weights), description="Projecting"):
            products = inner_products(stack, some)
            products_with_components += products @ self.weights[start : start + len(some)]
            with_mean += products.sum(dim=1) / len(self.weights)
        squares = norms_of(stack) - 2 * with_mean + self.mean_square
        return (products_with_components - self.offsets).float(), squares.clamp_min(0).float()

    def changes(self, scores: Tensor) -> dict[str, Tensor]:
        """Changes at points; see `WeightSpace.changes`."""
        dtype = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(dtype)
        if self.dense:
            return {
                name: mean + (scores @ components.flatten(1)).view(*scores.shape[:-1], *mean.shape)
                for name, (mean, components) in self._components(dtype, scores.device).items()
            }
        weights = scores @ self.weights.T.to(scores) + 1 / len(self.weights)
        modules = self._modules(dtype, scores.device)
        return {name: (one.ups * weights[..., None, one.owner]) @ one.downs for name, one in modules.items()}

    def factors(self, scores: Tensor) -> Iterator[tuple[str, LowRank]]:
        """See `Basis.factors`."""
        weights = self.weights @ scores.double() + 1 / len(self.weights)
        if self.bank.nbytes > _KEPT_BYTES:
            yield from self._summed(weights)
            return
        for name, one in self._modules(torch.float32, torch.device("cpu")).items():
            ups = (one.ups * weights[one.owner]).float()
            yield (
                name,
                LowRank(one.downs, ups)
                if len(one.owner) <= min(self.bank.shapes[name])
                else LowRank.of(ups @ one.downs),
            )

    def _summed(self, coefficients: Tensor) -> Iterator[tuple[str, LowRank]]:
        """The sum of a bank's changes by weights; of the bank, some adapters' factors of some modules are in memory."""
        left = sorted(self.bank.shapes)
        while left:
            sums: dict[str, Tensor] = {}
            while left and (not sums or sum(one.nbytes for one in sums.values()) < _DENSE_BYTES):
                name = left.pop(0)
                sums[name] = torch.zeros(self.bank.shapes[name])
            for start, stack in read_blocks(self.bank, len(self.weights), description="Summing", modules=sums.keys()):
                for name, total in sums.items():
                    weights = (coefficients[start : start + len(stack)] * stack.scale[name]).float()
                    ups = stack.up[name].float() * weights[:, None, None]
                    total.addmm_(ups.transpose(0, 1).flatten(1), stack.down[name].float().flatten(0, 1))
            yield from ((name, LowRank.of(sums.pop(name))) for name in list(sums))

    @property
    def dense(self) -> bool:
        """True if components as matrices are small, and enough smaller than factors to be worth computing."""
        size = sum(rows * columns for rows, columns in self.bank.shapes.values())
        components = self.weights.shape[1]
        return 4 * components <= len(self.weights) and 4 * size * components <= _DENSE_BYTES

    def _modules(self, dtype: torch.dtype, device: torch.device) -> dict[str, _Module]:
        """Factors of all adapters, kept after the first call."""
        if (dtype, device) not in self._factors:
            self._factors[dtype, device] = self._read(dtype, device)
        return self._factors[dtype, device]

    def _read(self, dtype: torch.dtype, device: torch.device) -> dict[str, _Module]:
        parts: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {name: [] for name in self.bank.shapes}
        for start, stack in read_blocks(self.bank, len(self.weights), description="Reading adapters"):
            for name, triples in parts.items():
                rank = stack.down[name].shape[1]
                # Shape (n, rank): True except for the zeros that fill up lower ranks.
                real = torch.arange(rank) < stack.ranks[name][:, None]
                ups = stack.up[name].to(torch.float64) * stack.scale[name][:, None, None]
                owner = start + torch.arange(len(stack))[:, None].expand(-1, rank)
                triples.append((
                    ups.mT[real].to(device, dtype), stack.down[name][real].to(device, dtype), owner[real].to(device),
                ))  # fmt: skip
        return {
            name: _Module(torch.cat(ups).T.contiguous(), torch.cat(downs), torch.cat(owners))
            for name, triples in parts.items()
            for ups, downs, owners in [zip(*triples, strict=True)]
        }

    def _components(self, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and components as matrices, kept after the first call."""
        if (dtype, device) not in self._matrices:
            weights = torch.cat([torch.full_like(self.weights[:, :1], 1 / len(self.weights)), self.weights], dim=1)
            made = {}
            for name, one in self._read(dtype, device).items():
                matrices = torch.stack([
                    (one.ups * column[one.owner]) @ one.downs for column in weights.T.to(device, dtype)
                ])  # fmt: skip
                made[name] = matrices[0], matrices[1:]
            self._matrices[dtype, device] = made
        return self._matrices[dtype, device]


@final
@dataclass(frozen=True, eq=False)
class Basis:
    """Mean and components of a space: how adapters get scores, and what points change."""

    combinations: Combinations | None = None
    """Adapters are measured by rows where there are some, and points are made of combinations where there are
    some: a fit through a sketch has both.
    """
    rows: RowBasis | None = None
    """Mean, deviations and components as rows; None if components are combinations of adapters only."""
    writer: RowLayout | Sketch | None = None
    """Layout or sketch by which adapters are written as rows."""

    def project(self, stack: AdapterStack) -> tuple[Tensor, Tensor]:
        """Scores of m adapters, shape `(m, k)`, and squared distances from the mean, shape `(m,)`; both fp32."""
        if self.rows is not None and self.writer is not None:
            return self.rows.project(self.writer.rows(stack))
        assert self.combinations is not None
        return self.combinations.project(stack)

    def changes(self, scores: Tensor) -> dict[str, Tensor]:
        """Changes at points; see `WeightSpace.changes`."""
        if self.combinations is not None:
            return self.combinations.changes(scores)
        layout, row = self._row(scores.to(torch.promote_types(scores.dtype, torch.float32)))
        return layout.changes(row)

    def factors(self, scores: Tensor) -> Iterator[tuple[str, LowRank]]:
        """Return the exact change of a point, shape `(k,)`, module by module."""
        if self.combinations is not None:
            return self.combinations.factors(scores)
        layout, row = self._row(scores.float())
        return iter(layout.adapter(row).factors.items())

    def _row(self, scores: Tensor) -> tuple[RowLayout, Tensor]:
        assert self.rows is not None
        assert isinstance(self.writer, RowLayout)
        return self.writer, self.rows.point(scores)
