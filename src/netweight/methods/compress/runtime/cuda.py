"""Weights whose payloads lie on a CUDA device: decoded there, checked there, encoded there.

What a payload holds is looked up once for each version of its bytes, so that a later pass waits for nothing. The first
decoding of bytes that came from outside is waited for, and refused if they are damaged. Every later one adds to a
status of the device's, which is looked at again and again without waiting (`Status`), and by `check_device`, so that
damage done in memory is reported, if some layers late. Where the kernels cannot run (`cuda.unavailable_because`) bytes
go to the CPU and the weight comes back, as for devices of other kinds. Payloads on the CPU never get here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import count
from typing import Any, final
from weakref import WeakSet

import torch

from netweight.codec import cuda
from netweight.codec.cuda import BlobLayout, LossyLayout, fixed_products
from netweight.errors import CorruptBlob, Unsupported, UsageError

# Bytes of the length at a payload's start.
LENGTH = 8
# The last value is the largest count of numbers of a small weight.
_CHUNK_LOG2, _SMALL_CHUNK_LOG2, _SMALL = 15, 14, 1 << 24
# The attribute of a payload with its version and what is known about this version.
_NOTE = "_netweight"
# Decodings between two looks at the status.
_LOOK_EVERY = 16
_DAMAGED = "Fetch or compress the model again; if that does not help, the memory of the device may be at fault."

Layout = BlobLayout | LossyLayout


def handles(payload: torch.Tensor) -> bool:
    """Return whether a payload is decoded by kernels on a CUDA device; otherwise it is decoded by the CPU."""
    # What a compiler traces is decided when it runs.
    return payload.is_cuda and (torch.compiler.is_compiling() or _kernels_run())


def multiplies_fixed(place: torch.device) -> bool:
    """Return whether products with the fixed-length form run on a device by kernels of ours."""
    return place.type == "cuda" and _kernels_run()


def no_fixed_because() -> str | None:
    """The reason for which no such product runs on a CUDA device here; None if it does."""
    return cuda.unavailable_because()


def is_here(payload: torch.Tensor) -> bool:
    """Return whether a payload is decoded by the CPU, and lies there."""
    return payload.is_cpu and not handles(payload)


def chunk_log2_of(numbers: int) -> int:
    """Binary logarithm of the numbers per chunk, for a weight of so many numbers that is encoded on a device."""
    # A warp decodes 16,384 numbers, or 8,192 of small weights, which keeps a GPU busy with single matrices at 0.25 and
    # 0.5 % more bytes (docs/gpus.md).
    return _CHUNK_LOG2 if numbers > _SMALL else _SMALL_CHUNK_LOG2


def wants_other_chunks(payload: torch.Tensor, level: str, chunk_log2: int | None) -> bool:
    """Return whether kernels would decode a weight faster if its device had encoded it: files have larger chunks."""
    return handles(payload) and level != "max" and (chunk_log2 is None or chunk_log2 > _CHUNK_LOG2)


@cache
def _kernels_run() -> bool:
    """Return whether netweight's kernels can run; warns once if they cannot."""
    reason = cuda.unavailable_because()
    if reason is not None:
        warnings.warn(
            "Compressed weights on CUDA devices are decoded on the CPU and copied, many times slower than by kernels. "
            f"{reason}",
            RuntimeWarning,
            stacklevel=3,
        )
    return reason is None


# ---- what is known of payloads ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class _PayloadFacts:
    """Properties of one version of a payload's bytes, shared by its copies on other devices."""

    layout: Layout | None = None
    checked: bool = False
    """True if the bytes passed the check at an earlier decoding, or were encoded here."""


def version_of(payload: torch.Tensor) -> int | None:
    """Return how often the bytes were written; None if torch does not count."""
    return None if payload.is_inference() else payload._version


def _found(payload: torch.Tensor) -> _PayloadFacts | None:
    version, note = getattr(payload, _NOTE, (None, None))
    return note if version is not None and version == version_of(payload) else None


def _note(payload: torch.Tensor, note: _PayloadFacts) -> _PayloadFacts:
    setattr(payload, _NOTE, (version_of(payload), note))
    return note


def copied(payload: torch.Tensor, source: torch.Tensor) -> None:
    """Note that a payload was copied from another one, from or to a device: what is found out of one holds for both."""
    # So weights that are offloaded to the CPU between passes are looked up and checked in the first pass only.
    note = _found(source)
    if note is None:
        note = _note(source, _PayloadFacts())
    if note.layout is not None and handles(payload):
        note = _PayloadFacts(_layout_on(note.layout, payload.device), note.checked)
    _note(payload, note)


def _layout_on(layout: Layout, place: torch.device) -> Layout:
    """A layout whose tensors are on a device, so that decoding there copies nothing."""
    if isinstance(layout, BlobLayout):
        return layout if layout.starts.device == place else replace(layout, starts=layout.starts.to(place))
    parts: dict[str, Any] = {
        name: None if part is None else replace(part, layout=_layout_on(part.layout, place))
        for name in ("words", "normalizers", "gaps", "exact")
        for part in [getattr(layout, name)]
    }
    return replace(layout, **parts)


def lossy(payload: torch.Tensor) -> bool | None:
    """Return whether a payload holds a rounded weight; None if it was not inspected yet."""
    note = _found(payload)
    return None if note is None or note.layout is None else isinstance(note.layout, LossyLayout)


def cut_of(payload: torch.Tensor, shape: tuple[int, ...]) -> int:
    """The binary logarithm of the numbers per chunk of a weight of a shape, if a device need know no more; else 0."""
    note = _found(payload)
    layout = None if note is None else note.layout
    known = isinstance(layout, BlobLayout) and not layout.cpu_modes and layout.shape == shape
    return layout.chunk_log2 if isinstance(layout, BlobLayout) and known else 0


def wrote(payload: torch.Tensor, size: int, like: torch.Tensor, chunk_log2: int | None, level: str) -> None:
    """Note that a payload holds a blob now that was encoded on its device from a tensor."""
    layout = cuda.layout_of_encoded(payload[LENGTH : LENGTH + size], like, level=level, chunk_log2=chunk_log2)
    _note(payload, _PayloadFacts(layout, checked=True))


# ---- the status of a device ------------------------------------------------------------------------------------------


# An event of torch.cuda; its `query` returns whether the device has reached it.
Event = Any


@final
class Status:
    """Two words on a device, zero as long as every decoding was sound, and a copy on the host that runs behind."""

    # The first word is for kernels, which add to it atomically. The second is for torch's operations, which cannot, but
    # can count.

    def __init__(self, device: torch.device, mark: Callable[[], Event]) -> None:
        # These tensors are also written outside of inference mode.
        with torch.inference_mode(False):
            self._words = torch.zeros(2, dtype=torch.int32, device=device)
            self._seen = torch.zeros(2, dtype=torch.int32, pin_memory=device.type == "cuda")
            self._first = torch.zeros(1, dtype=torch.int64, device=device)
        self._device, self._mark = device, mark
        self._coming: Event | None = None
        self._since = 0

    @property
    def kernels(self) -> torch.Tensor:
        """The word that kernels add to."""
        return self._words[:1]

    def count(self, damaged: torch.Tensor) -> None:
        """Count a tensor of one bool that says whether something is damaged."""
        self._words[1:].index_add_(0, self._first, damaged.to(torch.int32).view(1))

    def look(self) -> None:
        """Look, without waiting, at what was copied a while ago, and copy again now and then."""
        self._since += 1
        if self._coming is not None:
            if self._coming.query():
                self._coming = None
                self._refuse(self._seen)
        elif self._since >= _LOOK_EVERY:
            self._since = 0
            self._seen.copy_(self._words, non_blocking=True)
            self._coming = self._mark()

    def check(self) -> None:
        """Wait for the device and look."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._coming = None
        self._refuse(self._words.cpu())

    def _refuse(self, words: torch.Tensor) -> None:
        values = words.tolist()
        if not any(values):
            return
        self._words.zero_()
        if values == [cuda.NO_SUCH_ROW, 0]:
            raise IndexError(
                f"index out of range: an embedding on {self._device} was asked for a row "
                "that it does not have. Results "
                "since the last check are wrong."
            )
        raise CorruptBlob(
            f"A compressed weight on {self._device} was found damaged after it had been decoded well before. Results "
            "since the last check are wrong.",
            cure=_DAMAGED,
        )


_SLOTS, _POLLS = 1024, 1 << 14
_UNKNOWN = bytes([0xFF]) * 8


@final
class PendingNumber:
    """A number that a device will find out. To call it waits for what was enqueued before it was made, no more."""

    # The device writes it into the host's memory, which is looked at until it changes: an event takes longer.

    def __init__(self, number: torch.Tensor) -> None:
        self._number, self._memory = number, None
        if number.is_cuda:
            slots, turn = _answers()
            slot = slots[next(turn) % _SLOTS][: number.element_size()]
            self._memory = slot.numpy().data
            self._memory[:] = _UNKNOWN[: len(self._memory)]
            self._stream = torch.cuda.current_stream(number.device)
            self._number = slot.view(number.dtype)
            self._number.copy_(number.view(1), non_blocking=True)

    def __call__(self) -> float:
        if self._memory is not None:
            polls = 0
            while self._memory == _UNKNOWN[: len(self._memory)] and polls < _POLLS:
                polls += 1
            # A failed device raises its error here, and these bits may be those of a number.
            if polls == _POLLS:
                self._stream.synchronize()
        return float(self._number)


@cache
def _answers() -> tuple[torch.Tensor, Iterator[int]]:
    with torch.inference_mode(False):
        return torch.empty(_SLOTS, 8, dtype=torch.uint8, pin_memory=True), count()


# ---- decoding --------------------------------------------------------------------------------------------------------


@final
class Decoder:
    """Decodes the payloads of one device."""

    def __init__(self, status: Status) -> None:
        # Decodings of bytes that are known to be intact add to this status.
        self.status = status

    def weight(self, payload: torch.Tensor, memory: torch.Tensor | None = None) -> torch.Tensor:
        """Decode a payload on the device's current stream."""
        note = self._look_up(payload)
        layout: Any = note.layout
        out = None
        if memory is not None:
            out = memory[: layout.nbytes].view(layout.dtype).view(layout.shape)
        return self._decoded(payload[LENGTH : LENGTH + layout.size], layout, note, out)

    def gather(self, payload: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
        """Rows of a weight, from the chunks that hold them; None where the whole weight must be, or may as well be."""
        note = self._look_up(payload)
        if not note.checked or not isinstance(note.layout, BlobLayout):
            return None
        blob = payload[LENGTH : LENGTH + note.layout.size]
        return cuda.decode_rows(blob, note.layout, ids, self.status.kernels)

    def together(self, payloads: Sequence[torch.Tensor], cuts: Sequence[int], outs: Sequence[torch.Tensor]) -> None:
        """Decode payloads of which `cut_of` is known into `outs`, in one launch, which is not waited for."""
        layouts = [
            cuda.layout_of_encoded(payload[LENGTH:], out, chunk_log2=cut)
            for payload, cut, out in zip(payloads, cuts, outs, strict=True)
        ]
        cuda.DecodePlan([payload[LENGTH:] for payload in payloads], layouts, outs).decode(self.status.kernels)
        self.status.look()

    def nbytes(self, payload: torch.Tensor) -> int | None:
        """Bytes of a weight that can be decoded without waiting for the device; None if it cannot."""
        note = _found(payload)
        if note is None or note.layout is None or not note.checked:
            return None
        return note.layout.nbytes

    def _look_up(self, payload: torch.Tensor) -> _PayloadFacts:
        note = _found(payload) or _note(payload, _PayloadFacts())
        if note.layout is None:
            _refuse_capture(payload)
            note.layout = _layout_of(payload)
        return note

    def _decoded(
        self, blob: torch.Tensor, layout: Layout, note: _PayloadFacts, out: torch.Tensor | None
    ) -> torch.Tensor:
        if not note.checked:
            _refuse_capture(blob)
        status = self.status.kernels if note.checked else None
        try:
            if isinstance(layout, BlobLayout):
                weight = cuda.decode(blob, layout, out=out, status=status)
            else:
                weight = self._rounded(blob, layout, out, status)
        except torch.OutOfMemoryError as error:
            error.add_note(
                f"netweight was decoding a weight of shape {layout.shape}, which takes {layout.nbytes >> 20} MiB until "
                "its layer is done. Free memory on the device, use smaller batches, or place layers on other devices."
            )
            raise
        note.checked = True
        if not _is_capturing(blob):
            self.status.look()
        return weight

    def _rounded(
        self, blob: torch.Tensor, layout: LossyLayout, out: torch.Tensor | None, status: torch.Tensor | None
    ) -> torch.Tensor:
        weight, damaged = cuda.decode_lossy(blob, layout, partial(cuda.decode, status=status))
        if status is not None:
            self.status.count(damaged)
        elif bool(damaged):
            raise CorruptBlob("Cannot decode a blob: a code word or an offset in it is out of range.", cure=_DAMAGED)
        return weight if out is None else out.copy_(weight)


def _layout_of(payload: torch.Tensor) -> Layout:
    """Look at a payload; waits for the device."""
    start = payload[: LENGTH + 3].cpu()
    size = int.from_bytes(start[:LENGTH].numpy().tobytes(), "little")
    if start.numel() < LENGTH or size > payload.numel() - LENGTH:
        raise CorruptBlob(
            f"A compressed weight on {payload.device} states a length of {size} bytes and has {payload.numel()}.",
            cure=_DAMAGED,
        )
    blob = payload[LENGTH : LENGTH + size]
    if start[LENGTH:].numpy().tobytes() == b"NWL":
        return cuda.lossy_layout_of(blob)
    return cuda.layout_of(blob)


def _is_capturing(tensor: torch.Tensor) -> bool:
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _refuse_capture(payload: torch.Tensor) -> None:
    if _is_capturing(payload):
        raise UsageError(
            "A compressed weight must be checked before a CUDA graph can decode it.",
            cure="Run the model once before capturing the graph.",
        )


_decoders: dict[torch.device, Decoder] = {}


def decoder_of(device: torch.device) -> Decoder:
    """The decoder of a device on which kernels run."""
    decoder = _decoders.get(device)
    if decoder is None:
        status = Status(device, lambda: torch.cuda.current_stream(device).record_event())
        decoder = _decoders.setdefault(device, Decoder(status))
    return decoder


def check_device(device: torch.device | str | int | None = None) -> None:
    """Wait for a device, and raise an error if a compressed weight on it was damaged since the last check.

    The first decoding of a weight is always waited for and checked. Later ones are looked at some layers late, so that
    layers need not wait; call this where a result must be certain before it is used. `decode_ahead` does when it ends.

    Args:
        device: A CUDA device; None checks all that decoded something.

    Raises:
        CorruptBlob: A weight was damaged in the device's memory. What was calculated since the last check is wrong.
    """
    only = None if device is None else torch.device(device)
    for key, decoder in list(_decoders.items()):
        if only is None or only in (key, torch.device(key.type)):
            decoder.status.check()


# ---- encoding --------------------------------------------------------------------------------------------------------


_readers: WeakSet[Any] = WeakSet()


def add_reader(reader: Any) -> None:
    """Register what reads payloads at times of its own: `reader.let_go(payload)` is called before one is written."""
    _readers.add(reader)


def about_to_write(payload: torch.Tensor) -> None:
    """Say that the current stream will write a payload."""
    for reader in list(_readers):
        reader.let_go(payload)


def encode_into(
    weight: torch.Tensor, payload: torch.Tensor, level: str, chunk_log2: int | None, *, fixed: bool
) -> Callable[[], bool] | None:
    """Begin to encode a weight on its device into a payload; what is returned waits and says whether it fits."""
    if not (fixed_products.runs_on(weight.device) if fixed else handles(weight)):
        return None
    about_to_write(payload)
    status = torch.zeros(1, dtype=torch.int32, device=weight.device)
    try:
        if fixed:
            fixed_products.overwrite(weight.detach(), payload, status)
        else:
            cuda.encode_into(weight.detach(), payload, level=level, chunk_log2=chunk_log2, status=status)
    except (Unsupported, UsageError):
        return None
    answer = PendingNumber(status)
    return lambda: not answer()


def encode(weight: torch.Tensor, level: str, chunk_log2: int | None) -> torch.Tensor | None:
    """Encode a weight on its device, without checks; None if it is to be done on the host."""
    if not handles(weight):
        return None
    try:
        return cuda.encode(weight.detach(), level=level, chunk_log2=chunk_log2, checks=False)
    except Unsupported:
        return None
