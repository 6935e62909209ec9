"""Computation of layers with a compressed weight: decode, run the dense kernel, discard; decode again going backward.

`linear`, `addmm`, `conv` and `embedding` stand in for torch's own when the weight is compressed. Outputs and gradients
are those of the dense weight to the last bit, because the same kernels run on the same values; where that is not sure
(odd strides, vectors) the function returns None and torch's own runs, with operators that decode one by one. What is
kept for the backward pass is the payload, never a dense weight (NeuZip, arXiv 2410.20650, section 3.2). The operators
that decode, as torch's dispatcher and compiler know them, are at the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from netweight import codec
from netweight.codec.cuda import fixed_products
from netweight.codec.fixed import MOST_INPUTS, multiply, order_of
from netweight.errors import Unsupported
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime import prefetch
from netweight.methods.compress.runtime.gradient_parts import RowsPart, collector_of, placeholder
from netweight.methods.compress.runtime.prefetch import BorrowedBuffer
from netweight.methods.compress.runtime.storage import (
    Form,
    blob_of,
    decode_here,
    decode_payload,
    fill,
    multiply_payload,
    recent,
    threads_for,
)

# ---- what stands in for torch's functions ----------------------------------------------------------------------------


def linear(x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """`torch.nn.functional.linear`, or None where torch's own must run."""
    stored = weight.stored
    if torch.is_grad_enabled() or _is_watched() or _casts(x) or torch.compiler.is_compiling():
        return _product(x, weight, bias) if _as_dense_would(x) else None
    if not _as_dense_would(x):
        here = device.is_here(stored.payload) and stored.dtype == torch.bfloat16
        last = here and bias is None and _are_last_positions(x) and stored.payload.numel() >= _LARGE
        return _product_by_tiles(x, stored.payload, stored.shape, None, fixed=stored.fixed) if last else None
    small = stored.small()
    if small is not None:
        return F.linear(x, small, bias)
    payload, shape, dtype = stored.payload, stored.shape, stored.dtype
    if stored.fixed:
        return _linear_fixed(x, payload, shape, bias)
    if device.is_here(payload) and dtype == torch.bfloat16 and payload.numel() >= _LARGE:
        # Also while weights are decoded ahead: with few rows, multiplying chunks that are in the cache is faster.
        product = _product_by_tiles(x, payload, shape, bias, fixed=False)
        if product is not None:
            return product
    if prefetch.open_blocks or not device.is_here(payload):
        result: torch.Tensor = _on_dense(payload, stored.form, dtype, lambda dense: F.linear(x, dense, bias))
        return result
    return F.linear(x, decode_here(payload, shape, dtype), bias)


def addmm(bias: torch.Tensor, x: torch.Tensor, weight: Any, **options: Any) -> torch.Tensor | None:
    """`torch.addmm` as transformers' Conv1D calls it, or None where torch's own must run."""
    plain = not options and bias.dim() == 1 and _as_dense_would(x)
    return _product(x, weight, bias, turned=True) if plain else None


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
    stored = weight.stored
    x, bias, compute = _cast(x, stored.dtype, bias)
    result: torch.Tensor = _call(_Conv, x, weight, stored.payload, bias, stored.form, compute, (*geometry, groups))
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
    stored = weight.stored
    rows = stored.shape[0]
    padding = -1 if padding_idx is None else padding_idx + rows * (padding_idx < 0)
    if max_norm is not None or sparse or not -1 <= padding < rows:
        return None
    if not torch.is_grad_enabled():
        gather: Any = _gathered_rows if type(ids) is torch.Tensor and not _is_watched() else gather_rows
        gathered: torch.Tensor = gather(stored.payload, stored.shape, stored.dtype, stored.fixed, ids)
        return gathered
    result: torch.Tensor = _Embedding.apply(  # type: ignore[no-untyped-call]
        ids, weight, stored.payload, stored.form, padding, scale_grad_by_freq
    )
    return result


def _as_dense_would(x: torch.Tensor) -> bool:
    """Return whether a product with `x` surely takes the kernels that the functions here take."""
    return (x.dim() >= 2 and x.is_contiguous()) or torch.compiler.is_compiling()


def _are_last_positions(x: torch.Tensor) -> bool:
    """Return whether these are the last positions of several sequences, which give the next tokens."""
    return x.dim() == 3 and x.shape[1] == 1 and x.stride(2) == 1


def _product(x: Any, weight: Any, bias: Any, *, turned: bool = False) -> torch.Tensor:
    stored = weight.stored
    x, bias, compute = _cast(x, stored.dtype, bias)
    payload, keeper = stored.payload, []  # type: ignore[var-annotated]
    if not torch.compiler.is_compiling() and x.requires_grad and torch.is_grad_enabled() and _saving_is_hooked():
        x = _Keep.apply(x, payload, weight.requires_grad, keeper)  # type: ignore[no-untyped-call]
    result: torch.Tensor = _call(_Linear, x, weight, payload, bias, stored.form, compute, (turned, keeper))
    return result


def _saving_is_hooked() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _casts(x: torch.Tensor) -> bool:
    return torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(x.device.type)


def _cast(x: Any, dtype: torch.dtype, bias: Any) -> Any:
    """Input and bias as autocast wants them here, and the dtype to calculate in."""
    if not _casts(x):
        return x, bias, dtype
    dtypes = [x.dtype, dtype] if bias is None else [x.dtype, dtype, bias.dtype]
    if not all(each.is_floating_point and each != torch.float64 for each in dtypes):
        return x, bias, dtype
    compute = torch.get_autocast_dtype(x.device.type)
    return x.to(compute), bias.to(compute) if bias is not None else None, compute


def _call(function: Any, x: torch.Tensor, *arguments: Any) -> Any:
    # Without gradients there is no graph to save the weight in.
    run = function.apply if torch.is_grad_enabled() else partial(function.forward, None)
    if not _casts(x):
        return run(x, *arguments)
    with torch.autocast(x.device.type, enabled=False):
        return run(x, *arguments)


# ---- forward and backward of each ------------------------------------------------------------------------------------


def _owned(result: torch.Tensor) -> torch.Tensor:
    """A result that autograd does not take for a view, so that it may be changed in place as that of a dense layer."""
    owned: torch.Tensor = torch.ops.aten._unsafe_view.default(result, result.shape)
    return owned


def _on_dense(
    payload: Any, form: Form, compute: torch.dtype, kernel: Callable[[torch.Tensor], Any], direction: str = "forward"
) -> Any:
    """Run a kernel, which keeps neither the decoded weight nor a view of it."""
    borrowed = None if form.fixed else borrow(payload, direction)
    try:
        dense = _lately(payload, form, direction) if borrowed is None else borrowed.weight
        return kernel(dense.to(compute))
    finally:
        if borrowed is not None:
            borrowed.give_back()


def _on_dense_again(ctx: Any, payload: Any, gradient: torch.Tensor, kernel: Callable[[torch.Tensor], Any]) -> Any:
    """Run a kernel of the backward pass on the weight, decoded again."""

    def constant(dense: torch.Tensor) -> Any:
        # Only a graph of the gradients themselves (create_graph) is recorded here; the decoded weight is not a part of
        # it. Transforms of torch.func do not come here: they see the weight itself.
        if torch.is_grad_enabled() and ctx.trains and not torch.compiler.is_compiling():
            dense = _Constant.apply(dense, _ANCHOR)  # type: ignore[no-untyped-call]
        return kernel(dense)

    return _on_dense(payload, ctx.form, gradient.dtype, constant, "backward")


class _Constant(Function):
    """Passes a decoded weight on, and refuses second derivatives of it instead of leaving them out."""

    @staticmethod
    def forward(ctx: Any, dense: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return dense.view_as(dense)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise Unsupported(
            "Second derivatives with respect to a compressed weight are not supported: it is a constant in the graph "
            "of its layer's gradients.",
            cure="Call netweight.decompress_(model) before; or, for second derivatives of inputs, torch.autograd.grad "
            "with these inputs, or requires_grad_(False) for the weights.",
        )


# With this tensor as an input, autograd records `_Constant`, for which the weight is a constant.
_ANCHOR = torch.zeros((), requires_grad=True)


class _Keep(Function):
    """Saves what a product needs for its backward pass, before the product is calculated."""

    # A checkpoint that calculates again stops as soon as the last tensor is saved: with this the last product of a
    # checkpoint is not calculated a second time, as that of a dense layer is not.

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, payload: Any, needs_weight: bool, keeper: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(x if needs_weight else None, payload)
        keeper.append(ctx)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, None, None, None


class _Linear(Function):
    """`linear`, or with `turned` `addmm`, whose weight has its columns where that of `linear` has its rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, payload: Any, bias: Any, form: Form, compute: torch.dtype, rest: Any
    ) -> torch.Tensor:
        (turned, keeper), (shape, dtype, fixed) = rest, form
        # Only what the needed gradients require is saved, unless `_Keep` has it.
        if ctx is not None:
            needs_x, needs_weight = ctx.needs_input_grad[:2]
            if not keeper:
                ctx.save_for_backward(x if needs_weight else None, payload if needs_x else None)
            ctx.keeper, ctx.turned, ctx.form, ctx.trains = keeper, turned, form, needs_weight
        if turned:
            return _on_dense(payload, form, compute, lambda dense: torch.addmm(bias, x, dense))  # type: ignore[no-any-return]
        decodes = _is_going_back(payload) and x.numel() > MOST_INPUTS * shape[1]
        # If a kernel can multiply with the compressed weight, nothing is decoded.
        if fixed and compute == dtype and not decodes:
            return _owned(_direct(linear_fixed, _linear_fixed, x, payload, shape, bias))
        return _owned(_on_dense(payload, form, compute, lambda dense: F.linear(x, dense, bias)))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, payload = (ctx.keeper[0] if ctx.keeper else ctx).saved_tensors
        needs_x, needs_weight, _, needs_bias = ctx.needs_input_grad[:4]
        flat, to_x, to_weight = gradient.flatten(0, -2), None, None
        if needs_x:
            to_x = _on_dense_again(ctx, payload, flat, lambda dense: flat.mm(dense.t() if ctx.turned else dense))
            to_x = to_x.view(*gradient.shape[:-1], to_x.shape[1])
        if needs_weight:
            rows = x.flatten(0, -2)
            to_weight = (rows.t().mm(flat) if ctx.turned else flat.t().mm(rows)).to(ctx.form.dtype)
        return to_x, to_weight, None, flat.sum(0) if needs_bias else None, None, None, None


class _Conv(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Any, weight: Any, payload: Any, bias: Any, form: Form, compute: torch.dtype, geometry: Any
    ) -> torch.Tensor:
        if ctx is not None:
            # The backward operator wants the input's shape even where its values do not matter: it is always kept.
            ctx.save_for_backward(x, payload)
            ctx.form, ctx.geometry, ctx.trains = form, geometry, ctx.needs_input_grad[1]
        stride, padding, dilation, groups = geometry
        rest = (stride, padding, dilation, False, [0] * len(stride), groups)
        convolved: torch.Tensor = _on_dense(
            payload, form, compute, lambda dense: torch.convolution(x, dense, bias, *rest)
        )
        return convolved

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, payload = ctx.saved_tensors
        stride, padding, dilation, groups = ctx.geometry
        needed = [ctx.needs_input_grad[i] for i in (0, 1, 3)]
        rest = ([ctx.form.shape[0]], stride, padding, dilation, False, [0] * len(stride), groups, needed)
        to_x, to_weight, to_bias = _on_dense_again(
            ctx, payload, gradient, lambda dense: torch.ops.aten.convolution_backward(gradient, x, dense, *rest)
        )
        return to_x, to_weight.to(ctx.form.dtype) if needed[1] else None, None, to_bias, None, None, None


class _Embedding(Function):
    @staticmethod
    def forward(
        ctx: Any, ids: Any, weight: Any, payload: Any, form: Form, padding: int, by_frequency: bool
    ) -> torch.Tensor:
        ctx.save_for_backward(ids)
        ctx.rest, ctx.collector = (form.shape[0], padding, by_frequency), None
        if not torch.compiler.is_compiling() and (collector := collector_of(weight)) is not None:
            collector.embeddings += 1
            ctx.collector, ctx.weight = collector, weight
        return _owned(_direct(gather_rows, _gathered_rows, payload, *form, ids))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (ids,) = ctx.saved_tensors
        to_weight = None
        # With several embeddings, the order of the additions would change the result.
        if ctx.collector is not None and ctx.collector.embeddings == 1:
            to_weight = placeholder(ctx.weight, _rows_part(gradient, ids, *ctx.rest), ctx.collector)
        if to_weight is None:
            to_weight = torch.ops.aten.embedding_dense_backward(gradient, ids, *ctx.rest)
        return None, to_weight, None, None, None, None


def _rows_part(gradient: torch.Tensor, ids: torch.Tensor, rows: int, padding: int, by_frequency: bool) -> RowsPart:
    """The gradient of an embedding's weight in the rows that were asked for, added up as that of the whole weight."""
    asked, places = torch.unique(ids, return_inverse=True)
    at = int(torch.searchsorted(asked, padding))
    padding = at if padding >= 0 and at < len(asked) and asked[at] == padding else -1
    return RowsPart(
        asked, torch.ops.aten.embedding_dense_backward(gradient, places, len(asked), padding, by_frequency), rows
    )


# ---- decoding, without the dispatcher where nothing observes it: its microseconds count at one token at a time -------

_PLAIN = frozenset({torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, tuple, list, bool, type(None)})


def _direct(operator: Any, implementation: Callable[..., torch.Tensor], *arguments: Any) -> torch.Tensor:
    """Run an operator, without the dispatcher where nothing observes it."""
    plain = _PLAIN.issuperset(map(type, arguments)) and not _is_watched()
    result: torch.Tensor = (implementation if plain else operator)(*arguments)
    return result


def read(payload: torch.Tensor, form: Form, direction: str = "forward") -> torch.Tensor:
    """The operator `decode`, or `decode_backward`."""
    if direction == "forward":
        return _direct(decode, _decode_forward, payload, *form)
    return _direct(decode_backward, _decode_backward, payload, *form)


def _is_going_back(payload: torch.Tensor) -> bool:
    """Return whether a backward pass is running outside compilers and transforms; it may recompute a checkpoint."""
    if torch._C._current_graph_task_id() == -1 or torch.compiler.is_compiling() or type(payload) is not torch.Tensor:
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    return device.handles(payload) or (payload.is_cpu and not prefetch.open_blocks)


def _lately(payload: torch.Tensor, form: Form, direction: str) -> torch.Tensor:
    """The weight by an operator, unless the backward pass at work has it yet."""
    if not _is_going_back(payload):
        return read(payload, form, direction)
    nbytes = math.prod(form.shape) * form.dtype.itemsize
    return recent(payload.device).of(payload, lambda: read(payload, form, direction), nbytes)


def make_room(payload: torch.Tensor, nbytes: int) -> None:
    """Let weights go that the backward pass at work has kept, before another is decoded that it will not keep."""
    if _is_going_back(payload):
        recent(payload.device).make_room(nbytes, payload.device)


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
    """Return whether a compiler, a dispatch mode or a function transform must see every operator."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def _decoded(payload: torch.Tensor, shape: Any, dtype: torch.dtype, fixed: bool, *, direction: str) -> torch.Tensor:
    if fixed or not prefetch.open_blocks or not device.is_here(payload):
        return decode_payload(payload, shape, dtype, fixed)
    return prefetch.open_blocks[-1].take(payload, shape, dtype, direction)


_decode_forward, _decode_backward = partial(_decoded, direction="forward"), partial(_decoded, direction="backward")


def _gathered_rows(
    payload: torch.Tensor, shape: Any, dtype: torch.dtype, fixed: bool, ids: torch.Tensor
) -> torch.Tensor:
    """Rows of the weight, decoding only the chunks that hold them, or for many of them the whole weight."""
    there = device.decoder_of(payload.device) if device.handles(payload) else None
    if fixed:
        status = None if there is None else there.status.kernels
        return fixed_products.gather_rows(payload, shape[0], shape[1], ids, status)
    if there is not None:
        some = there.gather(payload, ids)
        if some is not None:
            return some
        borrowed = borrow(payload, "forward")
        try:
            weight = there.weight(payload) if borrowed is None else borrowed.weight
            return weight.index_select(0, ids.reshape(-1)).view(*ids.shape, *shape[1:])
        finally:
            if borrowed is not None:
                borrowed.give_back()
    local, count, width = payload if payload.is_cpu else payload.cpu(), ids.numel(), math.prod(shape[1:])
    blob, result = blob_of(local), (*ids.shape, *shape[1:])
    if count == 1:
        first = _checked(int(ids), shape) * width
        # A row may be one of many experts.
        threads = threads_for(local.numel() // shape[0])
        row = fill(torch.empty(result, dtype=dtype), local, first, first + width, threads=threads)
        return row if payload.is_cpu else row.to(payload.device)
    indices = ids.cpu()
    rows, places = torch.unique(indices, return_inverse=True)
    runs = _runs(rows.tolist(), max(1, (1 << _chunk_log2(blob)) // max(1, width))) if count else []
    for start, stop in runs:
        _checked(start, shape), _checked(stop - 1, shape)
    if sum(stop - start for start, stop in runs) * 2 > shape[0]:
        return F.embedding(indices, decode_here(local, shape, dtype)).to(payload.device)
    table = torch.empty((len(rows), *shape[1:]), dtype=dtype)
    for start, stop in runs:
        inside = (rows >= start) & (rows < stop)
        part = torch.empty((stop - start, *shape[1:]), dtype=dtype)
        table[inside] = fill(part, local, start * width, stop * width)[rows[inside] - start]
    return table[places.reshape(-1)].view(result).to(payload.device)


def _chunk_log2(blob: memoryview) -> int:
    """Binary logarithm of the numbers per chunk; see docs/format.md."""
    return 18 if codec.is_lossy(blob) else blob[6]


def _checked(row: int, shape: Any) -> int:
    if not 0 <= row < shape[0]:
        raise IndexError(f"index out of range: row {row} of an embedding of {shape[0]}")
    return row


def _runs(rows: list[int], near: int) -> list[tuple[int, int]]:
    """Stretches of ascending rows that are decoded in one go, with what is between: those nearer than a chunk."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and row - runs[-1][1] < near:
            runs[-1] = (runs[-1][0], row + 1)
        else:
            runs.append((row, row + 1))
    return runs


# ---- products of few rows, by tiles that are used while they are in the cache ----------------------------------------

# Below this number of bytes, starting another thread takes longer than it saves.
_LARGE = 1 << 18


def _product_by_tiles(
    x: torch.Tensor, payload: torch.Tensor, shape: Any, bias: torch.Tensor | None, *, fixed: bool
) -> torch.Tensor | None:
    """The product with a bf16 weight, or None where torch's order of adding is unknown, or the weight is rounded."""
    (rows, columns), threads = shape, torch.get_num_threads()
    inputs, plain = x.numel() // columns, bias is None or bias.is_contiguous()
    if not 0 < inputs <= MOST_INPUTS or not plain:
        return None
    if not fixed_products.fit(x, bias, rows, columns, payload.device):
        return None
    if not fixed and codec.is_lossy(blob_of(payload)):
        return None
    order = order_of(rows, columns, inputs, threads, bias is not None, strided=not _as_dense_would(x))
    if order is None:
        return None
    flat, result = x.reshape(inputs, columns).contiguous(), torch.empty(inputs, rows, dtype=torch.bfloat16)
    if fixed:
        multiply(payload, rows, flat, bias, order, result, threads, fixed=True)
    else:
        multiply_payload(payload, flat, bias, order, result, threads)
    return result.view(*x.shape[:-1], rows)


def _linear_fixed(x: torch.Tensor, payload: torch.Tensor, shape: Any, bias: torch.Tensor | None) -> torch.Tensor:
    by_tiles = payload.is_cpu and payload.numel() >= _LARGE
    product = _product_by_tiles(x, payload, shape, bias, fixed=True) if by_tiles else None
    return fixed_products.linear(x, payload, shape[0], shape[1], bias) if product is None else product


# ---- operators -------------------------------------------------------------------------------------------------------


def _like_weight(payload: torch.Tensor, shape: list[int], dtype: torch.dtype, fixed: bool) -> torch.Tensor:
    return payload.new_empty(shape, dtype=dtype)


def _like_rows(payload: torch.Tensor, shape: Any, dtype: torch.dtype, fixed: bool, ids: torch.Tensor) -> torch.Tensor:
    return payload.new_empty((*ids.shape, *shape[1:]), dtype=dtype)


def _like_product(x: torch.Tensor, payload: torch.Tensor, shape: list[int], bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


_library = torch.library.Library("netweight", "DEF")  # type: ignore[no-untyped-call]
_WEIGHT = "Tensor payload, SymInt[] shape, ScalarType dtype, bool fixed"
for _name, _arguments, _run, _fake in (
    ("decode", _WEIGHT, _decode_forward, _like_weight),
    ("decode_backward", _WEIGHT, _decode_backward, _like_weight),
    ("gather_rows", f"{_WEIGHT}, Tensor ids", _gathered_rows, _like_rows),
    ("linear_fixed", "Tensor x, Tensor payload, SymInt[] shape, Tensor? bias", _linear_fixed, _like_product),
):
    _library.define(f"{_name}({_arguments}) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"netweight::{_name}", _fake, lib=_library)

# (payload: U8 of shape (capacity,), *form) -> dense weight of its shape and dtype. The operator for the backward pass
# does the same under another name: a compiler that sees one operator twice with the same input keeps the first result,
# and every dense weight would live until the backward pass.
decode = torch.ops.netweight.decode.default
decode_backward = torch.ops.netweight.decode_backward.default
# (payload, *form, ids: integers of any shape) -> rows of the weight, of shape (*ids.shape, *shape[1:])
gather_rows = torch.ops.netweight.gather_rows.default
# (x: (..., columns), payload, shape (rows, columns), bias: (rows,) or None) -> (..., rows)
linear_fixed = torch.ops.netweight.linear_fixed.default
