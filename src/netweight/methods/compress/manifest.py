"""`netweight.json`: what a compressed folder holds and what it was made from, enough to restore every file.

{"format": "netweight-folder", "version": 1, "level": "default",
 "files": [{"path": "model.safetensors", "kind": "compressed", "stored": "model.net.safetensors", ...},
           {"path": "config.json", "kind": "rewritten", "stored": "config.json", "original": "...", ...},
           {"path": "vocab.txt", "kind": "carried", "stored": "vocab.txt", ...}],
 "folders": ["empty"], "left_out": []}
"""

# Where tensors are rounded, "version" is 2, their files' entries say by how much, and "rounding" says how.

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal, Self, final, get_args

from netweight.codec import Precision
from netweight.errors import CorruptBlob, UnsafeInput, Unsupported, UsageError
from netweight.store.safetensors import deflate_text, inflate_text

MANIFEST = "netweight.json"
Kind = Literal["compressed", "rewritten", "carried"]
_FORMAT, _VERSION = "netweight-folder", 1
_ROUNDED = 2  # version of manifests of rounded weights, which older releases cannot read


@final
@dataclass(frozen=True)
class FileEntry:
    """One file of the original folder."""

    path: str  # its path in the original folder, with slashes
    kind: Kind  # `"compressed"` weights, a `"rewritten"` index or configuration, or `"carried"` over unchanged
    stored: str  # its path in the compressed folder
    nbytes: int  # its size in the original folder
    digest: str  # digest of its original content
    stored_nbytes: int  # its size in the compressed folder
    # Digest of its content in the compressed folder; None for compressed weights, which carry a digest per tensor.
    stored_digest: str | None = None
    original: str | None = None  # the original content of a rewritten file, deflated, as base64; else None
    tensors: int = 0  # number of tensors of compressed weights; else 0
    payload: int = 0  # bytes of all compressed tensors; else 0
    rounded: int = 0  # how many tensors are rounded; `digest` is then that of the file that comes back
    bound: float = 0.0  # how much rounding may have changed a weight at most, relative to it
    worst_change: float = 0.0  # how much it did change one at most

    @classmethod
    def rewritten(cls, path: str, stored: str, original: bytes, *, digests: tuple[str, str], size: int) -> Self:
        """An entry for a file whose original content is kept."""
        return cls(path, "rewritten", stored, len(original), digests[0], size, digests[1], deflate_text(original))

    def original_content(self) -> bytes:
        """The original content of a rewritten file."""
        try:
            return inflate_text(self.original or "", limit=self.nbytes + 1)
        except ValueError as error:
            raise CorruptBlob(
                f"{MANIFEST}: the kept content of {self.path} is damaged ({error}).", cure="Fetch the file again."
            ) from error


@final
@dataclass(frozen=True)
class Manifest:
    """The content of `netweight.json`."""

    level: str  # the codec's level
    files: tuple[FileEntry, ...]  # all files of the original folder
    folders: tuple[str, ...] = ()  # its empty folders
    left_out: tuple[str, ...] = ()  # its files that were left out on request
    precision: Precision | None = None  # how tensors were rounded; None if none was, or if they had been rounded before

    def to_json(self) -> str:
        """Write the manifest."""
        fields = {
            "format": _FORMAT,
            "version": _ROUNDED if any(file.rounded for file in self.files) else _VERSION,
            "level": self.level,
            "files": [{key: value for key, value in asdict(file).items() if value} for file in self.files],
            "folders": list(self.folders),
            "left_out": list(self.left_out),
            **({} if self.precision is None else {"rounding": asdict(self.precision)}),
        }
        return json.dumps(fields, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read and check the manifest of a compressed folder."""
        path = folder / MANIFEST
        if not path.is_file():
            raise UsageError(
                f"{folder} has no {MANIFEST}: it is not a folder that netweight compressed.", cure="Check the path."
            )
        try:
            fields = json.loads(path.read_bytes())
            if fields["format"] != _FORMAT:
                raise ValueError(f"its format is {fields['format']!r}")
            if fields["version"] not in (_VERSION, _ROUNDED):
                raise Unsupported(
                    f"{path} is of version {fields['version']!r}; this release reads up to version {_ROUNDED}.",
                    cure="Upgrade netweight: pip install --upgrade netweight.",
                )
            files = tuple(_entry(entry) for entry in fields["files"])
            folders, left_out = (tuple(map(str, fields[key])) for key in ("folders", "left_out"))
            precision = Precision(**fields["rounding"]) if "rounding" in fields else None
            manifest = cls(str(fields["level"]), files, folders, left_out, precision)
        except (UsageError, KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptBlob(f"{path} is damaged ({error!r}).", cure="Fetch the file again.") from error
        for name in (*manifest.folders, *(name for file in files for name in (file.path, file.stored))):
            if not _inside(name):
                raise UnsafeInput(f"{path} points outside its folder: {name!r}.", cure="Do not use this model.")
        return manifest

    def check_present(self, folder: Path) -> None:
        """Check that all stored files are there."""
        missing = [entry.stored for entry in self.files if not (folder / entry.stored).is_file()]
        if missing:
            raise CorruptBlob(
                f"{folder} lacks {len(missing)} of its files: {', '.join(missing[:5])}.", cure="Fetch them again."
            )


def _entry(fields: dict[str, Any]) -> FileEntry:
    entry = FileEntry(**{"stored_nbytes": 0, "nbytes": 0, **fields})
    texts = (entry.path, entry.stored, entry.digest)
    numbers = (entry.nbytes, entry.stored_nbytes, entry.tensors, entry.payload, entry.rounded)
    changes = (entry.bound, entry.worst_change)
    if not all(isinstance(text, str) for text in texts) or not all(type(n) is int and n >= 0 for n in numbers):
        raise ValueError("an entry is malformed")
    if not all(type(change) in (int, float) and change >= 0 for change in changes):
        raise ValueError("an entry is malformed")
    if entry.kind not in get_args(Kind):
        raise ValueError(f"a file is of unknown kind {entry.kind!r}")
    return entry


def _inside(name: str) -> bool:
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\\" not in name
