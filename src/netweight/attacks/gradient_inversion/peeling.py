"""The blocks of a convolutional network, and what one image's gradient tells of a block's input.

A block is a convolution with max pooling and an activation; `read_chain` finds the blocks that a body begins with.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from netweight.errors import Unsupported

_CURE = "Peeling needs convolutions, max pooling and (leaky) ReLU in a chain; match gradients by descent instead."


@final
@dataclass(frozen=True)
class Block:
    """One convolution with what follows it, up to the next."""

    name: str  # module name of the convolution
    stride: int
    padding: int  # its zero padding
    pool: int  # side of the square, non-overlapping windows of max pooling; 1 without pooling
    slope: float  # slope of the activation below zero; 1 without activation


@final
@dataclass(frozen=True)
class Chain:
    """The blocks in order, and the name of the first linear layer, which sees their flattened result."""

    blocks: tuple[Block, ...]  # the convolutional blocks
    linear: str  # full name of the layer


def read_chain(body: nn.Module) -> Chain:
    """Return the chain that a body begins with, up to its first linear layer."""
    try:
        graph = fx.symbolic_trace(body)
    except Exception as reason:  # whatever a foreign forward raises when values are symbols
        raise Unsupported(f"The body could not be traced: {reason}.", cure=_CURE) from reason
    modules = dict(graph.named_modules())
    blocks: list[Block] = []
    for node in graph.graph.nodes:
        if node.op in ("placeholder", "output") or _is(node, modules, nn.Identity, nn.Flatten, "flatten"):
            continue
        module = modules.get(str(node.target)) if node.op == "call_module" else None
        if isinstance(module, nn.Linear):
            if not blocks or module.bias is None:
                raise Unsupported(f"The layer {node.target!r} has no convolution before it or no bias.", cure=_CURE)
            return Chain(tuple(blocks), str(node.target))
        if isinstance(module, nn.Conv2d):
            blocks.append(_convolution(str(node.target), module))
        elif not blocks:
            raise Unsupported(f"{node.name!r} comes before the first convolution.", cure=_CURE)
        elif _is(node, modules, nn.ReLU, "relu"):
            blocks[-1] = _with(blocks[-1], slope=0.0)
        elif _is(node, modules, nn.LeakyReLU, "leaky_relu"):
            slope = module.negative_slope if isinstance(module, nn.LeakyReLU) else _argument(node, 1, 0.01)
            blocks[-1] = _with(blocks[-1], slope=float(slope))
        elif _is(node, modules, nn.MaxPool2d, "max_pool2d", "boolean_dispatch"):
            blocks[-1] = _with(blocks[-1], pool=_window(node, module))
        else:
            raise Unsupported(f"{node.name!r} is no part of a chain.", cure=_CURE)
    raise Unsupported("The body has no linear layer.", cure=_CURE)


def _is(node: fx.Node, modules: dict[str, nn.Module], *kinds: type[nn.Module] | str) -> bool:
    if node.op == "call_module":
        return isinstance(modules[str(node.target)], tuple(kind for kind in kinds if isinstance(kind, type)))
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name in kinds and (name != "boolean_dispatch" or node.target is F.max_pool2d)


def _argument(node: fx.Node, index: int, default: Any) -> Any:
    names = ("input", "negative_slope")
    return node.args[index] if len(node.args) > index else node.kwargs.get(names[index], default)


def _convolution(name: str, layer: nn.Conv2d) -> Block:
    square = all(len(set(pair)) == 1 for pair in (layer.stride, layer.dilation)) and not isinstance(layer.padding, str)
    if not square or layer.dilation[0] != 1 or layer.groups != 1 or layer.bias is None:
        raise Unsupported(f"The convolution {name!r} is dilated, grouped, without bias or not square.", cure=_CURE)
    if len(set(layer.padding)) != 1 or layer.padding_mode != "zeros":
        raise Unsupported(f"The convolution {name!r} pads unevenly or not with zeros.", cure=_CURE)
    return Block(name, int(layer.stride[0]), int(layer.padding[0]), 1, 1.0)


def _window(node: fx.Node, module: nn.Module | None) -> int:
    kernel: Any
    stride: Any
    padding: Any
    dilation: Any
    if isinstance(module, nn.MaxPool2d):
        kernel, stride, padding, dilation = module.kernel_size, module.stride, module.padding, module.dilation
    else:
        kernel = node.args[1] if len(node.args) > 1 else node.kwargs["kernel_size"]
        stride = node.kwargs.get("stride") or kernel
        padding, dilation = node.kwargs.get("padding", 0), node.kwargs.get("dilation", 1)
    if not isinstance(kernel, int) or stride != kernel or padding != 0 or dilation != 1:
        raise Unsupported(f"The windows of {node.name!r} overlap, are padded or not square.", cure=_CURE)
    return kernel


def _with(block: Block, *, pool: int | None = None, slope: float | None = None) -> Block:
    """The block with pooling or an activation, which may come in either order: leaky ReLU is monotone."""
    if (pool is not None and block.pool != 1) or (slope is not None and block.slope != 1):
        raise Unsupported(f"Two poolings or two activations follow {block.name!r}.", cure=_CURE)
    return replace(block, pool=block.pool if pool is None else pool, slope=block.slope if slope is None else slope)


@final
@dataclass(frozen=True, eq=False)
class Peel:
    """A block with known weights and a known gradient, to be undone for one image; float64."""

    block: Block
    weight: Tensor  # shape `(C, c, k, k)`
    bias: Tensor  # shape `(C,)`
    gradient: Tensor  # by the weight, its shape
    size: tuple[int, ...]  # shape `(c, h, w)` of the input

    def pooled(self, inputs: Tensor, weight: Tensor | None = None, temperature: float = 0.0) -> Tensor:
        """Return what is pooled, `(1, C, h, w)`: the greatest value of a window, or a mean that leans to it."""
        weight = self.weight if weight is None else weight
        bias, pool = self.bias.to(weight.dtype), self.block.pool
        maps = F.conv2d(inputs, weight, bias, self.block.stride, self.block.padding)
        if temperature <= 0 or pool == 1:
            return F.max_pool2d(maps, pool)
        height, width = maps.shape[-2] // pool, maps.shape[-1] // pool
        cut = maps[..., : height * pool, : width * pool].unflatten(-1, (width, pool)).unflatten(-3, (height, pool))
        values = cut.transpose(-3, -2).flatten(-2)
        return (torch.softmax(values / (temperature * values.detach().std()), -1) * values).sum(-1)

    def undone(self, output: Tensor, back: Tensor) -> tuple[Tensor, Tensor]:
        """Return what was pooled as far as the output tells, 0 below zero for ReLU, and the gradient by it."""
        below = output / self.block.slope if self.block.slope > 0 else torch.zeros_like(output)
        return torch.where(output > 0, output, below), torch.where(output > 0, back, back * self.block.slope)

    def by_span(self, pooled: Tensor, back: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the input, exactly, and the gradient by it, given that by what was pooled; None if it is not told.

        Source: for sequences DAGER (arXiv 2405.15586); for convolutions this library's own.
        """
        # A channel's gradient is a sum of patches of the input. With as many channels as places every patch lies in
        # the span of these sums, and but for its scale one map alone has all of its patches there.
        channels, kernel = self.weight.shape[1], self.weight.shape[-1]
        plane = torch.eye(self.size[1] * self.size[2], dtype=self.weight.dtype).view(-1, 1, *self.size[1:])
        patches = F.unfold(plane, kernel, padding=self.block.padding, stride=self.block.stride)
        if patches.shape[-1] > len(self.weight):
            return None
        span = torch.linalg.svd(self.gradient.flatten(1), full_matrices=False).Vh[: patches.shape[-1]]
        inside = torch.einsum("rck,ikp->rpci", span.unflatten(1, (channels, -1)), patches).flatten(2).flatten(0, 1)
        whole = torch.einsum("ikp,jkp->ij", patches, patches)
        outside = torch.kron(torch.eye(channels, dtype=plane.dtype), whole) - inside.T @ inside
        sizes, maps = torch.linalg.eigh(outside)
        if sizes[0] > 1e-6 * sizes[1] or sizes[1] < 1e-6 * sizes[-1]:  # no map, or many
            return None
        fits: list[tuple[float, Tensor]] = []
        seen = pooled > 0 if self.block.slope == 0 else torch.ones_like(pooled, dtype=torch.bool)
        shift = self.bias.view(-1, 1, 1)
        for found in (maps[:, 0].view(1, *self.size), -maps[:, 0].view(1, *self.size)):
            got, wanted = (self.pooled(found) - shift)[seen], (pooled - shift)[seen]
            scale = got @ wanted / (got @ got)
            fits.append((float((scale * got - wanted).norm()), scale * found))
        found = min(fits, key=lambda fit: fit[0])[1].requires_grad_()
        (cotangent,) = torch.autograd.grad((self.pooled(found) * back).sum(), found)
        return found.detach(), cotangent
