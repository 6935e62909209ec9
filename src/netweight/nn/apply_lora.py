"""Adapters in a live model: changes of its linear layers that last as long as a block, or are merged for good.

    with applied(unet, stack, groups, component="unet"):
        unet(...)          # sample i runs with adapter groups[i]

Changes are an `AdapterStack`, which is never multiplied out, or dense matrices, through which gradients flow: inversion
descends on these. Trainers, samplers and audits of collections of adapters call it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from netweight.core.names import Select, not_found
from netweight.errors import Unsupported, UsageError
from netweight.nn.hooks import hooked
from netweight.nn.lora import Adapter, AdapterStack

# What `applied` takes: adapters, or module name → change, shape `(rows, columns)` or `(b, rows, columns)`.
Changes = AdapterStack | Adapter | Mapping[str, Tensor]


@contextmanager
def applied(model: nn.Module, changes: Changes, groups: Tensor | None = None, *, component: str = "") -> Iterator[None]:
    """Add changes to what linear layers of a model put out: W x becomes W x + ΔW x.

    Factors and dense changes are used as they are at each run of the model, so that they may be trained inside the
    block, and gradients flow to them. What is added is worked out in the wider dtype of the two and on the inputs'
    device.

    `groups`: which adapter, or which of the b dense changes, each sample runs with: shape `(batch,)`, int64; may be
    left out where there is only one; a model that is run on several copies of the batch behind each other, as for
    guidance, runs each with the same groups.
    """
    parts = _parts(changes)
    counts = {count for part in parts.values() if (count := part.count) is not None}
    order = _order(groups, counts)
    layers = _layers(model, parts, component)
    with hooked((layers[name], _adding(name, part, order)) for name, part in parts.items()):
        yield


@torch.no_grad()
def merge_(model: nn.Module, changes: Adapter | Mapping[str, Tensor], *, component: str = "") -> None:
    """Add one adapter, or dense changes of shape `(rows, columns)`, to a model's weights.

    `changes`: the change: an adapter, or tensors of shape `(rows, columns)` by module.
    """
    parts = _parts(changes)
    if any(part.count is not None for part in parts.values()):
        raise UsageError("Several changes of one layer cannot be merged.", cure="Merge one of them.")
    layers = _layers(model, parts, component)
    for name, change in (changes.factors if isinstance(changes, Adapter) else changes).items():
        dense = change if isinstance(change, Tensor) else change.dense()
        weight: Any = layers[name].weight
        weight.add_((dense.T if _transposed(layers[name]) else dense).to(weight))


def linear_layers(
    model: nn.Module, choice: Select | str | tuple[str, ...], *, component: str = ""
) -> dict[str, tuple[int, int]]:
    """Return names and shapes of the linear layers of a choice, as adapters name them."""
    before = f"{component}." if component else ""
    modules = Select.of(choice).modules(model)
    return {before + name: _shape(name, layer) for name, layer in modules.items()}


class _Factors:
    """Low-rank changes of one layer."""

    def __init__(self, down: Tensor, up: Tensor, scale: Tensor, single: bool) -> None:
        self.down, self.up, self.scale = down, up, scale
        self.shape = up.shape[1], down.shape[2]
        self.count: int | None = None if single else len(down)
        self.dtype = down.dtype

    def all(self, inputs: Tensor) -> Tensor:
        """Inputs of shape `(n, places, columns)`, one block for each change."""
        scale = self.scale.to(inputs)[:, None, None]
        return torch.bmm(torch.bmm(inputs, self.down.mT.to(inputs)) * scale, self.up.mT.to(inputs))

    def some(self, inputs: Tensor, groups: Tensor) -> Tensor:
        """Inputs of shape `(batch, places, columns)`, each with a change of its own."""
        scale = self.scale[groups].to(inputs)[:, None, None]
        down, up = self.down[groups].mT.to(inputs), self.up[groups].mT.to(inputs)
        return torch.bmm(torch.bmm(inputs, down) * scale, up)


class _Dense:
    """Dense changes of one layer."""

    def __init__(self, change: Tensor) -> None:
        self.change = change
        self.shape = tuple(change.shape[-2:])
        self.count: int | None = len(change) if change.ndim == 3 else None
        self.dtype = change.dtype

    def all(self, inputs: Tensor) -> Tensor:
        change = self.change.mT.to(inputs)
        return torch.bmm(inputs, change) if change.ndim == 3 else inputs @ change

    def some(self, inputs: Tensor, groups: Tensor) -> Tensor:
        return torch.bmm(inputs, self.change[groups].mT.to(inputs))


class _ChangeAssignment:
    """Assignment of changes to samples."""

    def __init__(self, groups: Tensor | None, count: int) -> None:
        # `groups` has shape `(batch,)`; None where all samples run with the only change.
        self.groups = groups
        self.size = 1 if groups is None else len(groups)
        each = self.size // count
        # Whether the changes come in order, each for equally many samples, so that nothing need be gathered.
        self.even = groups is not None and each * count == self.size and bool(
            (groups == torch.arange(count, device=groups.device).repeat_interleave(each)).all()
        )  # fmt: skip


def _parts(changes: Changes) -> dict[str, _Factors | _Dense]:
    if isinstance(changes, Adapter):
        return _factors(AdapterStack.of([changes]), single=True)
    if isinstance(changes, AdapterStack):
        return _factors(changes, single=False)
    wrong = [name for name, change in changes.items() if change.ndim not in (2, 3)]
    if wrong or not changes:
        what = (
            f"The change of {wrong[0]!r} has {changes[wrong[0]].ndim} dimensions." if wrong else "There is no change."
        )
        raise UsageError(what, cure="Give (rows, columns) or (b, rows, columns) for each module.")
    return {name: _Dense(change) for name, change in changes.items()}


def _factors(stack: AdapterStack, *, single: bool) -> dict[str, _Factors | _Dense]:
    return {name: _Factors(stack.down[name], stack.up[name], stack.scale[name], single) for name in stack.modules}


def _order(groups: Tensor | None, counts: set[int]) -> _ChangeAssignment:
    """Check groups against the numbers of changes."""
    if len(counts) > 1:
        raise UsageError(f"Layers have different numbers of changes: {sorted(counts)}.", cure="Give as many for each.")
    count = next(iter(counts), 1)
    if groups is None:
        if count > 1:
            raise UsageError(f"There are {count} adapters, and no groups.", cure="Give the group of each sample.")
        return _ChangeAssignment(None, 1)
    if groups.ndim != 1 or not len(groups) or groups.is_floating_point():
        raise UsageError(f"The groups are {groups.dtype} of shape {tuple(groups.shape)}.", cure="Give (batch,), int64.")
    if int(groups.min()) < 0 or int(groups.max()) >= count:
        raise UsageError(
            f"Groups reach from {int(groups.min())} to {int(groups.max())}, and there are {count} adapters.",
            cure=f"Give numbers from 0 to {count - 1}.",
        )
    return _ChangeAssignment(groups, count)


def _layers(model: nn.Module, parts: Mapping[str, _Factors | _Dense], component: str) -> dict[str, nn.Module]:
    """Find the layers of changes, and refuse shapes that are not theirs."""
    before = f"{component}." if component else ""
    modules = {before + name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    for name, part in parts.items():
        if name not in modules:
            raise not_found(f"The model has no module {name!r} to change.", name, modules, "See `component`.")
        if (shape := _shape(name, modules[name])) != part.shape:
            raise UsageError(
                f"The change of {name!r} is {part.shape[0]} × {part.shape[1]}, its layer {shape[0]} × {shape[1]}.",
                cure="Use adapters that were made for this model.",
            )
    return {name: modules[name] for name in parts}


def _shape(name: str, layer: nn.Module) -> tuple[int, int]:
    """Rows and columns of a layer, known by the attributes of `nn.Linear` or of transformers' `Conv1D`."""
    rows, columns = getattr(layer, "out_features", None), getattr(layer, "in_features", None)
    if _transposed(layer):
        rows, columns = layer.nf, layer.nx
    if rows is None or columns is None:
        raise Unsupported(
            f"{name!r} is a {type(layer).__name__}, and only linear layers take low-rank changes.",
            cure="Choose a linear layer.",
        )
    return int(rows), int(columns)


def _transposed(layer: nn.Module) -> bool:
    return type(layer).__name__ == "Conv1D" and hasattr(layer, "nf") and hasattr(layer, "nx")


def _adding(name: str, part: _Factors | _Dense, order: _ChangeAssignment) -> Any:
    """A forward hook that adds a layer's change."""

    def hook(_layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        given = inputs[0].to(torch.promote_types(part.dtype, inputs[0].dtype))
        if order.groups is None or part.count is None:
            flat = given.reshape(1, -1, given.shape[-1])
            return output + part.all(flat).reshape(output.shape).to(output.dtype)
        copies = len(given) // order.size
        if copies * order.size != len(given):
            raise UsageError(
                f"Module {name!r} is run on a batch of {len(given)}, with groups for {order.size} samples.",
                cure="Give a group for each sample.",
            )
        if order.even and copies == 1:
            added = part.all(given.reshape(part.count, -1, given.shape[-1]))
        else:
            added = part.some(given.reshape(len(given), -1, given.shape[-1]), order.groups.repeat(copies))
        return output + added.reshape(output.shape).to(output.dtype)

    return hook
