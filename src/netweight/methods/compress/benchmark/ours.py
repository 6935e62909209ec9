"""netweight as a contender: every code path and every level, tensor by tensor, through the public Python functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from netweight import codec
from netweight.methods.compress.benchmark.data import DataSet, raw_bytes, tensors_over
from netweight.methods.compress.benchmark.peers import Ready

__all__ = ["Setting", "fresh", "ready", "settings"]


@final
@dataclass(frozen=True)
class Setting:
    """One way to run the codec.

    Attributes:
        path: Code path.
        level: Level of the encoder.
    """

    path: str
    level: str


def settings(*, threads: int) -> list[Setting]:
    """List the ways worth measuring: on the fastest path every level, on the others the default.

    Args:
        threads: Number of threads; with more than one only the fastest path and the default level are of interest.

    Returns:
        The ways, in the order in which they are measured.
    """
    paths = codec.available_paths()
    compiled = [path for path in paths if path != "python"] or paths  # plain Python only where there is nothing else
    levels = [Setting(compiled[0], level) for level in ("default", "fast", "max")]
    return levels[:1] if threads > 1 else [levels[0], *(Setting(path, "default") for path in compiled[1:]), *levels[1:]]


def ready(data: DataSet, setting: Setting, threads: int) -> Ready:
    """Make the codec ready to decode into memory that is there and warm.

    Args:
        data: What is to be decoded.
        setting: Code path and level.
        threads: For decoding, at least 1.
    """
    encode = _encoder(data, setting, threads)
    blobs = encode(None)
    memory = np.zeros_like(data.raw)
    targets = tensors_over(memory, data.tensors)

    def decode() -> None:
        for blob, target in zip(blobs, targets, strict=True):
            codec.decode_into(blob, target, threads=threads, path=setting.path)

    def restored() -> Any:
        memory.fill(0xA5)
        decode()
        return memory

    return Ready(sum(map(len, blobs)), encode, decode, restored)


def fresh(data: DataSet, setting: Setting, threads: int, *, pooled: bool) -> Ready:
    """Make the codec ready to decode into new tensors, all of which are kept until the last is there.

    Args:
        data: What to decode.
        setting: How.
        threads: Number of threads.
        pooled: Whether the codec may take the memory of outputs that were freed before; otherwise every page of every
            output comes from the system, as when a model is loaded for the first time.
    """
    blobs = _encoder(data, setting, threads)(None)

    def decode() -> list[Any]:
        return [codec.decode(blob, threads=threads, path=setting.path) for blob in blobs]

    def restored() -> Any:
        return np.concatenate([raw_bytes(tensor) for tensor in decode()])

    prepare: Callable[[], Any] = (lambda: None) if pooled else codec.trim_pool
    return Ready(sum(map(len, blobs)), _encoder(data, setting, threads), decode, restored, prepare)


def _encoder(data: DataSet, setting: Setting, threads: int) -> Callable[[Any], list[bytes]]:
    def encode(_: Any) -> list[bytes]:
        return [
            codec.encode(tensor, level=setting.level, threads=threads, path=setting.path) for tensor in data.tensors
        ]

    return encode
