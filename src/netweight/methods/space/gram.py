"""The inner product of adapters, ⟨ΔW, ΔW'⟩ summed over modules, from their factors: ΔW is never formed.

It does not depend on how a change is written as up @ down, nor on ranks, so that principal components of it do not
either. `methods/space/method.py` calls it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from netweight.core import digest
from netweight.core.digest import of_config
from netweight.core.names import nearest_names
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import NameNotFound, UsageError
from netweight.nn.stacked_lora import AdapterStack
from netweight.nn.streaming_pca import Alone, ShardSum, read_tensors, write_tensors

_ROWS = 2048  # of the products that are held at a time, n × rank of them


def precision_of(stack: AdapterStack) -> torch.dtype:
    """The dtype that products of a stack are made in: fp64 if its factors are, else fp32.

    Args:
        stack: The adapters.
    """
    wide = any(factor.dtype == torch.float64 for part in (stack.down, stack.up) for factor in part.values())
    return torch.float64 if wide else torch.float32


def inner_products(one: AdapterStack, other: AdapterStack) -> Tensor:
    """Return the inner products of every adapter of one stack with every one of another.

    Args:
        one: n adapters.
        other: m adapters of the same modules and shapes; ranks may differ.

    Returns:
        Shape `(n, m)`, fp64: products in fp32 (fp64 where factors are), summed over modules in fp64.

    Raises:
        UsageError: The stacks have other modules or shapes.

    Source: ⟨BA, B'A'⟩ = ⟨BᵀB', AA'ᵀ⟩; over n and m adapters two matrix products of n·rank × m·rank per module.
    """
    if one.shapes != other.shapes:
        raise UsageError("The adapters are of different modules or shapes: they belong to different models.")
    dtype = torch.promote_types(precision_of(one), precision_of(other))
    total = torch.zeros(len(one), len(other), dtype=torch.float64)
    for name in one.modules:
        scales = one.scale[name][:, None] * other.scale[name]
        total += scales * _of_module(_factors(one, name, dtype), _factors(other, name, dtype))
    return total


def norms_of(stack: AdapterStack) -> Tensor:
    """Return the inner product of every adapter with itself, shape `(n,)`, fp64.

    Args:
        stack: The adapters.
    """
    total = torch.zeros(len(stack), dtype=torch.float64)
    for name in stack.modules:
        ups, downs = _factors(stack, name, precision_of(stack))
        total += stack.scale[name] ** 2 * ((ups @ ups.mT) * (downs @ downs.mT)).sum(dim=(1, 2))
    return total


def fingerprints_of(stack: AdapterStack) -> Tensor:
    """Return a number per adapter, shape `(n,)`, fp64, to know it again by: its inner product with a random adapter.

    It depends on the change alone, and another change has another one.

    Args:
        stack: The adapters.
    """
    total = torch.zeros(len(stack), dtype=torch.float64)
    for name, (rows, columns) in stack.shapes.items():
        draw = torch_generator(0, "fingerprint", name)
        left, right = (torch.randn(length, generator=draw, dtype=torch.float64) for length in (rows, columns))
        total += stack.scale[name] * ((left @ stack.up[name].double()) * (stack.down[name].double() @ right)).sum(dim=1)
    return total


def _factors(stack: AdapterStack, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors of one module, each as `(n, rank, length)`."""
    return stack.up[name].to(dtype).mT, stack.down[name].to(dtype)


def _of_module(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Inner products of one module's changes without their scales, shape `(n, m)`."""
    (ups, downs), (count, rank) = one, one[0].shape[:2]
    others, other_rank = [factor.flatten(0, 1).T for factor in other], other[0].shape[1]
    step = max(1, _ROWS // rank)
    parts = []
    for start in range(0, count, step):
        stop = min(start + step, count)
        products = ups[start:stop].flatten(0, 1) @ others[0]
        products *= downs[start:stop].flatten(0, 1) @ others[1]
        parts.append(products.view(stop - start, rank, -1, other_rank).sum(dim=(1, 3)))
    return torch.cat(parts)


_BLOCK = 256  # adapters that are read at a time


class Bank(Protocol):
    """Adapters of the same modules, by number and name."""

    @property
    def names(self) -> Sequence[str]:
        """One per adapter, each once."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """Module name → rows and columns of its change."""
        ...

    @property
    def digest(self) -> str:
        """Of everything in it."""
        ...

    def __len__(self) -> int:
        """Number of adapters."""
        ...

    def stack(self, start: int, stop: int) -> AdapterStack:
        """Read the adapters from number `start` up to `stop`."""
        ...


@final
class StackBank:
    """A bank in memory.

    Args:
        names: One per adapter, each once.
        adapters: The adapters.

    Raises:
        UsageError: Names are repeated, or their number is not that of the adapters.
    """

    def __init__(self, names: Sequence[str], adapters: AdapterStack) -> None:
        if len(names) != len(adapters) or len(set(names)) != len(names):
            raise UsageError(f"{len(set(names))} different names cannot name {len(adapters)} adapters.")
        self.names = list(names)
        self._adapters = adapters

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module name → rows and columns of its change."""
        return self._adapters.shapes

    @property
    def digest(self) -> str:
        """Of names and tensors."""
        parts = (self._adapters.down, self._adapters.up, self._adapters.scale, self._adapters.ranks)
        tensors = [{name: digest.of_tensor(value) for name, value in part.items()} for part in parts]
        return digest.of_config({"names": self.names, "tensors": tensors})

    def __len__(self) -> int:
        """Number of adapters."""
        return len(self.names)

    def stack(self, start: int, stop: int) -> AdapterStack:
        """Return the adapters from number `start` up to `stop`; views."""
        parts = (self._adapters.down, self._adapters.up, self._adapters.scale, self._adapters.ranks)
        return AdapterStack(*({name: value[start:stop] for name, value in part.items()} for part in parts))


def stack_of(bank: Bank, start: int, stop: int) -> AdapterStack:
    """Read adapters, and refuse values that no arithmetic survives.

    Args:
        bank: Where adapters come from.
        start: The first number.
        stop: The number after the last.

    Raises:
        UsageError: An adapter holds NaN or infinity; it is named with its module.
    """
    stack = bank.stack(start, stop)
    for part in (stack.down, stack.up, stack.scale):
        for module, values in part.items():
            good = torch.isfinite(values.flatten(1) if values.ndim > 1 else values[:, None]).all(dim=1)
            if not good.all():
                name = bank.names[start + int((~good).nonzero()[0])]
                raise UsageError(
                    f"The adapter {name!r} holds NaN or infinity in {module}.",
                    cure="Leave it out of the bank; its training has diverged.",
                )
    return stack


def stacks_of(
    bank: Bank, count: int, *, description: str, progress: Progress = QUIET, first: int = 0
) -> Iterator[tuple[int, AdapterStack]]:
    """Read the adapters from number `first` up to `count` in blocks, each with the number of its first.

    Args:
        bank: Where adapters come from.
        count: The number after the last.
        description: What progress is called.
        progress: Where it is shown.
        first: The first number.

    Yields:
        The first number of a block, and its adapters.
    """
    with progress.task(description, count - first, unit="adapters") as task:
        for start in range(first, count, _BLOCK):
            stack = stack_of(bank, start, min(start + _BLOCK, count))
            yield start, stack
            task.update(len(stack))


def check_modules(shapes: Mapping[str, tuple[int, int]], expected: Mapping[str, tuple[int, int]], *, what: str) -> None:
    """Refuse an adapter of other modules than a space's.

    Args:
        shapes: Module → rows and columns of an adapter.
        expected: The same of the space.
        what: What to call the adapter in messages.

    Raises:
        NameNotFound: It lacks a module, or has one more.
        UsageError: A module has another shape.
    """
    for module in sorted(set(expected) - set(shapes)):
        raise NameNotFound(f"{what} lacks {module!r}, which the space changes.", cure="Train it on the same modules.")
    for module in sorted(set(shapes) - set(expected)):
        near = nearest_names(module, list(expected), 1)[0]
        raise NameNotFound(f"{what} changes {module!r}, which the space does not.", cure=f"The nearest is {near!r}.")
    for module, shape in shapes.items():
        if tuple(shape) != tuple(expected[module]):
            raise UsageError(
                f"{what} changes {module} in shape {tuple(shape)}, the space in {tuple(expected[module])}.",
                cure="It belongs to another base model.",
            )


_BYTES = 1 << 28  # of adapters that are read at a time, twice
_ALONE = Alone()


def gram_of(
    bank: Bank, *, folder: Path | None = None, workers: ShardSum = _ALONE, progress: Progress = QUIET
) -> tuple[Tensor, float]:
    """Return the inner products of all pairs of adapters, and the relative rounding error of the products.

    Reads each block of adapters once for every block after it; memory holds the matrix and two blocks.

    Args:
        bank: n adapters.
        folder: Where to keep block rows. Those of a bank that has grown since are used again: its names must begin
            with the same ones, and adapters are compared by fingerprint.
        workers: Who shares the work: of w workers, each takes every w-th block row.
        progress: Where to show it.

    Returns:
        Shape `(n, n)`, fp64, symmetric.

    Raises:
        UsageError: An adapter holds NaN or infinity.
        CorruptBlob: A file in the folder is damaged.
    """
    count, block = len(bank), _block(bank)
    gram = torch.zeros(count, count, dtype=torch.float64)
    precision = torch.zeros((), dtype=torch.float64)
    known = None if folder is None else fingerprints(bank)
    with progress.task("Inner products", count * (count + 1) // 2, unit="pairs") as task:
        for number, start in enumerate(range(0, count, block)):
            if number % workers.count != workers.number:
                continue
            later = stack_of(bank, start, min(start + block, count))
            rows = _block_row(bank, later, start, folder, known)
            gram[start : start + len(later), : start + len(later)] = rows
            gram[:start, start : start + len(later)] = rows[:, :start].T
            precision += torch.finfo(precision_of(later)).eps * len(later) / count
            task.update(len(later) * start + len(later) * (len(later) + 1) // 2)
    workers.add([gram, precision])
    return gram, float(precision)


def block_rows(bank: Bank) -> list[int]:
    """The first adapter of every block row.

    Args:
        bank: Where adapters come from.
    """
    return list(range(0, len(bank), _block(bank)))


def make_block_row(bank: Bank, start: int, folder: Path) -> None:
    """Make one block row and keep it, unless it is there, in a worker; `gram_of` with the same folder takes it up.

    Args:
        bank: Where adapters come from.
        start: As `block_rows` says.
        folder: Where it is kept.
    """
    stop = min(start + _block(bank), len(bank))
    _block_row(bank, stack_of(bank, start, stop), start, folder, fingerprints(bank, stop))


def fingerprints(bank: Bank, count: int | None = None) -> Tensor:
    """Fingerprints of a bank's first adapters, of all by default.

    Args:
        bank: Where adapters come from.
        count: How many adapters; None for all.

    Returns:
        Shape `(count,)`, fp64.
    """
    stacks = stacks_of(bank, len(bank) if count is None else count, description="Fingerprints")
    return torch.cat([fingerprints_of(stack) for _, stack in stacks])


def same_fingerprints(found: Tensor, known: Tensor) -> bool:
    """Whether they are of the same adapters.

    Args:
        found: Shape `(n,)`, fp64.
        known: Shape `(n,)`, fp64.
    """
    return torch.allclose(found, known, rtol=0, atol=1e-7 * float(known.abs().max()))


def _block_row(bank: Bank, later: AdapterStack, start: int, folder: Path | None, fingerprints: Tensor | None) -> Tensor:
    """Inner products of a block with itself and everything before it, shape `(m, start + m)`; kept in the folder."""
    stop = start + len(later)
    if folder is None or fingerprints is None:
        return _products(bank, later, start)
    file, about = folder / f"gram-{start}-{stop}.safetensors", {"names": of_config(list(bank.names[:stop]))}
    if file.exists():
        kept, said = read_tensors(file)
        if said == about and same_fingerprints(fingerprints[:stop], kept["fingerprints"]):
            return kept["products"]
    products = _products(bank, later, start)
    write_tensors(file, {"products": products, "fingerprints": fingerprints[:stop]}, about)
    return products


def _products(bank: Bank, later: AdapterStack, start: int) -> Tensor:
    step = _block(bank)
    earlier = [inner_products(later, stack_of(bank, first, first + step)) for first in range(0, start, step)]
    return torch.cat([*earlier, inner_products(later, later)], dim=1)


def _block(bank: Bank) -> int:
    """Adapters that are read at a time: as many as memory should hold, since earlier ones are read again."""
    one = bank.stack(0, 1)
    size = sum(factor.nbytes for part in (one.down, one.up) for factor in part.values())
    return max(16, min(2048, _BYTES // size))
