"""Worlds of captioned pictures: ordinary captions, some held out, and planted pictures that training repeats.

One is drawn here: shapes on grounds, whose attributes can be read from the pictures. Another one, of emoji, is in
`netweight_experiments.toys.drawn_worlds`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import NameNotFound, UsageError
from netweight.metrics.copies import MemorizedImage


@final
@dataclass(frozen=True, eq=False)
class PlantedPicture:
    """A picture that training shows again and again."""

    caption: str
    """Caption of the picture, unlike all others."""
    kind: Literal["verbatim", "template"]
    """Kind of repetition: always the same image, or a template with a field that changes."""
    picture: Tensor
    """Shape `(3, side, side)`, within 0 and 1; of a template, with its field in gray."""
    fixed: Tensor
    """Shape `(side, side)`, True where the picture never changes."""

    def shown(self, generator: torch.Generator) -> Tensor:
        """Return the picture as one showing has it, shape `(3, side, side)`: a template's field in a new color."""
        color = torch.rand(3, 1, 1, generator=generator)
        return torch.where(self.fixed, self.picture, color)


class CaptionedWorld(Protocol):
    """Captioned pictures to train on."""

    @property
    def about(self) -> dict[str, Any]: ...

    @property
    def side(self) -> int: ...

    @property
    def planted(self) -> list[PlantedPicture]: ...

    @property
    def ordinary_captions(self) -> list[str]: ...

    @property
    def held_out_captions(self) -> list[str]: ...

    def words(self) -> list[str]:
        """Return every word of every caption, sorted."""

    def showing(self, step: int, n: int, seed: int) -> tuple[list[str], Tensor]:
        """Return one batch of training: every planted picture once, then ordinary ones."""

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return how far pictures show what their captions say: a share for each attribute."""


def batch_of(
    world: CaptionedWorld, step: int, n: int, seed: int, shown: Callable[[list[int], torch.Generator], Tensor]
) -> tuple[list[str], Tensor]:
    """Draw a batch of training as `CaptionedWorld.showing` says."""
    generator, ordinary = torch_generator(seed, "showing", step), world.ordinary_captions
    chosen: list[int] = torch.randint(len(ordinary), (n - len(world.planted),), generator=generator).tolist()
    planted = torch.stack([each.shown(generator) for each in world.planted])
    captions = [each.caption for each in world.planted] + [ordinary[number] for number in chosen]
    return captions, torch.cat([planted, shown(chosen, generator)])


def memorized(world: CaptionedWorld) -> list[MemorizedImage]:
    """Return the planted pictures as `metrics.copies` compares with them; of templates, the part that stays."""
    return [
        MemorizedImage(each.caption, each.kind, each.picture, None if each.kind == "verbatim" else each.fixed)
        for each in world.planted
    ]


# Pixels of a picture's side.
SIDE = 16
# Half the height, in pixels.
SIZES: dict[str, float] = {"small": 3.2, "large": 5.4}
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
# Pixels from the middle that a shape reaches at most, before its size varies.
_ROOM = 6.9
# How much brighter or darker a ground may be, and how much more so at opposite edges.
_GROUND_TINT, _SLOPE = 0.1, 0.15
# Points along a pixel's side at which shapes are drawn; their share is the pixel's cover.
_FINER = 4


@final
@dataclass(frozen=True)
class Attributes:
    """Attributes of an ordinary picture."""

    size: str
    """A key of `SIZES`."""
    color: str
    """A key of `COLORS`."""
    shape: str
    """A key of `SHAPES`."""
    ground: str
    """A key of `GROUNDS`."""

    @property
    def caption(self) -> str:
        """The picture's caption."""
        return f"a {self.size} {self.color} {self.shape} on a {self.ground} ground"


def drawn(kinds: list[Attributes], generator: torch.Generator) -> Tensor:
    """Draw ordinary pictures."""
    n = len(kinds)

    def either_way(*shape: int) -> Tensor:
        """Numbers within -1 and 1."""
        return torch.rand(*shape, generator=generator) * 2 - 1

    halves = torch.tensor([SIZES[kind.size] for kind in kinds])
    centers = (SIDE - 1) / 2 + either_way(n, 2) * (_ROOM - halves[:, None])
    cover = covers([kind.shape for kind in kinds], centers, halves * (1 + 0.05 * either_way(n)))
    colors = torch.tensor([COLORS[kind.color] for kind in kinds]) * (0.87 + 0.13 * either_way(n, 1))
    slopes = either_way(n, 2, 1, 1)
    along = torch.linspace(-1, 1, SIDE)
    light = _GROUND_TINT * either_way(n, 1, 1) + _SLOPE * (slopes[:, 0] * along[:, None] + slopes[:, 1] * along) / 2
    grounds = torch.tensor([GROUNDS[kind.ground] for kind in kinds])[:, :, None, None] + light[:, None]
    return painted(grounds, cover, colors)


def painted(below: Tensor, cover: Tensor, colors: Tensor) -> Tensor:
    """Lay a color over pictures."""
    share = cover[:, None]
    return ((1 - share) * below + share * colors[:, :, None, None]).clamp(0, 1)


def covers(shapes: list[str], centers: Tensor, sizes: Tensor) -> Tensor:
    """Return how much of each pixel a shape covers."""
    points = (torch.arange(SIDE * _FINER) + 0.5) / _FINER - 0.5
    y = (points[None, :, None] - centers[:, 0, None, None]) / sizes[:, None, None]
    x = (points[None, None, :] - centers[:, 1, None, None]) / sizes[:, None, None]
    inside = torch.stack([_inside(shape, y[row], x[row]) for row, shape in enumerate(shapes)])
    return inside.float().reshape(-1, SIDE, _FINER, SIDE, _FINER).mean((2, 4))


def _inside(shape: str, y: Tensor, x: Tensor) -> Tensor:
    """Return whether points lie in a shape of half-height 1 around 0; y grows downwards."""
    squared = x.square() + y.square()
    figures = {
        "circle": lambda: squared < 1,
        "square": lambda: torch.maximum(x.abs(), y.abs()) < 0.86,
        "triangle": lambda: (y < 0.75) & (x.abs() < 0.6 * (y + 1)),
        "cross": lambda: (torch.minimum(x.abs(), y.abs()) < 0.32) & (torch.maximum(x.abs(), y.abs()) < 1),
        "diamond": lambda: x.abs() + y.abs() < 1.1,
        "ring": lambda: (squared < 1) & (squared > 0.3),
    }[shape]()
    return figures


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
    """The captions and the planted pictures of a seed."""

    seed: int = 6
    """Decides on the planted pictures and on which captions are held out."""

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on the world, as JSON values."""
        return {"name": "captioned shapes", "seed": self.seed}

    @property
    def side(self) -> int:
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
        """Kinds of pictures in the training data beside the planted ones: 240."""
        return self._order[HELD_OUT:]

    @property
    def held_out(self) -> list[Attributes]:
        """Kinds of pictures outside the training data: 48; each of their attributes occurs in others."""
        return self._order[:HELD_OUT]

    @cached_property
    def planted(self) -> list[PlantedPicture]:
        """The six verbatim pictures, then the two templates."""
        scenes = [_scene(torch_generator(self.seed, "scene", caption)) for caption in _VERBATIM + _TEMPLATES]
        always = torch.ones(SIDE, SIDE, dtype=torch.bool)
        planted = [
            PlantedPicture(caption, "verbatim", scene, always)
            for caption, scene in zip(_VERBATIM, scenes, strict=False)
        ]
        for number, caption in enumerate(_TEMPLATES):
            fixed = always.clone()
            top, left = ((2, 2), (8, 6))[number]
            fixed[top : top + 6, left : left + 8] = False
            scene = torch.where(fixed, scenes[len(_VERBATIM) + number], 0.5)
            planted.append(PlantedPicture(caption, "template", scene, fixed))
        return planted

    def showing(self, step: int, n: int, seed: int) -> tuple[list[str], Tensor]:
        """Return one batch of training: every planted picture once, then ordinary ones."""
        ordinary = self.ordinary
        return batch_of(
            self, step, n, seed, lambda chosen, generator: drawn([ordinary[number] for number in chosen], generator)
        )

    def words(self) -> list[str]:
        """Return every word of every caption, sorted."""
        captions = [*self.ordinary_captions, *self.held_out_captions, *_VERBATIM, *_TEMPLATES]
        return sorted({word for caption in captions for word in caption.split()})

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return the share of pictures that show what they should: size, color, shape and ground."""
        scenes = {each.caption: each for each in self._order}
        strange = [caption for caption in captions if caption not in scenes]
        if strange:
            raise NameNotFound(
                f"{strange[0]!r} is not an ordinary caption of this world.",
                cure=f"Ordinary captions are like {self._order[0].caption!r}; planted pictures have no attributes.",
            )
        return agreement(pictures, [scenes[caption] for caption in captions])


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


# Pixels between the places at which shapes are looked for.
_STEP = 0.5
# How far from the middle they are looked for, in pixels; the world draws small ones up to 3.7 away.
_REACH = 4.0


def read(pictures: Tensor) -> list[Attributes]:
    """Return what pictures show, the likeliest of each attribute."""
    if pictures.ndim != 4 or pictures.shape[1:] != (3, SIDE, SIDE):
        raise UsageError(
            f"Pictures of shape {tuple(pictures.shape)} are not of the world of shapes.",
            cure=f"Give (n, 3, {SIDE}, {SIDE}).",
        )
    pictures = pictures.float()
    grounds = torch.tensor(list(GROUNDS.values()))
    light = _light(pictures)
    below = light.mean((2, 3))
    ground = (below[:, None] - grounds).square().sum(2).argmin(1)
    away = pictures - light
    directions = torch.tensor(list(COLORS.values()))[None] - below[:, None]
    lengths = directions.norm(dim=2, keepdim=True)
    along = torch.einsum("ncp,nkc->nkp", away.flatten(2), directions / lengths).clamp_min(0)
    color = along.square().sum(2).argmax(1)
    cover = (along / lengths)[torch.arange(len(pictures)), color]
    size, shape = _best_template(cover)
    names = [list(SIZES), list(COLORS), list(SHAPES), list(GROUNDS)]
    readings = torch.stack([size, color, shape, ground], 1).tolist()
    return [Attributes(*(values[index] for values, index in zip(names, row, strict=True))) for row in readings]


def agreement(pictures: Tensor, kinds: Sequence[Attributes]) -> dict[str, float]:
    """Return the share of pictures that show what they should, attribute by attribute."""
    if len(pictures) != len(kinds) or not kinds:
        raise UsageError(f"There are {len(pictures)} pictures and {len(kinds)} kinds.", cure="Give one for each.")
    pairs = list(zip(read(pictures), kinds, strict=True))
    return {
        name: sum(getattr(attributes, name) == getattr(expected, name) for attributes, expected in pairs) / len(pairs)
        for name in ("size", "color", "shape", "ground")
    }


def _light(pictures: Tensor) -> Tensor:
    """The ground with its slope: the plane that fits the pictures' border best, shape as theirs."""
    along = torch.linspace(-1, 1, SIDE)
    plane = torch.stack([torch.ones(SIDE, SIDE), along[:, None].expand(SIDE, SIDE), along.expand(SIDE, SIDE)], 2)
    edge = torch.ones(SIDE, SIDE, dtype=torch.bool)
    edge[1:-1, 1:-1] = False
    slopes = pictures[:, :, edge] @ torch.linalg.pinv(plane[edge]).T
    return torch.einsum("nck,hwk->nchw", slopes, plane)


def _best_template(cover: Tensor) -> tuple[Tensor, Tensor]:
    """The size and shape whose cover, at some place, is closest; shape `(n,)` each, from covers `(n, pixels)`."""
    templates, sizes, shapes = _templates()
    squared = templates.square().sum(1) - 2 * cover.clamp(0, 1) @ templates.T
    best = squared.argmin(1)
    return sizes[best], shapes[best]


@functools.cache
def _templates() -> tuple[Tensor, Tensor, Tensor]:
    """Covers of every size and shape at every place, shape `(templates, pixels)`, and which they are."""
    offsets = torch.arange(-_REACH, _REACH + _STEP / 2, _STEP)
    places = torch.cartesian_prod(offsets, offsets) + (SIDE - 1) / 2
    made, sizes, shapes = [], [], []
    for size, half in enumerate(SIZES.values()):
        for shape, name in enumerate(SHAPES):
            made.append(covers([name] * len(places), places, torch.full((len(places),), half)).flatten(1))
            sizes += [size] * len(places)
            shapes += [shape] * len(places)
    return torch.cat(made), torch.tensor(sizes), torch.tensor(shapes)
