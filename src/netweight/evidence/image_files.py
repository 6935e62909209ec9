"""Images as PNG files, without any imaging library. Attacks, audits, pages and commands keep with it what they made."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from netweight.core.files import whole_file
from netweight.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["png_bytes", "write_png"]


def write_png(path: Path, image: Tensor) -> None:
    """Write an image as an 8-bit PNG file, in place of one that may be there.

    Args:
        path: The file; its folder exists.
        image: Shape `(c, h, w)`, c 1 (gray) or 3 (color), within 0 and 1; values outside are cut off, NaN is black.

    Raises:
        UsageError: The shape is another.
        OutputFailed: The file cannot be written.
    """
    import torch

    if image.ndim != 3 or image.shape[0] not in (1, 3) or not image.numel():
        raise UsageError(f"A PNG cannot hold an image of shape {tuple(image.shape)}.", cure="Give 1 or 3 channels.")
    pixels = (image.detach().cpu().double().nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8)
    with whole_file(path, overwrite=True) as file:
        file.write(png_bytes(pixels.permute(1, 2, 0).numpy()))


def png_bytes(pixels: NDArray[np.uint8]) -> bytes:
    """Return an image as the bytes of a PNG file: of the filters tried, the one that makes it smallest.

    Args:
        pixels: Shape `(h, w, 1)` (gray) or `(h, w, 3)` (color).

    Raises:
        UsageError: The shape or the type is another.

    Source: PNG, third edition (W3C 2025), sections 9 (filters) and 11 (chunks).
    """
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size or pixels.dtype != np.uint8:
        raise UsageError(
            f"A PNG cannot hold pixels of shape {pixels.shape} and type {pixels.dtype}.",
            cure="Give uint8 of shape (h, w, 1) or (h, w, 3).",
        )
    height, width, channels = pixels.shape
    padded = np.pad(pixels, ((1, 0), (1, 0), (0, 0)))
    left, above = padded[1:, :-1], padded[:-1, 1:]  # 0 outside; differences wrap around, as the format has it
    filtered = (pixels, pixels - left, pixels - above)
    body = min((zlib.compress(_lines(kind, values), 9) for kind, values in enumerate(filtered)), key=len)
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _lines(kind: int, values: NDArray[np.uint8]) -> bytes:
    """Put the number of its filter before each row."""
    return np.pad(values.reshape(len(values), -1), ((0, 0), (1, 0)), constant_values=((0, 0), (kind, 0))).tobytes()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
