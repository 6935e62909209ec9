"""What training layer by layer cannot be combined with, found before it does harm. Used by `layerwise.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from netweight.errors import LayerwiseConflict, LossyWrite
from netweight.methods.compress.memory.hooks import hooks_of
from netweight.methods.compress.memory.sharding import local_part
from netweight.methods.compress.memory.tensor import CompressedTensor

__all__ = [
    "average_gradient",
    "refuse_reentrant_checkpoint",
    "refuse_reentrant_graph",
    "refuse_rounded_weights",
    "refuse_second_optimizer",
    "refuse_shards",
    "refuse_unreduced_gradients",
    "refuse_wrapped_model",
]


def average_gradient(gradient: torch.Tensor) -> None:
    """Average a gradient over all processes of the default group, in place: `LayerwiseOptimizer(..., reduce=this)`.

    It is scaled first and then summed, as `DistributedDataParallel` does: two processes train to the same bits as with
    that. With more, the order of a sum may depend on how gradients are put together.

    Args:
        gradient: A dense gradient; every process must train the same parameters in the same order.
    """
    gradient.mul_(1.0 / torch.distributed.get_world_size())
    torch.distributed.all_reduce(gradient)


def refuse_wrapped_model(model: nn.Module) -> None:
    """Refuse a model whose wrapper reduces gradients itself; called before and within its first forward pass.

    Args:
        model: What is trained.

    Raises:
        LayerwiseConflict: It is wrapped in `DistributedDataParallel`, or runs within one.
    """
    around = nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if isinstance(model, nn.parallel.DistributedDataParallel) or around is not None:
        raise LayerwiseConflict(
            "DistributedDataParallel reduces gradients after they would have been used up.",
            cure="Leave the model unwrapped, start it equal everywhere, and pass reduce=average_gradient.",
        )


def refuse_unreduced_gradients(reduce: Callable[[torch.Tensor], None] | None) -> None:
    """Refuse to step on gradients of one process among several.

    Args:
        reduce: What averages a gradient over processes; None if nothing does.

    Raises:
        LayerwiseConflict: There is a process group of more than one, and nothing reduces.
    """
    distributed = torch.distributed
    if reduce is None and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise LayerwiseConflict(
                f"Each of {size} processes would step on unreduced gradients, its own. Nothing was updated.",
                cure="Pass reduce=average_gradient, or reduce=lambda gradient: None to train replicas apart.",
            )


def refuse_reentrant_checkpoint(function: type[torch.autograd.Function]) -> None:
    """Refuse a backward pass that runs within another one: gradients would be taken for complete too early.

    Args:
        function: torch's function for reentrant checkpointing.

    Raises:
        LayerwiseConflict: Its backward is among the callers.
    """
    code = function.backward.__code__
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code is code:
            raise _reentrant()
        frame = frame.f_back


def refuse_reentrant_graph(output: Any, function: type[torch.autograd.Function]) -> bool:
    """Refuse a model whose forward pass used reentrant checkpointing, before anything goes backward.

    Args:
        output: What the model returned: tensors in any nesting that torch knows.
        function: torch's function for reentrant checkpointing.

    Returns:
        Whether there was a graph to look at.

    Raises:
        LayerwiseConflict: The function is in the graph.
    """
    waiting = [t.grad_fn for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.name() == f"{function.__name__}Backward":
            raise _reentrant()
        waiting += [before for before, _ in node.next_functions if before is not None]
    return bool(seen)


def _reentrant() -> LayerwiseConflict:
    return LayerwiseConflict(
        "The model uses reentrant checkpointing, which goes backward one segment at a time.",
        cure="Pass use_reentrant=False to torch.utils.checkpoint; in transformers, "
        'gradient_checkpointing_kwargs={"use_reentrant": False}.',
    )


def refuse_second_optimizer(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that another layer by layer optimizer steps.

    Args:
        names: Of the parameters.
        parameters: Those to be trained, any shape.

    Raises:
        LayerwiseConflict: Such a hook is on one of them.
    """
    for name, parameter in zip(names, parameters, strict=True):
        if any(hasattr(hook, "optimizer") for hook in hooks_of(parameter)):
            raise LayerwiseConflict(
                f"{name} is stepped by another LayerwiseOptimizer.", cure="Call close() on that one first."
            )


def refuse_shards(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters whose gradients FSDP reduces and cuts, after the backward pass of a whole group of layers.

    Args:
        names: Of the parameters.
        parameters: Those to be trained, any shape.

    Raises:
        LayerwiseConflict: Some are; the first is named.
    """
    shards = [name for name, value in zip(names, parameters, strict=True) if local_part(value) is not value]
    if shards:
        raise LayerwiseConflict(
            f"{shards[0]} is sharded, and its gradient is reduced by FSDP, not in a hook.",
            cure="Use an ordinary torch optimizer: each process steps its own shards.",
        )


def refuse_rounded_weights(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse to train weights that are kept rounded.

    Args:
        names: Of the parameters.
        parameters: Those to be trained, any shape.

    Raises:
        LossyWrite: Some are; the first is named.
    """
    rounded = [
        name
        for name, parameter in zip(names, parameters, strict=True)
        if isinstance(parameter, CompressedTensor) and parameter.box.lossy
    ]
    if rounded:
        others = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
        raise LossyWrite(
            f"{rounded[0]}{others} cannot be trained: each step would round the weight again.",
            cure="Call requires_grad_(False) on them and train adapters, or compress_ the model without mantissa_bits.",
        )
