"""The observation of a client, checked against what it would send before an attack begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad

from netweight.core.names import Select, not_found
from netweight.errors import UsageError


def chosen_tensors(observed: Tensors, patterns: str | tuple[str, ...] | None, imitated: Tensors) -> Tensors:
    """Return the observed tensors that an attack is to match."""
    names = list(observed) if patterns is None else Select.of(patterns).keys(observed)
    if not names:
        raise UsageError("Nothing was observed, so there is nothing to match.")
    for name in names:
        if name not in imitated:
            raise not_found(f"The client does not send a tensor {name!r}.", name, imitated)
        if observed[name].shape != imitated[name].shape:
            shape, sent = tuple(observed[name].shape), tuple(imitated[name].shape)
            raise UsageError(f"The observed tensor {name!r} has shape {shape}; the client would send {sent}.")
        if not observed[name].isfinite().all():
            raise UsageError(
                f"The observed tensor {name!r} contains NaN or infinity.",
                cure="Leave it out of the update's file, or in Python out of the observed tensors.",
            )
    return {name: observed[name].detach().to(imitated[name]) for name in names}


@final
@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The outcome of one attack, without knowledge of the true images.

    Attributes:
        images: Shape `(n, c, h, w)`, in the range the model sees (normalized, if the client normalizes).
        labels: int64 of shape `(n,)`, or probabilities of shape `(n, classes)`, as given, recovered or optimized.
        objective: What the attack minimized, at `images`; lower means a closer imitation. NaN if it diverged.
        objectives_by_restart: The same at the end of every restart; the least of them was kept.
        history: Objective over time for the restart that was kept, from the start, at equal distances. Where
            the weight of a term changes on the way, each value has the weight of its time.
        steps: Optimization steps taken per restart; 0 for an analytic attack.
        attack: What was run, as reports show it.
        every: The images of every restart, shape `(restarts, n, c, h, w)`; None where only the best is kept.
    """

    images: Tensor
    labels: Tensor
    objective: float
    objectives_by_restart: tuple[float, ...]
    history: tuple[float, ...]
    steps: int
    attack: str
    every: Tensor | None = None


# Tensors by parameter name.
Tensors: TypeAlias = Mapping[str, Tensor]
# Images, shape `(n, c, h, w)`, and labels: int64 of shape `(n,)`, or class probabilities of shape `(n, classes)`.
Batch: TypeAlias = tuple[Tensor, Tensor]
# What a client sends when it starts from these parameters and holds this batch; differentiable in the images.
LocalUpdate: TypeAlias = Callable[[Tensors, Batch], Tensors]
# A scalar from the model's outputs and the labels.
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]


def gradient_of(model: nn.Module, loss: Loss = F.cross_entropy) -> LocalUpdate:
    """Return the client that sends the gradient of its loss over one batch (FedSGD)."""
    gradient = _gradient(model, loss)

    def update(params: Tensors, batch: Batch) -> Tensors:
        _check_names(model, params)
        return gradient(dict(params), *batch)

    return update


def sgd_difference(
    model: nn.Module,
    *,
    lr: float,
    steps: int,
    batch_size: int | None = None,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    loss: Loss = F.cross_entropy,
) -> LocalUpdate:
    """Return the client that trains by SGD and sends how its parameters moved (FedAvg)."""
    # The steps are unrolled, so that the difference stays a differentiable function of the images. Batches follow one
    # another in the order of the images, epoch after epoch; the last batch of an epoch may be smaller. Memory grows
    # with the number of steps.
    if steps < 1 or lr <= 0 or (batch_size is not None and batch_size < 1):
        raise UsageError(f"A client cannot take {steps} steps of rate {lr} on batches of {batch_size}.")
    gradient = _gradient(model, loss)

    def update(params: Tensors, batch: Batch) -> Tensors:
        _check_names(model, params)
        current, velocity = dict(params), dict[str, Tensor]()
        for step in range(steps):
            gradients = gradient(current, *_part(batch, step, batch_size))
            for name, change in gradients.items():
                slope = change + weight_decay * current[name]
                velocity[name] = momentum * velocity[name] + slope if name in velocity else slope
            current = {name: tensor - lr * velocity[name] for name, tensor in current.items()}
        return {name: tensor - params[name] for name, tensor in current.items()}

    return update


def _gradient(model: nn.Module, loss: Loss) -> Callable[[dict[str, Tensor], Tensor, Tensor], dict[str, Tensor]]:
    """The gradient as a function; `torch.func.grad` composes with autograd around it and with vmap."""

    def scalar(params: dict[str, Tensor], buffers: dict[str, Tensor], images: Tensor, labels: Tensor) -> Tensor:
        return loss(functional_call(model, {**params, **buffers}, (images,), strict=True), labels)

    slope = grad(scalar)

    def gradient(params: dict[str, Tensor], images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        # Copies, since normalization layers in train mode write into their buffers.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        gradients: dict[str, Tensor] = slope(params, buffers, images, labels)
        return gradients

    return gradient


def _check_names(model: nn.Module, params: Tensors) -> None:
    parameters = dict(model.named_parameters())
    for name, parameter in parameters.items():
        if name not in params:
            raise not_found(f"The parameter {name!r} of the model is missing.", name, params)
        if params[name].shape != parameter.shape:
            given, expected = tuple(params[name].shape), tuple(parameter.shape)
            raise UsageError(f"The parameter {name!r} has shape {given}; the model's has {expected}.")
    for name in params:
        if name not in parameters:
            raise not_found(f"The model has no parameter {name!r}.", name, parameters)


def _part(batch: Batch, step: int, batch_size: int | None) -> Batch:
    images, labels = batch
    size = batch_size or len(images)
    start = step % -(-len(images) // size) * size
    return images[start : start + size], labels[start : start + size]


def known_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return detached copies of a module's parameters by name: the starting point a server knows."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def without_buffers(model: nn.Module, update: Tensors) -> tuple[dict[str, Tensor], list[str]]:
    """Return a client's update without the model's buffers, and the names of those that were left out.

    A client that sends its whole `state_dict` sends running statistics. They are not a function of the batch that a
    search could follow, so attacks compare parameters alone.

    Args:
        model: The client's model.
        update: What it sent, by name.
    """
    buffers = {name for name, _ in model.named_buffers()}
    return {n: v for n, v in update.items() if n not in buffers}, sorted(buffers & set(update))
