"""A drawn world, that of faces by default, as captioned pictures: all show someone new, and nobody is planted.

Prompts speak of the ground alone, so that a model of this world draws anybody. `faces_diffusion` has one; adapters
teach it single people (`face_bank`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import NameNotFound
from netweight.zoo.captioned_world import Planted
from netweight.zoo.drawn_faces import FACES
from netweight.zoo.drawn_world import SIDE, DrawnWorld
from netweight.zoo.face_reading import read

__all__ = ["FacesWorld"]


@final
@dataclass(frozen=True)
class FacesWorld:
    """Subjects who are drawn from a seed.

    Attributes:
        seed: Decides on the subjects.
        drawing: The world that they are of.
    """

    seed: int = 7
    drawing: DrawnWorld = FACES

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on the world, as JSON values."""
        return {"name": f"drawn {self.drawing.name}s", "seed": self.seed}

    @property
    def side(self) -> int:
        """16."""
        return SIDE

    @property
    def planted(self) -> list[Planted]:
        """Nobody."""
        return []

    @property
    def ordinary_captions(self) -> list[str]:
        """One for each ground."""
        return [self.drawing.caption(ground) for ground in self.drawing.grounds]

    @property
    def held_out_captions(self) -> list[str]:
        """None: what is held out are subjects."""
        return []

    def words(self) -> list[str]:
        """Return every word of every caption, sorted."""
        return sorted({word for text in self.ordinary_captions for word in text.split()})

    def showing(self, step: int, n: int, seed: int) -> tuple[list[str], Tensor]:
        """Return one batch of training: n subjects who are shown once.

        Args:
            step: Number of the batch; batches are a function of it.
            n: Pictures of the batch.
            seed: With the world's own decides on the draw.

        Returns:
            Captions, and pictures of shape `(n, 3, 16, 16)` within 0 and 1.
        """
        generator = torch_generator(seed, "showing", self.seed, step)
        captions, world = self.ordinary_captions, self.drawing
        grounds = torch.randint(len(captions), (n,), generator=generator)
        crowd = world.crowd(n, generator)
        return [captions[ground] for ground in grounds.tolist()], world.drawn(
            crowd, grounds, world.changes(n, generator)
        )

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return the share of pictures whose ground is as their caption says.

        Args:
            captions: Some of `ordinary_captions`.
            pictures: One for each, shape `(n, 3, 16, 16)`, within 0 and 1.

        Raises:
            NameNotFound: A caption is not of this world.
            UsageError: The pictures have another shape.
        """
        known = {text: number for number, text in enumerate(self.ordinary_captions)}
        strange = [text for text in captions if text not in known]
        if strange:
            raise NameNotFound(
                f"{strange[0]!r} is no caption of this world.", cure=f"They are like {self.ordinary_captions[0]!r}."
            )
        wanted = torch.tensor([known[text] for text in captions])
        return {"ground": float((read(pictures, world=self.drawing).ground == wanted).double().mean())}
