"""Reads the attributes of a shape back from a picture, by comparing it with what the world would have drawn.

The color and the ground of a generated picture are read reliably, size and shape as far as sixteen pixels let one tell
a circle from a diamond; `agreement` over real pictures says how far that is. Used to see whether a model still draws
what it is asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.zoo.drawn_shapes import COLORS, GROUNDS, SHAPES, SIDE, SIZES, Attributes, covers

__all__ = ["agreement", "read"]

_STEP = 0.5
"""Pixels between the places at which shapes are looked for."""
_REACH = 4.0
"""How far from the middle they are looked for, in pixels; the world draws small ones up to 3.7 away."""


def read(pictures: Tensor) -> list[Attributes]:
    """Return what pictures show, the likeliest of each attribute.

    Args:
        pictures: Shape `(n, 3, 16, 16)`, within 0 and 1.

    Raises:
        UsageError: They have another shape.
    """
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
    found = torch.stack([size, color, shape, ground], 1).tolist()
    return [Attributes(*(known[index] for known, index in zip(names, row, strict=True))) for row in found]


def agreement(pictures: Tensor, kinds: Sequence[Attributes]) -> dict[str, float]:
    """Return the share of pictures that show what they should, attribute by attribute.

    Args:
        pictures: Shape `(n, 3, 16, 16)`, within 0 and 1.
        kinds: What they should show.

    Raises:
        UsageError: There are not as many pictures as kinds, or none.
    """
    if len(pictures) != len(kinds) or not kinds:
        raise UsageError(f"There are {len(pictures)} pictures and {len(kinds)} kinds.", cure="Give one for each.")
    pairs = list(zip(read(pictures), kinds, strict=True))
    return {
        name: sum(getattr(found, name) == getattr(wanted, name) for found, wanted in pairs) / len(pairs)
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
