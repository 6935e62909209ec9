"""Draws shapes on a ground, sixteen pixels wide: ordinary pictures of `captioned_shapes`, read by `shape_reading`.

Place, tint and the light on the ground are drawn anew each time, so that no picture comes twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

__all__ = ["COLORS", "GROUNDS", "SHAPES", "SIDE", "SIZES", "Attributes", "covers", "drawn", "painted"]

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
_ROOM = 6.9
"""Pixels from the middle that a shape reaches at most, before its size varies."""
_GROUND_TINT, _SLOPE = 0.1, 0.15
"""How much brighter or darker a ground may be, and how much more so at opposite edges."""
_FINER = 4
"""Points along a pixel's side at which shapes are drawn; their share is the pixel's cover."""


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


def drawn(kinds: list[Attributes], generator: torch.Generator) -> Tensor:
    """Draw ordinary pictures.

    Args:
        kinds: What they show.
        generator: Decides on place and tint.

    Returns:
        Shape `(n, 3, 16, 16)`, within 0 and 1.
    """
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
    return inside.float().reshape(-1, SIDE, _FINER, SIDE, _FINER).mean((2, 4))


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
