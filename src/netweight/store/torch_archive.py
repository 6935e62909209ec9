"""The archives that `torch.save` writes, checked before torch opens them."""

from __future__ import annotations

import zipfile
from pathlib import Path

from netweight.errors import UnsafeInput

# torch compresses the code of TorchScript only, and none is as large as this.
_LARGEST_CODE = 16 << 20


def refuse_inflated(path: str | Path) -> None:
    """Refuse an archive of torch that has more bytes than the file: torch stores its entries, and inflates others.

    Args:
        path: A file that torch saved, or that is to be tried as one.

    Raises:
        UnsafeInput: An entry of the archive that is no code is compressed, or its code is very large.
    """
    if not zipfile.is_zipfile(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            compressed = (each for each in archive.infolist() if each.compress_type != zipfile.ZIP_STORED)
            inflated = next(
                (each for each in compressed if "/code/" not in each.filename or each.file_size > _LARGEST_CODE), None
            )
    except (zipfile.BadZipFile, NotImplementedError, OSError, ValueError):
        # torch reports the error itself.
        return
    if inflated is not None:
        raise UnsafeInput(
            f"{path}: the entry {inflated.filename[:200]!r} of the archive is compressed, {inflated.file_size:,} bytes "
            f"in {inflated.compress_size:,}. torch.save stores tensors as they are.",
            cure="Do not use this file, or save its weights again: safetensors, or torch.save.",
        )
