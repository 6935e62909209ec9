"""What training layer by layer cannot be combined with, found before it does harm. Used by `layerwise.py`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from netweight.errors import LayerwiseConflict
from netweight.methods.compress.memory.hooks import hooks_of

__all__ = [
    "average_gradient",
    "refuse_reentrant_checkpoint",
    "refuse_second_optimizer",
    "refuse_unreduced_gradients",
    "refuse_wrapped_model",
]


def average_gradient(gradient: torch.Tensor) -> None:
    """Average a gradient over all processes of the default group, in place: `LayerwiseOptimizer(..., reduce=this)`.

    Args:
        gradient: A dense gradient; every process must train the same parameters in the same order.
    """
    torch.distributed.all_reduce(gradient)
    gradient.div_(torch.distributed.get_world_size())


def refuse_wrapped_model(model: nn.Module) -> None:
    """Refuse a model whose wrapper reduces gradients itself, after the hooks have run.

    Raises:
        LayerwiseConflict: It is wrapped in `DistributedDataParallel`.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise LayerwiseConflict(
            "DistributedDataParallel reduces gradients after they would have been used up.",
            cure="Leave the model unwrapped, start it equal everywhere, and pass reduce=average_gradient.",
        )


def refuse_unreduced_gradients(reduce: Callable[[torch.Tensor], None] | None) -> None:
    """Refuse to step on gradients of one process among several.

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
            raise LayerwiseConflict(
                "This backward pass runs within reentrant checkpointing, which goes backward one segment at a time.",
                cure="Pass use_reentrant=False to torch.utils.checkpoint; in transformers, "
                'gradient_checkpointing_kwargs={"use_reentrant": False}.',
            )
        frame = frame.f_back


def refuse_second_optimizer(names: Sequence[str], parameters: Sequence[nn.Parameter]) -> None:
    """Refuse parameters that another layer by layer optimizer steps.

    Raises:
        LayerwiseConflict: Such a hook is on one of them.
    """
    for name, parameter in zip(names, parameters, strict=True):
        if any(hasattr(hook, "optimizer") for hook in hooks_of(parameter)):
            raise LayerwiseConflict(
                f"{name} is stepped by another LayerwiseOptimizer.", cure="Call close() on that one first."
            )
