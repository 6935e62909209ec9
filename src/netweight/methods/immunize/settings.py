"""How a defense is trained, frozen and checked; the defaults are the paper's. `training.py` trains by it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from netweight.errors import UsageError

__all__ = ["Settings"]


@final
@dataclass(frozen=True)
class Settings:
    """Training by Adam without weight decay, its rate rising linearly and then falling along a cosine to 0.

    Attributes:
        lr: Highest learning rate.
        epochs: Passes over the pairs.
        batch_size: Pairs per step.
        warmup: Share of the steps over which the rate rises.
        clip: Largest norm of the gradient of all weights; infinity does not clip.
        context: Most tokens of a prompt with an answer; what the model's configuration allows holds besides.
        seed: Of the order of pairs, of noise and of dropout.
        measure_every: Gradient norms of single terms are measured, and balanced weights found anew, every so many
            steps, at the first one too; such a step goes backward once per term.
        save_every: Steps between two checkpoints, where a folder is given.
        frozen: Layers that are not trained, such as "0-3,head"; see `freezing.block_numbers`.

    Raises:
        UsageError: A value is out of its range.

    Source: RepNoise (arXiv 2405.14577), appendix B.2: 1 epoch, batches of 8, 2e-5, 10 % warmup, seed 42.
    """

    lr: float = 2e-5
    epochs: int = 1
    batch_size: int = 8
    warmup: float = 0.1
    clip: float = 1.0
    context: int | None = None
    seed: int = 42
    measure_every: int = 25
    save_every: int = 100
    frozen: str | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if min(self.epochs, self.batch_size, self.measure_every, self.save_every, self.context or 1) < 1:
            raise UsageError(
                f"Epochs {self.epochs}, batches of {self.batch_size}, context {self.context}, measure_every "
                f"{self.measure_every} and save_every {self.save_every} cannot be.",
                cure="Give at least 1 of each.",
            )
        if not 0 < self.lr < math.inf or not self.clip > 0 or not 0 <= self.warmup <= 1:
            raise UsageError(
                f"Learning rate {self.lr}, clip {self.clip} and warmup {self.warmup} cannot be.",
                cure="Rate and clip are above 0, warmup is from 0 to 1.",
            )

    def rate(self, step: int, steps: int) -> float:
        """The learning rate at a step, counted from 0, of so many.

        Args:
            step: From 0.
            steps: How many there are.
        """
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
