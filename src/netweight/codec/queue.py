"""Decoding on a thread of the codec's own, for callers that know what they will need next.

A decoding that was not begun when its result is asked for is done by whoever asks, so that nobody ever waits for work
that could be under way. Without the native module all of them are done so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from netweight.codec import backend, lossy
from netweight.codec.api import _bytes_of, _in_our_words, _tensor_of, decode
from netweight.codec.dtypes import torch_dtype
from netweight.errors import UsageError

if TYPE_CHECKING:
    import torch

    from netweight.codec.api import Blob

__all__ = ["DecodeQueue", "Decoding"]


@final
class Decoding:
    """A blob that is being decoded, or will be; made by `DecodeQueue.add`."""

    def __init__(self, blob: Any, pending: Any, header: lossy.LossyHeader | None = None) -> None:
        self._blob = blob
        self._pending = pending
        self._header = header
        self._cancelled = False

    def result(self) -> torch.Tensor:
        """The tensor, waiting for it if need be.

        Raises:
            CorruptBlob: The blob is damaged.
            Unsupported: torch lacks the element type.
            UsageError: It was cancelled.
        """
        if self._cancelled:
            raise UsageError("A decoding that was cancelled has no result.", cure="Add the blob again.")
        if self._pending is None:
            return decode(self._blob)
        with _in_our_words("a blob"):
            raw, name, shape = self._pending.result()
            if self._header is not None:
                lossy.put_kept(self._header, 0, self._header.count, "auto", raw)
                name, shape = self._header.rounding.element.name, self._header.shape
        return _tensor_of(raw, torch_dtype(name), shape)

    def cancel(self) -> None:
        """Do not begin, or wait until what was begun is over; afterwards the blob's memory is not read any more."""
        self._cancelled = True
        if self._pending is not None:
            self._pending.cancel()


@final
class DecodeQueue:
    """One thread that decodes blobs in the order in which they were added.

    Examples:
        >>> queue = DecodeQueue()
        >>> decoding = queue.add(codec.encode(torch.ones(3)))  # doctest: +SKIP
        >>> decoding.result()  # doctest: +SKIP
        tensor([1., 1., 1.])
        >>> queue.close()
    """

    def __init__(self) -> None:
        self._native = backend.new_queue()

    def add(self, blob: Blob) -> Decoding:
        """Have a blob decoded.

        Args:
            blob: See `codec.decode`. Its memory must stay where it is until `result` or `cancel` returned.

        Returns:
            The blob's decoding, to be asked for its result.

        Raises:
            CorruptBlob: The blob's header is damaged.
            Unsupported: The blob is of a newer format.
        """
        with _in_our_words("a blob"):
            source = _bytes_of(blob)
            if not self._native:
                return Decoding(blob, None)
            if not lossy.recognizes(source):
                return Decoding(blob, self._native.add(source))
            header = lossy.read_header(source)
            normalizers = lossy.normalizers_of(header, 0, header.count, "auto")
            return Decoding(blob, backend.queue_words(self._native, header.words, normalizers, header.rounding), header)

    def close(self) -> None:
        """End the thread; results of what was added can still be asked for."""
        if self._native:
            self._native.close()
