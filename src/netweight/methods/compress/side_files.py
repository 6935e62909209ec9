"""Other contents for the side files of compressed folders, such as a model card, without breaking what proves them.

The manifest keeps the original, so that `netweight decompress` restores it and `netweight verify` knows the new one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from netweight.core import digest
from netweight.errors import UsageError
from netweight.methods.compress.manifest import MANIFEST, FileEntry, Manifest
from netweight.store.atomic import whole_file

__all__ = ["write_side_file"]


def write_side_file(folder: str | Path, name: str, content: bytes) -> None:
    """Write a file beside weights; in a compressed folder its manifest is told.

    What was changed by hand before counts as the original from then on. Writing what is there already changes nothing.

    Args:
        folder: A model's folder, compressed or not.
        name: The file's path in it, with slashes.
        content: The new content.

    Raises:
        UsageError: The file holds weights, or an index or configuration that loaders of compressed weights need.
        CorruptBlob: The manifest is damaged.
        OutputFailed: The folder cannot be written.
    """
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        _write(folder / name, content)
        return
    manifest = Manifest.read(folder)
    place = next((number for number, entry in enumerate(manifest.files) if entry.stored == name), None)
    if place is None:  # the original had none: restoring leaves it out
        _write(folder / name, content)
        return
    entry = _retold(manifest.files[place], folder / name, content)
    if entry == manifest.files[place]:
        return
    files = (*manifest.files[:place], entry, *manifest.files[place + 1 :])
    _write(folder / name, content)
    _write(folder / MANIFEST, dataclasses.replace(manifest, files=files).to_json().encode())


def _retold(entry: FileEntry, path: Path, content: bytes) -> FileEntry:
    """The entry of a file after another content was written for it."""
    if path.suffix in (".json", ".safetensors"):
        raise UsageError(f"{path} is needed to open the model.", cure="Change it in the model before compression.")
    found = digest.of_bytes(content)
    if entry.stored_digest == found:
        return entry
    if entry.kind == "rewritten":
        return dataclasses.replace(entry, stored_nbytes=len(content), stored_digest=found)
    original = path.read_bytes()
    digests = digest.of_bytes(original), found
    return FileEntry.rewritten(entry.path, entry.stored, original, digests=digests, size=len(content))


def _write(path: Path, content: bytes) -> None:
    if path.is_file() and path.read_bytes() == content:
        return
    with whole_file(path, overwrite=True) as file:
        file.write(content)
