"""The weighted average of clients' tensors: federated averaging, also of low-rank changes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.methods.federate.updates import LowRankUpdate, Tensors, Update


def aggregate(state: Tensors, updates: Sequence[Update]) -> dict[str, Tensor]:
    """Return the average of the clients' tensors, weighted by their numbers of examples.

    Pure: nothing given is changed, and the order of `updates` does not matter, since clients are taken in the order
    of their numbers. Low-rank matrices of all clients are joined by one product.

    Args:
        state: The server's tensors, which the clients started from.
        updates: At least one, each with exactly the state's names and shapes (see `validate_updates`).

    Raises:
        UsageError: There is no update, two come from one client, or names differ from the state's.

    Source: McMahan et al., FedAvg (arXiv 1602.05629), algorithm 1; HyperFL (arXiv 2412.07187), algorithm 1.
    """
    ordered = sorted(updates, key=lambda update: update.client)
    _check(state, ordered)
    total = sum(update.n for update in ordered)
    shares = [update.n / total for update in ordered]
    return {
        name: average_tensor(base, [update.tensors[name] for update in ordered], shares) for name, base in state.items()
    }


def _check(state: Tensors, ordered: Sequence[Update]) -> None:
    if not ordered:
        raise UsageError("There is no update to aggregate.", cure="Try the round again with more clients.")
    numbers = [update.client for update in ordered]
    if len(set(numbers)) < len(numbers):
        raise UsageError(f"A client sent two updates in one round; clients: {numbers}.")
    for update in ordered:
        if set(update.tensors) != set(state):
            odd = sorted(set(update.tensors) ^ set(state))
            raise UsageError(f"Client {update.client}'s update and the state differ in the tensors {odd}.")
        if update.n < 1:
            raise UsageError(f"Client {update.client} reports {update.n} examples.")


def average_tensor(base: Tensor, values: Sequence[Tensor | LowRankUpdate], shares: Sequence[float]) -> Tensor:
    """Return the weighted sum of the clients' values of one tensor; of whole numbers, the median.

    Args:
        base: The server's tensor.
        values: Each client's tensor, or its low-rank change of the server's.
        shares: Each client's weight; they add up to 1.
    """
    if not base.is_floating_point() and not base.is_complex():
        return median_of_whole_numbers(base, values)
    low = [(value, share) for value, share in zip(values, shares, strict=True) if isinstance(value, LowRankUpdate)]
    mean = _average_low_rank(base, low) if low else torch.zeros_like(base)
    for value, share in zip(values, shares, strict=True):
        if isinstance(value, Tensor):
            mean.add_(value.to(base), alpha=share)
    return mean


def median_of_whole_numbers(base: Tensor, values: Sequence[Tensor | LowRankUpdate]) -> Tensor:
    """Return the median of counters and other tensors that have no mean, such as numbers of batches.

    Args:
        base: The server's tensor, of a type that is not floating-point.
        values: Each client's tensor.
    """
    whole = torch.stack([value for value in values if isinstance(value, Tensor)])
    if base.dtype == torch.bool:
        return whole.to(torch.uint8).median(0).values.to(base)
    return whole.median(0).values.to(base)


# Rows of a matrix whose average is made at a time: few enough to stay in the processor's cache meanwhile.
_ROWS_AT_ONCE = 4096


def _average_low_rank(base: Tensor, values: Sequence[tuple[LowRankUpdate, float]]) -> Tensor:
    """Return the weighted sum of matrices that differ from `base` by low ranks, without a copy of their factors."""
    mean = base * sum(value.scale * share for value, share in values)
    for start in range(0, len(base), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        for value, share in values:
            mean[rows].addmm_(value.left[rows], value.right.T, alpha=-share)
    return mean
