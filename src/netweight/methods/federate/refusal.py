"""A client's look at the hypernetwork it was sent: reasons to refuse it, before any private image is shown to it.

A server chooses what every client generates. These checks compare what it sent with what training makes: weights
without structure of their own, a change no larger than clients make, and a first linear layer in which few rows wait
for one single image. Heads that ignore the embedding are no sign: honest training silences hidden units, too. The
checks refuse imprints as they are published. What an attacker who knows them still achieves is told in
docs/gradient-inversion.md: they make an attack small, not impossible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.errors import NameNotFound, UsageError
from netweight.generate.layout import ParameterLayout

__all__ = ["RefusalLimits", "Signs", "refuse_abnormal", "signs_of"]


@final
@dataclass(frozen=True)
class RefusalLimits:
    """The most that a client accepts; the defaults leave room above every state of the honest federations measured.

    Attributes:
        peaked: Kurtosis of the worst generated weight tensor; 3 for normal values, 25 for kernels with one entry.
        repeated: Share of rows, in the trunk or a generated weight, that repeat another row or are zero.
        lonely: Share of rows of the first linear layer that exactly one of the client's images activates; the default
            was measured with batches of 50, and batches of a few images need more.
        change: Change of the shared state since the last round, as a multiple of the client's own in that round.
    """

    peaked: float = 12.0
    repeated: float = 0.02
    lonely: float = 0.25
    change: float = 3.0


@final
@dataclass(frozen=True)
class Signs:
    """What was measured; the names are those of the limits. None where nothing was given to measure it with.

    Attributes:
        peaked: Compared with the limit of this name.
        repeated: Likewise.
        lonely: Likewise; needs images.
        change: Likewise; needs the state before and the client's own change.
    """

    peaked: float
    repeated: float
    lonely: float | None
    change: float | None


_WORDS = {
    "peaked": "the generated weights are made of few large values, as kernels that copy an image are",
    "repeated": "rows repeat each other or are zero",
    "lonely": "rows of the first linear layer wait for one single image",
    "change": "the state changed more than clients change it",
}


def refuse_abnormal(
    received: Mapping[str, Tensor],
    *,
    body: nn.Module,
    embedding: Tensor,
    images: Tensor | None = None,
    previous: Mapping[str, Tensor] | None = None,
    own_change: float | None = None,
    limits: RefusalLimits | None = None,
) -> list[str]:
    """Return the reasons to refuse a hypernetwork; an empty list when it looks like a trained one.

    Args:
        received: The shared state: `heads.weight`, `heads.bias`, `trunk.0.weight` and so on, under any common prefix.
            By name.
        body: The feature extractor whose parameters are generated.
        embedding: The client's own embedding, shape `(E,)`.
        images: Private images of one batch, as the body sees them; with them the strongest sign is measured. Nothing
            about them leaves the client but the refusal itself.
        previous: The state received in the round before. Tensors by name.
        own_change: Norm of the client's own change of that state.
        limits: What is accepted.

    Raises:
        NameNotFound: A tensor of the hypernetwork is missing.
        UsageError: Shapes do not fit the body or the embedding.
    """
    limits = limits or RefusalLimits()
    bad = [name for name, tensor in received.items() if not tensor.isfinite().all()]
    if bad:
        return [f"{name!r} holds NaN or infinity" for name in bad]
    signs = signs_of(received, body=body, embedding=embedding, images=images, previous=previous, own_change=own_change)
    reasons = []
    for name, words in _WORDS.items():
        value, limit = getattr(signs, name), getattr(limits, name)
        if value is not None and not value <= limit:
            reasons.append(f"{words} ({name} {value:.3g}, at most {limit:g})")
    return reasons


@torch.no_grad()
def signs_of(
    received: Mapping[str, Tensor],
    *,
    body: nn.Module,
    embedding: Tensor,
    images: Tensor | None = None,
    previous: Mapping[str, Tensor] | None = None,
    own_change: float | None = None,
) -> Signs:
    """Measure a received hypernetwork; arguments as for `refuse_abnormal`."""
    state, layout = _without_prefix(received), ParameterLayout.of(body)
    weight, bias = state["heads.weight"], state["heads.bias"]
    if len(bias) != layout.size or state["trunk.0.weight"].shape[1] != len(embedding):
        raise UsageError(
            f"The heads generate {len(bias)} values from {state['trunk.0.weight'].shape[1]} numbers; "
            f"the body has {layout.size} parameters and the embedding {len(embedding)} numbers."
        )
    generated = layout.split(weight @ _code(state, embedding) + bias)
    matrices = [part.flatten(1) for part in generated.values() if part.ndim > 1]
    change = None
    if previous is not None and own_change is not None:
        moved = sum(float((received[name] - previous[name]).double().square().sum()) for name in received)
        change = moved**0.5 / max(own_change, 1e-12)
    return Signs(
        peaked=max(_kurtosis(matrix) for matrix in matrices),
        repeated=max(_repeated(matrix) for matrix in [*matrices, state["trunk.0.weight"]]),
        lonely=None if images is None else _lonely(body, generated, images),
        change=change,
    )


def _without_prefix(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    prefixes = {name.removesuffix("heads.weight") for name in state if name.endswith("heads.weight")}
    if len(prefixes) != 1:
        raise NameNotFound(f"The state has {len(prefixes)} tensors 'heads.weight', not one.")
    prefix = prefixes.pop()
    found = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    for wanted in ("heads.bias", "trunk.0.weight", "trunk.0.bias"):
        if wanted not in found:
            raise NameNotFound(f"The tensor {prefix + wanted!r} is missing.", cure="Give the hypernetwork's state.")
    return found


def _code(state: Mapping[str, Tensor], embedding: Tensor) -> Tensor:
    code, layer = embedding, 0
    while f"trunk.{layer}.weight" in state:
        code = torch.relu(state[f"trunk.{layer}.weight"] @ code + state[f"trunk.{layer}.bias"])
        layer += 1
    return code


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


def _lonely(body: nn.Module, parameters: Mapping[str, Tensor], images: Tensor) -> float:
    """Share of the first linear layer's rows whose gradient would come from one image alone."""
    linear = next((module for module in body.modules() if isinstance(module, nn.Linear)), None)
    if linear is None:
        raise UsageError("The body has no linear layer to look at.", cure="Leave `images` out.")
    seen: list[Tensor] = []
    handle = linear.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    try:
        functional_call(body, dict(parameters), (images,), strict=True)
    finally:
        handle.remove()
    return float(((seen[0] > 0).sum(0) == 1).double().mean())
