"""Activations that wait for the backward pass compressed, bit for bit.

Autograd keeps tensors for the backward pass; `compress_activations` keeps their bytes compressed instead. With
`torch.utils.checkpoint` it compresses what a checkpoint keeps, its inputs; `compress_recomputed` compresses what the
checkpoint computes again, which is the larger part. This goes beyond NeuZip, which compresses weights alone.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from netweight import codec
from netweight.errors import Unsupported, UsageError
from netweight.methods.compress.runtime.cuda import LENGTH
from netweight.methods.compress.runtime.storage import blob_of, pack, threads_for

# Smaller tensors are not compressed: there are many of them, and little would be saved.
_SMALL = 1 << 16
# If the result is larger than this share of a tensor's bytes, the saving is not worth the decoding.
_PAYS = 0.75
_SAMPLE = 4096  # numbers
# Numbers that are encoded at a time.
_PIECE = 1 << 19
# The newest tensor stays uncompressed, because the backward pass begins with it.
_NEWEST = 1
_Pack = Callable[[Any], Any]


class _SavedMemory:
    """The values of one piece of memory: as they are at first, compressed when newer ones have come."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._values: torch.Tensor | None = tensor.detach().as_strided((tensor.numel(),), (1,))
        self._version = tensor._version
        self._payloads: list[torch.Tensor] = []
        self._count, self._dtype = tensor.numel(), tensor.dtype

    def compress(self) -> None:
        if self._values is None or self._values._version != self._version:
            return
        most = _PAYS * self._values.nbytes
        # The encoder needs additional memory of the size of a piece.
        for piece in torch.split(self._values, _PIECE):
            blob = codec.encode(piece, threads=threads_for(piece.nbytes))
            self._payloads.append(pack(blob, LENGTH + len(blob)))
            most -= len(blob)
            if most < 0:
                self._payloads.clear()
                return
        self._values = None

    def values(self) -> torch.Tensor:
        if self._values is not None:
            # With such hooks, autograd itself does not check this.
            if self._values._version != self._version:
                raise UsageError(
                    f"A tensor of {self._count} numbers ({self._dtype}), which the backward pass needs, was changed in "
                    "place after it was saved.",
                    cure="Make a new tensor instead of changing it, or leave compress_activations out to learn from "
                    "torch.autograd.set_detect_anomaly(True) which operation saved it.",
                )
            return self._values
        # Not from the codec's pool, which keeps what is freed: these come in other sizes than weights.
        values = torch.empty(self._count, dtype=self._dtype)
        for payload, piece in zip(self._payloads, torch.split(values, _PIECE), strict=True):
            codec.decode_into(blob_of(payload), piece, threads=threads_for(piece.nbytes))
        return values


class _Packed:
    """Replacement of a saved tensor: its values, and its view of them."""

    # A checkpoint reads this attribute of the tensors that it stores, and their shape, dtype and device.
    requires_grad = False

    def __init__(self, tensor: torch.Tensor, memory: _SavedMemory) -> None:
        self.memory = memory
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.stride = tensor.stride()

    def dense(self) -> torch.Tensor:
        values = self.memory.values()
        return values.as_strided(self.shape, self.stride, values.storage_offset())


class _Packing:
    """Packs tensors: the same memory once, however often autograd saves it, and the newest last."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[StorageWeakRef, weakref.ref[_SavedMemory]]] = {}
        self._newest: deque[weakref.ref[_SavedMemory]] = deque()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Packed:
        return _Packed(tensor, self._memory_of(tensor)) if _worth_trying(tensor) else tensor

    def _memory_of(self, tensor: torch.Tensor) -> _SavedMemory:
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.numel(), tensor.dtype, tensor._version)
        if key in self._known:
            copy = self._known[key][1]()
            if copy is not None:
                return copy
        copy = _SavedMemory(tensor)
        # The reference to the storage keeps its address from being used again as long as the entry is there, and the
        # entry goes with what is kept: a block may be as long as a whole training.
        forget = weakref.finalize(copy, self._known.pop, key, None)
        forget.atexit = False
        self._known[key] = StorageWeakRef(storage), weakref.ref(copy)  # type: ignore[no-untyped-call]
        self._newest.append(weakref.ref(copy))
        if len(self._newest) > _NEWEST:
            oldest = self._newest.popleft()()
            if oldest is not None:
                oldest.compress()
        return copy


def _worth_trying(tensor: torch.Tensor) -> bool:
    return (
        # Parameters are not compressed here, and compressed weights already are.
        type(tensor) is torch.Tensor
        and tensor.is_floating_point()
        and tensor.is_cpu
        and tensor.nbytes >= _SMALL
        and not isinstance(tensor._base, torch.nn.Parameter)
        and torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
        and (tensor.itemsize == 2 or (tensor.dtype == torch.float32 and _is_widened(tensor)))
    )


def _is_widened(tensor: torch.Tensor) -> bool:
    """Return whether fp32 numbers look like bf16 made wider; others save less than a fifth."""
    sample = tensor.detach().as_strided((min(tensor.numel(), _SAMPLE),), (1,))
    return torch.equal(sample, sample.bfloat16().float())


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _unpacked(saved: torch.Tensor | _Packed) -> torch.Tensor:
    return saved.dense() if isinstance(saved, _Packed) else saved


@contextmanager
def compress_activations() -> Iterator[None]:
    """Compress the tensors that autograd saves in this block, bit for bit, until the backward pass uses them.

    Put the forward pass and the loss into the block; the backward pass may follow outside. Gradients are the same to
    the last bit. Activations of 16 bits take about two thirds of their memory, fp32 ones that were bf16 before a third.
    Parameters, inputs, small tensors, other fp32, noise and tensors that are not on the CPU are kept as they are.
    Checkpoints inside the block keep their inputs compressed; see `compress_recomputed` for what they compute again.

    Raises:
        UsageError: In the backward pass: a tensor that it needs was changed in place while it was not compressed yet.

    Examples:
        >>> with netweight.compress_activations():  # doctest: +SKIP
        ...     loss = model(**batch).loss
        >>> loss.backward()  # doctest: +SKIP
    """
    packing = _Packing()
    # A leaf is kept alive by its owner anyway.
    with saved_tensors_hooks(lambda tensor: tensor if tensor.is_leaf else packing.pack(tensor), _unpacked):
        yield


def compress_recomputed() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Return a `context_fn` for `torch.utils.checkpoint.checkpoint` that compresses recomputed activations.

    A checkpoint computes its activations a second time when the backward pass comes to it, and holds them until they
    are used. With this it holds them compressed; each is decoded when it is used, and let go.

    Returns:
        Contexts for the first computation and for those that follow, as torch asks for.

    Raises:
        Unsupported: On use, outside of a checkpoint with `use_reentrant=False`.

    Examples:
        >>> checkpoint(layer, x, use_reentrant=False, context_fn=netweight.compress_recomputed)  # doctest: +SKIP
        >>> model.activation_checkpointing_enable(  # doctest: +SKIP
        ...     {"use_reentrant": False, "context_fn": netweight.compress_recomputed}
        ... )
    """
    return _InCheckpoint(lambda: _as_it_is), _InCheckpoint(lambda: _Packing().pack)


class _InCheckpoint(AbstractContextManager[None]):
    """Hooks in front of the checkpoint's own; entered again for every time it computes."""

    def __init__(self, packing: Callable[[], _Pack]) -> None:
        self._packing = packing

    def __enter__(self) -> None:
        note, find = _checkpoint_hooks()
        pack = self._packing()
        self._hooks = saved_tensors_hooks(lambda tensor: note(pack(tensor)), lambda saved: _unpacked(find(saved)))
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)


def _checkpoint_hooks() -> tuple[_Pack, _Pack]:
    """The hooks with which the checkpoint around notes and finds what was saved; ours run in front of them."""
    hooks: tuple[_Pack, _Pack] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if hooks is None or not hooks[0].__module__.startswith("torch.utils.checkpoint"):
        raise Unsupported(
            "compress_recomputed works only inside a checkpoint that is not reentrant.",
            cure="Pass it as checkpoint(..., use_reentrant=False, context_fn=netweight.compress_recomputed).",
        )
    return hooks
