"""The inner product of adapters, ⟨ΔW, ΔW'⟩ summed over modules, from their factors: ΔW is never formed.

It does not depend on how a change is written as up @ down, nor on ranks, so that principal components of it do not
either. `methods/space/method.py` calls it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.generate.stack import AdapterStack

__all__ = ["fingerprints_of", "inner_products", "norms_of", "precision_of"]

_ROWS = 2048  # of the products that are held at a time, n × rank of them


def precision_of(stack: AdapterStack) -> torch.dtype:
    """The dtype that products of a stack are made in: fp64 if its factors are, else fp32.

    Args:
        stack: The adapters.
    """
    wide = any(factor.dtype == torch.float64 for part in (stack.down, stack.up) for factor in part.values())
    return torch.float64 if wide else torch.float32


def inner_products(one: AdapterStack, other: AdapterStack) -> Tensor:
    """Return the inner products of every adapter of one stack with every one of another.

    Args:
        one: n adapters.
        other: m adapters of the same modules and shapes; ranks may differ.

    Returns:
        Shape `(n, m)`, fp64: products in fp32 (fp64 where factors are), summed over modules in fp64.

    Raises:
        UsageError: The stacks have other modules or shapes.

    Source: ⟨BA, B'A'⟩ = ⟨BᵀB', AA'ᵀ⟩; over n and m adapters two matrix products of n·rank × m·rank per module.
    """
    if one.shapes != other.shapes:
        raise UsageError("The adapters are of different modules or shapes: they belong to different models.")
    dtype = torch.promote_types(precision_of(one), precision_of(other))
    total = torch.zeros(len(one), len(other), dtype=torch.float64)
    for name in one.modules:
        scales = one.scale[name][:, None] * other.scale[name]
        total += scales * _of_module(_factors(one, name, dtype), _factors(other, name, dtype))
    return total


def norms_of(stack: AdapterStack) -> Tensor:
    """Return the inner product of every adapter with itself, shape `(n,)`, fp64.

    Args:
        stack: The adapters.
    """
    total = torch.zeros(len(stack), dtype=torch.float64)
    for name in stack.modules:
        ups, downs = _factors(stack, name, precision_of(stack))
        total += stack.scale[name] ** 2 * ((ups @ ups.mT) * (downs @ downs.mT)).sum(dim=(1, 2))
    return total


def fingerprints_of(stack: AdapterStack) -> Tensor:
    """Return a number per adapter, shape `(n,)`, fp64, to know it again by: its inner product with a random adapter.

    It depends on the change alone, and another change has another one.

    Args:
        stack: The adapters.
    """
    total = torch.zeros(len(stack), dtype=torch.float64)
    for name, (rows, columns) in stack.shapes.items():
        draw = torch_generator(0, "fingerprint", name)
        left, right = (torch.randn(length, generator=draw, dtype=torch.float64) for length in (rows, columns))
        total += stack.scale[name] * ((left @ stack.up[name].double()) * (stack.down[name].double() @ right)).sum(dim=1)
    return total


def _factors(stack: AdapterStack, name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Factors of one module, each as `(n, rank, length)`."""
    return stack.up[name].to(dtype).mT, stack.down[name].to(dtype)


def _of_module(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Inner products of one module's changes without their scales, shape `(n, m)`."""
    (ups, downs), (count, rank) = one, one[0].shape[:2]
    others, other_rank = [factor.flatten(0, 1).T for factor in other], other[0].shape[1]
    step = max(1, _ROWS // rank)
    parts = []
    for start in range(0, count, step):
        stop = min(start + step, count)
        products = ups[start:stop].flatten(0, 1) @ others[0]
        products *= downs[start:stop].flatten(0, 1) @ others[1]
        parts.append(products.view(stop - start, rank, -1, other_rank).sum(dim=(1, 3)))
    return torch.cat(parts)
