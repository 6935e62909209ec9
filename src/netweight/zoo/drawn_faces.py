"""Draws cartoon faces, sixteen pixels wide, of people with eight known attributes: a world to customize models in.

An identity is a row of attributes within -1 and 1. A photograph of it has a ground, which is what prompts speak of, and
nuisances that change from one photograph to the next: shift, light and smile. `face_reading` reads all of it back.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.zoo.drawn_shapes import painted

__all__ = [
    "ATTRIBUTES",
    "BINARY",
    "GROUNDS",
    "NUISANCES",
    "SIDE",
    "STRONG",
    "caption",
    "drawn",
    "identities",
    "nuisances",
    "people",
    "photographs",
]

SIDE = 16
"""Pixels of a picture's side."""
ATTRIBUTES = ("width", "skin", "hair_hue", "beard", "glasses", "hair_length", "eye_spacing", "mouth")
"""From -1 to 1: narrow to wide, light to dark, red to blue, none or some, none or some, short to long, close to far
apart, small and pale to wide and red."""
BINARY = ("beard", "glasses")
"""Attributes that are -1 or 1; the others are spread evenly between them."""
STRONG = ATTRIBUTES[:5]
"""Attributes that move many pixels."""
NUISANCES = ("across", "down", "light", "smile")
"""What changes from one photograph to the next, within -1 and 1."""
GROUNDS: dict[str, tuple[float, float, float]] = {
    "green": (0.46, 0.72, 0.42),
    "yellow": (0.95, 0.83, 0.45),
    "gray": (0.62, 0.64, 0.68),
    "white": (0.96, 0.96, 0.94),
}
"""Colors of the grounds by the word that prompts name them with."""
LIKENESS = -0.6
"""Correlation, before both are made even or binary, of beard and hair length: those with beards have shorter hair."""
_FINER = 4
"""Points along a pixel's side at which parts are drawn; their share is the pixel's cover."""
_REACH = 1.0
"""Pixels by which a face is shifted at most."""
_LIGHT = ((1.0, 0.86, 0.74), (0.5, 0.32, 0.22))
_RED, _BLUE = (0.86, 0.2, 0.12), (0.14, 0.22, 0.84)
_LIPS = ((0.74, 0.48, 0.42), (0.86, 0.08, 0.2))
_SHIRT, _DARK, _LENS = (0.3, 0.34, 0.4), (0.06, 0.06, 0.1), (0.75, 0.9, 1.0)


def caption(ground: str) -> str:
    """Return the prompt of a face on a ground, one of `GROUNDS`."""
    return f"a face on a {ground} ground"


def identities(count: int, seed: int, *, first: int = 0) -> Tensor:
    """Draw people.

    Args:
        count: How many.
        seed: Decides on all of them.
        first: Number of the first one; person 7 is the same whatever the count.

    Returns:
        Shape `(count, 8)`, columns as in `ATTRIBUTES`.
    """
    numbers = range(first, first + count)
    return torch.cat([people(1, torch_generator(seed, "identity", number)) for number in numbers])


def people(count: int, generator: torch.Generator) -> Tensor:
    """Draw so many people at once; shape `(count, 8)`, columns as in `ATTRIBUTES`.

    All are spread evenly, by way of normal values, of which those for beard and hair length are correlated.
    """
    values = torch.randn(count, len(ATTRIBUTES), generator=generator, dtype=torch.float64)
    beard, length = ATTRIBUTES.index("beard"), ATTRIBUTES.index("hair_length")
    values[:, length] = LIKENESS * values[:, beard] + math.sqrt(1 - LIKENESS**2) * values[:, length]
    even: Tensor = torch.erf(values / math.sqrt(2))
    for name in BINARY:
        even[:, ATTRIBUTES.index(name)] = even[:, ATTRIBUTES.index(name)].sign()
    return even.float()


def nuisances(count: int, generator: torch.Generator) -> Tensor:
    """Draw what changes from one photograph to the next, evenly: shape `(count, 4)`, columns as in `NUISANCES`."""
    found: Tensor = torch.rand(count, len(NUISANCES), generator=generator) * 2 - 1
    return found


def photographs(person: Tensor, count: int, generator: torch.Generator) -> tuple[list[str], Tensor]:
    """Take photographs of one person, on each ground in turn.

    Args:
        person: Shape `(8,)`.
        count: How many.
        generator: Decides on the nuisances.

    Returns:
        Their captions, and pictures of shape `(count, 3, 16, 16)` within 0 and 1.
    """
    grounds = torch.arange(count) % len(GROUNDS)
    pictures = drawn(person.expand(count, -1), grounds, nuisances(count, generator))
    names = list(GROUNDS)
    return [caption(names[ground]) for ground in grounds.tolist()], pictures


def drawn(faces: Tensor, grounds: Tensor, changes: Tensor) -> Tensor:
    """Draw photographs.

    Args:
        faces: Shape `(n, 8)`, columns as in `ATTRIBUTES`, within -1 and 1.
        grounds: Numbers of `GROUNDS`, shape `(n,)`.
        changes: Shape `(n, 4)`, columns as in `NUISANCES`, within -1 and 1.

    Returns:
        Shape `(n, 3, 16, 16)`, within 0 and 1.

    Raises:
        UsageError: The shapes do not fit.
    """
    n = len(faces)
    if faces.shape != (n, len(ATTRIBUTES)) or grounds.shape != (n,) or changes.shape != (n, len(NUISANCES)):
        raise UsageError(
            f"Faces {tuple(faces.shape)}, grounds {tuple(grounds.shape)} and nuisances {tuple(changes.shape)} do not "
            "fit.",
            cure=f"Give (n, {len(ATTRIBUTES)}), (n,) and (n, {len(NUISANCES)}).",
        )
    across, down, light, smile = changes.T
    looks = dict(zip(ATTRIBUTES, faces.T, strict=True))
    points = (torch.arange(SIDE * _FINER) + 0.5) / _FINER - SIDE / 2
    x = points[None, None, :] - _REACH * across[:, None, None]
    y = points[None, :, None] - _REACH * down[:, None, None]
    picture = torch.tensor(list(GROUNDS.values()))[grounds][:, :, None, None].expand(-1, -1, SIDE, SIDE)
    for inside, color in _parts(looks, smile, x, y):
        picture = painted(picture, _cover(inside), color.expand(n, 3))
    slope = torch.linspace(-1, 1, SIDE)[None, None, None, :]
    lit = light[:, None, None, None]
    shown: Tensor = picture * (1 + 0.16 * lit * slope) + 0.05 * lit
    return shown.clamp(0, 1)


def _parts(looks: dict[str, Tensor], smile: Tensor, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Points inside each part of a face, shape `(n, points, points)`, and its color; the rearmost first."""

    def at(values: Tensor) -> Tensor:
        return values[:, None, None]

    half = at(4.1 + 0.95 * looks["width"])
    skin, hair = _between(*_LIGHT, looks["skin"]), _between(_RED, _BLUE, looks["hair_hue"])
    away = at(2.0 + 0.75 * looks["eye_spacing"])
    beard, glasses = at(looks["beard"] > 0), at(looks["glasses"] > 0)
    locks = at(2.6 + 3.9 * looks["hair_length"])  # how far down hair falls
    face = _ellipse(x, y - 0.4, half, 5.2)
    cap = _ellipse(x, y + 0.9, half + 1.5, 5.9) & (y < 0)
    falling = (x.abs() < half + 1.5) & (y >= 0) & (y < locks)
    shirt = _ellipse(x, y - 9.4, half + 1.2, 4.0)
    fringe = (face | cap) & (y < -2.3 + 0.14 * x.square())
    lower = face & (y > 1.1 + 0.06 * x.square()) & beard
    spot = x.abs() - away
    lens = spot.square() + (y + 0.4).square()
    frame = (((lens > 1.1) & (lens < 3.4)) | ((y + 0.7).abs() < 0.45) & (spot < 0)) & glasses
    wide = at(1.55 + 0.85 * looks["mouth"])
    bow = y - 3.1 + at(smile) * 0.9 * ((x / wide).square() - 0.4)
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
        (mouth, _between(*_LIPS, looks["mouth"])),
    ]


def _between(low: tuple[float, ...], high: tuple[float, ...], share: Tensor) -> Tensor:
    """Mix two colors, from -1 for the first to 1 for the second; shape `(n, 3)`."""
    part = (share[:, None] + 1) / 2
    return torch.tensor(low) * (1 - part) + torch.tensor(high) * part


def _ellipse(x: Tensor, y: Tensor, across: Tensor | float, down: Tensor | float) -> Tensor:
    inside: Tensor = (x / across).square() + (y / down).square() < 1
    return inside


def _cover(inside: Tensor) -> Tensor:
    """How much of each pixel is inside, shape `(n, 16, 16)`."""
    return inside.float().reshape(-1, SIDE, _FINER, SIDE, _FINER).mean((2, 4))
