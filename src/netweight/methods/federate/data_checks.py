"""Checks of a client's examples before anything is trained: values, shapes, targets, loss; an error names the client.

Without them one client's odd file ends a federation in an error of torch that names neither the client nor the cure, or
is left out of every round because its update contains NaN.
"""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netweight.errors import UsageError
from netweight.methods.federate.habits import copied
from netweight.methods.federate.local_model import one_tensor
from netweight.methods.federate.task import ClientData, Task

# Examples that are run through the network at a time.
_AT_ONCE = 256


def refuse_unfit_examples(task: Task, client: int) -> None:
    """Refuse examples of a client that its network or its loss cannot take, or that hold no numbers.

    Numbers, such as tokens, are all run through the network, since only some may be outside of its vocabulary; of other
    inputs two are. All targets are given to the loss.

    Args:
        task: The network, the loss and the client's data.
        client: Its number.

    Raises:
        UsageError: Inputs contain NaN or infinity; the network cannot take them, returns NaN, infinity,
            probabilities or one output, or has a layer whose outputs are the same for every example; the loss
            cannot take the targets, or returns more than one value or a sum in place of a mean; test targets are not
            class numbers; or the loss has no gradient with regard to some weight that is to be trained.
    """
    data = task.client(client)
    halves = nn.ModuleList([copied(task.body), copied(task.head)]).eval()
    for part, (inputs, _) in (("training", data.train), ("test", data.test)):
        _refuse_values(inputs, f"{part} inputs of client {client}")
    with torch.no_grad():
        outputs = _outputs(halves, data.train[0], f"training inputs of client {client}")
        _outputs(halves, data.test[0], f"test inputs of client {client}")
        _refuse_training_targets(task, outputs, data, client)
    _refuse_test_targets(outputs, data.test[1], client)
    _refuse_steps(task, data, client)


def _refuse_values(inputs: Tensor, what: str) -> None:
    if not inputs.is_floating_point():
        return
    odd = int((~inputs.flatten(1).isfinite()).any(1).sum()) if inputs.ndim > 1 else int((~inputs.isfinite()).sum())
    if odd:
        raise UsageError(
            f"{odd} of {len(inputs)} {what} contain NaN or infinity.",
            cure="Leave these examples out, or give the missing values a number.",
        )


def _outputs(halves: nn.ModuleList, inputs: Tensor, what: str) -> Tensor:
    tried = inputs[:2] if inputs.is_floating_point() else inputs
    device = next(halves.parameters()).device
    parts = []
    try:
        for part in torch.split(tried, _AT_ONCE):
            features = one_tensor(halves[0], halves[0](part.to(device)))
            parts.append(one_tensor(halves[1], halves[1](features)))
        outputs: Tensor = torch.cat(parts)
    except UsageError:
        raise
    # The network of a user may raise anything.
    except Exception as error:
        kinds = {value.dtype for value in halves.parameters() if value.is_floating_point()}
        others = sorted(str(kind) for kind in kinds - {inputs.dtype})
        raise UsageError(
            f"The network cannot take the {what}, {inputs.dtype} of shape (n{_shape(inputs)}): {_reason(error)}.",
            cure=f"Weights of the network are {' and '.join(others)}: return them as {inputs.dtype} (`module.to`), or "
            "convert the inputs in `forward`."
            if others and inputs.is_floating_point()
            else "Convert them to the type, shape and range that the network was made for.",
        ) from error
    if not bool(outputs.isfinite().all()):
        largest = f", whose largest value is {float(tried.abs().max()):.3g}" if tried.is_floating_point() else ""
        raise UsageError(
            f"The network returns NaN or infinity for the {what}{largest}.",
            cure="Scale the inputs, such as to a mean of 0 and a standard deviation of 1, or initialize the network "
            "with smaller weights.",
        )
    return outputs


def _refuse_training_targets(task: Task, outputs: Tensor, data: ClientData, client: int) -> None:
    targets = data.train[1].to(outputs.device)
    same = outputs[:1].expand(len(targets), *outputs.shape[1:])
    whose = f"training targets of client {client}, {targets.dtype} of shape (n{_shape(targets)})"
    try:
        once, twice = task.loss(same, targets), task.loss(torch.cat([same, same]), torch.cat([targets, targets]))
    # The loss of a user may raise anything.
    except Exception as error:
        plain = task.loss is F.cross_entropy
        raise UsageError(
            f"The loss cannot take the {whose}, beside outputs of shape (n{_shape(outputs)}): {_reason(error)}.",
            cure="Return outputs of shape (n, classes)."
            if plain and outputs.ndim != 2
            else f"Give class numbers, int64 of shape (n,), from 0 to {outputs.shape[-1] - 1}, or another loss."
            if plain
            else "Give targets that the loss of the task takes.",
        ) from error
    if not isinstance(once, Tensor) or once.ndim:
        raise UsageError(
            "The loss returns more than one value for a batch.", cure="Return the mean over the examples, a scalar."
        )
    if once.abs() > 1e-6 and math.isclose(float(twice), 2 * float(once), rel_tol=1e-4):
        raise UsageError(
            "The loss is a sum over the examples: the same batch twice has twice the loss. Learning rates, weights of "
            "clients and clipped gradients are for a mean.",
            cure='Return the mean over the examples, such as reduction="mean".',
        )


def _refuse_steps(task: Task, data: ClientData, client: int) -> None:
    """Refuse a network that cannot be trained: its first step fails, or some weight has no part in the loss."""
    inputs, targets = (each[:2] if len(each) > 1 else torch.cat([each, each]) for each in data.train)
    halves = nn.ModuleDict({"body": copied(task.body), "head": copied(task.head)}).train()
    trained = {name: value for name, value in halves.named_parameters() if value.requires_grad}
    device = next(iter(trained.values())).device
    for name, layer in halves.named_modules():
        if isinstance(layer, nn.GroupNorm | nn.LayerNorm):
            layer.register_forward_pre_hook(partial(_refuse_single_values, name))
    try:
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            outputs = halves["head"](halves["body"](inputs.to(device)))
            loss = task.loss(outputs, targets.to(device))
            gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    except UsageError:
        raise
    # The network of a user may raise anything.
    except Exception as error:
        raise UsageError(
            f"The network cannot be trained on the examples of client {client}: {_reason(error)}.",
            cure="Correct its forward. A layer with inplace=True must not overwrite what the layer before it needs, "
            "and no layer may run under torch.no_grad.",
        ) from error
    unused = [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]
    if unused:
        raise UsageError(
            f"The loss does not depend on {len(unused)} of {len(trained)} weights that are to be trained, such as "
            f"{unused[0]!r}.",
            cure="Use them in forward, outside of torch.no_grad, or call requires_grad_(False) on them.",
        )
    if task.loss is F.cross_entropy and outputs.ndim == 2 and outputs.shape[1] == 1:
        raise UsageError(
            "The network has one output. The loss (cross entropy) takes one for each class, and is always 0 here.",
            cure="Return at least two outputs, one for each class.",
        )
    if task.loss is F.cross_entropy and outputs.ndim == 2 and _probabilities(outputs):
        raise UsageError(
            "The network returns probabilities: no output is negative, and those of an example add up to 1. The loss "
            "(cross entropy) takes logits, and hardly learns from probabilities.",
            cure="Leave out the softmax at the end of the network.",
        )


def _refuse_single_values(name: str, layer: nn.GroupNorm | nn.LayerNorm, arguments: tuple[Tensor, ...]) -> None:
    """Refuse a normalization over one value, which is always 0 afterwards, whatever the example was."""
    if isinstance(layer, nn.LayerNorm):
        count = math.prod(layer.normalized_shape)
    else:
        count = arguments[0][0].numel() // layer.num_groups
    if count == 1:
        raise UsageError(
            f"The layer {name!r}, {layer}, normalizes single values: its outputs are the same for every example.",
            cure="Use fewer groups, such as GroupNorm(1, channels), or LayerNorm over all features.",
        )


def _probabilities(outputs: Tensor) -> bool:
    return bool((outputs >= 0).all()) and bool((outputs.sum(1) - 1).abs().max() < 1e-4)


def _refuse_test_targets(outputs: Tensor, targets: Tensor, client: int) -> None:
    whole = not targets.is_floating_point() and targets.dtype != torch.bool
    low, high = (int(targets.min()), int(targets.max())) if whole else (0, 0)
    if not whole or targets.ndim != 1 or low < 0 or high >= outputs.shape[-1]:
        what = f"{targets.dtype} of shape (n{_shape(targets)})" + (f", from {low} to {high}" if whole else "")
        raise UsageError(
            f"Accuracy cannot be measured on the test targets of client {client}, {what}: the network has "
            f"{outputs.shape[-1]} outputs.",
            cure=f"Give class numbers, int64 of shape (n,), from 0 to {outputs.shape[-1] - 1}.",
        )


def _shape(values: Tensor) -> str:
    return "".join(f", {size}" for size in values.shape[1:]) or ","


def _reason(error: Exception) -> str:
    """Return the first line of an error, with its class where the message alone says little."""
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    return text if " " in text else f"{type(error).__name__}: {text}".removesuffix(": ")
