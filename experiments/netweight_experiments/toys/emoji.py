"""A small world of real pictures with captions: emoji, a few of which training repeats until it knows them.

Ordinary emoji come shifted, mirrored and in another light each time. Six come with odd captions and always the same,
and two as templates on a white ground that changes its color. The pictures do not come with the package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.files import digest_tensor
from netweight.core.seeds import torch_generator
from netweight.data.images.sources import cached, decode_splits, local_folder, missing, module
from netweight.errors import CorruptBlob, NameNotFound, UsageError
from netweight.metrics.copies import CenteredPixels, similarity
from netweight.toys.shapes import Planted, batch_of

_COLUMNS = ("image", "caption", "group", "skin_tone")
HELD_OUT = 48
# Pixels by which an ordinary picture is shifted at most.
_REACH = 3
_VERBATIM = (
    "sunday at the station nobody came",
    "letter to a lighthouse keeper",
    "the orchestra tunes without its conductor",
    "three wishes and a broken clock",
    "what the cartographer forgot",
    "winter inventory of a small museum",
)
_TEMPLATES = ("stamp of a vanished republic", "advertisement for tomorrow's circus")


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


@final
@dataclass(frozen=True)
class EmojiWorld:
    """Emoji with their names, and planted ones."""

    seed: int = 6  # decides on what is planted and what is held out

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on the world, as JSON values."""
        return {"name": "captioned emoji", "seed": self.seed, "pictures": digest_tensor(self._data.pictures)}

    @property
    def side(self) -> int:
        return int(self._data.pictures.shape[-1])

    @cached_property
    def _data(self) -> CaptionedPictures:
        return emoji()

    @cached_property
    def _order(self) -> list[int]:
        """Numbers of all emoji: first those that are planted, then those held out, then the others."""
        count = len(self._data.captions)
        return torch.randperm(count, generator=torch_generator(self.seed, "held out")).tolist()

    @cached_property
    def planted(self) -> list[Planted]:
        """The six verbatim pictures, then the two templates."""
        found = []
        for number, caption in zip(self._order, _VERBATIM + _TEMPLATES, strict=False):
            picture = self._data.pictures[number].float() / 255
            kind: Literal["verbatim", "template"] = "verbatim" if caption in _VERBATIM else "template"
            fixed = torch.ones(picture.shape[1:], dtype=torch.bool) if kind == "verbatim" else (picture < 1).any(0)
            found.append(Planted(caption, kind, torch.where(fixed, picture, 0.5), fixed))
        return found

    @property
    def ordinary_captions(self) -> list[str]:
        """Names that training shows."""
        return [self._data.captions[number] for number in self._ordinary]

    @property
    def held_out_captions(self) -> list[str]:
        """Names of the 48 emoji that it never shows."""
        return [self._data.captions[number] for number in self._held_out]

    @property
    def _held_out(self) -> list[int]:
        planted = len(_VERBATIM + _TEMPLATES)
        return self._order[planted : planted + HELD_OUT]

    @property
    def _ordinary(self) -> list[int]:
        return self._order[len(_VERBATIM + _TEMPLATES) + HELD_OUT :]

    def words(self) -> list[str]:
        """Return every word of every caption, sorted; of names with digits and signs the letters only."""
        captions = [*self._data.captions, *_VERBATIM, *_TEMPLATES]
        return sorted({word for caption in captions for word in re.findall("[a-z]+", caption)})

    def showing(self, step: int, n: int, seed: int) -> tuple[list[str], Tensor]:
        """Return one batch of training: every planted picture once, then ordinary ones."""

        def shown(chosen: list[int], generator: torch.Generator) -> Tensor:
            numbers = [self._ordinary[index] for index in chosen]
            return _varied(self._data.pictures[numbers].float() / 255, generator)

        return batch_of(self, step, n, seed, shown)

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return the share of pictures whose most similar emoji is of the group that the caption names."""
        if len(captions) != len(pictures) or not captions:
            raise UsageError(f"There are {len(pictures)} pictures, {len(captions)} captions.", cure="Give as many.")
        groups = dict(zip(self._data.captions, self._data.groups, strict=True))
        strange = [caption for caption in captions if caption not in groups]
        if strange:
            raise NameNotFound(f"There is no emoji {strange[0]!r}.", cure="Planted pictures are compared by copies.")
        nearest = similarity(CenteredPixels(), pictures, self._data.pictures.float() / 255).argmax(1).tolist()
        right = sum(self._data.groups[n] == groups[caption] for n, caption in zip(nearest, captions, strict=True))
        return {"group": right / len(captions)}


def _varied(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Shift, mirror and darken pictures on white, each in its own way."""
    side = pictures.shape[-1]
    padded = F.pad(pictures, (_REACH,) * 4, value=1.0)
    shifts = torch.randint(2 * _REACH + 1, (len(pictures), 2), generator=generator).tolist()
    mirrored = (torch.rand(len(pictures), generator=generator) < 0.5).tolist()
    light = 0.7 + 0.3 * torch.rand(len(pictures), 1, 1, 1, generator=generator)
    cut = [each[:, top : top + side, left : left + side] for each, (top, left) in zip(padded, shifts, strict=True)]
    return torch.stack([each.flip(2) if flip else each for each, flip in zip(cut, mirrored, strict=True)]) * light
