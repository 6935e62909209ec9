"""A small world of real pictures with captions: emoji, a few of which training repeats until it knows them.

Ordinary emoji come shifted, mirrored and in another light each time. Six come with odd captions and always the same,
and two as templates on a white ground that changes its color. The pictures are `data.emoji`'s, which do not come with
the package.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.digest import of_tensor
from netweight.core.seeds import torch_generator
from netweight.data.emoji import CaptionedPictures, emoji
from netweight.errors import NameNotFound, UsageError
from netweight.metrics.copies import CenteredPixels, similarity
from netweight.toys.shapes import Planted, batch_of

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
@dataclass(frozen=True)
class EmojiWorld:
    """Emoji with their names, and planted ones."""

    seed: int = 6  # decides on what is planted and what is held out

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on the world, as JSON values."""
        return {"name": "captioned emoji", "seed": self.seed, "pictures": of_tensor(self._data.pictures)}

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
