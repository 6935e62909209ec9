"""Noto emoji with their names: small pictures with captions, to train text-to-image models on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor

from netweight.data.images.sources import cached, decode_splits, local_folder, missing, module
from netweight.errors import CorruptBlob

_COLUMNS = ("image", "caption", "group", "skin_tone")


@final
@dataclass(frozen=True, eq=False)
class CaptionedPictures:
    """Pictures with captions."""

    name: str
    pictures: Tensor  # uint8, shape `(n, 3, side, side)`
    captions: tuple[str, ...]  # one per picture
    groups: tuple[str, ...]  # what kind of thing each picture shows, in a word or two


def emoji() -> CaptionedPictures:
    """Return the emoji without skin tones, 32 pixels wide on white, with their Unicode names in lower case."""
    # Source: googlefonts/noto-emoji (Apache-2.0), names from muan/unicode-emoji-json (MIT).
    folder = local_folder("emoji_captions")
    file = folder / "noto32-all.parquet" if folder is not None else None
    if file is None or not file.is_file():
        raise missing("emoji", "emoji_captions", "noto32-all.parquet")
    rows = [row for row in _rows(file) if not row["skin_tone"]]
    captions = tuple(row["caption"].lower() for row in rows)

    def decoded() -> dict[str, Tensor]:
        named = [(caption, row["image"]) for caption, row in zip(captions, rows, strict=True)]
        return {"pictures": decode_splits([named], of="emoji")[0]}

    status = file.stat()
    pictures = cached("emoji", [file.name, status.st_size, status.st_mtime_ns], decoded)["pictures"]
    return CaptionedPictures("emoji", pictures, captions, tuple(row["group"] for row in rows))


def _rows(file: Path) -> list[dict[str, Any]]:
    parquet = module("pyarrow.parquet", "Reading emoji", "llm")
    try:
        rows: list[dict[str, Any]] = parquet.read_table(file, columns=list(_COLUMNS)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are these two's
        raise CorruptBlob(f"{file} cannot be read: {error}", cure="Fetch it again.") from error
    if not rows or any(name not in rows[0] for name in _COLUMNS):
        raise CorruptBlob(f"{file} lacks rows or one of the columns {_COLUMNS}.", cure="Fetch it again.")
    return rows
