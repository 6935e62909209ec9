"""Checkpoints: what a piece of work has come to, as an account in JSON and tensors by name, in one compressed file.

The account is a tensor of bytes named "about", the first of the file. Trainings and federations are kept this way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy

from netweight.core.digest import canonical_json
from netweight.core.files import parse_json, read_object, whole_file
from netweight.errors import CorruptBlob, UsageError
from netweight.store.reader import Store, open_store
from netweight.store.writer import StoreWriter

if TYPE_CHECKING:
    import torch


_ABOUT = "about"
_MOST = 1 << 28  # bytes of a record


def write_checkpoint(path: Path, about: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a checkpoint over the one before it, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with StoreWriter(path, level="fast", overwrite=True) as writer:
        writer.add(_ABOUT, numpy.frombuffer(json.dumps(about).encode(), numpy.uint8))
        for name, value in tensors:
            writer.add(name, value.detach().cpu().contiguous())


@contextmanager
def open_checkpoint(
    path: Path, same: Mapping[str, Any] | None = None, *, refusal: str = "holds other work"
) -> Iterator[tuple[dict[str, Any], Store, list[str]]]:
    """Open a checkpoint."""
    # `same`: entries that the account must have, such as a digest of what was asked for: only the same may go on
    with open_store(path) as store:
        names = store.names()
        if _ABOUT not in names:
            raise CorruptBlob(f"{path} is no checkpoint: it holds no account of itself.")
        about: dict[str, Any] = parse_json(bytes(store.content(_ABOUT)))
        if any(about.get(key) != value for key, value in (same or {}).items()):
            raise UsageError(f"{path} {refusal}.", cure="Choose another folder, or delete the file to begin anew.")
        yield about, store, [name for name in names if name != _ABOUT]


T = TypeVar("T")


def write_record(path: str | Path, values: Mapping[str, Any], *, version: int, overwrite: bool = True) -> None:
    """Write a record, whole or not at all."""
    # `values`: what `canonical_json` takes; infinity and NaN are kept
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, overwrite=overwrite) as file:
        file.write(canonical_json({"version": version, **values}, allow_nan=True).encode())


def read_record(path: str | Path, make: Callable[[dict[str, Any]], T], *, version: int, of: str) -> T:
    """Read a record."""
    # `version`: which it must have
    try:
        values = read_object(Path(path), limit=_MOST)
        if values.pop("version") != version:
            raise KeyError("version")
        return make(values)
    except (ValueError, KeyError, TypeError, AttributeError, UsageError) as error:
        raise CorruptBlob(f"{path} holds no record of version {version} of {of}: {error}.") from error
