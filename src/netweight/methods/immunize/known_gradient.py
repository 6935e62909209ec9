"""A scalar whose gradients were computed together with it, so that nothing but these waits for the backward pass.

For values that are made from large things in between, such as logits or kernels of all pairs. Used by `lens.py` and
`mmd.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["with_gradients"]


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
    """Put a scalar into the graph.

    Args:
        value: The scalar.
        inputs: What it depends on; those that require no gradient are passed over.
        gradients: Its derivatives by these, of their shapes.

    Returns:
        The same number. It can go backward as often as its graph is kept, but has no second derivatives.
    """
    used = [pair for pair in zip(inputs, gradients, strict=True) if pair[0].requires_grad]
    if not used or not torch.is_grad_enabled():
        return value
    leaves = [given for given, _ in used]
    known = [gradient.to(given.dtype) for given, gradient in used]
    result: Tensor = _Known.apply(value, len(used), *leaves, *known)  # type: ignore[no-untyped-call]
    return result
