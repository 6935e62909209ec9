"""Trimmed mean and median of each value: its extremes among the clients are left out (Yin et al., arXiv 1803.01498)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from netweight.methods.federate.averaging import median_of_whole_numbers
from netweight.methods.federate.changes import as_matrix, changes, joint_update, row_blocks
from netweight.methods.federate.updates import Tensors, Update


def trimmed_mean(state: Tensors, updates: Sequence[Update], liars: int) -> list[Update]:
    """Return the mean of each value without its largest and smallest ones.

    Args:
        state: The server's tensors by name.
        updates: The round's updates.
        liars: How many of the largest, and of the smallest, are left out.
    """
    cut = min(liars, (len(updates) - 1) // 2)
    return _by_coordinate(state, updates, lambda values: values[:, cut : values.shape[1] - cut].mean(1))


def coordinate_median(state: Tensors, updates: Sequence[Update], liars: int) -> list[Update]:
    """Return the median of each value; arguments as for `trimmed_mean`."""
    return trimmed_mean(state, updates, len(updates))


def _by_coordinate(state: Tensors, updates: Sequence[Update], rule: Callable[[Tensor], Tensor]) -> list[Update]:
    """Return an update by a rule that makes one value of each row of sorted ones, shape `(values, clients)`."""
    made = {}
    for name, base in state.items():
        if not base.is_floating_point():
            made[name] = median_of_whole_numbers(base, [update.tensors[name] for update in updates])
            continue
        made[name] = base.clone()
        if base.numel():
            matrix = as_matrix(made[name])
            for rows in row_blocks(matrix, len(updates)):
                ordered = changes(base, name, updates, rows).T.sort(dim=1).values
                matrix[rows] += rule(ordered).view_as(matrix[rows])
    return [joint_update(updates, made)]
