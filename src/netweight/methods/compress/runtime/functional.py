"""How layers calculate with a compressed weight: decode, run the dense kernel, forget; decode again going backward.

`linear`, `addmm`, `conv` and `embedding` stand in for torch's own when the weight is compressed. Outputs and gradients
are those of the dense weight to the last bit, because the same kernels run on the same values; where that is not sure
(odd strides, vectors) the function returns None and torch's own runs, with operators that decode one by one. What is
kept for the backward pass is the payload, never a dense weight (NeuZip, arXiv 2410.20650, section 3.2). The operators
that decode, as torch's dispatcher and compiler know them, are at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from netweight import codec
from netweight.codec.cuda import fixed_products
from netweight.errors import Unsupported
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime import prefetch
from netweight.methods.compress.runtime.prefetch import BorrowedBuffer
from netweight.methods.compress.runtime.storage import blob_of, decode_payload

# ---- what stands in for torch's functions ----------------------------------------------------------------------------


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """`torch.nn.functional.linear`, or None where torch's own must run."""
    return _product(_FixedLinear if weight.stored.fixed else _Linear, x, weight, bias) if _as_dense_would(x) else None


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
    result: torch.Tensor = _call(_Conv, x, weight, weight.stored.payload, bias, compute, (*geometry, groups))
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
    result: torch.Tensor = rows_of(ids, weight, weight.stored.payload, padding, scale_grad_by_freq)
    return result


def _as_dense_would(x: torch.Tensor) -> bool:
    """Whether a product with `x` surely takes the kernels that the functions here take."""
    return torch.compiler.is_compiling() or (x.dim() >= 2 and x.is_contiguous())


def _product(function: Any, x: Any, weight: Any, bias: Any) -> Any:
    x, bias, compute = _cast(x, weight, bias)
    payload, keeper = weight.stored.payload, []  # type: ignore[var-annotated]
    if x.requires_grad and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        x = _Keep.apply(x, payload, weight.requires_grad, keeper)  # type: ignore[no-untyped-call]
    return _call(function, x, weight, payload, bias, compute, keeper)


def _cast(x: Any, weight: Any, bias: Any) -> Any:
    """Input and bias as autocast wants them here, and the dtype to calculate in."""
    kind = x.device.type
    if not torch.is_autocast_enabled(kind):
        return x, bias, weight.dtype
    if not all(t is None or (t.is_floating_point() and t.dtype != torch.float64) for t in (x, weight, bias)):
        return x, bias, weight.dtype
    compute = torch.get_autocast_dtype(kind)
    return x.to(compute), bias.to(compute) if bias is not None else None, compute


def _call(function: Any, x: torch.Tensor, *arguments: Any) -> Any:
    run = function.apply if torch.is_grad_enabled() else function.forward
    if not torch.is_autocast_enabled(x.device.type):
        return run(x, *arguments)
    with torch.autocast(x.device.type, enabled=False):
        return run(x, *arguments)


# ---- forward and backward of each ------------------------------------------------------------------------------------


def _on_dense(payload: Any, weight: Any, compute: torch.dtype, kernel: Callable[[torch.Tensor], Any]) -> torch.Tensor:
    """Run a kernel, which keeps neither the decoded weight nor a view of it."""
    borrowed = borrow(payload, "forward")
    try:
        dense = read(payload, weight.shape, weight.dtype) if borrowed is None else borrowed.weight
        result: torch.Tensor = kernel(dense.to(compute))
        return result
    finally:
        if borrowed is not None:
            borrowed.give_back()


def _on_dense_again(ctx: Any, payload: Any, gradient: torch.Tensor, kernel: Callable[[torch.Tensor], Any]) -> Any:
    """Run a kernel of the backward pass on the weight, decoded again."""
    borrowed = None if ctx.fixed else borrow(payload, "backward")
    try:
        again = decode_fixed_backward if ctx.fixed else decode_backward
        dense = again(payload, ctx.shape, ctx.dtype) if borrowed is None else borrowed.weight
        dense = dense.to(gradient.dtype)
        # Only a graph of the gradients themselves (create_graph) is recorded here, and the decoded weight is no part of
        # it. Transforms of torch.func do not come here: they see the weight itself.
        if torch.is_grad_enabled() and ctx.trains and not torch.compiler.is_compiling():
            dense = _Constant.apply(dense, _ANCHOR)  # type: ignore[no-untyped-call]
        return kernel(dense)
    finally:
        if borrowed is not None:
            borrowed.give_back()


class _Constant(Function):
    """Passes a decoded weight on, and refuses second derivatives of it instead of leaving them out."""

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


_ANCHOR = torch.zeros((), requires_grad=True)  # lets autograd record `_Constant`, whose weight is a constant to it


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
        """Save what the needed gradients ask for, and nothing else, unless `_Keep` has."""
        x, weight, payload = inputs[:3]
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.keeper = inputs[-1]
        if not ctx.keeper:
            ctx.save_for_backward(x if needs_weight else None, payload if needs_x else None)
        ctx.shape, ctx.dtype, ctx.fixed, ctx.trains = weight.shape, weight.dtype, False, needs_weight


class _Linear(_Product):
    @staticmethod
    def forward(x: Any, weight: Any, payload: Any, bias: Any, compute: torch.dtype, keeper: Any) -> torch.Tensor:
        return _on_dense(payload, weight, compute, lambda dense: F.linear(x, dense, bias))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, payload = (ctx.keeper[0] if ctx.keeper else ctx).saved_tensors
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        flat = gradient.flatten(0, -2)
        to_x = None
        if needs_x:
            to_x = _on_dense_again(ctx, payload, flat, flat.mm).view(*gradient.shape[:-1], ctx.shape[1])
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
        return _on_dense(payload, weight, compute, lambda dense: torch.addmm(bias, x, dense))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, payload = (ctx.keeper[0] if ctx.keeper else ctx).saved_tensors
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        to_x = _on_dense_again(ctx, payload, gradient, lambda dense: gradient.mm(dense.t())) if needs_x else None
        to_weight = x.t().mm(gradient).to(ctx.dtype) if needs_weight else None
        return to_x, to_weight, None, gradient.sum(0) if needs_bias else None, None, None


class _Conv(Function):
    @staticmethod
    def forward(x: Any, weight: Any, payload: Any, bias: Any, compute: torch.dtype, geometry: Any) -> torch.Tensor:
        stride, padding, dilation, groups = geometry
        rest = (stride, padding, dilation, False, [0] * len(stride), groups)
        return _on_dense(payload, weight, compute, lambda dense: torch.convolution(x, dense, bias, *rest))

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
        rest = ([ctx.shape[0]], stride, padding, dilation, False, [0] * len(stride), groups, wanted)
        to_x, to_weight, to_bias = _on_dense_again(
            ctx, payload, gradient, lambda dense: torch.ops.aten.convolution_backward(gradient, x, dense, *rest)
        )
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


# ---- decoding, without the dispatcher where nothing observes it: its microseconds count at one token at a time -------


def read(payload: torch.Tensor, shape: list[int] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The operator `decode`."""
    if type(payload) is torch.Tensor and not _is_watched():
        return _decoded(payload, "forward")
    weight: torch.Tensor = decode(payload, shape, dtype)
    return weight


def multiply(
    x: torch.Tensor, payload: torch.Tensor, shape: list[int] | torch.Size, bias: torch.Tensor | None
) -> torch.Tensor:
    """The operator `linear_fixed`."""
    plain = (torch.Tensor, torch.nn.Parameter, type(None))
    if all(type(tensor) in plain for tensor in (x, payload, bias)) and not _is_watched():
        return _linear_fixed(x, payload, shape, bias)
    result: torch.Tensor = linear_fixed(x, payload, shape, bias)
    return result


def borrow(payload: torch.Tensor, direction: str) -> BorrowedBuffer | None:
    """Borrow a weight that was decoded ahead of time on a device, in memory that layers share."""
    # For kernels only, which keep neither the weight nor a view of it. Autograd, compilers and tracers may keep it, and
    # so get one with memory of its own.
    if torch.compiler.is_compiling() or not prefetch.open_blocks:
        return None
    if not device.handles(payload) or _is_watched() or torch.is_grad_enabled():
        return None
    return prefetch.open_blocks[-1].lend(payload, direction)


def _is_watched() -> bool:
    """Whether a compiler, a tracer, a dispatch mode or a function transform must see every operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def _decoded(payload: torch.Tensor, direction: str) -> torch.Tensor:
    if not prefetch.open_blocks or device.handles(payload) or not payload.is_cpu:
        return decode_payload(payload)
    return prefetch.open_blocks[-1].take(payload, direction)


def _gathered_rows(payload: torch.Tensor, shape: list[int], dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    """Rows of the weight, decoding only the chunks that hold them; many of them, or on a device, the whole weight."""
    if device.handles(payload):  # to know which chunks are touched is to wait for the device
        borrowed = borrow(payload, "forward")
        try:
            return F.embedding(ids, decode_payload(payload) if borrowed is None else borrowed.weight)
        finally:
            if borrowed is not None:
                borrowed.give_back()
    local, wanted, result = payload.cpu(), ids.reshape(-1).cpu(), (*ids.shape, *shape[1:])
    if not wanted.numel():
        return torch.empty(result, dtype=dtype, device=payload.device)
    rows, places = torch.unique(wanted, return_inverse=True)
    if int(rows[0]) < 0 or int(rows[-1]) >= shape[0]:
        raise IndexError(f"index out of range: rows {int(rows[0])} to {int(rows[-1])} of an embedding of {shape[0]}")
    blob = blob_of(local)
    chunk_rows = max(1, (1 << codec.info(blob).chunk_log2) * shape[0] // max(1, math.prod(shape)))
    # Rows that lie closer together than a chunk are decoded in one go, with what is between them.
    breaks = (rows.diff() > chunk_rows).nonzero().reshape(-1) + 1
    runs = [(int(run[0]), int(run[-1]) + 1) for run in torch.tensor_split(rows, breaks)]
    if sum(stop - start for start, stop in runs) * 2 > shape[0]:
        return F.embedding(wanted, codec.decode(blob)).reshape(result).to(payload.device)
    table = torch.cat([codec.decode_rows(blob, start, stop) for start, stop in runs])
    starts = torch.tensor([start for start, _ in runs])
    offsets = torch.tensor([0] + [stop - start for start, stop in runs[:-1]]).cumsum(0) - starts
    of_row = torch.searchsorted(starts, rows, right=True) - 1
    return F.embedding((rows + offsets[of_row])[places], table).reshape(result).to(payload.device)


def _decoded_fixed(payload: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return fixed_products.decode(payload, shape[0], shape[1])


def _linear_fixed(x: torch.Tensor, payload: torch.Tensor, shape: Any, bias: torch.Tensor | None) -> torch.Tensor:
    return fixed_products.linear(x, payload, shape[0], shape[1], bias)


# ---- operators -------------------------------------------------------------------------------------------------------


def _like_weight(payload: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return payload.new_empty(shape, dtype=dtype)


def _like_rows(payload: torch.Tensor, shape: list[int], dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    return payload.new_empty((*ids.shape, *shape[1:]), dtype=dtype)


def _like_product(x: torch.Tensor, payload: torch.Tensor, shape: list[int], bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


_library = torch.library.Library("netweight", "DEF")  # type: ignore[no-untyped-call]
_WEIGHT = "(Tensor payload, SymInt[] shape, ScalarType dtype)"
for _name, _arguments, _run, _fake in (
    ("decode", _WEIGHT, lambda payload, shape, dtype: _decoded(payload, "forward"), _like_weight),
    ("decode_backward", _WEIGHT, lambda payload, shape, dtype: _decoded(payload, "backward"), _like_weight),
    ("gather_rows", _WEIGHT.replace(")", ", Tensor ids)"), _gathered_rows, _like_rows),
    ("decode_fixed", _WEIGHT, _decoded_fixed, _like_weight),
    ("decode_fixed_backward", _WEIGHT, _decoded_fixed, _like_weight),
    ("linear_fixed", "(Tensor x, Tensor payload, SymInt[] shape, Tensor? bias)", _linear_fixed, _like_product),
):
    _library.define(f"{_name}{_arguments} -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"netweight::{_name}", _fake, lib=_library)

# (payload: U8 of shape (capacity,), shape, dtype) -> dense weight of that shape and dtype. The operators for the
# backward pass do the same under another name: a compiler that sees one operator twice with the same input keeps the
# first result, and every dense weight would live until the backward pass.
decode = torch.ops.netweight.decode.default
decode_backward = torch.ops.netweight.decode_backward.default
decode_fixed = torch.ops.netweight.decode_fixed.default
decode_fixed_backward = torch.ops.netweight.decode_fixed_backward.default
# (payload, shape, dtype, ids: integers of any shape) -> rows of the weight, of shape (*ids.shape, *shape[1:])
gather_rows = torch.ops.netweight.gather_rows.default
# (x: (..., columns), payload, shape (rows, columns), bias: (rows,) or None) -> (..., rows)
linear_fixed = torch.ops.netweight.linear_fixed.default
