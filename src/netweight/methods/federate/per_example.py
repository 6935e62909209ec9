"""Gradients of single examples for linear layers and convolutions, from one backward pass. `per_sample.py` calls it.

A layer's input a and the gradient g of its output hold every example's gradient of its weights. For a linear layer
that is g aᵀ, whose norm and weighted sum need no such matrix; for a convolution it is a product over the positions.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.func import grad_and_value, vmap
from torch.utils.hooks import RemovableHandle

from netweight.errors import Unsupported
from netweight.methods.federate.method import LocalModel
from netweight.nn import ParameterLayout


class PerSample(Protocol):
    """One parameter's gradients for n examples."""

    def squared_norms(self) -> Tensor:
        """Return each example's squared norm, shape `(n,)`."""
        ...

    def weighted_sum(self, weights: Tensor) -> Tensor:
        """Return the sum of the examples' gradients times `weights`, shape `(n,)`, as a flat vector."""
        ...


@final
@dataclass(frozen=True)
class _Products:
    """Gradients g aᵀ of a linear layer that saw one vector per example: never formed."""

    gradients: Tensor
    inputs: Tensor

    def squared_norms(self) -> Tensor:
        return self.gradients.square().sum(1) * self.inputs.square().sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return ((self.gradients * weights[:, None]).T @ self.inputs).flatten()


@final
@dataclass(frozen=True)
class _Rows:
    """Gradients as they are, one row per example."""

    rows: Tensor

    def squared_norms(self) -> Tensor:
        return self.rows.square().sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        return weights @ self.rows


@final
@dataclass(frozen=True)
class _Kernels:
    """Gradients of a convolution's kernels with channels last, shape `(n, out, height, width, in)`."""

    kernels: Tensor

    def squared_norms(self) -> Tensor:
        return self.kernels.flatten(1).square().sum(1)

    def weighted_sum(self, weights: Tensor) -> Tensor:
        total = (weights @ self.kernels.flatten(1)).view(self.kernels.shape[1:])
        return total.permute(0, 3, 1, 2).flatten()


def is_known(layer: nn.Module) -> bool:
    """Say whether `layer_gradients` covers a layer: exactly Linear, or Conv2d in one group padded with zeros."""
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


def layer_gradients(layer: nn.Module, inputs: Tensor, gradients: Tensor) -> dict[str, PerSample]:
    """Return the gradients of a known layer's weight and bias."""
    if isinstance(layer, nn.Conv2d):
        return _convolution(layer, inputs, gradients)
    if inputs.ndim == 2:
        return {"weight": _Products(gradients, inputs), "bias": _Rows(gradients)}
    along, seen = gradients.flatten(1, -2), inputs.flatten(1, -2)
    return {"weight": _Rows((along.transpose(1, 2) @ seen).flatten(1)), "bias": _Rows(along.sum(1))}


def _convolution(layer: nn.Conv2d, inputs: Tensor, gradients: Tensor) -> dict[str, PerSample]:
    along = gradients.permute(0, 2, 3, 1).flatten(1, 2)
    kernels = along.transpose(1, 2) @ _patches(layer, inputs, gradients.shape[2], gradients.shape[3])
    kernels = kernels.view(*kernels.shape[:2], *layer.kernel_size, inputs.shape[1])
    return {"weight": _Kernels(kernels), "bias": _Rows(along.sum(1))}


def _patches(layer: nn.Conv2d, inputs: Tensor, height: int, width: int) -> Tensor:
    """Return what each output position of a convolution sees, shape `(n, height · width, kernel · channels)`."""
    assert not isinstance(layer.padding, str)
    down, across = layer.padding
    padded = F.pad(inputs, (across, across, down, down)) if down or across else inputs
    last = padded.permute(0, 2, 3, 1).contiguous()
    of_example, of_row, of_column, of_channel = last.stride()
    (step_y, step_x), (gap_y, gap_x) = layer.stride, layer.dilation
    shape = (len(last), height, width, *layer.kernel_size, last.shape[3])
    strides = (of_example, of_row * step_y, of_column * step_x, of_row * gap_y, of_column * gap_x, of_channel)
    return last.as_strided(shape, strides).reshape(len(last), height * width, -1)


@final
@dataclass(frozen=True)
class Call:
    """One call of a layer while it was watched."""

    inputs: Tensor  # what it was given, shape `(n, …)`
    output: GradientEdge  # where its output stands in the graph
    shape: torch.Size  # the output's shape


@contextmanager
def captured(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Note every call of the layers while the block runs, by the layers' names."""
    # Weights need no gradients: an output that does not depend on any becomes the start of a graph of its own.
    calls: dict[str, list[Call]] = {name: [] for name in layers}
    handles = [layer.register_forward_hook(_noting(calls[name])) for name, layer in layers.items()]
    try:
        yield calls
    finally:
        _remove(handles)


def _remove(handles: list[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


class _Hook(Protocol):
    def __call__(self, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor: ...


def _noting(calls: list[Call]) -> _Hook:
    def note(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        begun = output if output.requires_grad else output.detach().requires_grad_()
        calls.append(Call(inputs[0].detach(), get_gradient_edge(begun), output.shape))
        # A leaf that needs gradients cannot be changed in place, as the next layer may do, but a copy of it can.
        return begun if begun is output else begun.clone()

    return note


Trains = Literal["head", "body", "both"]
_LOG = logging.getLogger(__name__)
# Largest number of single examples' gradient values to hold: a quarter of a gigabyte.
_VALUES_AT_ONCE = 2**26


@final
@dataclass(frozen=True)
class Clipped:
    """Clipped gradients of a batch, summed."""

    body: Tensor | None  # shape `(P,)`, or None if not asked for
    head: Tensor | None  # shape `(Q,)`, or None if not asked for
    loss: Tensor  # mean loss of the examples, a scalar; 0 if there is none
    norms: Tensor  # norm of each example's gradient before clipping, shape `(n,)`; of no meaning where masked


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
    """Clip each example's gradient over all that is trained together, and add them up."""
    # Source: Abadi et al. (arXiv 1607.00133), algorithm 1.
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
    """Refuse layers in training mode that normalize over the batch or keep statistics of it."""
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


# Whether the fast way is right for what a model trains, as far as it was tried.
_FITS: weakref.WeakKeyDictionary[LocalModel, dict[Trains, bool]] = weakref.WeakKeyDictionary()


def _agree(fast: Clipped, plain: Clipped, mask: Tensor, clip: float) -> bool:
    """Say whether two ways give the same."""
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


# Inputs, shape `(n, …)`, and targets, shape `(n, …)`, of one client's step; n may be 0.
Batch = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True)
class Gradients:
    """Gradients of K clients."""

    body: Tensor | None  # shape `(K, P)`, or None if not asked for
    head: Tensor | None  # shape `(K, Q)`, or None if not asked for
    losses: Tensor  # shape `(K,)`; 0 for an empty batch, whose gradients are 0 too


# Takes the model, bodies `(K, P)`, heads `(K, Q)`, a batch per client, what is asked for, and running statistics.
GradientRule = Callable[
    [LocalModel, Tensor, Tensor, Sequence[Batch], Literal["head", "body", "both"], Sequence[Mapping[str, Tensor]]],
    Gradients,
]


def rule_for(device: torch.device) -> GradientRule:
    """Return the rule that is fast on a device."""
    return one_by_one if device.type == "cpu" else together


def one_by_one(
    model: LocalModel,
    bodies: Tensor,
    heads: Tensor,
    batches: Sequence[Batch],
    trains: Literal["head", "body", "both"],
    statistics: Sequence[Mapping[str, Tensor]],
) -> Gradients:
    """Return the gradients, computed one client after another; running statistics change in place."""
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
    """Return the gradients of all clients at once; batches are padded to the largest and the padding weighs nothing."""
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
