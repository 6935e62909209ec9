"""Which examples go into which step, from a seed. Local training calls it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from netweight.core import seeds

__all__ = ["padded", "poisson_batches", "shuffled_batches", "steps_per_epoch"]


def steps_per_epoch(n: int, batch_size: int) -> int:
    """Return the number of steps that go once through n examples.

    Args:
        n: Examples, at least 1.
        batch_size: At least 1.
    """
    return -(-n // batch_size)


def shuffled_batches(n: int, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Yield indices, shape `(up to batch_size,)`, of each step: every epoch goes once through all, in a new order.

    Args:
        n: Examples, at least 1.
        batch_size: At least 1; the last batch of an epoch may be smaller.
        epochs: Passes over all examples.
        seed: Where orders are drawn from.
    """
    generator = seeds.torch_generator(seed, "shuffle")
    for _ in range(epochs):
        yield from torch.split(torch.randperm(n, generator=generator), batch_size)


def poisson_batches(n: int, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Yield indices of each step, every example drawn on its own with probability `batch_size / n`.

    Args:
        n: Examples, at least 1.
        batch_size: Its mean.
        epochs: As many steps as `steps_per_epoch` says, times this.
        seed: Where draws come from.
    """
    generator = seeds.torch_generator(seed, "poisson")
    rate = min(1.0, batch_size / n)
    for _ in range(epochs * steps_per_epoch(n, batch_size)):
        yield torch.nonzero(torch.rand(n, generator=generator) < rate).flatten()


def padded(index: Tensor, multiple: int = 8) -> tuple[Tensor, Tensor]:
    """Return a batch's indices filled up to a multiple with its first one, and a mask of those that count.

    Kernels are chosen and cached by shape: so a few shapes recur. The examples added are of the batch itself.

    Args:
        index: Shape `(b,)`, int64, b at least 1.
        multiple: At least 1.
    """
    missing = -len(index) % multiple
    mask = torch.arange(len(index) + missing) < len(index)
    return torch.cat([index, index[:1].expand(missing)]), mask
