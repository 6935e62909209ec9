"""Draws vehicles from the side, sixteen pixels wide, with six known attributes: a second world to customize models in.

Faces are alike in their layout; vehicles change their outline with length and roof, and have other parts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from netweight.zoo.drawn_world import DrawnWorld, Part, between

__all__ = ["VEHICLES"]

_RED, _BLUE = (0.88, 0.16, 0.1), (0.12, 0.26, 0.86)
_CLEAR, _TINTED = (0.8, 0.93, 1.0), (0.1, 0.12, 0.2)
_TIRE, _HUB, _LAMP, _LOAD = (0.06, 0.06, 0.08), (0.78, 0.78, 0.8), (1.0, 0.95, 0.5), (0.36, 0.2, 0.08)


def _parts(looks: Mapping[str, Tensor], changes: Mapping[str, Tensor], x: Tensor, y: Tensor) -> list[Part]:
    """Parts of vehicles that drive to the right."""

    def at(values: Tensor) -> Tensor:
        return values[:, None, None]

    half = at(5.2 + 1.1 * looks["length"])
    roof = at(-3.0 - 1.7 * looks["roof"])  # tall ones are vans, whose cabins reach further
    reach = half * at(0.66 + 0.14 * looks["roof"])
    body, middle = between(_RED, _BLUE, looks["hue"]), x + 0.5
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


VEHICLES = DrawnWorld(
    name="vehicle",
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
    parts=_parts,
)
"""From -1 to 1: red to blue, short to long, clear to dark windows, small to large wheels, low to tall (a van), no or a
loaded roof rack. Long ones tend to be tall."""
