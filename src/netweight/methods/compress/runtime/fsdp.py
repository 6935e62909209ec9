"""Compressed weights under FSDP2: every process holds its rows compressed, and a gather moves compressed bytes.

`torch.distributed.fsdp.fully_shard` copies rows of a weight into zeros that the weight makes (`zeros`) and calls two
functions of the pieces: `before_gather` gives what is sent, `after_gather` makes the weight of what was received. All
processes must send equally many bytes, and torch keeps a buffer of that size. So each weight has a capacity, the same
everywhere: the largest piece, found by an all-reduce, and some headroom. Pieces bring their lengths with them, so that
after a gather every process knows all of them: when a changed weight nears its capacity, all processes enlarge it alike
before the next gather of it. A piece that has outgrown the capacity already is sent in two parts, the second by a
gather of its own; nothing is ever cut off.

What is gathered on a GPU is decoded there, in one launch if every process encoded its piece on one; the host reads 32
bytes per process and gather. Not yet run on several GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch.autograd.grad_mode import _unsafe_preserve_version_counter

from netweight import codec
from netweight.errors import Unsupported
from netweight.methods.compress.runtime import cuda as device
from netweight.methods.compress.runtime.cuda import LENGTH
from netweight.methods.compress.runtime.functional import decode
from netweight.methods.compress.runtime.storage import CompressedStorage, blob_of, threads_for

# Bytes before a piece's payload: its rows, those that it holds, how it is cut, and nothing, so that it is aligned.
_FRONT = 64
_ALIGN = 64


@dataclass(eq=False)
class _Wire:
    """Form in which a weight is sent; every process derives the same one."""

    capacity: int | None = None
    """Number of bytes that each process sends; None until the processes have agreed on it."""
    dtype: torch.dtype | None = None
    """Dtype in which the weight is sent, known after the first gather; None is the weight's own."""


@dataclass(frozen=True, eq=False)
class _Sent:
    """State that `before_gather` keeps for `after_gather`."""

    wire: _Wire
    group: Any
    dtype: torch.dtype
    """Dtype in which the weight is sent, known after the first gather; None is the weight's own."""
    capacity: int
    """Number of bytes that each process sends; None until the processes have agreed on it."""
    rest: torch.Tensor | None
    """Part of this process's payload beyond the capacity."""


# ---- cutting a weight into shards ------------------------------------------------------------------------------------


def zeros(stored: CompressedStorage, shape: torch.Size, size: Any) -> CompressedStorage | None:
    """Return `weight.new_zeros(size)`: compressed if the size is that of a shard, into which FSDP2 copies its rows.

    Shards of fewer rows than others stay views of these zeros. None where `size` is that of no shard.
    """
    if len(size) != len(shape) or sum(one != other for one, other in zip(size, shape, strict=True)) > 1:
        return None
    if stored.lossy:
        raise Unsupported(
            f"A weight of shape {tuple(shape)} is stored rounded, and a shard of it would be rounded again.",
            cure="Shard a model that was compressed without mantissa_bits, or keep it whole in every process: put it "
            "into ignored_params.",
        )
    empty = torch.zeros(size, dtype=stored.dtype, device=stored.payload.device)
    fresh = CompressedStorage.of(empty, level=stored.level, chunk_log2=stored.chunk_log2)
    fresh.wire = stored.wire or _Wire()
    return fresh


def local_part(value: Any) -> Any:
    """This process's part of a tensor that is spread over processes; any other tensor itself."""
    return getattr(value, "_local_tensor", value)


def dense_shard(value: Any) -> Any:
    """A DTensor of the same shards, decoded."""
    return type(value).from_local(
        local_part(value).dense(),
        value.device_mesh,
        value.placements,
        run_check=False,
        shape=value.shape,
        stride=value.stride(),
    )


# ---- gathering -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def before_gather(stored: CompressedStorage, rows: int, mesh: Any) -> tuple[tuple[torch.Tensor], _Sent]:
    """Return what this process sends: its shard's payload in a buffer of the common size."""
    stored.own()
    # A shard that was loaded does not have a wire yet.
    wire = stored.wire = stored.wire or _Wire()
    group = mesh.get_group()
    sent = _as_sent(stored, wire)
    if wire.capacity is None:
        _refuse_resharding(wire)
        wire.capacity = _agreed(sent, group)
    buffer = sent.payload.new_zeros(wire.capacity)
    cut = device.cut_of(sent.payload, tuple(sent.shape))
    buffer[:24].view(torch.int64).copy_(torch.tensor([rows, sent.shape[0], cut]))
    fitting = min(sent.payload.numel(), wire.capacity - _FRONT)
    buffer[_FRONT : _FRONT + fitting].copy_(sent.payload[:fitting])
    rest = sent.payload[fitting:].clone() if fitting < sent.payload.numel() else None
    return (buffer,), _Sent(wire, group, sent.dtype, wire.capacity, rest)


@torch.no_grad()
def after_gather(
    stored: CompressedStorage, gathered: torch.Tensor, sent: _Sent, dtype: torch.dtype, out: torch.Tensor | None
) -> tuple[torch.Tensor, tuple[torch.Tensor]] | None:
    """Decode all shards into the weight that layers calculate with."""
    pieces = _pieces(gathered, sent)
    lengths, rows, held, cuts = _described(pieces)
    longest = max(lengths)
    if longest > sent.capacity:
        pieces = _completed(pieces, longest, sent)
    if out is None:
        dense = torch.empty((sum(rows), *stored.shape[1:]), dtype=dtype, device=gathered.device)
        _decode_all(pieces, rows, held, cuts, sent.dtype, dense)
    elif out.is_inference():
        _decode_all(pieces, rows, held, cuts, sent.dtype, out)
    else:
        # Autograd has saved this tensor; that its memory was freed and filled again is none of its business.
        with _unsafe_preserve_version_counter(out):
            _decode_all(pieces, rows, held, cuts, sent.dtype, out)
    del pieces
    _prepare_next_gather(stored, sent, dtype, longest, gathered)
    return (dense, (dense,)) if out is None else None


def _as_sent(stored: CompressedStorage, wire: _Wire) -> CompressedStorage:
    """The shard in the dtype that it is sent in: casting before the gather is what FSDP2 does with dense weights."""
    if wire.dtype is None or wire.dtype == stored.dtype:
        return stored
    dense = decode(stored.payload, *stored.form)
    return CompressedStorage.of(dense.to(wire.dtype), level=stored.level, chunk_log2=stored.chunk_log2, lasting=False)


def _agreed(sent: CompressedStorage, group: Any) -> int:
    """The capacity to begin with, by an all-reduce over the processes."""
    longest = torch.tensor([_FRONT + sent.payload.numel()], device=sent.payload.device)
    torch.distributed.all_reduce(longest, torch.distributed.ReduceOp.MAX, group=group)
    return _capacity_for(int(longest))


def _headroom(length: int) -> int:
    """Bytes to spare: one in 128, since an optimizer's step changes lengths by much less."""
    return max(length >> 7, 4 * _ALIGN)


def _capacity_for(length: int) -> int:
    return _aligned(length + _headroom(length))


def _aligned(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def _pieces(gathered: torch.Tensor, sent: _Sent) -> torch.Tensor:
    """One row of bytes per process."""
    processes = sent.group.size()
    if gathered.numel() == processes * sent.capacity:
        return gathered.view(processes, sent.capacity)
    # Another shard took this one's place, by load_state_dict(assign=True). torch has enlarged the memory, not the view.
    every = torch.empty(0, dtype=torch.uint8, device=gathered.device)
    return every.set_(gathered.untyped_storage(), 0, (processes, sent.capacity))  # type: ignore[call-overload,no-any-return]


def _described(pieces: torch.Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
    """The length of each piece in bytes, front included, its rows, those with padding, and how it is cut."""
    front = torch.cat([pieces[:, :24], pieces[:, _FRONT : _FRONT + 8]], dim=1).view(torch.int64)
    rows, held, cuts, lengths = front.t().tolist()
    return [_FRONT + LENGTH + length for length in lengths], rows, held, cuts


def _completed(pieces: torch.Tensor, longest: int, sent: _Sent) -> torch.Tensor:
    """Fetch what lies beyond the capacity. Every process comes here, since all have read the same lengths."""
    beyond = _aligned(longest - sent.capacity)
    mine = pieces.new_zeros(beyond)
    if sent.rest is not None:
        fitting = min(beyond, sent.rest.numel())
        mine[:fitting].copy_(sent.rest[:fitting])
    rests = pieces.new_empty((pieces.shape[0], beyond))
    torch.distributed.all_gather(list(rests), mine, group=sent.group)
    return torch.cat([pieces, rests], dim=1)


def _decode_all(
    pieces: torch.Tensor, rows: list[int], held: list[int], cuts: list[int], dtype: torch.dtype, dense: torch.Tensor
) -> None:
    if all(cuts) and dense.dtype == dtype and device.handles(pieces):
        _decode_together(pieces, rows, held, cuts, dense)
        return
    start = 0
    for piece, count, padded in zip(pieces, rows, held, strict=True):
        payload, part = piece[_FRONT:], dense[start : start + count]
        if count == padded and payload.is_cpu and part.dtype == dtype:
            codec.decode_into(blob_of(payload), part, threads=threads_for(part.nbytes))
        elif count:
            part.copy_(decode(payload, (padded, *part.shape[1:]), dtype, False)[:count])
        start += count


def _decode_together(
    pieces: torch.Tensor, rows: list[int], held: list[int], cuts: list[int], dense: torch.Tensor
) -> None:
    parts = dense.split(rows)  # type: ignore[no-untyped-call]
    outs = [
        part if len(part) == padded else part.new_empty((padded, *part.shape[1:]))
        for part, padded in zip(parts, held, strict=True)
    ]
    # A process may have nothing but padding.
    there = [i for i, part in enumerate(parts) if len(part)]
    payloads = [pieces[i, _FRONT:] for i in there]
    device.decoder_of(dense.device).together(payloads, [cuts[i] for i in there], [outs[i] for i in there])
    for part, out in zip(parts, outs, strict=True):
        if part is not out:
            part.copy_(out[: len(part)])


def _prepare_next_gather(
    stored: CompressedStorage, sent: _Sent, dtype: torch.dtype, longest: int, gathered: torch.Tensor
) -> None:
    """Make ready for the next gather, in every process alike."""
    wire, outputs = sent.wire, gathered._base
    # This is torch's buffer. Without it, in inference mode, the capacity does not change.
    if outputs is not None:
        capacity = _capacity_for(longest)
        if sent.dtype != dtype:
            wire.dtype = dtype
            wire.capacity = _agreed(_as_sent(stored, wire), sent.group)
        elif longest + _headroom(longest) // 4 > sent.capacity or capacity < sent.capacity - (sent.capacity >> 3):
            wire.capacity = capacity
        nbytes = sent.group.size() * (wire.capacity or 0)
        if outputs.numel() != nbytes:
            outputs.resize_(nbytes)
    # Everything is decoded. torch would keep these bytes as long as the dense weight; it takes new memory when needed.
    gathered.untyped_storage().resize_(0)


# ---- what is refused -------------------------------------------------------------------------------------------------


def refuse_flattening() -> NoReturn:
    """Refuse FSDP's first version, which would put decoded weights into one flat parameter."""
    raise Unsupported(
        "FSDP's first version cannot shard compressed weights. Nothing was sharded.",
        cure="Use its second, torch.distributed.fsdp.fully_shard; or netweight.decompress_(model) first.",
    )


def refuse_sending(operator: Any) -> NoReturn:
    """Refuse torch.distributed's operators: they send decoded copies, and write what they receive into copies, too."""
    raise Unsupported(
        f"{operator} cannot send or receive compressed weights, and so DTensor cannot distribute them. Nothing was "
        "distributed.",
        cure="Use torch.distributed.fsdp.fully_shard; or call netweight.decompress_(model) first. "
        "With accelerate, set fsdp_cpu_ram_efficient_loading to false.",
    )


def _refuse_resharding(wire: _Wire) -> None:
    """Refuse resharding over other processes after the forward pass, which only FSDP2's own objects state."""
    from torch.distributed._composable_state import _module_state_mapping

    states = [reference() for reference in _module_state_mapping.values()]
    groups = [group for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    for parameter in [parameter for group in groups for parameter in group.fsdp_params]:
        its = getattr(local_part(parameter.sharded_param), "stored", None)
        after = parameter.post_forward_mesh_info
        if its is not None and its.wire is wire and after is not None and after is not parameter.mesh_info:
            raise Unsupported(
                "Compressed weights cannot be resharded to another number of processes after the forward pass.",
                cure="Pass reshard_after_forward=True or False to fully_shard.",
            )


def refuse_columns(tensor: Any, dim: int, start: int, length: int) -> Any:
    """Refuse shards by columns: of zeros made for a shard only FSDP2 takes all columns, and fills them."""
    if dim and tensor.stored.wire is not None and length == tensor.shape[dim]:
        raise Unsupported(
            "A compressed weight can be sharded by rows only.",
            cure="Leave it out of shard_placement_fn, or call netweight.decompress_(model) before fully_shard; "
            "a model that is partly sharded must be created again.",
        )
    return NotImplemented


def refuse_pinning(tensor: Any, *_: Any, **__: Any) -> NoReturn:
    """Refuse pinned memory, which would hold decoded shards."""
    raise Unsupported(
        "Compressed weights cannot be pinned in host memory.",
        cure="Pass CPUOffloadPolicy(pin_memory=False), or leave offload_policy out.",
    )
