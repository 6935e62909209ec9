"""A large weight and the states of its optimizer, updated some numbers at a time, so that little of it is ever dense.

For optimizers that treat every number alone. The embedding of a large vocabulary is the largest weight of many models;
decoded as a whole, with its gradient, its states and the temporary results of the optimizer, it would need more memory
at once than anything else in training. Tiles also stay in the processor's cache while the optimizer reads and writes
them ten times.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal, Protocol, final

import torch

from netweight.codec.header import VERSION, dtype_name
from netweight.codec.tiled import TiledBlob
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.gradient_parts import GradientSum
from netweight.methods.compress.runtime.storage import CompressedStorage, blob_of, fill, recent
from netweight.methods.compress.runtime.tensor import CompressedTensor
from netweight.store.choices import Level

States = Literal["dense", "compressed", "offloaded"]
# States are written in every step, so half a percent of size is not worth the time.
STATE_LEVEL: Level = "fast"
# Numbers in a tile, a power of 2.
_NUMBERS = 1 << 20
# The binary logarithm of the numbers in a chunk of states, for a weight of which a batch changes only few rows.
_SPARSE_CHUNK_LOG2 = 12
# The binary logarithm of the numbers in the codec's largest chunk of floats, unless another size is chosen.
_CHUNK_LOG2 = 18
_ELEMENTWISE = frozenset(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD",
    )
)  # fmt: skip


def fit(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, gradient: torch.Tensor | None = None) -> bool:
    """Return whether a parameter is to be updated by tiles: large, on the CPU, by an optimizer known to allow it.

    `gradient`: its gradient; None if that is a sum of parts.
    """
    return (
        type(optimizer) in _ELEMENTWISE
        and parameter.numel() > _NUMBERS
        and parameter.is_floating_point()
        and device.is_here(parameter.payload if isinstance(parameter, CompressedTensor) else parameter)
        and parameter.is_contiguous()
        and (gradient is None or gradient.layout == torch.strided)
    )


def tiles(parameter: torch.Tensor) -> Iterator[tuple[int, int]]:
    """First and last number (exclusive) of each tile of a parameter; all but the last are whole chunks."""
    count, step = parameter.numel(), max(_NUMBERS, torch.get_num_threads() << _CHUNK_LOG2)
    if isinstance(parameter, CompressedTensor) and not parameter.stored.fixed:
        # Byte 6 of a blob is the binary logarithm of its chunks' size.
        step = max(step, 1 << blob_of(parameter.payload)[6])
    return ((first, min(first + step, count)) for first in range(0, count, step))


class Tiled(Protocol):
    """A tensor that is read and replaced from front to back."""

    def read(self, first: int, last: int) -> torch.Tensor:
        """The numbers of a tile, dense, for the caller to change."""

    def write(self, first: int, last: int, numbers: torch.Tensor) -> None:
        """Replace these numbers."""

    def keep(self, first: int, last: int) -> None:
        """Leave these numbers as they are."""

    def finish(self) -> torch.Tensor | None:
        """End after the last tile, or earlier: all other numbers keep their values; None if there are none."""


def tiled(tensor: torch.Tensor) -> Tiled:
    """Begin to update a parameter or state by tiles."""
    if not isinstance(tensor, CompressedTensor):
        return _DenseTiles(tensor.detach())
    stored = tensor.stored
    stored.own()
    has_tiles = not stored.fixed and not stored.lossy and blob_of(stored.payload)[3] == VERSION
    return _CompressedTiles(tensor) if has_tiles else _DecodedTiles(tensor)


@final
class _DenseTiles:
    """A dense tensor, changed where it is."""

    def __init__(self, dense: torch.Tensor) -> None:
        self._dense, self._flat = dense, dense.view(-1)

    def read(self, first: int, last: int) -> torch.Tensor:
        return self._flat[first:last]

    def write(self, first: int, last: int, numbers: torch.Tensor) -> None:
        if numbers.data_ptr() != self._flat[first:last].data_ptr():
            self._flat[first:last] = numbers

    def keep(self, first: int, last: int) -> None:
        pass

    def finish(self) -> torch.Tensor:
        return self._dense


@final
class _DecodedTiles:
    """A compressed weight in a form that has to be written as a whole."""

    def __init__(self, tensor: CompressedTensor) -> None:
        self._tensor, self._dense = tensor, tensor.stored.taken()
        tiles_of_dense = _DenseTiles(self._dense)
        self.read, self.write, self.keep = tiles_of_dense.read, tiles_of_dense.write, tiles_of_dense.keep

    def finish(self) -> torch.Tensor:
        self._tensor.stored.write(self._dense)
        return self._tensor


@final
class _CompressedTiles:
    """A compressed tensor, of which one tile at a time is decoded, and encoded again in place."""

    def __init__(self, tensor: CompressedTensor) -> None:
        self._tensor, self._payload = tensor, tensor.payload
        # A backward pass may have decoded this weight just before.
        decoded = recent(self._payload.device).take(self._payload)
        self._decoded = None if decoded is None else decoded.view(-1)
        self._blob = tensor.stored.begin_tiles(threads=torch.get_num_threads())

    def read(self, first: int, last: int) -> torch.Tensor:
        if self._decoded is not None:
            return self._decoded[first:last]
        out = torch.empty(last - first, dtype=self._tensor.dtype)
        return fill(out, self._payload, first, last, threads=torch.get_num_threads())

    def write(self, first: int, last: int, numbers: torch.Tensor) -> None:
        self._blob.add(numbers.detach())

    def keep(self, first: int, last: int) -> None:
        self._blob.keep(last)

    def finish(self) -> torch.Tensor:
        self._blob.keep_rest()
        self._tensor.stored.put_tiles(self._blob)
        return self._tensor


@final
class _NewTiles:
    """A state that the optimizer begins to keep, or that begins to be kept compressed."""

    def __init__(
        self,
        like: torch.Tensor,
        shape: torch.Size,
        how: States,
        *,
        before: torch.Tensor | None = None,
        chunk_log2: int | None = None,
    ) -> None:
        self._shape, self._dtype, self._written = shape, like.dtype, 0
        self._before = before
        self._dense = torch.empty(shape, dtype=like.dtype) if how != "compressed" else None
        self._blob = TiledBlob(
            dtype_name(like.dtype), shape, level=STATE_LEVEL, chunk_log2=chunk_log2, threads=torch.get_num_threads()
        )

    def read(self, first: int, last: int) -> torch.Tensor:
        assert self._before is not None, "a new state has no values before its first write"
        return self._before.view(-1)[first:last]

    def write(self, first: int, last: int, numbers: torch.Tensor) -> None:
        if self._dense is not None:
            self._dense.view(-1)[first:last] = numbers
        else:
            self._blob.add(numbers.detach())
            if self._before is not None and numbers.data_ptr() != self.read(first, last).data_ptr():
                self._before.view(-1)[first:last] = numbers
        self._written = last

    def keep(self, first: int, last: int) -> None:
        self.write(first, last, self.read(first, last))

    def finish(self) -> torch.Tensor | None:
        if self._written < math.prod(self._shape):
            return self._before
        if self._dense is not None:
            return self._dense
        stored = CompressedStorage.of_tiles(self._blob, tuple(self._shape), self._dtype, STATE_LEVEL)
        return CompressedTensor(stored)


@final
class StateTiles:
    """The states of one parameter: those of its shape by tiles, all others, such as counts of steps, as they are.

    Args:
        state: The optimizer's state of the parameter; empty before the first step.
        shape: The parameter's shape.
        how: How new states are kept.
        gradient: The parameter's gradient.
    """

    def __init__(self, state: dict[str, Any], shape: torch.Size, how: States, gradient: GradientSum) -> None:
        self._shape, self._how = shape, how
        # States that are mostly zeros are encoded several times as fast in chunks most of which are nothing but zeros.
        sparse = not state and how == "compressed" and gradient.is_mostly_zeros(1 << _SPARSE_CHUNK_LOG2)
        self._chunk_log2 = _SPARSE_CHUNK_LOG2 if sparse else None
        self._tiled: dict[str, Tiled] = {}
        # Every tile begins with this state.
        self._before = dict(state)
        self._after = dict(state)
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == shape:
                self._tiled[name] = self._begin(value)

    def _begin(self, value: torch.Tensor) -> Tiled:
        """Begin with a state that may be kept in another way than it was, after its loading from a checkpoint."""
        if self._how == "compressed":
            if isinstance(value, CompressedTensor):
                return tiled(value)
            return _NewTiles(value, self._shape, self._how, before=value)
        return tiled(value.dense() if isinstance(value, CompressedTensor) else value)

    def read(self, first: int, last: int) -> dict[str, Any]:
        """The state for the optimizer's step of a tile."""
        return {
            name: self._tiled[name].read(first, last) if name in self._tiled else copied(value)
            for name, value in self._before.items()
        }

    def write(self, first: int, last: int, state: dict[str, Any]) -> None:
        """Keep the state after the optimizer's step of a tile."""
        for name, value in state.items():
            self._after[name] = value
            if not isinstance(value, torch.Tensor) or value.shape != (last - first,):
                continue
            if name not in self._tiled:
                self._tiled[name] = _NewTiles(value, self._shape, self._how, chunk_log2=self._chunk_log2)
            self._tiled[name].write(first, last, value)

    def keep(self, first: int, last: int, others: dict[str, Any]) -> None:
        """Leave the states of a tile as they are, and keep all others as they are after a step."""
        self._after.update(others)
        for each in self._tiled.values():
            each.keep(first, last)

    def finish(self) -> dict[str, Any]:
        """The state for the next step; without states whose first tiles alone exist, after an error."""
        for name, each in self._tiled.items():
            self._after[name] = each.finish()
        return {name: value for name, value in self._after.items() if name not in self._tiled or value is not None}


def copied(value: Any) -> Any:
    """A state that every tile changes anew, such as the count of steps."""
    return value.clone() if isinstance(value, torch.Tensor) else value
