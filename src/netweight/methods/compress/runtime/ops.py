"""The operators that decode, known to torch's dispatcher and compiler.

`netweight::decode` and `netweight::decode_backward` do the same. They have two names because a compiler that sees one
operator twice with the same input keeps the first result: every dense weight would then live until the backward pass.
`netweight::gather_rows` decodes only the chunks that hold the rows asked for.
"""

from __future__ import annotations

import torch

from netweight import codec
from netweight.codec.cuda import fixed_products
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime import prefetch as ahead
from netweight.methods.compress.runtime.side_stream import Loan
from netweight.methods.compress.runtime.storage import blob_of, threads_for

_library = torch.library.Library("netweight", "DEF")  # type: ignore[no-untyped-call]
_TAGS = (torch.Tag.pt2_compliant_tag,)


def decode_now(payload: torch.Tensor) -> torch.Tensor:
    """Decode a payload on the spot."""
    if device.handles(payload):
        return device.decoder_of(payload.device).weight(payload)
    local = payload.cpu()
    # A weight is about half again as large as its blob.
    weight = codec.decode(blob_of(local), threads=threads_for(local.numel() * 3 // 2))
    return weight.to(payload.device)


def _decode_to(payload: torch.Tensor, direction: str) -> torch.Tensor:
    pending = ahead.current()
    if pending is None or device.handles(payload) or not payload.is_cpu:
        return decode_now(payload)
    return pending.take(payload, direction)


def _decode(payload: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return _decode_to(payload, "forward")


def _decode_backward(payload: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return _decode_to(payload, "backward")


def _decode_fake(payload: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return payload.new_empty(shape, dtype=dtype)


def _gather_rows(payload: torch.Tensor, shape: list[int], dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    if device.handles(payload):  # the whole table: to know which chunks are touched is to wait for the device
        loan = borrow(payload, "forward")
        try:
            return torch.nn.functional.embedding(ids, decode_now(payload) if loan is None else loan.weight)
        finally:
            give_back(loan)
    local, wanted = payload.cpu(), ids.reshape(-1).cpu()
    if not wanted.numel():
        return torch.empty((*ids.shape, *shape[1:]), dtype=dtype, device=payload.device)
    rows, places = torch.unique(wanted, return_inverse=True)
    if int(rows[0]) < 0 or int(rows[-1]) >= shape[0]:
        raise IndexError(f"index out of range: rows {int(rows[0])} to {int(rows[-1])} of an embedding of {shape[0]}")
    blob = blob_of(local)
    chunk_rows = max(1, _numbers_per_chunk(blob) * shape[0] // max(1, _numbers(shape)))
    # Rows that lie closer together than a chunk are decoded in one go, with what is between them.
    breaks = (rows.diff() > chunk_rows).nonzero().reshape(-1) + 1
    runs = [(int(run[0]), int(run[-1]) + 1) for run in torch.tensor_split(rows, breaks)]
    decoded = sum(stop - start for start, stop in runs)
    if decoded * 2 > shape[0]:
        return (
            torch.nn.functional.embedding(wanted, codec.decode(blob)).reshape(*ids.shape, *shape[1:]).to(payload.device)
        )
    table = torch.cat([codec.decode_rows(blob, start, stop) for start, stop in runs])
    starts = torch.tensor([start for start, _ in runs])
    offsets = torch.tensor([0] + [stop - start for start, stop in runs[:-1]]).cumsum(0) - starts
    of_row = torch.searchsorted(starts, rows, right=True) - 1
    found = torch.nn.functional.embedding((rows + offsets[of_row])[places], table)
    return found.reshape(*ids.shape, *shape[1:]).to(payload.device)


def _numbers(shape: list[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


def _numbers_per_chunk(blob: object) -> int:
    return 1 << codec.info(blob).chunk_log2  # type: ignore[arg-type]


def _gather_rows_fake(payload: torch.Tensor, shape: list[int], dtype: torch.dtype, ids: torch.Tensor) -> torch.Tensor:
    return payload.new_empty((*ids.shape, *shape[1:]), dtype=dtype)


for _name, _arguments, _run, _fake in (
    ("decode", "", _decode, _decode_fake),
    ("decode_backward", "", _decode_backward, _decode_fake),
    ("gather_rows", ", Tensor ids", _gather_rows, _gather_rows_fake),
):
    _library.define(f"{_name}(Tensor payload, SymInt[] shape, ScalarType dtype{_arguments}) -> Tensor", tags=_TAGS)  # type: ignore[no-untyped-call]
    _library.impl(_name, _run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"netweight::{_name}", _fake, lib=_library)


def is_watched() -> bool:
    """Whether a compiler, a tracer, a dispatch mode or a function transform wants to see every operator."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
    )


def read(payload: torch.Tensor, shape: list[int] | torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """`decode`, without the dispatcher where nobody watches: at one token at a time its microseconds count."""
    if type(payload) is torch.Tensor and not is_watched():
        return _decode_to(payload, "forward")
    weight: torch.Tensor = decode(payload, shape, dtype)
    return weight


def borrow(payload: torch.Tensor, direction: str) -> Loan | None:
    """Borrow a weight that was decoded ahead of time on a device, in memory that layers share."""
    # For products only, which keep neither the weight nor a view of it. Where autograd, a compiler or a tracer looks on
    # there is no loan: what they keep must have memory of its own.
    if not device.handles(payload) or is_watched() or torch.is_grad_enabled():
        return None
    pending = ahead.current()
    return None if pending is None else pending.lend(payload, direction)


def give_back(loan: Loan | None) -> None:
    """Give back what `borrow` gave, once everything that reads it was asked of the current stream."""
    if loan is not None:
        loan.give_back()


# (payload: U8 of shape (capacity,), shape, dtype) -> dense weight of that shape and dtype
decode = torch.ops.netweight.decode.default
decode_backward = torch.ops.netweight.decode_backward.default
# (payload, shape, dtype, ids: integers of any shape) -> rows of the weight, of shape (*ids.shape, *shape[1:])
gather_rows = torch.ops.netweight.gather_rows.default


_library_fixed_ops = torch.library.Library("netweight", "FRAGMENT")  # type: ignore[no-untyped-call]


def _decode_fixed_ops(payload: torch.Tensor, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    return fixed_products.decode(payload, shape[0], shape[1])


def _linear(x: torch.Tensor, payload: torch.Tensor, shape: list[int], bias: torch.Tensor | None) -> torch.Tensor:
    return fixed_products.linear(x, payload, shape[0], shape[1], bias)


def _linear_fake(x: torch.Tensor, payload: torch.Tensor, shape: list[int], bias: torch.Tensor | None) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


for _signature, _run_fixed_ops, _fake_fixed_ops in (
    ("decode_fixed(Tensor payload, SymInt[] shape, ScalarType dtype)", _decode_fixed_ops, _decode_fake),
    ("decode_fixed_backward(Tensor payload, SymInt[] shape, ScalarType dtype)", _decode_fixed_ops, _decode_fake),
    ("linear_fixed(Tensor x, Tensor payload, SymInt[] shape, Tensor? bias)", _linear, _linear_fake),
):
    _name_fixed_ops = _signature.partition("(")[0]
    _library_fixed_ops.define(f"{_signature} -> Tensor", tags=_TAGS)  # type: ignore[no-untyped-call]
    _library_fixed_ops.impl(_name_fixed_ops, _run_fixed_ops, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"netweight::{_name_fixed_ops}", _fake_fixed_ops, lib=_library_fixed_ops)


def multiply(
    x: torch.Tensor, payload: torch.Tensor, shape: list[int] | torch.Size, bias: torch.Tensor | None
) -> torch.Tensor:
    """`linear_fixed`, without the dispatcher where nobody watches."""
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
