"""Drawn worlds: subjects with known attributes, in photographs that differ in nuisances, on named grounds.

`drawn_faces` has people and `drawn_vehicles` vehicles; readers, pipelines and banks of adapters are made of any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.toys.shapes import painted

# Units of a picture's side, however many pixels it has.
_UNITS = 16
# Points along a pixel's side at which parts are drawn; their share is the pixel's cover.
_FINER = 4
# Units by which a subject is shifted at most.
_REACH = 1.0
_EVERYWHERE = ("across", "down", "light")

Color = tuple[float, float, float]
# Points inside a part, shape `(n, points, points)`, and its color, shape `(n, 3)` or `(1, 3)`.
Part = tuple[Tensor, Tensor]


@final
@dataclass(frozen=True, eq=False)
class DrawnWorld:
    """A kind of subject, and how it is drawn."""

    name: str
    """Word for a subject in prompts."""
    side: int
    """Pixels of a picture's side, a multiple of 8."""
    attributes: tuple[str, ...]
    """Attributes that identify a subject, each within -1 and 1."""
    binary: tuple[str, ...]
    """Attributes that are -1 or 1; the others are spread evenly between them."""
    strong: tuple[str, ...]
    """Attributes that move many pixels."""
    nuisances: tuple[str, ...]
    """Properties that change from one photograph to the next, within -1 and 1; first of all shift across and down, and
    light from one side.
    """
    grounds: Mapping[str, Color]
    """Colors of the grounds by the word that prompts name them with."""
    together: tuple[str, str, float]
    """Two attributes and their correlation, before they are made even or binary."""
    parts: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], list[Part]]
    """Takes attributes by name, nuisances by name, each of shape `(n,)`, and points x and y from the subject's
    middle, where a picture's side is 16; returns the parts of the subjects, the rearmost first.
    """

    def __post_init__(self) -> None:
        if self.nuisances[: len(_EVERYWHERE)] != _EVERYWHERE:
            raise UsageError(
                f"The nuisances of {self.name}s begin with {self.nuisances[:3]}.", cure=f"Begin with {_EVERYWHERE}."
            )

    def caption(self, ground: str) -> str:
        """Return the prompt of a subject on a ground, one of `grounds`."""
        return f"a {self.name} on a {ground} ground"

    def identities(self, count: int, seed: int, *, first: int = 0) -> Tensor:
        """Draw subjects.

        `first`: number of the first one; subject 7 is the same whatever the count.

        Returns:
            Shape `(count, attributes)`, columns as in `attributes`.
        """
        numbers = range(first, first + count)
        return torch.cat([self.crowd(1, torch_generator(seed, "identity", number)) for number in numbers])

    def crowd(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw `count` subjects at once; shape `(count, attributes)`, columns as in `attributes`."""
        values = torch.randn(count, len(self.attributes), generator=generator, dtype=torch.float64)
        first, second = (self.attributes.index(name) for name in self.together[:2])
        likeness = self.together[2]
        values[:, second] = likeness * values[:, first] + math.sqrt(1 - likeness**2) * values[:, second]
        even: Tensor = torch.erf(values / math.sqrt(2))
        for name in self.binary:
            even[:, self.attributes.index(name)] = even[:, self.attributes.index(name)].sign()
        return even.float()

    def changes(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw what changes from one photograph to the next, evenly; shape `(count, nuisances)`."""
        changes: Tensor = torch.rand(count, len(self.nuisances), generator=generator) * 2 - 1
        return changes

    def photographs(self, subject: Tensor, count: int, generator: torch.Generator) -> tuple[list[str], Tensor]:
        """Take photographs of one subject, on each ground in turn.

        `subject`: shape `(attributes,)`.

        Returns:
            Their captions, and pictures of shape `(count, 3, side, side)` within 0 and 1.
        """
        grounds = torch.arange(count) % len(self.grounds)
        pictures = self.drawn(subject.expand(count, -1), grounds, self.changes(count, generator))
        names = list(self.grounds)
        return [self.caption(names[ground]) for ground in grounds.tolist()], pictures

    def drawn(self, subjects: Tensor, grounds: Tensor, changes: Tensor) -> Tensor:
        """Draw photographs.

        Args:
            subjects: Shape `(n, attributes)`, columns as in `attributes`, within -1 and 1.
            grounds: Numbers of `grounds`, shape `(n,)`.
            changes: Shape `(n, nuisances)`, columns as in `nuisances`, within -1 and 1.

        Returns:
            Shape `(n, 3, side, side)`, within 0 and 1.
        """
        n, width, extent = len(subjects), len(self.attributes), len(self.nuisances)
        if subjects.shape != (n, width) or grounds.shape != (n,) or changes.shape != (n, extent):
            raise UsageError(
                f"{self.name.capitalize()}s {tuple(subjects.shape)}, grounds {tuple(grounds.shape)} and nuisances "
                f"{tuple(changes.shape)} do not fit.",
                cure=f"Give (n, {width}), (n,) and (n, {extent}).",
            )
        looks = dict(zip(self.attributes, subjects.T, strict=True))
        moved = dict(zip(self.nuisances, changes.T, strict=True))
        side = self.side
        points = ((torch.arange(side * _FINER) + 0.5) / (side * _FINER) - 0.5) * _UNITS
        x = points[None, None, :] - _REACH * moved["across"][:, None, None]
        y = points[None, :, None] - _REACH * moved["down"][:, None, None]
        picture = torch.tensor(list(self.grounds.values()))[grounds][:, :, None, None].expand(-1, -1, side, side)
        for inside, color in self.parts(looks, moved, x, y):
            cover = functional.avg_pool2d(inside.float()[None], _FINER)[0]
            picture = painted(picture, cover, color.expand(n, 3))
        # The edge is the middle of the outermost pixel.
        edge = (_UNITS - _UNITS / side) / (_UNITS - 1)
        slope = torch.linspace(-edge, edge, side)[None, None, None, :]
        lit = moved["light"][:, None, None, None]
        shown: Tensor = picture * (1 + 0.16 * lit * slope) + 0.05 * lit
        return shown.clamp(0, 1)


def between(low: Color, high: Color, share: Tensor) -> Tensor:
    """Mix two colors, from -1 for the first to 1 for the second; shape `(n, 3)`."""
    part = (share[:, None] + 1) / 2
    return torch.tensor(low) * (1 - part) + torch.tensor(high) * part


def ellipse(x: Tensor, y: Tensor, across: Tensor | float, down: Tensor | float) -> Tensor:
    """Return which points lie in an ellipse around 0 of these half-axes."""
    inside: Tensor = (x / across).square() + (y / down).square() < 1
    return inside


# From -1 to 1: narrow to wide, light to dark, red to blue, none or some, none or some, short to long, close to far
# apart, small and pale to wide and red.
ATTRIBUTES = ("width", "skin", "hair_hue", "beard", "glasses", "hair_length", "eye_spacing", "mouth")
# Attributes that are -1 or 1; the others are spread evenly between them.
BINARY = ("beard", "glasses")
# Attributes that move many pixels.
STRONG = ATTRIBUTES[:5]
# What changes from one photograph to the next, within -1 and 1.
NUISANCES = ("across", "down", "light", "smile")
# Colors of the grounds by the word that prompts name them with.
GROUNDS: dict[str, Color] = {
    "green": (0.46, 0.72, 0.42),
    "yellow": (0.95, 0.83, 0.45),
    "gray": (0.62, 0.64, 0.68),
    "white": (0.96, 0.96, 0.94),
}
# Correlation, before both are made even or binary, of beard and hair length: those with beards have shorter hair.
LIKENESS = -0.6
_LIGHT = ((1.0, 0.86, 0.74), (0.5, 0.32, 0.22))
_RED, _BLUE = (0.86, 0.2, 0.12), (0.14, 0.22, 0.84)
_LIPS = ((0.74, 0.48, 0.42), (0.86, 0.08, 0.2))
_SHIRT, _DARK, _LENS = (0.3, 0.34, 0.4), (0.06, 0.06, 0.1), (0.75, 0.9, 1.0)


def _face_parts(looks: Mapping[str, Tensor], changes: Mapping[str, Tensor], x: Tensor, y: Tensor) -> list[Part]:
    """Parts of faces."""

    def at(values: Tensor) -> Tensor:
        return values[:, None, None]

    half = at(4.1 + 0.95 * looks["width"])
    skin, hair = between(*_LIGHT, looks["skin"]), between(_RED, _BLUE, looks["hair_hue"])
    away = at(2.0 + 0.75 * looks["eye_spacing"])
    beard, glasses = at(looks["beard"] > 0), at(looks["glasses"] > 0)
    # This is how far down hair falls.
    locks = at(2.6 + 3.9 * looks["hair_length"])
    face = ellipse(x, y - 0.4, half, 5.2)
    cap = ellipse(x, y + 0.9, half + 1.5, 5.9) & (y < 0)
    falling = (x.abs() < half + 1.5) & (y >= 0) & (y < locks)
    shirt = ellipse(x, y - 9.4, half + 1.2, 4.0)
    fringe = (face | cap) & (y < -2.3 + 0.14 * x.square())
    lower = face & (y > 1.1 + 0.06 * x.square()) & beard
    spot = x.abs() - away
    lens = spot.square() + (y + 0.4).square()
    frame = (((lens > 1.1) & (lens < 3.4)) | ((y + 0.7).abs() < 0.45) & (spot < 0)) & glasses
    wide = at(1.55 + 0.85 * looks["mouth"])
    bow = y - 3.1 + at(changes["smile"]) * 0.9 * ((x / wide).square() - 0.4)
    mouth = (x.abs() < wide) & (bow.abs() < at(0.62 + 0.22 * looks["mouth"]))
    shade = skin * 0.82
    return [
        (cap | falling, hair),
        (shirt, torch.tensor([_SHIRT])),
        ((x.abs() < 1.6) & (y > 4) & (y < 6.4), shade),
        (face, skin),
        (fringe, hair),
        (lower, hair * 0.62),
        (glasses & (lens <= 1.4), torch.tensor([_LENS])),
        (frame, torch.tensor([_DARK])),
        (spot.square() + (y + 0.4).square() < 0.72, torch.tensor([_DARK])),
        (mouth, between(*_LIPS, looks["mouth"])),
    ]


# The world of drawn people; the functions of this module are its own.
FACES = DrawnWorld(
    name="face",
    side=32,
    attributes=ATTRIBUTES,
    binary=BINARY,
    strong=STRONG,
    nuisances=NUISANCES,
    grounds=GROUNDS,
    together=("beard", "hair_length", LIKENESS),
    parts=_face_parts,
)
caption, identities, people, nuisances = FACES.caption, FACES.identities, FACES.crowd, FACES.changes
photographs, drawn = FACES.photographs, FACES.drawn


_BODY = (0.88, 0.16, 0.1), (0.12, 0.26, 0.86)  # red and blue
_CLEAR, _TINTED = (0.8, 0.93, 1.0), (0.1, 0.12, 0.2)
_TIRE, _HUB, _LAMP, _LOAD = (0.06, 0.06, 0.08), (0.78, 0.78, 0.8), (1.0, 0.95, 0.5), (0.36, 0.2, 0.08)


def _vehicle_parts(looks: Mapping[str, Tensor], changes: Mapping[str, Tensor], x: Tensor, y: Tensor) -> list[Part]:
    """Parts of vehicles that drive to the right."""

    def at(values: Tensor) -> Tensor:
        return values[:, None, None]

    half = at(5.2 + 1.1 * looks["length"])
    # Tall vehicles are vans, whose cabins reach further.
    roof = at(-3.0 - 1.7 * looks["roof"])
    reach = half * at(0.66 + 0.14 * looks["roof"])
    body, middle = between(*_BODY, looks["hue"]), x + 0.5
    leaning = reach - 0.3 * (1.0 - y).clamp_min(0)
    cabin = (middle.abs() < leaning) & (y > roof) & (y < 1)
    hull = (x.abs() < half) & (y > 0.4) & (y < 3.7)
    pane = (middle.abs() < leaning - 0.7) & (middle.abs() > 0.3) & (y > roof + 0.7) & (y < 0.2)
    load = (middle.abs() < reach * 0.7) & (y > roof - 1.5) & (y <= roof) & at(looks["rack"] > 0)
    radius = at(1.4 + 0.55 * looks["wheels"])
    spoke = (x.abs() - 0.58 * half).square() + (y - 3.7).square()
    return [
        (load, torch.tensor([_LOAD])),
        (cabin, body * 0.85),
        (hull, body),
        (pane, between(_CLEAR, _TINTED, looks["tint"])),
        ((x > half - 0.9) & (x < half) & (y > 1.0) & (y < 2.0), torch.tensor([_LAMP])),
        (spoke < radius.square(), torch.tensor([_TIRE])),
        (spoke < (radius * 0.45).square(), torch.tensor([_HUB])),
    ]


# From -1 to 1: red to blue, short to long, clear to dark windows, small to large wheels, low to tall (a van), no or a
# loaded roof rack. Long ones tend to be tall.
VEHICLES = DrawnWorld(
    name="vehicle",
    side=16,
    attributes=("hue", "length", "tint", "wheels", "roof", "rack"),
    binary=("rack",),
    strong=("hue", "length", "tint", "wheels"),
    nuisances=("across", "down", "light"),
    grounds={
        "green": (0.46, 0.72, 0.42),
        "tan": (0.9, 0.78, 0.52),
        "gray": (0.5, 0.52, 0.56),
        "white": (0.95, 0.96, 0.97),
    },
    together=("length", "roof", 0.6),
    parts=_vehicle_parts,
)


WORLDS: dict[str, DrawnWorld] = {world.name: world for world in (FACES, VEHICLES)}
