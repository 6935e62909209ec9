"""Checks of a client on what it receives: it declines hypernetworks that seem made to read images out of updates.

What the signs are, what they stop and what passes: docs/gradient-inversion-results.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.attacks.gradient_inversion.analytic import hypernetwork_tensors
from netweight.errors import UsageError
from netweight.methods.federate.updates import Tensors
from netweight.nn.hypernetwork import ParameterLayout, hidden_code


@final
@dataclass(frozen=True)
class AcceptanceLimits:
    """The most that a client accepts; the defaults leave room above every state of the honest federations measured."""

    peaked: float = 12.0
    """Kurtosis of the worst generated weight tensor; 3 for normal values, 25 for kernels with one entry."""
    repeated: float = 0.02
    """Share of rows, in the trunk or a generated weight, that repeat another row or are zero."""
    lonely: float = 0.25
    """Share of rows of the first linear layer that exactly one of the client's images activates; the default was
    measured with batches of 50, and batches of a few images need more.
    """
    change: float = 3.0
    """Change of the shared state since the last round, as a multiple of the client's own in that round."""


_WORDS = {
    "peaked": "the generated weights are made of few large values, as kernels that copy an image are",
    "repeated": "rows repeat each other or are zero",
    "lonely": "rows of the first linear layer are activated by one single image",
    "change": "the state changed more than clients change it",
}


def reasons_to_decline(
    received: Tensors, *, body: nn.Module, embedding: Tensor, images: Tensor | None = None,
    change: float | None = None, limits: AcceptanceLimits | None = None,
) -> list[str]:  # fmt: skip
    """Return the reasons to decline a hypernetwork; an empty list when it looks like a trained one.

    Args:
        received: The shared tensors by name, under any prefix, with heads that generate the body alone.
        body: The feature extractor.
        embedding: The client's, shape `(E,)`.
        images: Some of the client's, shape `(n, c, h, w)`, for the limit `lonely`.
        change: What `relative_change` says, for the limit `change`.
        limits: The most that is accepted.

    Raises:
        NameNotFound: The tensors are not those of a hypernetwork.
        UsageError: Shapes do not fit.
    """
    limits = limits or AcceptanceLimits()
    bad = [name for name, tensor in received.items() if not tensor.isfinite().all()]
    if bad:
        return [f"{name!r} contains NaN or infinity" for name in bad]
    signs = signs_of(received, body=body, embedding=embedding, images=images, change=change)
    reasons = []
    for name, words in _WORDS.items():
        value, limit = signs[name], getattr(limits, name)
        if value is not None and not value <= limit:
            reasons.append(f"{words} ({name} {value:.3g}, at most {limit:g})")
    return reasons


@torch.no_grad()
def signs_of(
    received: Tensors, *, body: nn.Module, embedding: Tensor, images: Tensor | None = None,
    change: float | None = None,
) -> dict[str, float | None]:  # fmt: skip
    """Measure a received hypernetwork by the names of the limits; None where nothing was given to measure it with.

    Arguments as for `reasons_to_decline`.
    """
    layout = ParameterLayout.of(body)
    state = {name: value.to(embedding.dtype) for name, value in hypernetwork_tensors(received).items()}
    weight, bias = state["heads.weight"], state["heads.bias"]
    if len(bias) != layout.size or state["trunk.0.weight"].shape[1] != len(embedding):
        raise UsageError(
            f"The heads generate {len(bias)} values from {state['trunk.0.weight'].shape[1]} numbers; "
            f"the body has {layout.size} parameters and the embedding {len(embedding)} numbers."
        )
    generated = layout.split(weight @ hidden_code(state, embedding) + bias)
    matrices = [part.flatten(1) for part in generated.values() if part.ndim > 1]
    return {
        "peaked": max(_kurtosis(matrix) for matrix in matrices),
        "repeated": max(_repeated(matrix) for matrix in [*matrices, state["trunk.0.weight"]]),
        "lonely": None if images is None else _lonely(body, generated, images),
        "change": change,
    }


def relative_change(received: Tensors, previous: Tensors, own_change: float) -> float:
    """Return how far a state moved, as a multiple of a client's own change in the round between."""
    moved = [float((value - previous[name]).double().square().sum()) for name, value in received.items()]
    return math.sqrt(sum(moved)) / max(own_change, 1e-12)


def _kurtosis(values: Tensor) -> float:
    centered = values.double() - values.double().mean()
    return float(centered.pow(4).mean() / centered.square().mean().square().clamp_min(1e-300))


def _repeated(matrix: Tensor) -> float:
    """Share of rows that are zero or point where another row does, either way."""
    lengths = matrix.norm(dim=1)
    zero = lengths <= 1e-6 * lengths.max()
    unit = matrix / lengths.clamp_min(1e-30)[:, None]
    alike = (unit @ unit.T).abs()
    alike.fill_diagonal_(0)
    return float((zero | (alike.max(1).values > 0.999)).double().mean())


def _lonely(body: nn.Module, parameters: Tensors, images: Tensor) -> float:
    """Share of the first linear layer's rows whose gradient would come from one image alone."""
    linear = next((module for module in body.modules() if isinstance(module, nn.Linear)), None)
    if linear is None:
        raise UsageError("The body has no linear layer that could be inspected.", cure="Leave `images` out.")
    outputs: list[Tensor] = []
    handle = linear.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    try:
        functional_call(body, dict(parameters), (images,), strict=True)
    finally:
        handle.remove()
    return float(((outputs[0] > 0).sum(0) == 1).double().mean())
