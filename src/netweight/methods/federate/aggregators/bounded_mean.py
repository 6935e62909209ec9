"""The mean of updates of bounded length, without the extremes of each value: the default.

A client gains from a long update, and from values that stand alone. The first is bounded before any rule is applied:
the product of weight and length is at most the round's median (Sun et al., arXiv 1911.07963). The second is bounded
here: of each value, a fifth of the clients is left out at either end (Yin et al., arXiv 1803.01498).

Matrices that most clients send as low-rank changes, which is what a hypernetwork's are, are averaged as they are: each
client's embedding moves other values of them, so that every honest value would stand alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from netweight.core.lazy import lazy_modules
from netweight.methods.federate.aggregator import AggregatorSettings

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from netweight.methods.federate import averaging, changes
    from netweight.methods.federate import updates as forms
    from netweight.methods.federate.updates import Tensors, Update
else:
    averaging, changes, forms, torch = lazy_modules(
        "netweight.methods.federate.averaging",
        "netweight.methods.federate.changes",
        "netweight.methods.federate.updates",
        "torch",
    )

# One client of so many is left out at either end. The share is fixed, since nobody knows how many clients lie.
SHARE = 5


class BoundedMean(AggregatorSettings):
    """Average updates of at most the median length, without the extremes of each value."""

    bounds_to_median = True

    def updates_to_average(self, state: Tensors, updates: Sequence[Update]) -> list[Update]:
        """Return the mean of each value without a fifth of the clients at either end.

        Args:
            state: The server's tensors by name.
            updates: The round's updates, of bounded length, weighted by numbers of examples.
        """
        cut, total = len(updates) // SHARE, sum(update.n for update in updates)
        if not cut:
            return list(updates)
        joint: dict[str, Tensor] = {}
        for name, base in state.items():
            values = [update.tensors[name] for update in updates]
            if not base.is_floating_point():
                joint[name] = averaging.median_of_whole_numbers(base, values)
                continue
            if 2 * sum(isinstance(value, forms.LowRankUpdate) for value in values) > len(values):
                joint[name] = averaging.average_tensor(base, values, [update.n / total for update in updates])
                continue
            joint[name] = base.clone()
            matrix = changes.as_matrix(joint[name])
            weights = torch.tensor([update.n for update in updates]).to(base)[:, None]
            for rows in changes.row_blocks(matrix, len(updates)):
                # What acts on a mean is a change times its weight, so that product is what has extremes.
                ordered = (changes.changes_of_rows(base, name, updates, rows) * weights).sort(dim=0).values
                middle = ordered[cut : len(updates) - cut]
                matrix[rows] += (middle.mean(0) * (len(updates) / total)).view_as(matrix[rows])
        return [changes.joint_update(updates, joint)]
