"""Images as PNG files, without any imaging library. Attacks, audits and commands call it to keep what they made."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.errors import UsageError
from netweight.store.atomic import whole_file

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["write_png"]


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
    channels, height, width = image.shape
    pixels = (image.detach().cpu().double().nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8)
    rows = pixels.permute(1, 2, 0).reshape(height, -1).numpy()
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    body = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows), 9)  # filter 0: every row as it is
    with whole_file(path, overwrite=True) as file:
        file.write(b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", body) + _chunk(b"IEND", b""))


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
