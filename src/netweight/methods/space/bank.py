"""What a space is fitted to: any collection of adapters of the same modules that hands them out in stacks.

`store.AdapterBank` is one on disk; `StackBank` here is one in memory, such as a batched training leaves behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, final

import torch

from netweight.core import digest
from netweight.core.names import nearest_names
from netweight.core.progress import QUIET, Progress
from netweight.errors import NameNotFound, UsageError
from netweight.generate.stack import AdapterStack

__all__ = ["Bank", "StackBank", "check_modules", "stack_of", "stacks_of"]

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
