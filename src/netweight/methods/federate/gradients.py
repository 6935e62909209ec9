"""Gradients of many clients' losses: one client after another, or all at once by `vmap`. Local training calls it.

On a CPU one after another is faster (grouped convolutions are slow there); on a GPU small networks fill the device
only together. Both give the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from netweight.errors import Unsupported
from netweight.methods.federate.local_model import LocalModel

__all__ = ["Batch", "GradientRule", "Gradients", "one_by_one", "rule_for", "together"]

Batch = tuple[Tensor, Tensor]
"""Inputs, shape `(n, …)`, and targets, shape `(n, …)`, of one client's step; n may be 0."""


@final
@dataclass(frozen=True)
class Gradients:
    """Gradients of K clients.

    Attributes:
        body: Shape `(K, P)`, or None if not asked for.
        head: Shape `(K, Q)`, or None if not asked for.
        losses: Shape `(K,)`; 0 for an empty batch, whose gradients are 0 too.
    """

    body: Tensor | None
    head: Tensor | None
    losses: Tensor


GradientRule = Callable[
    [LocalModel, Tensor, Tensor, Sequence[Batch], Literal["head", "body", "both"], Sequence[Mapping[str, Tensor]]],
    Gradients,
]
"""Takes the model, bodies `(K, P)`, heads `(K, Q)`, a batch per client, what is asked for, and running statistics."""


def rule_for(device: torch.device) -> GradientRule:
    """Return the rule that is fast on a device.

    Args:
        device: Where the clients train.
    """
    return one_by_one if device.type == "cpu" else together


def one_by_one(
    model: LocalModel,
    bodies: Tensor,
    heads: Tensor,
    batches: Sequence[Batch],
    trains: Literal["head", "body", "both"],
    statistics: Sequence[Mapping[str, Tensor]],
) -> Gradients:
    """Return the gradients, computed one client after another; running statistics change in place.

    Args:
        model: The thread's model.
        bodies: Shape `(K, P)`, one row per client.
        heads: Shape `(K, Q)`.
        batches: One per client; an empty one gives gradients of 0.
        trains: Which vectors' gradients are asked for.
        statistics: Running statistics of each client by name.
    """
    body_rows: list[Tensor] = []
    head_rows: list[Tensor] = []
    losses = torch.zeros(len(batches), device=bodies.device)
    for row, (inputs, targets) in enumerate(batches):
        body, head = bodies[row].detach(), heads[row].detach()
        if not len(inputs):
            body_rows.append(torch.zeros_like(body))
            head_rows.append(torch.zeros_like(head))
            continue
        wanted = [vector.requires_grad_() for vector in _wanted(body, head, trains)]
        loss = model.loss(body, head, inputs, targets, statistics[row])
        found = torch.autograd.grad(loss, wanted)
        losses[row] = loss.detach()
        if trains != "head":
            body_rows.append(found[0])
        if trains != "body":
            head_rows.append(found[-1])
    return Gradients(_rows(body_rows, trains != "head"), _rows(head_rows, trains != "body"), losses)


def _wanted(body: Tensor, head: Tensor, trains: str) -> list[Tensor]:
    return {"body": [body], "head": [head], "both": [body, head]}[trains]


def _rows(rows: list[Tensor], wanted: bool) -> Tensor | None:
    if not wanted:
        return None
    return rows[0][None] if len(rows) == 1 else torch.stack(rows)


def together(
    model: LocalModel,
    bodies: Tensor,
    heads: Tensor,
    batches: Sequence[Batch],
    trains: Literal["head", "body", "both"],
    statistics: Sequence[Mapping[str, Tensor]],
) -> Gradients:
    """Return the gradients of all clients at once; batches are padded to the largest and the padding weighs nothing.

    Args:
        model: The thread's model.
        bodies: Shape `(K, P)`, one row per client.
        heads: Shape `(K, Q)`.
        batches: One per client.
        trains: Which vectors' gradients are asked for.
        statistics: Running statistics of each client by name; must be empty.

    Raises:
        Unsupported: The body keeps running statistics, which cannot change under vmap.
    """
    if any(statistics):
        raise Unsupported(
            "Running statistics of normalization layers cannot change when clients run together.",
            cure="Train on the CPU, or use layers without running statistics, such as GroupNorm.",
        )
    inputs, targets, weights = _padded(batches)

    def loss(body: Tensor, head: Tensor, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        outputs = model.classify(head, model.features(body, x))
        each = vmap(lambda output, target: model.task.loss(output[None], target[None]))(outputs, y)
        return (each * weight).sum()

    which = {"body": (0,), "head": (1,), "both": (0, 1)}[trains]
    found, losses = vmap(grad_and_value(loss, argnums=which), randomness="different")(
        bodies, heads, inputs, targets, weights
    )
    body = found[0] if trains != "head" else None
    return Gradients(body, found[-1] if trains != "body" else None, losses)


def _padded(batches: Sequence[Batch]) -> tuple[Tensor, Tensor, Tensor]:
    """Stack batches, shape `(K, n, …)`, with weights `(K, n)` that sum to 1 over each client's examples."""
    sizes = [len(inputs) for inputs, _ in batches]
    inputs = torch.nn.utils.rnn.pad_sequence([x for x, _ in batches], batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence([y for _, y in batches], batch_first=True)
    weights = torch.zeros(inputs.shape[:2], device=inputs.device)
    for row, size in enumerate(sizes):
        weights[row, :size] = 1 / max(size, 1)
    return inputs, targets, weights
