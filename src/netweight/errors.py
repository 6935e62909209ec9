"""All exceptions that netweight raises on purpose. Each message names the thing, the reason and the cure.

`exit_code` is what the command line returns: 2 for wrong usage, 3 for corrupt or unsafe input.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class NetweightError(Exception):
    """Base of all errors of this library.

    Args:
        message: What is wrong, naming the thing and the reason.
        cure: What the reader can do about it; appended to the message.
    """

    exit_code = 2

    def __init__(self, message: str, *, cure: str | None = None) -> None:
        self.reason = message
        self.cure = cure
        super().__init__(f"{message} {cure}" if cure else message)


class UsageError(NetweightError):
    """The call or command is wrong: a bad value, incompatible options, a missing path."""


class NameNotFound(UsageError):
    """A pattern or name matches no parameter, module, table or option; the nearest names are in the message."""


class AlreadyCompressed(UsageError):
    """A weight that was to be compressed in memory is compressed already."""


class DenseOnly(UsageError):
    """Code asked a compressed weight for something that only a dense tensor has, such as its memory."""


class LossyWrite(UsageError):
    """New values were to be written into a weight that is kept rounded: each write would round it again."""


class LayerwiseConflict(UsageError):
    """Layer by layer training was combined with something that needs all gradients at once, or that it would break."""


class BadGradient(NetweightError):
    """A gradient contains NaN or infinity; the message names the parameter and what was updated before."""


class OutputExists(UsageError):
    """The destination exists already and was not to be overwritten."""


class OutputFailed(NetweightError):
    """The output could not be written: the disk is full, a quota or size limit was met, or the folder is read-only."""


class FederationStopped(NetweightError):
    """A federation had too few clients for a round, again and again; its state was saved and can be resumed."""


class PrivateTensor(NetweightError):
    """A client was about to send a tensor that is private to it; nothing was sent."""


class TrainingStopped(NetweightError):
    """Training met NaN or diverged; the message names the step and the part, and where the last good weights are."""


class MissingExtra(NetweightError):
    """An optional dependency is not installed; the message holds the pip command."""


class CudaUnavailable(NetweightError):
    """CUDA kernels were asked for and cannot run here: no GPU, another torch, an old driver, no compiler for them."""


class CudaFailed(NetweightError):
    """The CUDA driver refused a call or a kernel could not be compiled; the message holds the driver's own words."""


class OutOfMemory(NetweightError):
    """A GPU has no room for a tensor that was to be decoded or encoded; the message names the tensor and its size."""


class Unsupported(NetweightError):
    """The input is valid but of a kind, dtype or version that this release does not handle."""

    exit_code = 3


class CorruptBlob(NetweightError):
    """Compressed bytes are damaged: truncated, altered, or not written by netweight at all.

    Args:
        message: What is wrong, naming the thing and the reason.
        cure: What the reader can do about it; appended to the message.
        file: Path of the file that the message names already, so that its reader does not name it again.
    """

    exit_code = 3

    def __init__(self, message: str, *, cure: str | None = None, file: Path | None = None) -> None:
        super().__init__(message, cure=cure)
        self.file = file


class UnsafeInput(NetweightError):
    """The input could run code when opened (a pickle) or points outside its own folder."""

    exit_code = 3
