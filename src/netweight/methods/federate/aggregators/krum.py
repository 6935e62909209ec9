"""Krum and multi-Krum: the updates that are nearest to most others (Blanchard et al., NeurIPS 2017)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from netweight.methods.federate.changes import inner_products
from netweight.methods.federate.updates import Tensors, Update


def krum(state: Tensors, updates: Sequence[Update], liars: int, *, keep: int = 1) -> list[Update]:
    """Return the updates with the least sum of squared distances to their nearest neighbors.

    Args:
        state: The server's tensors by name.
        updates: The round's updates.
        liars: How many liars are reckoned with; so many and two more are not neighbors.
        keep: How many updates are returned.
    """
    gram = inner_products(state, updates)
    own = gram.diagonal()
    distances = (own[:, None] + own[None] - 2 * gram).clamp_min(0).fill_diagonal_(torch.inf)
    near = max(1, len(updates) - liars - 2)
    scores = distances.sort(dim=1).values[:, :near].sum(1)
    return [updates[row] for row in scores.argsort(stable=True)[:keep].sort().values.tolist()]


def multi_krum(state: Tensors, updates: Sequence[Update], liars: int) -> list[Update]:
    """Return all updates but as many as there may be liars; arguments as for `krum`."""
    return krum(state, updates, liars, keep=max(1, len(updates) - liars))
