"""How layers calculate with a compressed weight: decode, run the dense kernel, forget; decode again going backward.

Each function stands in for one of torch's when its weight is compressed. Outputs and gradients are those of the dense
weight to the last bit, because the same kernels run on the same values; where that is not sure (odd strides, vectors)
the function declines and torch's own runs, with operators that decode one by one. What is kept for the backward pass
is the payload, never a dense weight (NeuZip, section 3.2). A weight that is lent (`ops.borrow`) is given back when its
product has been asked for; nothing here keeps it. Called by `tensor.py` only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from netweight.core import seeds
from netweight.errors import Unsupported
from netweight.methods.compress.runtime.ops import (
    borrow,
    decode_backward,
    decode_fixed,
    decode_fixed_backward,
    gather_rows,
    give_back,
    multiply,
    read,
)
from netweight.methods.compress.runtime.side_stream import Loan


class _Keep(Function):
    """Saves what a product needs for its backward pass, before the product is calculated."""

    # A checkpoint that calculates again stops as soon as the last tensor is saved: with this the last product of a
    # checkpoint is not calculated a second time, as that of a dense layer is not.

    @staticmethod
    def forward(x: Any, payload: Any, needs_weight: bool, keeper: list[Any]) -> torch.Tensor:
        same: torch.Tensor = x.view_as(x)
        return same

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, payload, needs_weight, keeper = inputs
        ctx.save_for_backward(x if needs_weight else None, payload)
        keeper.append(ctx)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None, None


class _Product(Function):
    """What products share: a payload, the parameter it belongs to (for its gradient), a dtype to calculate in."""

    generate_vmap_rule = False

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save what the needed gradients ask for, and nothing else, unless that is done."""
        x, weight, payload = inputs[:3]
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.keeper = inputs[-1]
        if not ctx.keeper:
            ctx.save_for_backward(x if needs_weight else None, payload if needs_x else None)
        ctx.shape, ctx.dtype, ctx.fixed, ctx.trains = weight.shape, weight.dtype, False, needs_weight


def _kept(ctx: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The product's input, if its weight needs a gradient, and its payload."""
    x, payload = (ctx.keeper[0] if ctx.keeper else ctx).saved_tensors
    return x, payload


def _dense(payload: torch.Tensor, weight: torch.Tensor, compute: torch.dtype, loan: Loan | None) -> torch.Tensor:
    return (read(payload, weight.shape, weight.dtype) if loan is None else loan.weight).to(compute)


def _dense_again(ctx: Any, payload: torch.Tensor, gradient: torch.Tensor, loan: Loan | None) -> torch.Tensor:
    again = decode_fixed_backward if ctx.fixed else decode_backward
    dense: torch.Tensor = again(payload, ctx.shape, ctx.dtype) if loan is None else loan.weight
    dense = dense.to(gradient.dtype)
    # Only a graph of the gradients themselves (create_graph) is recorded here, and the decoded weight is no part of it.
    return _not_again(dense) if torch.is_grad_enabled() and ctx.trains else dense


class _Last(Function):
    """Passes a decoded weight on, and refuses to be differentiated."""

    @staticmethod
    def forward(ctx: Any, dense: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return dense.view_as(dense)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise Unsupported(
            "Second derivatives with respect to a compressed weight are not to be had: it is a constant in the graph "
            "of its layer's gradients.",
            cure="Call netweight.decompress_(model) before; or, for second derivatives of inputs, torch.autograd.grad "
            "with these inputs, or requires_grad_(False) for the weights.",
        )


_ANCHOR = torch.zeros((), requires_grad=True)  # lets autograd record `_Last`, whose weight is a constant to it


def _not_again(dense: torch.Tensor) -> torch.Tensor:
    """A decoded weight through which second derivatives of weights are refused instead of being left out."""
    # Transforms of torch.func do not come here: they see the weight itself.
    if torch.compiler.is_compiling():
        return dense
    same: torch.Tensor = _Last.apply(dense, _ANCHOR)  # type: ignore[no-untyped-call]
    return same


def _times_weight(ctx: Any, payload: torch.Tensor, gradient: torch.Tensor, *, transposed: bool = False) -> torch.Tensor:
    """A gradient of shape (rows, a) times the weight of shape (a, b), or (b, a) if that is to be transposed."""
    loan = None if ctx.fixed else borrow(payload, "backward")
    try:
        dense = _dense_again(ctx, payload, gradient, loan)
        return gradient.mm(dense.t() if transposed else dense)
    finally:
        give_back(loan)


class _Linear(_Product):
    @staticmethod
    def forward(x: Any, weight: Any, payload: Any, bias: Any, compute: torch.dtype, keeper: Any) -> torch.Tensor:
        loan = borrow(payload, "forward")
        try:
            return F.linear(x, _dense(payload, weight, compute, loan), bias)
        finally:
            give_back(loan)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, payload = _kept(ctx)
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        flat = gradient.flatten(0, -2)
        to_x = None
        if needs_x:
            to_x = _times_weight(ctx, payload, flat).view(*gradient.shape[:-1], ctx.shape[1])
        to_weight = flat.t().mm(x.flatten(0, -2)).to(ctx.dtype) if needs_weight else None
        return to_x, to_weight, None, flat.sum(0) if needs_bias else None, None, None


class _FixedLinear(_Linear):
    """A product with a weight in the fixed-length form: nothing is decoded where a kernel can multiply with it."""

    @staticmethod
    def forward(x: Any, weight: Any, payload: Any, bias: Any, compute: torch.dtype, keeper: Any) -> torch.Tensor:
        if compute == weight.dtype:
            return multiply(x, payload, weight.shape, bias)
        return F.linear(x, decode_fixed(payload, weight.shape, weight.dtype).to(compute), bias)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _Product.setup_context(ctx, inputs, output)
        ctx.fixed = True


class _Addmm(_Product):
    @staticmethod
    def forward(x: Any, weight: Any, payload: Any, bias: Any, compute: torch.dtype, keeper: Any) -> torch.Tensor:
        loan = borrow(payload, "forward")
        try:
            return torch.addmm(bias, x, _dense(payload, weight, compute, loan))
        finally:
            give_back(loan)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, payload = _kept(ctx)
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        to_x = _times_weight(ctx, payload, gradient, transposed=True) if needs_x else None
        to_weight = x.t().mm(gradient).to(ctx.dtype) if needs_weight else None
        return to_x, to_weight, None, gradient.sum(0) if needs_bias else None, None, None


class _Conv(Function):
    @staticmethod
    def forward(x: Any, weight: Any, payload: Any, bias: Any, compute: torch.dtype, geometry: Any) -> torch.Tensor:
        stride, padding, dilation, groups = geometry
        none = [0] * len(stride)
        loan = borrow(payload, "forward")
        try:
            dense = _dense(payload, weight, compute, loan)
            return torch.convolution(x, dense, bias, stride, padding, dilation, False, none, groups)
        finally:
            give_back(loan)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        # The backward operator wants the input's shape even where its values do not matter, so it is always kept.
        ctx.save_for_backward(inputs[0], inputs[2])
        ctx.shape, ctx.dtype, ctx.fixed, ctx.geometry = inputs[1].shape, inputs[1].dtype, False, inputs[5]
        ctx.trains = ctx.needs_input_grad[1]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, payload = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        wanted = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
        loan = borrow(payload, "backward")
        try:
            to_x, to_weight, to_bias = torch.ops.aten.convolution_backward(
                gradient, x, _dense_again(ctx, payload, gradient, loan), [ctx.shape[0]], stride, padding, dilation,
                False, [0] * len(stride), groups, wanted,
            )  # fmt: skip
        finally:
            give_back(loan)
        return to_x, to_weight.to(ctx.dtype) if wanted[1] else None, None, to_bias, None, None


class _Embedding(Function):
    @staticmethod
    def forward(ids: Any, weight: Any, payload: Any, padding: int, by_frequency: bool) -> torch.Tensor:
        rows: torch.Tensor = gather_rows(payload, weight.shape, weight.dtype, ids)
        return rows

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.rows, ctx.padding, ctx.by_frequency = inputs[1].shape[0], inputs[3], inputs[4]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        table = torch.ops.aten.embedding_dense_backward(gradient, ids, ctx.rows, ctx.padding, ctx.by_frequency)
        return None, table, None, None, None


def _as_dense_would(x: torch.Tensor) -> bool:
    """Whether a product with `x` surely takes the kernels that the functions here take."""
    return torch.compiler.is_compiling() or (x.dim() >= 2 and x.is_contiguous())


def _autocast(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.dtype | None:
    """The dtype that autocast asks for here, if it is on and the tensors take part."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return None
    takes_part = all(t is None or (t.is_floating_point() and t.dtype != torch.float64) for t in (x, weight, bias))
    return torch.get_autocast_dtype(kind) if takes_part else None


def _product(function: Any, x: Any, weight: Any, bias: Any) -> Any:
    x, bias, compute = _cast(x, weight, bias)
    payload, keeper = weight.box.payload, []  # type: ignore[var-annotated]
    if x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        x = _Keep.apply(x, payload, weight.requires_grad, keeper)  # type: ignore[no-untyped-call]
    return _call(function, x, weight, payload, bias, compute, keeper)


def _cast(x: Any, weight: Any, bias: Any) -> Any:
    """Input and bias as autocast wants them here, and the dtype to calculate in."""
    compute = _autocast(x, weight, bias)
    if compute is None:
        return x, bias, weight.dtype
    return x.to(compute), bias.to(compute) if bias is not None else None, compute


def _call(function: Any, x: torch.Tensor, *arguments: Any) -> Any:
    run = function.apply if torch.is_grad_enabled() else function.forward
    if not torch.is_autocast_enabled(x.device.type):
        return run(x, *arguments)
    with torch.autocast(x.device.type, enabled=False):
        return run(x, *arguments)


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """`torch.nn.functional.linear`, or None where torch's own must run."""
    return _product(_FixedLinear if weight.box.fixed else _Linear, x, weight, bias) if _as_dense_would(x) else None


def addmm(bias: torch.Tensor, x: torch.Tensor, weight: Any) -> torch.Tensor | None:
    """`torch.addmm` as transformers' Conv1D calls it, or None where torch's own must run."""
    return _product(_Addmm, x, weight, bias) if bias.dim() == 1 and _as_dense_would(x) else None


def conv(
    dimensions: int,
    x: torch.Tensor,
    weight: Any,
    bias: torch.Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> torch.Tensor | None:
    """`torch.nn.functional.conv1d` or `conv2d`, or None where torch's own must run (padding given as a word)."""
    if isinstance(padding, str) or x.dim() != dimensions + 2:
        return None
    geometry = [
        [value] * dimensions if isinstance(value, int) else list(value) * (dimensions if len(value) == 1 else 1)
        for value in (stride, padding, dilation)
    ]
    x, bias, compute = _cast(x, weight, bias)
    result: torch.Tensor = _call(_Conv, x, weight, weight.box.payload, bias, compute, (*geometry, groups))
    return result


def embedding(
    ids: torch.Tensor,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor | None:
    """`torch.nn.functional.embedding`, decoding only chunks that are touched, or None where torch's own must run."""
    rows = weight.shape[0]
    padding = -1 if padding_idx is None else padding_idx + rows * (padding_idx < 0)
    if max_norm is not None or sparse or not -1 <= padding < rows:
        return None
    rows_of: Any = _Embedding.apply
    result: torch.Tensor = rows_of(ids, weight, weight.box.payload, padding, scale_grad_by_freq)
    return result


def round_stochastically(values: torch.Tensor, seed: int, *path: str | int) -> torch.Tensor:
    """Round fp32 to bf16, up or down at random so that the expected value is the exact one."""
    generator = seeds.torch_generator(seed, *path, device=str(values.device))
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
