"""The drawn worlds by the word that their prompts use."""

from __future__ import annotations

from netweight.zoo.drawn_faces import FACES
from netweight.zoo.drawn_vehicles import VEHICLES
from netweight.zoo.drawn_world import DrawnWorld

__all__ = ["WORLDS"]

WORLDS: dict[str, DrawnWorld] = {world.name: world for world in (FACES, VEHICLES)}
