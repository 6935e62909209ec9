"""Update of a client, and its checks on both sides: names that may leave, shapes, finite values, the form on the wire.

Pure functions over dictionaries of tensors. The engine of one process and the Flower app call them alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core.names import Select
from netweight.errors import PrivateTensor, UsageError

# Named tensors.
Tensors = Mapping[str, Tensor]


@final
@dataclass(frozen=True)
class LowRankUpdate:
    """A matrix that differs from the server's own by a factor and a low rank: `scale · W₀ − left · rightᵀ`."""

    # That is what local SGD makes of a linear layer whose input is one vector, exactly: each step adds one rank.

    scale: float
    """Factor of the server's matrix W₀, which weight decay makes less than 1."""
    left: Tensor
    """Shape `(rows, rank)`."""
    right: Tensor
    """Shape `(columns, rank)`."""

    @property
    def shape(self) -> torch.Size:
        """Shape of the matrix."""
        return torch.Size((self.left.shape[0], self.right.shape[0]))

    def dense(self, base: Tensor) -> Tensor:
        """Return the matrix itself, given the server's."""
        return torch.addmm(base, self.left, self.right.T, beta=self.scale, alpha=-1)


@final
@dataclass(frozen=True)
class Fault:
    """Why a client's reply cannot be used."""

    reason: str
    """The reason, for logs and for the history of rounds."""
    kind: Literal["left out", "declined", "error"] = "left out"
    """"declined" if the client protects itself and does not take part, "error" if its program or its node failed or
    its reply cannot be read, "left out" if it sent nothing, or if the server did not add it to a sum.
    """


@final
@dataclass(frozen=True)
class Update:
    """A client's reply to a round, in the one form that it has from local training to the aggregate."""

    client: int
    """The client's number; of a secure sum, the least of its clients'."""
    n: int
    """Number of training examples, the update's weight in an average; at least 1."""
    tensors: Mapping[str, Tensor | LowRankUpdate]
    """The shared tensors after local training, by the names of the server's state. Matrices may be low-rank changes."""
    round: int = 1
    """The round that it answers, from 1."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Figures that the client reports of its model: "before", "after", "loss", "epsilon", as far as it knows them."""
    fault: Fault | None = None
    """Why the reply cannot be used; None for one that can be validated."""
    members: tuple[Update, ...] = ()
    """Updates of the single clients, without tensors, if this is a secure sum or another joint update."""


def dense_tensors(tensors: Mapping[str, Tensor | LowRankUpdate], base: Tensors) -> dict[str, Tensor]:
    """Return tensors with low-rank matrices made whole, given the server's."""
    return {n: value.dense(base[n]) if isinstance(value, LowRankUpdate) else value for n, value in tensors.items()}


def check_allow_list(names: Iterable[str], shared: Sequence[str], *, client: int | str) -> None:
    """Refuse to send a tensor whose name no pattern of `shared` allows; a PrivateTensor error names it."""
    plain = [name.partition("|")[0] for name in names]
    private = sorted(set(plain) - set(_matching(plain, shared)))
    if private:
        raise PrivateTensor(
            f"Client {client} was about to send the private tensors {private}; nothing was sent.",
            cure=f"The shared tensors are: {', '.join(shared) or 'none'}. Send these only, or extend the "
            f"method's `shared`.",
        )


def _matching(names: Sequence[str], shared: Sequence[str]) -> list[str]:
    matches: list[str] = []
    for pattern in shared:
        try:
            matches += Select(pattern).keys(names)
        except UsageError:
            # A pattern that does not match any of these names does not allow any of them.
            continue
    return matches


def validate_updates(
    sent: Mapping[int, Tensors], updates: Sequence[Update], *, round: int
) -> tuple[list[Update], dict[int, str]]:
    """Sort a round's updates into those that may be aggregated and those that are rejected, each with the reason.

    An update is sound if its client was asked, sent it alone and answers this round, and if it has at least one
    example and exactly the tensors that the client was sent: names, shapes and dtypes, all values finite. What a
    sound update does to the model is not judged.

    Args:
        sent: What each client that was asked was sent, by client number and tensor name.
        updates: What came back, in any order.
        round: The round under way, from 1.

    Returns:
        Sound updates in the order of client numbers, and client number → reason for all others, those that sent
        nothing included.
    """
    accepted: dict[int, Update] = {}
    rejected: dict[int, str] = {}
    for update in sorted(updates, key=lambda update: update.client):
        client = update.client
        if client not in sent:
            rejected[client] = "was not asked in this round"
        elif client in accepted or client in rejected:
            accepted.pop(client, None)
            rejected[client] = "sent two updates in one round"
        elif (fault := fault_of(sent[client], update, round=round)) is not None:
            rejected[client] = fault
        else:
            accepted[client] = update
    silent = {client: "sent nothing" for client in sent if client not in accepted and client not in rejected}
    return list(accepted.values()), {**rejected, **silent}


def fault_of(sent: Tensors, update: Update, *, round: int) -> str | None:
    """Return the fault of one update, or None: round, number of examples, names, shapes, kinds, finite values."""
    if update.round != round:
        return f"answers round {update.round}, not {round}: replayed or late"
    if not 1 <= update.n < 2**53:
        return f"claims {update.n} examples"
    missing, extra = sorted(set(sent) - set(update.tensors)), sorted(set(update.tensors) - set(sent))
    if missing or extra:
        return "; ".join(f"{word} tensors {names}" for word, names in (("missing", missing), ("extra", extra)) if names)
    for name, base in sent.items():
        fault = _tensor_fault(base, update.tensors[name])
        if fault is not None:
            return f"tensor {name!r} {fault}"
    return None


def _tensor_fault(base: Tensor, value: Tensor | LowRankUpdate) -> str | None:
    if value.shape != base.shape:
        return f"has shape {tuple(value.shape)}, not {tuple(base.shape)}"
    parts = (value,) if isinstance(value, Tensor) else (value.left, value.right)
    for part in parts:
        if part.dtype != base.dtype:
            return f"has dtype {part.dtype}, not {base.dtype}"
    largest = [_largest(part) for part in parts]
    if not all(math.isfinite(size) for size in largest):
        return "contains NaN or infinity"
    if isinstance(value, LowRankUpdate):
        # Finite factors alone do not say that their product is.
        bound = largest[0] * largest[1] * value.left.shape[1]
        if not math.isfinite(value.scale) or not bound < torch.finfo(base.dtype).max:
            return "contains NaN or infinity, or factors whose product could overflow"
    return None


def _largest(part: Tensor) -> float:
    """Return the largest magnitude, NaN if there is one and 0 for an empty tensor: one pass, in the order of memory."""
    if not part.numel():
        return 0.0
    if part.is_complex():
        part = torch.view_as_real(part)
    low, high = torch.aminmax(part.T if part.ndim == 2 and part.stride(0) < part.stride(1) else part)
    return max(-low.item(), high.item()) if low == low else math.nan


_PARTS = ("scale", "left", "right")


def to_wire(tensors: Mapping[str, Tensor | LowRankUpdate]) -> dict[str, Tensor]:
    """Return tensors as they travel: a low-rank matrix becomes three, `NAME|scale`, `NAME|left`, `NAME|right`."""
    sent: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if isinstance(value, Tensor):
            sent[name] = value
        else:
            parts = (torch.tensor([value.scale], dtype=torch.float64), value.left, value.right)
            sent.update({f"{name}|{part}": tensor for part, tensor in zip(_PARTS, parts, strict=True)})
    return sent


def from_wire(sent: Tensors) -> dict[str, Tensor | LowRankUpdate]:
    """Return what `to_wire` was given."""
    tensors: dict[str, Tensor | LowRankUpdate] = {name: value for name, value in sent.items() if "|" not in name}
    for name in {name.rpartition("|")[0] for name in sent if "|" in name}:
        parts = [sent.get(f"{name}|{part}") for part in _PARTS]
        scale, left, right = parts
        if scale is None or left is None or right is None:
            raise UsageError(f"The low-rank matrix {name!r} came without one of its parts {_PARTS}.")
        if scale.numel() != 1 or left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[1]:
            shapes = [tuple(part.shape) for part in (scale, left, right)]
            raise UsageError(f"The parts of the low-rank matrix {name!r} do not fit: shapes {shapes}.")
        tensors[name] = LowRankUpdate(float(scale), left, right)
    return tensors
