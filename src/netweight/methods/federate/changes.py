"""Clients' changes of the server's tensors, read a block of rows at a time, low-rank changes included."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from netweight.methods.federate.updates import LowRankUpdate, Tensors, Update

# Values of a tensor that are looked at at a time, of one client and of all together.
AT_ONCE, OF_ALL = 2**20, 2**22


def norm_of_change(sent: Tensors, update: Update, norms: dict[int, float]) -> float:
    """Return the norm of an update's change; for a low-rank matrix an upper bound that needs no dense one."""
    # `norms` remembers those of tensors that were sent, by identity: they are large, and mostly the same for all.
    squares = 0.0
    for name, value in update.tensors.items():
        base = sent[name]
        if isinstance(value, LowRankUpdate):
            gram = (value.left.T @ value.left).double() * (value.right.T @ value.right).double()
            own = max(float(gram.sum()), 0.0) ** 0.5
            if value.scale != 1:
                if id(base) not in norms:
                    norms[id(base)] = float(base.norm())
                own += abs(value.scale - 1) * norms[id(base)]
            squares += own**2
        elif base.is_floating_point():
            squares += float((value - base).double().square().sum())
    return math.sqrt(squares)


def shortened(update: Update, sent: Tensors, factor: float) -> Update:
    def of(base: Tensor, value: Tensor | LowRankUpdate) -> Tensor | LowRankUpdate:
        if isinstance(value, LowRankUpdate):
            return LowRankUpdate(1 + factor * (value.scale - 1), value.left * factor, value.right)
        return base + factor * (value - base) if base.is_floating_point() else value

    return replace(update, tensors={name: of(sent[name], value) for name, value in update.tensors.items()})


def joint_update(updates: Sequence[Update], tensors: Tensors) -> Update:
    """Return one update in place of several, which remembers whose it is."""
    own = tuple(replace(one, tensors={}) for one in updates)
    return Update(updates[0].client, sum(one.n for one in updates), tensors, updates[0].round, members=own)


def changes_of_rows(base: Tensor, name: str, updates: Sequence[Update], rows: slice | Tensor) -> Tensor:
    """Return some rows of every client's change of a tensor, flat: shape `(clients, values)`."""
    own = as_matrix(base)[rows]
    parts = []
    for update in updates:
        value = update.tensors[name]
        if isinstance(value, LowRankUpdate):
            part = torch.addmm(own, value.left[rows], value.right.T, beta=value.scale - 1, alpha=-1)
        else:
            part = as_matrix(value)[rows] - own
        parts.append(part.flatten())
    return torch.stack(parts)


def as_matrix(tensor: Tensor) -> Tensor:
    return tensor.reshape(len(tensor), -1) if tensor.ndim else tensor.reshape(1, 1)


def rows_at_once(matrix: Tensor, clients: int) -> int:
    return max(1, min(AT_ONCE, OF_ALL // clients) // max(matrix.shape[1], 1))


def row_blocks(matrix: Tensor, clients: int) -> Iterator[slice]:
    step = rows_at_once(matrix, clients)
    for start in range(0, len(matrix), step):
        yield slice(start, start + step)


def inner_products(state: Tensors, updates: Sequence[Update]) -> Tensor:
    """Return the inner products of clients' changes, shape `(clients, clients)`, float64."""
    total = torch.zeros(len(updates), len(updates), dtype=torch.float64)
    for name, base in state.items():
        if base.is_floating_point() and base.numel():
            for rows in row_blocks(as_matrix(base), len(updates)):
                rows_of_clients = changes_of_rows(base, name, updates, rows).double()
                total += (rows_of_clients @ rows_of_clients.T).cpu()
    return total
