"""Draws cartoon faces, sixteen pixels wide, of people with eight known attributes: a world to customize models in.

An identity is a row of attributes within -1 and 1. A photograph of it has a ground, which is what prompts speak of, and
nuisances that change from one photograph to the next: shift, light and smile. `face_reading` reads all of it back.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from netweight.zoo.drawn_world import SIDE, Color, DrawnWorld, Part, between, ellipse

__all__ = [
    "ATTRIBUTES",
    "BINARY",
    "FACES",
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

ATTRIBUTES = ("width", "skin", "hair_hue", "beard", "glasses", "hair_length", "eye_spacing", "mouth")
"""From -1 to 1: narrow to wide, light to dark, red to blue, none or some, none or some, short to long, close to far
apart, small and pale to wide and red."""
BINARY = ("beard", "glasses")
"""Attributes that are -1 or 1; the others are spread evenly between them."""
STRONG = ATTRIBUTES[:5]
"""Attributes that move many pixels."""
NUISANCES = ("across", "down", "light", "smile")
"""What changes from one photograph to the next, within -1 and 1."""
GROUNDS: dict[str, Color] = {
    "green": (0.46, 0.72, 0.42),
    "yellow": (0.95, 0.83, 0.45),
    "gray": (0.62, 0.64, 0.68),
    "white": (0.96, 0.96, 0.94),
}
"""Colors of the grounds by the word that prompts name them with."""
LIKENESS = -0.6
"""Correlation, before both are made even or binary, of beard and hair length: those with beards have shorter hair."""
_LIGHT = ((1.0, 0.86, 0.74), (0.5, 0.32, 0.22))
_RED, _BLUE = (0.86, 0.2, 0.12), (0.14, 0.22, 0.84)
_LIPS = ((0.74, 0.48, 0.42), (0.86, 0.08, 0.2))
_SHIRT, _DARK, _LENS = (0.3, 0.34, 0.4), (0.06, 0.06, 0.1), (0.75, 0.9, 1.0)


def _parts(looks: Mapping[str, Tensor], changes: Mapping[str, Tensor], x: Tensor, y: Tensor) -> list[Part]:
    """Parts of faces."""

    def at(values: Tensor) -> Tensor:
        return values[:, None, None]

    half = at(4.1 + 0.95 * looks["width"])
    skin, hair = between(*_LIGHT, looks["skin"]), between(_RED, _BLUE, looks["hair_hue"])
    away = at(2.0 + 0.75 * looks["eye_spacing"])
    beard, glasses = at(looks["beard"] > 0), at(looks["glasses"] > 0)
    locks = at(2.6 + 3.9 * looks["hair_length"])  # how far down hair falls
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


FACES = DrawnWorld(
    name="face",
    attributes=ATTRIBUTES,
    binary=BINARY,
    strong=STRONG,
    nuisances=NUISANCES,
    grounds=GROUNDS,
    together=("beard", "hair_length", LIKENESS),
    parts=_parts,
)
"""The world of drawn people; the functions of this module are its own."""
caption, identities, people, nuisances = FACES.caption, FACES.identities, FACES.crowd, FACES.changes
photographs, drawn = FACES.photographs, FACES.drawn
