"""A model folder as parts of at most 60 MB, for machines that take only small files; and the folder made of them again.

    python -m netweight_experiments.benchmarks compress.model_parts split MODEL PARTS
    python -m netweight_experiments.benchmarks compress.model_parts join PARTS MODEL

The parts are the folder's files one after another. Compress the folder first (`netweight compress`): it then takes two
thirds of the parts, and `compress.gpu` decompresses it. `parts.json` holds the names, sizes and digests.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

from netweight.core.digests import digest_file
from netweight.errors import CorruptBlob, OutputExists, UsageError

CONTENTS = "parts.json"
_BLOCK = 1 << 22  # bytes copied at a time


def split(folder: Path, parts: Path, *, megabytes: int = 60) -> list[Path]:
    """Write the files of a folder as parts.

    Args:
        folder: The model folder; files in folders below it are left out.
        parts: The folder of parts, which must not exist.
        megabytes: The most that a part takes, in units of 1,000,000 bytes, at least 1.

    Returns:
        The parts in order.

    Raises:
        UsageError: The folder contains no file, or a part would have no room.
        OutputExists: The folder of parts exists.
    """
    files = sorted(path for path in folder.glob("*") if path.is_file())
    if not files or megabytes < 1:
        raise UsageError(f"{folder} contains no files, or {megabytes} MB is no room for a part.", cure="Check the two.")
    if parts.exists():
        raise OutputExists(f"{parts} exists.", cure="Remove it, or name another folder.")
    parts.mkdir(parents=True)
    written: list[Path] = []
    content, room = None, 0
    for block in _blocks(files):
        while block:
            if content is None or not room:
                if content is not None:
                    content.close()
                written.append(parts / f"part-{len(written):03}")
                content, room = open(written[-1], "wb"), megabytes * 1_000_000
            content.write(block[:room])
            block, room = block[room:], room - min(room, len(block))
    if content is not None:
        content.close()
    sizes = [{"name": path.name, "size": path.stat().st_size, "digest": digest_file(path)} for path in files]
    contents = {"parts": len(written), "files": sizes}
    (parts / CONTENTS).write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
    return written


def _blocks(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        with open(path, "rb") as file:
            while block := file.read(_BLOCK):
                yield block


def join(parts: Path, folder: Path) -> Path:
    """Make a model folder of its parts.

    Args:
        parts: The folder of parts, with `parts.json`.
        folder: The folder to make. What an interrupted call left there is written anew.

    Returns:
        The folder.

    Raises:
        UsageError: A part is missing.
        CorruptBlob: A file does not have the digest that was recorded.
    """
    contents = json.loads((parts / CONTENTS).read_text(encoding="utf-8"))
    names = [f"part-{number:03}" for number in range(contents["parts"])]
    if missing := [name for name in names if not (parts / name).is_file()]:
        raise UsageError(f"{parts} lacks {len(missing)} of {len(names)} parts, {missing[0]} first.", cure="Bring them.")
    folder.mkdir(parents=True, exist_ok=True)
    blocks, held = _blocks([parts / name for name in names]), b""
    for about in contents["files"]:
        path, left = folder / Path(about["name"]).name, about["size"]
        with open(path, "wb") as file:
            while left:
                held = held or next(blocks, b"")
                if not held:
                    raise CorruptBlob(f"The parts in {parts} end within {path.name}.", cure="Bring them again.")
                file.write(held[:left])
                held, left = held[left:], left - min(left, len(held))
        if digest_file(path) != about["digest"]:
            raise CorruptBlob(f"{path} is not what the parts were made of.", cure=f"Bring the parts in {parts} again.")
    return folder


def is_joined(parts: Path, folder: Path) -> bool:
    """Return whether a folder has all files of the parts, with their sizes, newer than the list of parts.

    Args:
        parts: The folder of parts, with `parts.json`.
        folder: What `join` has made, perhaps.
    """
    listed = parts / CONTENTS
    files = [(folder / each["name"], each["size"]) for each in json.loads(listed.read_text(encoding="utf-8"))["files"]]
    return all(
        path.is_file() and path.stat().st_size == size and path.stat().st_mtime >= listed.stat().st_mtime
        for path, size in files
    )


def main(action: Literal["split", "join"], source: Path, target: Path, /, *, megabytes: Annotated[int, "a part"] = 60):
    """Split a folder into parts, or join parts to a folder; nothing is written to the results."""
    print(*split(source, target, megabytes=megabytes) if action == "split" else [join(source, target)], sep="\n")
