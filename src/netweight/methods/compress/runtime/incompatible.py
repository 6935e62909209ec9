"""Refusals of options and models that cannot be combined with `LayerwiseOptimizer`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointFunction

from netweight.errors import LayerwiseConflict, LossyWrite
from netweight.methods.compress.runtime.fsdp import local_part
from netweight.methods.compress.runtime.tensor import CompressedTensor


def refuse_closures(optimizer_class: type[torch.optim.Optimizer]) -> None:
    """Refuse optimizers that evaluate the model themselves."""
    closure = inspect.signature(optimizer_class.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise LayerwiseConflict(
            f"{optimizer_class.__name__} needs all gradients at once: its step evaluates the model several times.",
            cure="Choose an optimizer that steps each parameter by its own gradient, such as AdamW, or train without "
            "LayerwiseOptimizer.",
        )


def refuse_wrapped_model(model: nn.Module) -> None:
    """Refuse a model whose wrapper reduces gradients itself; called before and within its first forward pass."""
    around = nn.parallel.DistributedDataParallel._get_active_ddp_module()  # type: ignore[no-untyped-call]
    if isinstance(model, nn.parallel.DistributedDataParallel) or around is not None:
        raise LayerwiseConflict(
            "DistributedDataParallel reduces gradients after they would have been used up.",
            cure="Leave the model unwrapped, start it equal everywhere, and pass reduce=average_gradient.",
        )


def refuse_parameters(parameters: Mapping[str, nn.Parameter]) -> None:
    """Refuse parameters that another layer by layer optimizer steps, rounded ones, and shards."""
    rounded: list[str] = []
    shards: list[str] = []
    for name, parameter in parameters.items():
        hooks: Any = parameter._post_accumulate_grad_hooks or {}
        if any(getattr(hook, "optimizer", None) is not None for hook in hooks.values()):
            raise LayerwiseConflict(
                f"{name} is stepped by another LayerwiseOptimizer.", cure="Call close() on that one first."
            )
        if isinstance(parameter, CompressedTensor) and parameter.stored.lossy:
            rounded.append(name)
        if local_part(parameter) is not parameter:
            shards.append(name)
    if rounded:
        raise _not_trained(rounded)
    # FSDP reduces and shards gradients after the backward pass of a whole group of layers.
    if shards:
        raise LayerwiseConflict(
            f"{shards[0]} is sharded, and its gradient is reduced by FSDP, not in a hook.",
            cure="Use an ordinary torch optimizer: each process steps its own shards.",
        )


@cache
def refuse_rounded_steps() -> None:
    """From now on refuse any optimizer's step on rounded weights as a whole, before it has written the first weight."""
    register_optimizer_step_pre_hook(_refuse_rounded_step)


def _refuse_rounded_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stepped = (parameter for group in optimizer.param_groups for parameter in group["params"])
    rounded = [p for p in stepped if isinstance(p, CompressedTensor) and p.grad is not None and p.stored.lossy]
    if rounded:
        raise _not_trained([p.stored.name or f"A weight of shape {p.stored.shape}" for p in rounded])


def _not_trained(rounded: list[str]) -> LossyWrite:
    others = f" and {len(rounded) - 1} more" if len(rounded) > 1 else ""
    return LossyWrite(
        f"{rounded[0]}{others} cannot be trained: each step would round the weight again. Nothing was updated.",
        cure="Call requires_grad_(False) on them and train adapters, or compress_ the model without mantissa_bits.",
    )


def refuse_unreduced_gradients(reduce: Callable[[torch.Tensor], None] | None) -> None:
    """Refuse to step on gradients of one process among several."""
    distributed = torch.distributed
    if reduce is None and distributed.is_available() and distributed.is_initialized():
        size = distributed.get_world_size()
        if size > 1:
            raise LayerwiseConflict(
                f"Each of {size} processes would step on unreduced gradients, its own. Nothing was updated.",
                cure="Pass reduce=average_gradient, or reduce=lambda gradient: None to train replicas apart.",
            )


def refuse_reentrant_graph(output: Any) -> None:
    """Refuse a model whose forward pass used reentrant checkpointing, or runs within it, before it goes backward."""
    recomputes = torch._C._current_graph_task_id() != -1
    if recomputes and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
        # This is a forward pass within a backward pass, and not one of a non-reentrant checkpoint.
        raise reentrant()
    waiting = [t.grad_fn for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.grad_fn is not None]
    nodes: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node in nodes:
            continue
        nodes.add(node)
        if node.name() == f"{CheckpointFunction.__name__}Backward":
            raise reentrant()
        waiting += [before for before, _ in node.next_functions if before is not None]


def reentrant() -> LayerwiseConflict:
    """The refusal of a backward pass within another one: gradients would be taken for complete too early."""
    return LayerwiseConflict(
        "The model uses reentrant checkpointing, which goes backward one segment at a time.",
        cure="Pass use_reentrant=False to torch.utils.checkpoint; in transformers, "
        'gradient_checkpointing_kwargs={"use_reentrant": False}.',
    )
