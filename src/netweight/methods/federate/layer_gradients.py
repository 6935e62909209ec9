"""Gradients of single examples for linear layers and convolutions, from one backward pass. `per_sample.py` calls it.

A layer's input a and the gradient g of its output hold every example's gradient of its weights. For a linear layer
that is g aᵀ, whose norm and weighted sum need no such matrix; for a convolution it is a product over the positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

__all__ = ["Call", "PerSample", "captured", "is_known", "layer_gradients"]


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
    """Say whether `layer_gradients` covers a layer: exactly Linear, or Conv2d in one group padded with zeros.

    Args:
        layer: Any module.
    """
    if type(layer) is nn.Conv2d:
        return layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return type(layer) is nn.Linear


def layer_gradients(layer: nn.Module, inputs: Tensor, gradients: Tensor) -> dict[str, PerSample]:
    """Return the gradients of a known layer's weight and bias.

    Args:
        layer: Says how a convolution moves; its own weights are not looked at.
        inputs: What the layer was given, shape `(n, …)`.
        gradients: Gradients of the loss summed over examples with respect to the layer's output.
    """
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
    """Return what each output position of a convolution sees, shape `(n, height · width, kernel · channels)`.

    With channels last a patch is a few long runs of memory, which is several times faster to copy than by `unfold`.
    """
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
    """One call of a layer while it was watched.

    Attributes:
        inputs: What it was given, shape `(n, …)`.
        output: Where its output stands in the graph.
        shape: The output's shape.
    """

    inputs: Tensor
    output: GradientEdge
    shape: torch.Size


@contextmanager
def captured(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, list[Call]]]:
    """Note every call of the layers while the block runs, by the layers' names.

    Weights need no gradients: an output that does not depend on any becomes the start of a graph of its own.

    Args:
        layers: Modules by name.

    Yields:
        The calls by name, filled while the block runs.
    """
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
