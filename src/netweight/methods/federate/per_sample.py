"""Each example's gradient clipped and summed: the heart of differentially private SGD. Private training calls it.

Two ways give the same: a backward pass of `vmap` over examples, for any model, and a single plain backward pass for
models of linear layers and convolutions. Whether the second is right for a model is tried on its first batch.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from netweight.errors import Unsupported
from netweight.generate import ParameterLayout
from netweight.methods.federate.gradients import Batch
from netweight.methods.federate.layer_gradients import PerSample, captured, is_known, layer_gradients
from netweight.methods.federate.local_model import LocalModel

__all__ = ["Clipped", "clipped_sum"]

Trains = Literal["head", "body", "both"]
_LOG = logging.getLogger(__name__)
_VALUES_AT_ONCE = 2**26
"""Largest number of single examples' gradient values to hold: a quarter of a gigabyte."""


@final
@dataclass(frozen=True)
class Clipped:
    """Clipped gradients of a batch, summed.

    Attributes:
        body: Shape `(P,)`, or None if not asked for.
        head: Shape `(Q,)`, or None if not asked for.
        loss: Mean loss of the examples, a scalar; 0 if there is none.
        norms: Norm of each example's gradient before clipping, shape `(n,)`; of no meaning where masked.
    """

    body: Tensor | None
    head: Tensor | None
    loss: Tensor
    norms: Tensor


def clipped_sum(
    model: LocalModel,
    body: Tensor,
    head: Tensor,
    batch: Batch,
    mask: Tensor,
    trains: Trains,
    clip: float,
    statistics: Mapping[str, Tensor] | None = None,
) -> Clipped:
    """Clip each example's gradient over all that is trained together, and add them up.

    Args:
        model: The thread's model, in the mode to train in.
        body: The body's weights, shape `(P,)`.
        head: The head's weights, shape `(Q,)`.
        batch: Inputs and targets of n examples.
        mask: Which of them count, shape `(n,)`, bool; the others are padding.
        trains: What the gradients are asked for.
        clip: Largest norm of one example's gradient.
        statistics: Running statistics of a body in evaluation mode. By name.

    Raises:
        Unsupported: A normalization layer mixes examples, so that no gradient belongs to one of them.

    Source: Abadi et al. (arXiv 1607.00133), algorithm 1.
    """
    refuse_mixing_layers(model)
    trained = (body.numel() if trains != "head" else 0) + (head.numel() if trains != "body" else 0)
    at_once = max(1, _VALUES_AT_ONCE // trained)
    whole = (*batch, mask)
    parts = [
        _sum_of_part(model, body, head, (x, y), m, trains, clip, statistics)
        for x, y, m in zip(*(torch.split(one, at_once) for one in whole), strict=True)
    ]
    return parts[0] if len(parts) == 1 else _joined(parts, [int(m.sum()) for m in torch.split(mask, at_once)])


def _joined(parts: Sequence[Clipped], counts: Sequence[int]) -> Clipped:
    """Add up the parts of a batch, in which so many examples count."""
    bodies = [part.body for part in parts if part.body is not None]
    heads = [part.head for part in parts if part.head is not None]
    losses = torch.stack([part.loss * count for part, count in zip(parts, counts, strict=True)])
    return Clipped(
        torch.stack(bodies).sum(0) if bodies else None,
        torch.stack(heads).sum(0) if heads else None,
        losses.sum() / max(sum(counts), 1),
        torch.cat([part.norms for part in parts]),
    )


def refuse_mixing_layers(model: LocalModel) -> None:
    """Refuse layers in training mode that normalize over the batch or keep statistics of it.

    Raises:
        Unsupported: There is one; the message names it.
    """
    for half, module in (("body", model.body), ("head", model.head)):
        for name, layer in module.named_modules():
            normalizes = isinstance(layer, nn.modules.batchnorm._BatchNorm)
            keeps = isinstance(layer, nn.modules.batchnorm._NormBase) and layer.track_running_stats
            if layer.training and (normalizes or keeps):
                raise Unsupported(
                    f"The {half}'s layer {name or type(layer).__name__!r} ({type(layer).__name__}) mixes the examples "
                    "of a batch, so that no example has a gradient of its own to clip.",
                    cure="Use GroupNorm or LayerNorm, or train this half without differential privacy.",
                )


def _sum_of_part(
    model: LocalModel,
    body: Tensor,
    head: Tensor,
    batch: Batch,
    mask: Tensor,
    trains: Trains,
    clip: float,
    statistics: Mapping[str, Tensor] | None,
) -> Clipped:
    if not bool(mask.any()):
        nothing = body.new_zeros(())
        sums = (body.new_zeros(len(body)) if trains != "head" else None, head.new_zeros(len(head)))
        return Clipped(sums[0], sums[1] if trains != "body" else None, nothing, body.new_zeros(len(mask)))
    known = _FITS.setdefault(model, {})
    if not known.get(trains, True):
        return by_vmap(model, body, head, batch, mask, trains, clip, statistics)
    found = by_layers(model, body, head, batch, mask, trains, clip, statistics)
    if found is None or trains not in known:
        plain = by_vmap(model, body, head, batch, mask, trains, clip, statistics)
        known[trains] = found is not None and _agree(found, plain, mask, clip)
        if not known[trains]:
            _LOG.info("Gradients of single examples are computed by vmap for this model, which is slower.")
            return plain
    assert found is not None
    return found


_FITS: weakref.WeakKeyDictionary[LocalModel, dict[Trains, bool]] = weakref.WeakKeyDictionary()
"""Whether the fast way is right for what a model trains, as far as it was tried."""


def _agree(fast: Clipped, plain: Clipped, mask: Tensor, clip: float) -> bool:
    """Say whether two ways give the same.

    A layer used twice or a model that mixes examples changes every example's norm. Rounding can do so for a few: where
    two inputs of a maximum are all but equal, either may win.
    """
    norms, others = fast.norms[mask], plain.norms[mask]
    alike = (norms - others).abs() <= 1e-3 * others
    apart = [a - b for a, b in ((fast.body, plain.body), (fast.head, plain.head)) if a is not None and b is not None]
    return bool(alike.float().mean() >= 0.75) and bool(torch.cat(apart).norm() <= 0.05 * others.clamp(max=clip).sum())


def _factors(squared: Tensor, mask: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return norms, and what each example's gradient is multiplied by: 0 for padding."""
    norms = squared.sqrt()
    return norms, torch.where(mask, clip / norms.clamp(min=clip), 0)


def by_vmap(
    model: LocalModel,
    body: Tensor,
    head: Tensor,
    batch: Batch,
    mask: Tensor,
    trains: Trains,
    clip: float,
    statistics: Mapping[str, Tensor] | None = None,
) -> Clipped:
    """Do what `clipped_sum` does with every example's gradient as a row of a matrix; for any model."""

    def loss(body: Tensor, head: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return model.loss(body, head, x[None], y[None], statistics)

    which = {"body": (0,), "head": (1,), "both": (0, 1)}[trains]
    rule = vmap(grad_and_value(loss, argnums=which), in_dims=(None, None, 0, 0), randomness="different")
    rows, losses = rule(body.detach(), head.detach(), *batch)
    squared = torch.stack([part.square().sum(1) for part in rows]).sum(0)
    norms, factors = _factors(squared, mask, clip)
    sums = [factors @ part for part in rows]
    return Clipped(
        sums[0] if trains != "head" else None, sums[-1] if trains != "body" else None, losses[mask].mean(), norms
    )


def by_layers(
    model: LocalModel,
    body: Tensor,
    head: Tensor,
    batch: Batch,
    mask: Tensor,
    trains: Trains,
    clip: float,
    statistics: Mapping[str, Tensor] | None = None,
) -> Clipped | None:
    """Do what `clipped_sum` does from one backward pass; None if some trained parameter is not of a known layer."""
    halves: list[tuple[str, nn.Module, ParameterLayout]] = []
    if trains != "head":
        halves.append(("body.", model.body, model.task.body_layout))
    if trains != "body":
        halves.append(("head.", model.head, model.task.head_layout))
    layers: dict[str, nn.Module] = {}
    for prefix, module, layout in halves:
        owners = _owners(module, layout)
        if owners is None:
            return None
        layers |= {prefix + name: layer for name, layer in owners.items()}
    found = _backward(model, body.detach(), head.detach(), batch, mask, layers, statistics)
    if found is None:
        return None
    gradients, loss = found
    parts = [[gradients[prefix + name] for name in layout.names] for prefix, _, layout in halves]
    squared = torch.stack([one.squared_norms() for half in parts for one in half]).sum(0)
    norms, factors = _factors(squared, mask, clip)
    sums = [torch.cat([one.weighted_sum(factors) for one in half]) for half in parts]
    return Clipped(sums[0] if trains != "head" else None, sums[-1] if trains != "body" else None, loss, norms)


def _owners(module: nn.Module, layout: ParameterLayout) -> dict[str, nn.Module] | None:
    """Return the layers that own a half's trained parameters, or None if some are of another kind."""
    owners = {name.rpartition(".")[0]: module.get_submodule(name.rpartition(".")[0]) for name in layout.names}
    return owners if all(is_known(layer) for layer in owners.values()) else None


def _backward(
    model: LocalModel,
    body: Tensor,
    head: Tensor,
    batch: Batch,
    mask: Tensor,
    layers: Mapping[str, nn.Module],
    statistics: Mapping[str, Tensor] | None,
) -> tuple[dict[str, PerSample], Tensor] | None:
    """Return gradients by full parameter name and the mean loss; None if a layer was not called exactly once."""
    inputs, targets = batch
    with torch.enable_grad(), captured(layers) as calls:
        outputs = model.classify(head, model.features(body, inputs, statistics))
        loss = model.task.loss(outputs[mask], targets[mask])
    if any(len(made) != 1 or made[0].inputs.shape[0] != len(inputs) for made in calls.values()):
        return None
    once = {name: made[0] for name, made in calls.items()}
    # The loss is a mean over the examples that count; an example's own gradient is not divided by their number.
    seed = mask.sum().to(loss)
    found = torch.autograd.grad(loss, [call.output for call in once.values()], seed, allow_unused=True)
    gradients: dict[str, PerSample] = {}
    for (name, call), gradient in zip(once.items(), found, strict=True):
        along = loss.new_zeros(call.shape) if gradient is None else gradient
        for own, value in layer_gradients(layers[name], call.inputs, along).items():
            gradients[f"{name.removesuffix('.')}.{own}"] = value
    return gradients, loss.detach()
