"""Krum and multi-Krum: the updates that are nearest to most others (Blanchard et al., NeurIPS 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.methods.federate.aggregator import AggregatorSettings

if TYPE_CHECKING:
    import torch

    from netweight.methods.federate import changes
    from netweight.methods.federate.updates import Tensors, Update
else:
    changes, torch = lazy_modules("netweight.methods.federate.changes", "torch")


class Krum(AggregatorSettings):
    """Take the one update that is nearest to most others."""

    compares_values = True

    liars: int = Field(1, ge=1, description="Number of malicious clients that are expected.")

    def updates_to_average(self, state: Tensors, updates: Sequence[Update]) -> list[Update]:
        """Return the updates with the least sums of squared distances to their nearest neighbors.

        Args:
            state: The server's tensors by name.
            updates: The round's updates, bounded.
        """
        return _nearest(state, updates, self.liars, self._count(len(updates)))

    def _count(self, updates: int) -> int:
        return 1


class MultiKrum(Krum):
    """Average the updates that are nearest to most others: all but as many as there may be malicious clients."""

    def _count(self, updates: int) -> int:
        return max(1, updates - self.liars)


def _nearest(state: Tensors, updates: Sequence[Update], liars: int, count: int) -> list[Update]:
    """Return `count` updates; as many clients as may lie, and two more, do not count as neighbors of one."""
    gram = changes.inner_products(state, updates)
    own = gram.diagonal()
    distances = (own[:, None] + own[None] - 2 * gram).clamp_min(0).fill_diagonal_(torch.inf)
    near = max(1, len(updates) - liars - 2)
    scores = distances.sort(dim=1).values[:, :near].sum(1)
    return [updates[row] for row in scores.argsort(stable=True)[:count].sort().values.tolist()]
