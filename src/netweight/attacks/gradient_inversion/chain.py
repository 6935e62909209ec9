"""A feature extractor read as a chain: convolution, pooling, (leaky) ReLU, again and again, then a linear layer.

Only such chains can be peeled from behind (`peeling.py`); what else a body is made of is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

import torch.nn.functional as F
from torch import fx, nn

from netweight.errors import Unsupported

__all__ = ["Block", "Chain", "read_chain"]

_CURE = "Peeling needs convolutions, max pooling and (leaky) ReLU in a chain; match gradients by descent instead."


@final
@dataclass(frozen=True)
class Block:
    """One convolution with what follows it, up to the next.

    Attributes:
        name: Module name of the convolution.
        stride: Its stride.
        padding: Its zero padding.
        pool: Side of the square, non-overlapping windows of max pooling; 1 without pooling.
        slope: Slope of the activation below zero; 1 without activation.
    """

    name: str
    stride: int
    padding: int
    pool: int
    slope: float


@final
@dataclass(frozen=True)
class Chain:
    """The blocks in order, and the name of the first linear layer, which sees their flattened result.

    Attributes:
        blocks: The convolutional blocks.
        linear: Full name of the layer.
    """

    blocks: tuple[Block, ...]
    linear: str


def read_chain(body: nn.Module) -> Chain:
    """Return the chain that a body begins with, up to its first linear layer.

    Args:
        body: The feature extractor.

    Raises:
        Unsupported: Something in it is no part of such a chain.
    """
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
    return Block(
        block.name,
        block.stride,
        block.padding,
        block.pool if pool is None else pool,
        block.slope if slope is None else slope,
    )
