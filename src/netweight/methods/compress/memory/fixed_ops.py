"""The operators of weights in the fixed-length form, known to torch's dispatcher and compiler.

`netweight::linear_fixed` multiplies, on a GPU without a dense weight in memory. `netweight::decode_fixed` and
`netweight::decode_fixed_backward` do the same under two names, for the reason that `ops.py` tells.
"""

from __future__ import annotations

import torch

from netweight.codec.cuda import fixed_products
from netweight.methods.compress.memory.ops import is_watched

__all__ = ["decode_fixed", "decode_fixed_backward", "linear_fixed", "multiply"]

_library = torch.library.Library("netweight", "FRAGMENT")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag,)


def _decode(payload: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return fixed_products.decode(payload, shape[0], shape[1])


def _decode_fake(payload: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return payload.new_empty(shape, dtype=dtype)


def _linear(x: torch.Tensor, payload: torch.Tensor, shape: list[int], bias: torch.Tensor | None) -> torch.Tensor:
    return fixed_products.linear(x, payload, shape[0], shape[1], bias)


def _linear_fake(x: torch.Tensor, payload: torch.Tensor, shape: list[int], bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


for _signature, _run, _fake in (
    ("decode_fixed(Tensor payload, SymInt[] shape, ScalarType dtype)", _decode, _decode_fake),
    ("decode_fixed_backward(Tensor payload, SymInt[] shape, ScalarType dtype)", _decode, _decode_fake),
    ("linear_fixed(Tensor x, Tensor payload, SymInt[] shape, Tensor? bias)", _linear, _linear_fake),
):
    _name = _signature.partition("(")[0]
    _library.define(f"{_signature} -> Tensor", tags=_TAGS)  # type: ignore[no-untyped-call]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"netweight::{_name}", _fake, lib=_library)


def multiply(
    x: torch.Tensor, payload: torch.Tensor, shape: list[int] | torch.Size, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear_fixed`, without the dispatcher where nobody watches.

    Args:
        x: Tensor of shape (..., columns) and the weight's dtype.
        payload: U8 payload in the fixed-length form.
        shape: Shape of the weight, (rows, columns).
        bias: Tensor of shape (rows,), or None.

    Returns:
        Tensor of shape (..., rows); see `fixed_products.linear`.
    """
    if all(type(tensor) in (torch.Tensor, torch.nn.Parameter, type(None)) for tensor in (x, payload, bias)):
        if not is_watched():
            return _linear(x, payload, list(shape), bias)
    result: torch.Tensor = linear_fixed(x, payload, shape, bias)
    return result


# (payload: U8 of shape (capacity,), shape, dtype) -> dense weight of that shape and dtype
decode_fixed = torch.ops.netweight.decode_fixed.default
decode_fixed_backward = torch.ops.netweight.decode_fixed_backward.default
# (x: (..., columns), payload, shape (rows, columns), bias: (rows,) or None) -> (..., rows)
linear_fixed = torch.ops.netweight.linear_fixed.default
