"""Gradients of large weights that never exist whole: their parts, of which an update takes some numbers at a time.

The gradient of an embedding has numbers in the rows that a batch asked for, and zeros elsewhere; that of the output
layer is the product of two small matrices. Where a `LayerwiseOptimizer` updates such a weight by tiles, the layer's
backward pass adds its part here, and gives autograd a gradient without numbers in its place, with which autograd finds
out when the weight's gradient is complete. Everywhere else the gradient is a tensor, as usual.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Protocol, final

import torch


class GradientPart(Protocol):
    """A summand of a weight's gradient."""

    def numbers(self, first: int, last: int) -> torch.Tensor | None:
        """Numbers `first` to `last` of the gradient as a vector of the weight's dtype; None if all are zero."""

    def is_finite(self) -> bool:
        """Return whether every number is finite."""

    def zero_chunks(self, chunk: int) -> float:
        """The share of chunks of so many numbers that are certainly zeros, at least 0 and at most 1."""


class Collector(Protocol):
    """Collector of the parts of a weight's gradient: the hook of a `LayerwiseOptimizer` on this weight."""

    embeddings: int
    """Uses of the weight as an embedding since its last update."""

    def takes_parts(self) -> bool:
        """Return whether an update by tiles follows as soon as the gradient is complete."""

    def add(self, part: GradientPart) -> None:
        """Add a part, in a backward pass."""


def collector_of(weight: torch.Tensor) -> Collector | None:
    """The collector of a parameter's gradient, if it accepts parts and no other hook reads the gradient."""
    if torch.compiler.is_compiling() or not weight.is_leaf or weight._backward_hooks:
        return None
    hooks = tuple((getattr(weight, "_post_accumulate_grad_hooks", None) or {}).values())
    collector = hooks[0] if len(hooks) == 1 and hasattr(hooks[0], "takes_parts") else None
    return collector if collector is not None and collector.takes_parts() else None


def placeholder(weight: torch.Tensor, part: GradientPart, collector: Collector | None) -> torch.Tensor | None:
    """Give a part to the collector of a weight's gradient, in a backward pass.

    Args:
        weight: A parameter.
        part: A part of its gradient.
        collector: That of the weight; None if it had none in the forward pass.

    Returns:
        A gradient without numbers for autograd, or None if the gradient must be a tensor: it is asked for by
        `torch.autograd.grad`, is itself to be differentiated, or the collector no longer takes it.
    """
    if collector is None or torch.is_grad_enabled() or collector_of(weight) is not collector:
        return None
    node = torch.autograd.graph.get_gradient_edge(weight).node
    try:
        if not torch._C._will_engine_execute_node(node):
            return None
    except RuntimeError:
        # torch.autograd.grad requires this gradient.
        return None
    collector.add(part)
    nothing = torch.empty(1, 0, dtype=torch.int64), torch.empty(0, *weight.shape[1:], dtype=weight.dtype)
    return torch.sparse_coo_tensor(*nothing, size=tuple(weight.shape), check_invariants=False)


@final
class DensePart:
    """A gradient that is a tensor."""

    def __init__(self, gradient: torch.Tensor) -> None:
        self._flat = gradient.reshape(-1)

    def numbers(self, first: int, last: int) -> torch.Tensor | None:
        """Numbers `first` to `last`; None if all are zero."""
        tile = self._flat[first:last]
        return None if is_zero(tile) else tile

    def is_finite(self) -> bool:
        """Return whether every number is finite."""
        return bool(torch.isfinite(self._flat).all())

    def zero_chunks(self, chunk: int) -> float:
        """The share of chunks that are zeros."""
        least, most = torch.aminmax(self._flat[: self._flat.numel() // chunk * chunk].view(-1, chunk), dim=1)
        return float(((least == 0) & (most == 0)).float().mean())


@final
class RowsPart:
    """A gradient with numbers in some rows, and zeros elsewhere.

    Args:
        rows: int64 of shape (n,), ascending, each once.
        numbers: The gradient of these rows, of shape (n, …), in the weight's dtype.
        total: Rows of the weight.
    """

    def __init__(self, rows: torch.Tensor, numbers: torch.Tensor, total: int) -> None:
        self._rows, self._numbers = rows.tolist(), numbers.reshape(len(rows), -1)
        self._total, self._width = total, self._numbers.shape[1]

    def numbers(self, first: int, last: int) -> torch.Tensor | None:
        """Numbers `first` to `last`; None if all are zero."""
        width = self._width
        begin, end = bisect_left(self._rows, first // width), bisect_left(self._rows, -(-last // width))
        if begin == end:
            return None
        tile = torch.zeros(last - first, dtype=self._numbers.dtype)
        for at in range(begin, end):
            start = self._rows[at] * width
            inside = slice(max(start, first) - start, min(start + width, last) - start)
            tile[start + inside.start - first : start + inside.stop - first] = self._numbers[at, inside]
        return tile

    def is_finite(self) -> bool:
        """Return whether every number is finite."""
        return bool(torch.isfinite(self._numbers).all())

    def zero_chunks(self, chunk: int) -> float:
        """The share of chunks in which no row has numbers."""
        width, touched = self._width, set[int]()
        for row in self._rows:
            touched.update(range(row * width // chunk, -(-(row + 1) * width // chunk)))
        return 1 - len(touched) / max(1, -(-self._total * width // chunk))


@final
class GradientSum:
    """A weight's gradient: the sum of its parts, in the order in which they came."""

    def __init__(self, parts: Sequence[GradientPart]) -> None:
        self._parts = parts

    def numbers(self, first: int, last: int) -> torch.Tensor | None:
        """Numbers `first` to `last`, which may lie in the gradient's own memory; None if all are zero."""
        parts = [part.numbers(first, last) for part in self._parts]
        tiles = [tile for tile in parts if tile is not None]
        if len(tiles) < 2:
            # Adding zeros turns -0.0 into 0.0, as it does where all parts are tensors.
            return None if not tiles else tiles[0] if len(parts) == 1 else tiles[0] + 0.0
        whole = tiles[0] + tiles[1]
        for tile in tiles[2:]:
            whole += tile
        return whole

    def is_finite(self) -> bool:
        """Return whether every number of every part is finite."""
        return all(part.is_finite() for part in self._parts)

    def is_mostly_zeros(self, chunk: int) -> bool:
        """Return whether at least half of the chunks of so many numbers are zeros and nothing else."""
        return sum(1 - part.zero_chunks(chunk) for part in self._parts) <= 0.5


def is_zero(numbers: torch.Tensor) -> bool:
    """Return whether all bits of a vector on the CPU are zero; -0.0 has one that is not."""
    bits = numbers.view(_INTEGERS[numbers.element_size()])
    if bits[:_SAMPLE].any():
        return False
    whole = 8 // numbers.element_size()
    if bits.numel() % whole == 0 and bits.storage_offset() % whole == 0:
        # Comparing 64 bits at a time takes a fraction of the time.
        bits = bits.view(torch.int64)
    return not bits.any()


_SAMPLE = 1024  # numbers that are looked at first
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
