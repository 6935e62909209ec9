"""What differences are differences from: the tensors of another model, found by name and told by digest."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, final

from netweight.errors import UsageError

MOST_LINKS = 8  # of a chain of differences
_UP = 4  # folders above a file beside which its base is looked for
_GIVEN = "NETWEIGHT_BASE"


@final
@dataclass(frozen=True)
class BaseNote:
    """What a file says of its base."""

    name: str  # name of the base's file or folder, without the path to it; or a model's id on the hub
    within: str  # where in it the tensors lie: a folder's path with slashes, or "."
    links: int  # how many bases stand behind each other: 1 if the base has none
    digest: str  # of the names and digests of the tensors that are differences

    @classmethod
    def from_json(cls, values: Any) -> BaseNote:
        """Read and check what is kept; every refusal is a `ValueError`."""
        if not isinstance(values, dict) or values.keys() != cls.__dataclass_fields__.keys():
            raise ValueError("what it says of its base is malformed")
        note = cls(**values)
        for text, most in ((note.name, 2), (note.within, _UP)):
            path = PurePosixPath(text)  # a TypeError, which counts as the ValueErrors do, if it is no text
            if path.is_absolute() or ".." in path.parts or "\0" in text or len(path.parts) > most:
                raise ValueError(f"the name {text!r} of its base is malformed")
        if not PurePosixPath(note.name).name or not isinstance(note.digest, str):
            raise ValueError("what it says of its base is malformed")
        if type(note.links) is not int or not 1 <= note.links <= MOST_LINKS:
            raise ValueError(f"it has {note.links!r} bases behind each other, more than {MOST_LINKS}")
        return note


def find_base(file: Path, note: BaseNote) -> Path:
    """Find a file's base by its name: as NETWEIGHT_BASE says, beside the file or its folder, in the hub's cache."""
    for path in _candidates(file, note.name):
        if path.is_file() or (path / note.within).is_dir():
            return path
    raise UsageError(
        f"{file} holds differences from {note.name} (digest {note.digest}), which is not at hand.",
        cure=f"Give it (base=, --base, or the variable {_GIVEN}), or put it beside the folder.",
    )


def _candidates(file: Path, name: str) -> Iterator[Path]:
    for given in filter(None, os.environ.get(_GIVEN, "").split(os.pathsep)):
        yield from (Path(given) / name, Path(given)) if Path(given).name != name else (Path(given),)
    own = PurePosixPath(name).name
    yield from (folder / own for folder in list(file.absolute().parents)[:_UP])
    if "/" in name:
        yield from _in_hub_cache(name)


def _in_hub_cache(name: str) -> Iterator[Path]:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        return
    try:
        yield Path(snapshot_download(name, local_files_only=True))
    except (OSError, ValueError):  # it is not there, or the name is none
        return


def name_of(path: Path) -> str:
    """The name by which a base is found again: its own, or its id if it lies in the hub's cache."""
    path = path.resolve()
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
    return path.name
