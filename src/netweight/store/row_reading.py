"""Rows of many small tensors of an open store, without opening the file once per tensor."""

from __future__ import annotations

import torch
from torch import Tensor

from netweight.store.reading import Store

__all__ = ["FLOATS", "read_rows"]

FLOATS = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
"""The dtypes that factors of adapters may have, by their names in safetensors."""
_DTYPES = {**FLOATS, "I64": torch.int64}


def read_rows(store: Store, name: str, rows: slice | None = None) -> Tensor:
    """Read rows of a tensor, as `Store.get_slice` does, or all of it, checked if it is compressed.

    Args:
        store: The open store.
        name: Of a tensor of one of `FLOATS` or int64, not empty.
        rows: Which ones, step 1; all by default.

    Returns:
        The rows, in the tensor's dtype.

    Raises:
        CorruptBlob: The bytes are damaged.
    """
    info = store.info(name)
    if info.compressed or not info.shape:
        return store.get(name, check=True) if rows is None else store.get_slice(name, rows)
    start, stop, _ = (rows or slice(None)).indices(info.shape[0])
    width = info.nbytes // info.shape[0]
    content = bytearray(store.raw(name)[start * width : stop * width])
    return torch.frombuffer(content, dtype=_DTYPES[info.dtype]).view(stop - start, *info.shape[1:])
