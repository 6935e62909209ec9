"""Checkpoints: a compressed file with an account of a piece of work in JSON, and tensors by name.

The account is a tensor of bytes named "about", the first of the file. Trainings and federations are kept this way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from netweight.core.bounded_json import parse_json
from netweight.errors import CorruptBlob, UsageError
from netweight.store.reader import Store, open_store
from netweight.store.writer import StoreWriter

if TYPE_CHECKING:
    import torch

_ABOUT = "about"


def write_checkpoint(path: Path, about: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a checkpoint over the one before it, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with StoreWriter(path, level="fast", overwrite=True) as writer:
        writer.add(_ABOUT, numpy.frombuffer(json.dumps(about).encode(), numpy.uint8))
        for name, value in tensors:
            writer.add(name, value.detach().cpu().contiguous())


@contextmanager
def open_checkpoint(
    path: Path, same: Mapping[str, Any] | None = None, *, refusal: str = "contains other work"
) -> Iterator[tuple[dict[str, Any], Store, list[str]]]:
    """Open a checkpoint.

    `same`: entries that the account must have, such as a digest of what was asked for: only the same may go on.
    """
    with open_store(path) as store:
        names = store.names()
        if _ABOUT not in names:
            raise CorruptBlob(f"{path} is not a checkpoint of netweight: it contains no record.")
        about: dict[str, Any] = parse_json(bytes(store.content(_ABOUT)))
        if any(about.get(key) != value for key, value in (same or {}).items()):
            raise UsageError(
                f"{path} {refusal}.",
                cure="Choose another folder, or delete the file to start again from the beginning.",
            )
        yield about, store, [name for name in names if name != _ABOUT]
