"""What a gradient inversion attack brings home: images, and how sure the attack itself is of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from torch import Tensor

__all__ = ["Reconstruction"]


@final
@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The outcome of one attack, without knowledge of the true images.

    Attributes:
        images: Shape `(n, c, h, w)`, in the range the model sees (normalized, if the client normalizes).
        labels: int64 of shape `(n,)`, or probabilities of shape `(n, classes)`, as given, recovered or optimized.
        objective: What the attack minimized, at `images`; lower means a closer imitation. NaN if it diverged.
        objectives_by_restart: The same at the end of every restart; the least of them was kept.
        history: Objective over time for the restart that was kept, from the start, at equal distances. Where
            the weight of a term changes on the way, each value has the weight of its time.
        steps: Optimization steps taken per restart; 0 for an analytic attack.
        attack: What was run, as reports show it.
    """

    images: Tensor
    labels: Tensor
    objective: float
    objectives_by_restart: tuple[float, ...]
    history: tuple[float, ...]
    steps: int
    attack: str
