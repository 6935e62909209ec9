"""The idx format in which MNIST and its successors are published: `…-ubyte`, mostly compressed by gzip."""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from netweight.errors import CorruptBlob

__all__ = ["idx_pair", "read_idx"]


def read_idx(path: Path) -> Tensor:
    """Read a file of unsigned bytes in the idx format.

    Args:
        path: The file; one that ends in `.gz` is unpacked.

    Returns:
        uint8, of the shape that its header states.

    Raises:
        CorruptBlob: It is not such a file, or it is damaged.
        OSError: It cannot be read.
    """
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorruptBlob(f"{path} is damaged: {error}.", cure="Fetch it again.") from error
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each dimension as a big-endian integer.
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise CorruptBlob(f"{path} is no idx file of unsigned bytes.", cure="Fetch it again.")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], dtype=">u4").astype(np.int64)
    if len(shape) != content[3] or int(shape.prod()) != len(content) - start:
        raise CorruptBlob(f"{path} has not the {shape.tolist()} values that its header states.", cure="Fetch it again.")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape.tolist())


def idx_pair(folder: Path, prefix: str) -> tuple[Tensor, Tensor] | None:
    """Read the images and labels of one split, wherever below a folder they lie.

    Args:
        folder: Searched with all its subfolders.
        prefix: What the file names begin with: "train", "t10k", "emnist-letters-test".

    Returns:
        Images, uint8 of shape `(n, 1, height, width)`, and labels, int64 of shape `(n,)`; None if a file is missing.

    Raises:
        CorruptBlob: A file is damaged.
    """
    found = [sorted(folder.rglob(f"{prefix}-{kind}-ubyte*")) for kind in ("images-idx3", "labels-idx1")]
    if not all(found):
        return None
    images, labels = (read_idx(files[0]) for files in found)
    return images.unsqueeze(1), labels.long()
