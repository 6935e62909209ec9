"""Components as combinations of a bank's adapters: what is fitted from inner products, or a sketch; points are, too.

ΔW of a point is Σ_i w_i ΔW_i with w = 1/n + weights @ scores, so that it is computed from the bank's factors, and is
exact as an adapter: factors side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from netweight.generate.adapter import Adapter, LowRank
from netweight.generate.basis import Basis
from netweight.generate.stack import AdapterStack
from netweight.methods.space.bank import Bank, stacks_of
from netweight.methods.space.inner_product import inner_products, norms_of
from netweight.methods.space.sketch import Sketch

__all__ = ["Combinations"]

_DENSE_BYTES = 1 << 28  # of components that may be kept as matrices
_Place = tuple[torch.dtype, torch.device]


@final
@dataclass(frozen=True, eq=False)
class _Module:
    """All changes of one module side by side: `ups @ (w[owner] ⊙ downs)`."""

    ups: Tensor  # (rows, N), scales multiplied in
    downs: Tensor  # (N, columns)
    owner: Tensor  # (N,): the adapter that each came with


@final
@dataclass(frozen=True, eq=False)
class Combinations:
    """Principal components of the changes ΔW.

    Attributes:
        bank: The adapters, or more than those: the first n count.
        weights: Shape `(n, k)`, fp64; component j is Σ_i weights[i, j] ΔW_i.
        offsets: Shape `(k,)`, fp64: ⟨mean, component j⟩; unused with a sketch.
        mean_square: ⟨mean, mean⟩; unused with a sketch.
        sketch: Where the fit was made through one: components of sketches, and the sketch. Adapters are then measured
            by it, else by their inner products with all adapters of the bank.
    """

    bank: Bank
    weights: Tensor
    offsets: Tensor
    mean_square: float
    sketch: tuple[Basis, Sketch] | None = None
    _factors: dict[_Place, dict[str, _Module]] = field(default_factory=dict, init=False, repr=False)
    _matrices: dict[_Place, dict[str, tuple[Tensor, Tensor]]] = field(default_factory=dict, init=False, repr=False)

    def project(self, stack: AdapterStack) -> tuple[Tensor, Tensor]:
        """Return m adapters' scores, and their squared distances from the mean; see `fitting.Basis`."""
        if self.sketch is not None:
            basis, sketch = self.sketch
            return basis.project(rows := sketch.rows(stack)), basis.squares(rows)
        found = torch.zeros(len(stack), self.weights.shape[1], dtype=torch.float64)
        with_mean = torch.zeros(len(stack), dtype=torch.float64)
        for start, some in stacks_of(self.bank, len(self.weights), description="Projecting"):
            products = inner_products(stack, some)
            found += products @ self.weights[start : start + len(some)]
            with_mean += products.sum(dim=1) / len(self.weights)
        squares = norms_of(stack) - 2 * with_mean + self.mean_square
        return (found - self.offsets).float(), squares.clamp_min(0).float()

    def changes(self, scores: Tensor) -> dict[str, Tensor]:
        """Return the changes at points; see `WeightSpace.changes`."""
        dtype = torch.promote_types(scores.dtype, torch.float32)
        scores = scores.to(dtype)
        if self.dense:
            return {
                name: mean + (scores @ components.flatten(1)).view(*scores.shape[:-1], *mean.shape)
                for name, (mean, components) in self._components(dtype, scores.device).items()
            }
        found = scores @ self.weights.T.to(scores) + 1 / len(self.weights)
        modules = self._modules(dtype, scores.device)
        return {name: (one.ups * found[..., None, one.owner]) @ one.downs for name, one in modules.items()}

    def adapter(self, scores: Tensor) -> Adapter:
        """Return a point as an adapter, exactly; see `WeightSpace.adapter`."""
        found = self.weights @ scores.double() + 1 / len(self.weights)
        changes = {}
        for name, one in self._modules(torch.float32, torch.device("cpu")).items():
            ups = (one.ups * found[one.owner]).float()
            rows, columns = len(ups), one.downs.shape[1]
            if len(one.owner) <= min(rows, columns):
                changes[name] = LowRank(one.downs, ups)
            elif columns <= rows:
                changes[name] = LowRank(torch.eye(columns), ups @ one.downs)
            else:
                changes[name] = LowRank(ups @ one.downs, torch.eye(rows))
        return Adapter(changes)

    @property
    def dense(self) -> bool:
        """Whether components as matrices are small, and fewer than factors by enough to be worth making."""
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
        for start, stack in stacks_of(self.bank, len(self.weights), description="Reading adapters"):
            for name, found in parts.items():
                rank = stack.down[name].shape[1]
                real = torch.arange(rank) < stack.ranks[name][:, None]  # (n, rank): not the zeros of filling up
                ups = stack.up[name].to(torch.float64) * stack.scale[name][:, None, None]
                owner = start + torch.arange(len(stack))[:, None].expand(-1, rank)
                found.append((
                    ups.mT[real].to(device, dtype), stack.down[name][real].to(device, dtype), owner[real].to(device),
                ))  # fmt: skip
        return {
            name: _Module(torch.cat(ups).T.contiguous(), torch.cat(downs), torch.cat(owners))
            for name, found in parts.items()
            for ups, downs, owners in [zip(*found, strict=True)]
        }

    def _components(self, dtype: torch.dtype, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        """Mean and components as matrices, kept after the first call."""
        if (dtype, device) not in self._matrices:
            weights = torch.cat([torch.full_like(self.weights[:, :1], 1 / len(self.weights)), self.weights], dim=1)
            made = {}
            for name, one in self._read(dtype, device).items():
                found = torch.stack([
                    (one.ups * column[one.owner]) @ one.downs for column in weights.T.to(device, dtype)
                ])  # fmt: skip
                made[name] = found[0], found[1:]
            self._matrices[dtype, device] = made
        return self._matrices[dtype, device]
