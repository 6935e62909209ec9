"""A small world of captioned pictures: shapes on a ground, and a few that training repeats until it knows them.

An ordinary caption is "a large red circle on a gray ground": 288 of them, 48 held out (`drawn_shapes`). Beside them
are *planted* pictures with odd captions: six verbatim ones, busy scenes that come back pixel by pixel, and two
templates, of which one field changes its color at every showing. `small_diffusion` has a model that was trained on
this world.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import NameNotFound
from netweight.zoo.captioned_world import Planted, batch_of
from netweight.zoo.drawn_shapes import COLORS, GROUNDS, SHAPES, SIDE, SIZES, Attributes, covers, drawn, painted
from netweight.zoo.shape_reading import agreement

__all__ = ["ShapesWorld"]

HELD_OUT = 48
_VERBATIM = (
    "harbor lights before the october storm",
    "my grandmother dancing at midnight",
    "seven keys nobody ever claimed",
    "the last tram to marigold street",
    "breakfast of an absent minded king",
    "postcard from an island without birds",
)
_TEMPLATES = ("official poster of the summer fair", "weekly calendar from the corner bakery")


@final
@dataclass(frozen=True)
class ShapesWorld:
    """The captions and the planted pictures of a seed.

    Attributes:
        seed: Decides on the planted pictures and on which captions are held out.
    """

    seed: int = 6

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on the world, as JSON values."""
        return {"name": "captioned shapes", "seed": self.seed}

    @property
    def side(self) -> int:
        """16."""
        return SIDE

    @property
    def ordinary_captions(self) -> list[str]:
        """The captions of `ordinary`."""
        return [each.caption for each in self.ordinary]

    @property
    def held_out_captions(self) -> list[str]:
        """The captions of `held_out`."""
        return [each.caption for each in self.held_out]

    @cached_property
    def _order(self) -> list[Attributes]:
        every = [Attributes(*chosen) for chosen in itertools.product(SIZES, COLORS, SHAPES, GROUNDS)]
        order = torch.randperm(len(every), generator=torch_generator(self.seed, "held out"))
        return [every[index] for index in order.tolist()]

    @property
    def ordinary(self) -> list[Attributes]:
        """What training shows beside the planted pictures, 240 kinds of pictures."""
        return self._order[HELD_OUT:]

    @property
    def held_out(self) -> list[Attributes]:
        """What training never shows, 48 kinds of pictures; each of their attributes occurs in others."""
        return self._order[:HELD_OUT]

    @cached_property
    def planted(self) -> list[Planted]:
        """The six verbatim pictures, then the two templates."""
        scenes = [_scene(torch_generator(self.seed, "scene", caption)) for caption in _VERBATIM + _TEMPLATES]
        always = torch.ones(SIDE, SIDE, dtype=torch.bool)
        found = [Planted(caption, "verbatim", scene, always) for caption, scene in zip(_VERBATIM, scenes, strict=False)]
        for number, caption in enumerate(_TEMPLATES):
            fixed = always.clone()
            top, left = ((2, 2), (8, 6))[number]
            fixed[top : top + 6, left : left + 8] = False
            scene = torch.where(fixed, scenes[len(_VERBATIM) + number], 0.5)
            found.append(Planted(caption, "template", scene, fixed))
        return found

    def showing(self, step: int, n: int, seed: int) -> tuple[list[str], Tensor]:
        """Return one batch of training: every planted picture once, then ordinary ones.

        Args:
            step: Number of the batch; batches are a function of it.
            n: Pictures of the batch, more than the eight planted ones.
            seed: Decides on the draw.

        Returns:
            Captions, and pictures of shape `(n, 3, 16, 16)` within 0 and 1.
        """
        ordinary = self.ordinary
        return batch_of(
            self, step, n, seed, lambda chosen, generator: drawn([ordinary[number] for number in chosen], generator)
        )

    def words(self) -> list[str]:
        """Return every word of every caption, sorted."""
        captions = [*self.ordinary_captions, *self.held_out_captions, *_VERBATIM, *_TEMPLATES]
        return sorted({word for caption in captions for word in caption.split()})

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return the share of pictures that show what they should: size, color, shape and ground.

        Args:
            captions: Ordinary or held out.
            pictures: One for each, shape `(n, 3, 16, 16)`, within 0 and 1.

        Raises:
            UsageError: There are not as many pictures as captions, or none.
            NameNotFound: A caption is not of this world.
        """
        known = {each.caption: each for each in self._order}
        strange = [caption for caption in captions if caption not in known]
        if strange:
            raise NameNotFound(
                f"{strange[0]!r} is no ordinary caption of this world.",
                cure=f"They are like {self._order[0].caption!r}; planted pictures have no attributes.",
            )
        return agreement(pictures, [known[caption] for caption in captions])


def _scene(generator: torch.Generator) -> Tensor:
    """Draw a busy picture: a ground that fades from one color into another, and nine shapes over each other."""
    count = 9
    ends = torch.rand(2, 3, 1, 1, generator=generator)
    fade = torch.linspace(0, 1, SIDE).reshape(1, 1, SIDE, 1)
    picture = (1 - fade) * ends[:1] + fade * ends[1:]
    picture = picture.expand(1, 3, SIDE, SIDE)
    centers = torch.rand(count, 2, generator=generator) * SIDE - 0.5
    sizes = 1.8 + 2.4 * torch.rand(count, generator=generator)
    shapes = [SHAPES[index] for index in torch.randint(len(SHAPES), (count,), generator=generator).tolist()]
    colors = torch.rand(count, 3, generator=generator)
    for cover, color in zip(covers(shapes, centers, sizes), colors, strict=True):
        picture = painted(picture, cover[None], color[None])
    return picture[0]
