"""Digests of bytes, files, tensors and configurations.

A digest is the text `"xxh3-128:"` and 32 hexadecimal digits. It detects damage and change; it is not a defense against
someone who forges content on purpose.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import xxhash

from netweight.core.regular_files import regular
from netweight.core.tensor_bytes import row_major_bytes
from netweight.errors import UsageError

ALGORITHM = "xxh3-128"


def digest_bytes(data: bytes | bytearray | memoryview) -> str:
    """Digest a contiguous buffer of bytes."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def digest_file(path: str | Path) -> str:
    """Digest the content of a regular file."""
    with open(path, "rb", buffering=0, opener=regular) as file:
        return f"{ALGORITHM}:{hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()}"


def digest_tensor(tensor: Any) -> str:
    """Digest a tensor's bytes in row-major order; dtype and shape do not enter."""
    if hasattr(tensor, "detach"):
        tensor = row_major_bytes(tensor.detach().cpu()).numpy()
    else:
        tensor = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return digest_bytes(memoryview(tensor))


def _plain(value: Any) -> Any:
    """Turn one value that JSON does not know into one that it does."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, PurePath):
        return value.as_posix()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise UsageError(
        f"A {type(value).__name__} cannot be part of a configuration.",
        cure="Use numbers, text, lists, mappings, paths, dataclasses or pydantic models.",
    )


def canonical_json(value: Any, *, allow_nan: bool = False) -> str:
    """Write a configuration as JSON that is the same for equal configurations: sorted keys, no spaces, plain UTF-8."""
    try:
        return json.dumps(
            value, default=_plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=allow_nan
        )
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"A value cannot be written as JSON: {error}.", cure="Replace the value, for example NaN by null."
        ) from None


def digest_config(value: Any) -> str:
    """Digest a configuration by its canonical JSON, so that it is the same on every platform and in every process."""
    return digest_bytes(canonical_json(value).encode())
