"""Edits of points: steps along directions, summed, and when in the making of an image they begin to hold.

edited = edit(scores, [Move(beard, 2.0), Move(width, -1.0)])

Steps are added, so their order does not matter, and undoing one is taking its negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.methods.space.directions import Direction, Unit

__all__ = ["Delay", "Move", "edit"]


@final
@dataclass(frozen=True, eq=False)
class Move:
    """A step along a direction.

    Attributes:
        direction: Where to.
        strength: How far; negative goes back.
        unit: What `strength` counts, see `Direction.step`.
    """

    direction: Direction
    strength: float
    unit: Unit = "deviations"


def edit(scores: Tensor, moves: Sequence[Move]) -> Tensor:
    """Return points after all moves.

    Args:
        scores: Shape `(k,)` or `(b, k)`.
        moves: At least one, of directions of the same space.

    Returns:
        Of the same shape, dtype and device.

    Raises:
        UsageError: There is no move, a direction has another number of components, or a strength is not finite.
    """
    if not moves:
        raise UsageError("There is no move to edit with.", cure="Give at least one.")
    total = torch.zeros(scores.shape[-1], dtype=torch.float64)
    for move in moves:
        if len(move.direction.vector) != scores.shape[-1]:
            raise UsageError(
                f"The direction {move.direction.name!r} has {len(move.direction.vector)} components, "
                f"the point {scores.shape[-1]}.",
                cure="Find the direction in the point's own space.",
            )
        step = move.direction.step(move.strength, move.unit)
        if not step.isfinite().all():
            raise UsageError(f"The strength {move.strength} of {move.direction.name!r} is not finite.")
        total += step
    return (scores.detach().double().cpu() + total).to(device=scores.device, dtype=scores.dtype)


@final
@dataclass(frozen=True)
class Delay:
    """When an edit begins to hold: the noisy first steps are made with the weights before it, later ones after it.

    An image's layout is settled early, so the later an edit begins the more of the image stays, and the less changes.

    Attributes:
        until: The largest timestep that is made with edited weights. The paper takes 700 to 1,000 of 1,000 for edits of
            the whole face and 400 to 700 for fine ones.

    Raises:
        UsageError: `until` is negative.

    Source: weights2weights, "delayed injection".
    """

    until: float

    def __post_init__(self) -> None:
        """Refuse what is no timestep."""
        if not self.until >= 0:
            raise UsageError(f"An edit cannot begin to hold at timestep {self.until}.", cure="Give 0 to 1,000.")

    def edited(self, timestep: float | Tensor) -> bool:
        """Whether a step at this timestep (the noisiest come first and are largest) is made with edited weights."""
        return float(timestep) <= self.until
