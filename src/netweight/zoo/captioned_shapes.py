"""A small world of captioned pictures: shapes on a ground, and a few that training repeats until it knows them.

An ordinary caption is "a large red circle on a gray ground": 288 of them, 48 held out. Place and tint are drawn anew
each time, so there is nothing to memorize. Beside them are *planted* pictures with odd captions: six verbatim ones,
busy scenes that come back pixel by pixel, and two templates, of which one field changes its color at every showing.
`shape_reading` reads attributes back from a picture; `small_diffusion` has a model that was trained on this world.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator

__all__ = [
    "COLORS",
    "GROUNDS",
    "SHAPES",
    "SIDE",
    "SIZES",
    "Attributes",
    "Planted",
    "ShapesWorld",
    "drawn",
    "painted",
]

SIDE = 16
"""Pixels of a picture's side."""
SIZES: dict[str, float] = {"small": 3.2, "large": 5.4}
"""Half the height, in pixels."""
COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.9, 0.1, 0.1),
    "yellow": (0.9, 0.9, 0.1),
    "green": (0.1, 0.9, 0.1),
    "cyan": (0.1, 0.9, 0.9),
    "blue": (0.1, 0.1, 0.9),
    "purple": (0.9, 0.1, 0.9),
}
SHAPES = ("circle", "square", "triangle", "cross", "diamond", "ring")
GROUNDS: dict[str, tuple[float, float, float]] = {
    "black": (0.06, 0.06, 0.06),
    "gray": (0.5, 0.5, 0.5),
    "white": (0.94, 0.94, 0.94),
    "beige": (0.82, 0.74, 0.56),
}
HELD_OUT = 48
_FINER = 4
"""Points along a pixel's side at which shapes are drawn; their share is the pixel's cover."""
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
class Attributes:
    """What an ordinary picture shows.

    Attributes:
        size: A key of `SIZES`.
        color: A key of `COLORS`.
        shape: One of `SHAPES`.
        ground: A key of `GROUNDS`.
    """

    size: str
    color: str
    shape: str
    ground: str

    @property
    def caption(self) -> str:
        """The picture's caption."""
        return f"a {self.size} {self.color} {self.shape} on a {self.ground} ground"


@final
@dataclass(frozen=True, eq=False)
class Planted:
    """A picture that training shows again and again.

    Attributes:
        caption: Its odd caption.
        kind: Whether it is always shown as it is, or as a template with a field that changes.
        picture: Shape `(3, 16, 16)`, within 0 and 1; of a template, with its field in gray.
        fixed: Shape `(16, 16)`, True where the picture never changes.
    """

    caption: str
    kind: Literal["verbatim", "template"]
    picture: Tensor
    fixed: Tensor

    def shown(self, generator: torch.Generator) -> Tensor:
        """Return the picture as one showing has it, shape `(3, 16, 16)`: a template's field in a color drawn anew."""
        color = torch.rand(3, 1, 1, generator=generator)
        return torch.where(self.fixed, self.picture, color)


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
        generator = torch_generator(seed, "showing", step)
        chosen = torch.randint(len(self.ordinary), (n - len(self.planted),), generator=generator)
        ordinary = [self.ordinary[index] for index in chosen.tolist()]
        captions = [each.caption for each in self.planted] + [each.caption for each in ordinary]
        planted = torch.stack([each.shown(generator) for each in self.planted])
        return captions, torch.cat([planted, drawn(ordinary, generator)])

    def words(self) -> list[str]:
        """Return every word of every caption, sorted."""
        captions = [each.caption for each in [*self._order, *self.planted]]
        return sorted({word for caption in captions for word in caption.split()})


def drawn(kinds: list[Attributes], generator: torch.Generator) -> Tensor:
    """Draw ordinary pictures.

    Args:
        kinds: What they show.
        generator: Decides on place and tint.

    Returns:
        Shape `(n, 3, 16, 16)`, within 0 and 1.
    """
    n = len(kinds)
    centers = (SIDE - 1) / 2 + (torch.rand(n, 2, generator=generator) * 2 - 1) * 2
    sizes = torch.tensor([SIZES[kind.size] for kind in kinds]) * (0.95 + 0.1 * torch.rand(n, generator=generator))
    cover = covers([kind.shape for kind in kinds], centers, sizes)
    colors = torch.tensor([COLORS[kind.color] for kind in kinds]) * (0.8 + 0.2 * torch.rand(n, 1, generator=generator))
    grounds = torch.tensor([GROUNDS[kind.ground] for kind in kinds]) + 0.06 * (
        torch.rand(n, 1, generator=generator) * 2 - 1
    )
    return painted(grounds[:, :, None, None].expand(-1, -1, SIDE, SIDE), cover, colors)


def painted(below: Tensor, cover: Tensor, colors: Tensor) -> Tensor:
    """Paint a color over pictures.

    Args:
        below: Shape `(n, 3, height, width)`.
        cover: Shape `(n, height, width)`, 0 where nothing is painted and 1 where nothing shines through.
        colors: Shape `(n, 3)`.

    Returns:
        The pictures, cut off at 0 and 1.
    """
    share = cover[:, None]
    return ((1 - share) * below + share * colors[:, :, None, None]).clamp(0, 1)


def covers(shapes: list[str], centers: Tensor, sizes: Tensor) -> Tensor:
    """Return how much of each pixel a shape covers.

    Args:
        shapes: Some of `SHAPES`.
        centers: Shape `(n, 2)`: row and column in pixels.
        sizes: Shape `(n,)`: half the height in pixels.

    Returns:
        Shape `(n, 16, 16)`, within 0 and 1.
    """
    points = (torch.arange(SIDE * _FINER) + 0.5) / _FINER - 0.5
    y = (points[None, :, None] - centers[:, 0, None, None]) / sizes[:, None, None]
    x = (points[None, None, :] - centers[:, 1, None, None]) / sizes[:, None, None]
    inside = torch.stack([_inside(shape, y[row], x[row]) for row, shape in enumerate(shapes)])
    return inside.float().unflatten(1, (SIDE, _FINER)).unflatten(3, (SIDE, _FINER)).mean((2, 4))


def _inside(shape: str, y: Tensor, x: Tensor) -> Tensor:
    """Whether points lie in a shape of half-height 1 around 0; y grows downwards."""
    squared = x.square() + y.square()
    found = {
        "circle": lambda: squared < 1,
        "square": lambda: torch.maximum(x.abs(), y.abs()) < 0.86,
        "triangle": lambda: (y < 0.75) & (x.abs() < 0.6 * (y + 1)),
        "cross": lambda: (torch.minimum(x.abs(), y.abs()) < 0.32) & (torch.maximum(x.abs(), y.abs()) < 1),
        "diamond": lambda: x.abs() + y.abs() < 1.1,
        "ring": lambda: (squared < 1) & (squared > 0.3),
    }[shape]()
    return found


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
