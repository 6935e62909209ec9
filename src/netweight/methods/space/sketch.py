"""A short row of numbers per adapter whose inner products are, on average, those of the changes ΔW.

Random maps from the left and the right make every module's change small: R ΔW Sᵀ, from the factors. The row is linear
in the change and depends on nothing else, so that collections too large for a Gram matrix stay free of the gauge.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.generate.dual_fit import fit_gram
from netweight.generate.stack import AdapterStack
from netweight.methods.space.bank import Bank, stack_of
from netweight.methods.space.inner_product import inner_products

__all__ = ["Sketch", "SketchError", "SketchRows", "sketch_error"]


@final
@dataclass(frozen=True)
class Sketch:
    """The maps.

    Attributes:
        shapes: Module name → rows and columns of its change.
        side: Rows and columns that a change is made to; a shorter side stays as it is, exactly.
        seed: Of the maps.

    Source: for R of m independent rows with E[RᵀR] = I, and S alike, E⟨R X Sᵀ, R Y Sᵀ⟩ = ⟨X, Y⟩; of rank 1 the
    relative variance is at most about 2/m + 2/m + 4/m², and modules average it out.
    """

    shapes: Mapping[str, tuple[int, int]]
    side: int
    seed: int

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

    def rows(self, stack: AdapterStack) -> Tensor:
        """Write n adapters as rows, shape `(n, length)`, fp32.

        Args:
            stack: The adapters.

        Returns:
            Rows.
        """
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
class SketchRows:
    """A bank's adapters as a matrix of sketches that is read by rows.

    Attributes:
        bank: The adapters.
        sketch: How they are written.
        start: Number of the first.
        stop: Number after the last.
    """

    bank: Bank
    sketch: Sketch
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Adapters and numbers of each."""
        return self.stop - self.start, self.sketch.length

    def rows(self, start: int, stop: int) -> Tensor:
        """Read adapters as rows, fp32."""
        return self.sketch.rows(stack_of(self.bank, self.start + start, self.start + stop))


@final
@dataclass(frozen=True)
class SketchError:
    """What the sketch gets wrong, measured against exact inner products on some adapters.

    Attributes:
        adapters: How many.
        products: Root mean squared error of their inner products about the mean, relative to the root mean square.
        captured: Variance along the leading components by the sketch, relative to that along the exact ones.
        components: How many of them.
    """

    adapters: int
    products: float
    captured: float
    components: int


def sketch_error(bank: Bank, sketch: Sketch, components: int, *, most: int = 512) -> SketchError:
    """Compare a sketch with exact inner products on adapters evenly taken from a bank.

    Args:
        bank: The adapters.
        sketch: The maps.
        components: Of the fit; at most half of the adapters that are compared.
        most: Adapters to compare.
    """
    step = -(-len(bank) // most)
    taken = AdapterStack.of([stack_of(bank, number, number + 1).adapter(0) for number in range(0, len(bank), step)])
    exact, rows = inner_products(taken, taken), sketch.rows(taken).double()
    center = torch.eye(len(taken), dtype=torch.float64) - 1 / len(taken)
    exact, drawn = center @ exact @ center, center @ (rows @ rows.T) @ center
    error = float((drawn - exact).norm() / exact.norm())
    wanted = min(components, len(taken) // 2)
    best = fit_gram(exact.clone(), wanted, precision=1e-7)
    own = fit_gram(drawn, wanted, precision=1e-7)
    vectors = torch.linalg.qr(own.scores).Q  # of the adapters, in which both Gram matrices are written
    share = float((vectors * (exact @ vectors)).sum() / (best.variances.sum() * (len(taken) - 1)))
    return SketchError(len(taken), error, share, wanted)
