"""What a world of captioned pictures is: ordinary captions, some held out, and planted pictures that training repeats.

`captioned_shapes` and `captioned_emoji` are two; `small_diffusion_training` trains pipelines on any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.metrics.copies import Memorized

__all__ = ["CaptionedWorld", "Planted", "batch_of", "memorized"]


@final
@dataclass(frozen=True, eq=False)
class Planted:
    """A picture that training shows again and again.

    Attributes:
        caption: Its odd caption.
        kind: Whether it is always shown as it is, or as a template with a field that changes.
        picture: Shape `(3, side, side)`, within 0 and 1; of a template, with its field in gray.
        fixed: Shape `(side, side)`, True where the picture never changes.
    """

    caption: str
    kind: Literal["verbatim", "template"]
    picture: Tensor
    fixed: Tensor

    def shown(self, generator: torch.Generator) -> Tensor:
        """Return the picture as one showing has it, shape `(3, side, side)`: a template's field in a new color."""
        color = torch.rand(3, 1, 1, generator=generator)
        return torch.where(self.fixed, self.picture, color)


class CaptionedWorld(Protocol):
    """Captioned pictures to train on.

    Attributes:
        about: Everything that decides on the world, as JSON values.
        side: Pixels of a picture's side.
        planted: The pictures that training repeats.
        ordinary_captions: Captions that training shows beside them.
        held_out_captions: Captions of the same kind that it never shows.
    """

    @property
    def about(self) -> dict[str, Any]: ...  # noqa: D102 - said above

    @property
    def side(self) -> int: ...  # noqa: D102 - said above

    @property
    def planted(self) -> list[Planted]: ...  # noqa: D102 - said above

    @property
    def ordinary_captions(self) -> list[str]: ...  # noqa: D102 - said above

    @property
    def held_out_captions(self) -> list[str]: ...  # noqa: D102 - said above

    def words(self) -> list[str]:
        """Return every word of every caption, sorted."""

    def showing(self, step: int, n: int, seed: int) -> tuple[list[str], Tensor]:
        """Return one batch of training: every planted picture once, then ordinary ones.

        Args:
            step: Number of the batch; batches are a function of it.
            n: Pictures of the batch, more than the planted ones.
            seed: Decides on the draw.

        Returns:
            Captions, and pictures of shape `(n, 3, side, side)` within 0 and 1.
        """

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return how far pictures show what their captions say: shares by what is looked at.

        Args:
            captions: Ordinary or held out.
            pictures: One for each, shape `(n, 3, side, side)`, within 0 and 1.
        """


def batch_of(
    world: CaptionedWorld, step: int, n: int, seed: int, shown: Callable[[list[int], torch.Generator], Tensor]
) -> tuple[list[str], Tensor]:
    """Draw a batch of training as `CaptionedWorld.showing` says.

    Args:
        world: The world.
        step: Number of the batch.
        n: Pictures of the batch.
        seed: Decides on the draw.
        shown: Takes numbers of ordinary captions and returns their pictures, as one showing has them.
    """
    generator, ordinary = torch_generator(seed, "showing", step), world.ordinary_captions
    chosen: list[int] = torch.randint(len(ordinary), (n - len(world.planted),), generator=generator).tolist()
    planted = torch.stack([each.shown(generator) for each in world.planted])
    captions = [each.caption for each in world.planted] + [ordinary[number] for number in chosen]
    return captions, torch.cat([planted, shown(chosen, generator)])


def memorized(world: CaptionedWorld) -> list[Memorized]:
    """Return the planted pictures as `metrics.copies` compares with them; of templates, the part that stays."""
    return [
        Memorized(each.caption, each.kind, each.picture, None if each.kind == "verbatim" else each.fixed)
        for each in world.planted
    ]
