"""Trimmed mean and median of each value: its extremes among the clients are left out (Yin et al., arXiv 1803.01498)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.methods.federate.aggregator import AggregatorSettings

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.methods.federate import averaging, changes
    from netweight.methods.federate.updates import Tensors, Update
else:
    averaging, changes = lazy_modules("netweight.methods.federate.averaging", "netweight.methods.federate.changes")


class TrimmedMean(AggregatorSettings):
    """Average each value without its largest and smallest ones among the clients."""

    compares_values = True

    liars: int = Field(
        1,
        ge=1,
        description="Number of malicious clients that are expected. This many values are left out at either end.",
    )

    def updates_to_average(self, state: Tensors, updates: Sequence[Update]) -> list[Update]:
        """Return the mean of each value without its extremes.

        Args:
            state: The server's tensors by name.
            updates: The round's updates, bounded.
        """
        return _trimmed(state, updates, self.liars)


class CoordinateMedian(AggregatorSettings):
    """Take the median of each value among the clients."""

    compares_values = True

    def updates_to_average(self, state: Tensors, updates: Sequence[Update]) -> list[Update]:
        """Return the median of each value.

        Args:
            state: The server's tensors by name.
            updates: The round's updates, bounded.
        """
        return _trimmed(state, updates, len(updates))


def _trimmed(state: Tensors, updates: Sequence[Update], most_cut: int) -> list[Update]:
    cut = min(most_cut, (len(updates) - 1) // 2)
    return _by_coordinate(state, updates, lambda values: values[:, cut : values.shape[1] - cut].mean(1))


def _by_coordinate(state: Tensors, updates: Sequence[Update], rule: Callable[[Tensor], Tensor]) -> list[Update]:
    """Return an update by a rule that makes one value of each row of sorted ones, shape `(values, clients)`."""
    made = {}
    for name, base in state.items():
        if not base.is_floating_point():
            made[name] = averaging.median_of_whole_numbers(base, [update.tensors[name] for update in updates])
            continue
        made[name] = base.clone()
        if base.numel():
            matrix = changes.as_matrix(made[name])
            for rows in changes.row_blocks(matrix, len(updates)):
                ordered = changes.changes_of_rows(base, name, updates, rows).T.sort(dim=1).values
                matrix[rows] += rule(ordered).view_as(matrix[rows])
    return [changes.joint_update(updates, made)]
