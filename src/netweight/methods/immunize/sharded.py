"""Weights of which each process holds a part: their own part, the whole, and norms over all parts.

PyTorch's FSDP2 keeps such weights as DTensors. What is said here of them is true of ordinary tensors, too, which are
whole. Reading the whole, or a norm, is something that all processes do together, in one order.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from netweight.methods.immunize.ranks import Ranks

__all__ = [
    "common_norm",
    "gathered",
    "is_sharded",
    "local",
    "put",
    "run",
    "sharded_like",
    "trained_weights",
    "units",
    "whole",
]


def is_sharded(value: Tensor) -> bool:
    """Whether a tensor is a part of one that is spread over processes.

    Args:
        value: Any tensor.
    """
    tensors: Any = sys.modules.get("torch.distributed.tensor")  # who has not imported it has no such tensor
    return tensors is not None and isinstance(value, tensors.DTensor)


def units(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards, each of which gathers its weights when it runs.

    Args:
        model: As it is trained.
    """
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return [] if fsdp is None else [module for module in model.modules() if isinstance(module, fsdp.FSDPModule)]


def trained_weights(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that require a gradient; of sharded ones the parts.

    To be asked before the model runs: FSDP2 leaves the outermost weights gathered after a forward pass, and these are
    other tensors.

    Args:
        model: As it is trained.
    """
    for unit in units(model):
        unit.reshard()
    return [value for value in model.parameters() if value.requires_grad]


@torch.no_grad()
def local(value: Tensor) -> Tensor:
    """This process's part, in the same memory.

    Args:
        value: Any shape, sharded or not.
    """
    part: Tensor = value.to_local() if is_sharded(value) else value  # type: ignore[attr-defined]
    return part


@torch.no_grad()
def whole(value: Tensor) -> Tensor:
    """The whole, without a gradient.

    Args:
        value: Any shape, sharded or not.
    """
    value = value.detach()
    full: Tensor = value.full_tensor() if is_sharded(value) else value  # type: ignore[attr-defined]
    return full


@torch.no_grad()
def sharded_like(full: Tensor, like: Tensor) -> Tensor:
    """A whole tensor, equal on all processes, as the part of it that `like` holds of its own.

    Args:
        full: Any shape.
        like: Sharded or not, of the whole shape of `full`.
    """
    full = full.to(like.device)
    if not is_sharded(like):
        return full
    from torch.distributed.tensor import distribute_tensor

    spread: Any = like
    return distribute_tensor(full, spread.device_mesh, spread.placements, src_data_rank=None)


@torch.no_grad()
def put(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor, equal on all processes, into one that may be sharded.

    Args:
        target: Any shape, sharded or not; changed in place.
        full: The whole, of the shape of `target`.
    """
    target.copy_(sharded_like(full, target))


def common_norm(values: Sequence[Tensor], ranks: Ranks) -> float:
    """The Euclidean norm of all values together; parts are added up over the processes.

    Args:
        values: Any shapes.
        ranks: The processes.
    """
    complete = [value for value in values if not is_sharded(value)]
    norm = float(nn.utils.get_total_norm(complete)) if complete else 0.0
    if len(complete) == len(values):
        return norm
    parts = [local(value).float().square().sum() for value in values if is_sharded(value)]
    return math.hypot(norm, float(ranks.sum(torch.stack(parts).sum()).sqrt()))


@contextmanager
def gathered(modules: Iterable[nn.Module], dtype: torch.dtype) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Let modules compute with whole weights, although their own are parts.

    Within the block call them by `run`.

    Args:
        modules: Without modules inside them that are sharded.
        dtype: Of what they will be given; weights that are gathered take it if they are float32 and it is narrower, as
            by FSDP's own mixed precision.

    Yields:
        The weights that require a gradient: those that the modules compute with, and the same in the graph, whose
        gradients reach the model's own. Weights that are whole stand in both lists.
    """
    used: dict[Tensor, tuple[Tensor, Tensor]] = {}
    replaced: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for owner in (inner for module in modules for inner in module.modules()):
            for name, value in list(owner._parameters.items()):
                if value is None:
                    continue
                if value not in used:
                    used[value] = _gather(value, dtype) if is_sharded(value) else (value, value)
                if is_sharded(value):
                    replaced.append((owner, name, value))
                    owner._parameters[name] = used[value][0]  # type: ignore[assignment]  # as FSDP itself does it
        wanted = [pair for value, pair in used.items() if value.requires_grad]
        yield [leaf for leaf, _ in wanted], [graph for _, graph in wanted]
    finally:
        for owner, name, value in replaced:
            owner._parameters[name] = value


def run(module: nn.Module, given: Tensor) -> Tensor:
    """Call a module; one that FSDP takes for a unit of its own without FSDP's hooks, which would put the parts back.

    Args:
        module: Any module of one input.
        given: Its input, any shape.

    Returns:
        Its output, any shape.
    """
    result: Tensor = module.forward(given) if module in units(module) else module(given)
    return result


def _gather(value: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    from torch.distributed.tensor import Partial

    # Each process has a gradient of its own by the whole; FSDP takes their mean, and so does this. The sum is divided
    # beforehand, because not every backend knows means.
    graph: Tensor = _Divided.apply(value.full_tensor(grad_placements=[Partial()]), value.device_mesh.size())  # type: ignore[no-untyped-call]
    narrow = value.dtype == torch.float32 and dtype.itemsize < 4
    leaf = graph.detach().to(dtype) if narrow else graph.detach()
    return leaf.requires_grad_(value.requires_grad), graph


class _Divided(torch.autograd.Function):
    """The same tensor, with a part of the gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, by: int) -> Tensor:
        ctx.by = by
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad / ctx.by, None
