"""Digests that name their algorithm: of bytes, files, tensors and configurations. Any layer may use them.

A digest is the text `"xxh3-128:"` and 32 hexadecimal digits. It detects damage and change; it is no defense against
someone who forges content on purpose.
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import xxhash

from netweight.errors import UsageError

ALGORITHM = "xxh3-128"
_BLOCK = 1 << 22  # bytes read from a file at a time


def of_bytes(data: bytes | bytearray | memoryview) -> str:
    """Digest a contiguous buffer of bytes."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def of_file(path: str | Path) -> str:
    """Digest a file's content, reading it in blocks of 4 MiB."""
    state = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            state.update(block)
    return f"{ALGORITHM}:{state.hexdigest()}"


def of_tensor(tensor: Any) -> str:
    """Digest a tensor's bytes in row-major order; dtype and shape do not enter."""
    if hasattr(tensor, "detach"):
        import torch

        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        import numpy

        tensor = numpy.ascontiguousarray(tensor).reshape(-1).view(numpy.uint8)
    return of_bytes(memoryview(tensor))


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
            f"A value cannot be written as JSON: {error}.", cure="Replace the value, e.g. NaN by null."
        ) from None


def of_config(value: Any) -> str:
    """Digest a configuration by its canonical JSON, so that it is the same on every platform and in every process."""
    return of_bytes(canonical_json(value).encode())
