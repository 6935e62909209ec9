"""A scalar whose gradients were computed together with it, so that nothing but these waits for the backward pass.

For values that are made from large things in between, such as logits or kernels of all pairs. Used by `lens.py` and
`mmd.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from netweight.methods.immunize.distributed import ALONE, Ranks, common_norm, is_sharded


class _Known(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[count:])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        known = ctx.saved_tensors
        return None, None, *(grad * value for value in known), *(None for _ in known)


def with_gradients(value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Put a scalar into the graph."""
    used = [pair for pair in zip(inputs, gradients, strict=True) if pair[0].requires_grad]
    if not used or not torch.is_grad_enabled():
        return value
    leaves = [given for given, _ in used]
    known = [gradient.to(given.dtype) for given, gradient in used]
    result: Tensor = _Known.apply(value, len(used), *leaves, *known)  # type: ignore[no-untyped-call]
    return result


def gradient_norm(value: Tensor, parameters: Iterable[nn.Parameter], ranks: Ranks = ALONE) -> float:
    """The norm of a scalar's gradient by all parameters; the graph is kept, no parameter's `grad` changes."""
    parameters = list(parameters)
    if any(is_sharded(parameter) for parameter in parameters):
        return _of_shards(value, parameters, ranks)
    grads = torch.autograd.grad(value, parameters, retain_graph=True, allow_unused=True)
    if ranks.size > 1:  # one after the other; what one process has no gradient by, another may have
        squares = [
            ranks.mean(torch.zeros_like(parameter) if grad is None else grad).float().square().sum()
            for parameter, grad in zip(parameters, grads, strict=True)
        ]
        return float(torch.stack(squares).sum().sqrt())
    norms = [grad.float().norm() for grad in grads if grad is not None]
    return float(torch.stack(norms).norm()) if norms else 0.0


def _of_shards(value: Tensor, parameters: Sequence[nn.Parameter], ranks: Ranks) -> float:
    """As above: FSDP computes with other tensors than its parts, and only going backward it gives these a gradient."""
    held = [parameter.grad for parameter in parameters]
    try:
        for parameter in parameters:
            parameter.grad = None
        value.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        ranks.average(parameter.grad for parameter in _whole_ones(parameters))  # type: ignore[misc]
        return common_norm([parameter.grad for parameter in parameters if parameter.grad is not None], ranks)
    finally:
        for parameter, grad in zip(parameters, held, strict=True):
            parameter.grad = grad


def _whole_ones(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Those that FSDP was told to leave alone, each with a gradient."""
    found = [parameter for parameter in parameters if not is_sharded(parameter)]
    for parameter in found:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    return found
