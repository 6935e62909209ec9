"""What a drawn world is: subjects with known attributes, in photographs that differ in nuisances, on named grounds.

`drawn_faces` has people and `drawn_vehicles` vehicles; readers, pipelines and banks of adapters are made of any.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.zoo.drawn_shapes import painted

__all__ = ["SIDE", "Color", "DrawnWorld", "Part", "between", "ellipse"]

SIDE = 16
"""Pixels of a picture's side."""
_FINER = 4
"""Points along a pixel's side at which parts are drawn; their share is the pixel's cover."""
_REACH = 1.0
"""Pixels by which a subject is shifted at most."""
_EVERYWHERE = ("across", "down", "light")

Color = tuple[float, float, float]
Part = tuple[Tensor, Tensor]
"""Points inside a part, shape `(n, points, points)`, and its color, shape `(n, 3)` or `(1, 3)`."""


@final
@dataclass(frozen=True, eq=False)
class DrawnWorld:
    """A kind of subject, and how it is drawn.

    Attributes:
        name: What prompts call a subject.
        attributes: What makes a subject who or what it is, each within -1 and 1.
        binary: Attributes that are -1 or 1; the others are spread evenly between them.
        strong: Attributes that move many pixels.
        nuisances: What changes from one photograph to the next, within -1 and 1; first of all shift across and down,
            and light from one side.
        grounds: Colors of the grounds by the word that prompts name them with.
        together: Two attributes and their correlation, before they are made even or binary.
        parts: Takes attributes by name, nuisances by name, each of shape `(n,)`, and points x and y in pixels from
            the subject's middle; returns the parts of the subjects, the rearmost first.
    """

    name: str
    attributes: tuple[str, ...]
    binary: tuple[str, ...]
    strong: tuple[str, ...]
    nuisances: tuple[str, ...]
    grounds: Mapping[str, Color]
    together: tuple[str, str, float]
    parts: Callable[[Mapping[str, Tensor], Mapping[str, Tensor], Tensor, Tensor], list[Part]]

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

        Args:
            count: How many.
            seed: Decides on all of them.
            first: Number of the first one; subject 7 is the same whatever the count.

        Returns:
            Shape `(count, attributes)`, columns as in `attributes`.
        """
        numbers = range(first, first + count)
        return torch.cat([self.crowd(1, torch_generator(seed, "identity", number)) for number in numbers])

    def crowd(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw so many subjects at once; shape `(count, attributes)`, columns as in `attributes`.

        All are spread evenly, by way of normal values, of which those of two attributes are correlated.
        """
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
        found: Tensor = torch.rand(count, len(self.nuisances), generator=generator) * 2 - 1
        return found

    def photographs(self, subject: Tensor, count: int, generator: torch.Generator) -> tuple[list[str], Tensor]:
        """Take photographs of one subject, on each ground in turn.

        Args:
            subject: Shape `(attributes,)`.
            count: How many.
            generator: Decides on the nuisances.

        Returns:
            Their captions, and pictures of shape `(count, 3, 16, 16)` within 0 and 1.
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
            Shape `(n, 3, 16, 16)`, within 0 and 1.

        Raises:
            UsageError: The shapes do not fit.
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
        points = (torch.arange(SIDE * _FINER) + 0.5) / _FINER - SIDE / 2
        x = points[None, None, :] - _REACH * moved["across"][:, None, None]
        y = points[None, :, None] - _REACH * moved["down"][:, None, None]
        picture = torch.tensor(list(self.grounds.values()))[grounds][:, :, None, None].expand(-1, -1, SIDE, SIDE)
        for inside, color in self.parts(looks, moved, x, y):
            picture = painted(picture, _cover(inside), color.expand(n, 3))
        slope = torch.linspace(-1, 1, SIDE)[None, None, None, :]
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


def _cover(inside: Tensor) -> Tensor:
    """How much of each pixel is inside, shape `(n, 16, 16)`."""
    return inside.float().reshape(-1, SIDE, _FINER, SIDE, _FINER).mean((2, 4))
