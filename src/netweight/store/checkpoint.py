"""Checkpoints: what a piece of work has come to, as an account in JSON and tensors by name, in one compressed file.

The account is a tensor of bytes named "about", the first of the file. Trainings and federations are kept this way.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from netweight.errors import CorruptBlob, UsageError
from netweight.store.reading import Store, open_store
from netweight.store.writing import StoreWriter

if TYPE_CHECKING:
    import torch

__all__ = ["open_checkpoint", "write_checkpoint"]

_ABOUT = "about"


def write_checkpoint(path: Path, about: Mapping[str, Any], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Write a checkpoint over the one before it, all or nothing.

    Args:
        path: The file; its folder is made if it is not there.
        about: The account: JSON values.
        tensors: Names other than "about", each once, with tensors on any device, of any shape, dtype and strides; taken
            one at a time.

    Raises:
        OutputFailed: The file could not be written; the older one is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with StoreWriter(path, level="fast", overwrite=True) as writer:
        writer.add(_ABOUT, numpy.frombuffer(json.dumps(about).encode(), numpy.uint8))
        for name, value in tensors:
            writer.add(name, value.detach().cpu().contiguous())


@contextmanager
def open_checkpoint(
    path: Path, same: Mapping[str, Any] | None = None, *, refusal: str = "holds other work"
) -> Iterator[tuple[dict[str, Any], Store, list[str]]]:
    """Open a checkpoint.

    Args:
        path: The file.
        same: Entries that the account must have, such as a digest of what was asked for: only the same may go on.
        refusal: What is said of a file whose entries are others, after its name.

    Yields:
        The account, the open file, and the names of the tensors in the order in which they were written.

    Raises:
        UsageError: The file belongs to other work.
        CorruptBlob: It is damaged, or no checkpoint.
    """
    with open_store(path) as store:
        names = store.names()
        if _ABOUT not in names:
            raise CorruptBlob(f"{path} is no checkpoint: it holds no account of itself.")
        about: dict[str, Any] = json.loads(bytes(store.get(_ABOUT, check=True).tolist()))
        if any(about.get(key) != value for key, value in (same or {}).items()):
            raise UsageError(f"{path} {refusal}.", cure="Choose another folder, or delete the file to begin anew.")
        yield about, store, [name for name in names if name != _ABOUT]
