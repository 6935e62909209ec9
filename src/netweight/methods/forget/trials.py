"""Trials of blocked neurons on one memorized prompt: how alike are predictions with and without them?

Many trials go through the denoiser in one batch, each row with neurons of its own switched off, and none goes twice.
Where only the answer "all seeds lie below a threshold" is wanted, the seed that was nearest to it goes first, and the
others follow for those trials alone that it leaves open.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor

from netweight.methods.forget.batches import Batches
from netweight.methods.forget.detection import predicted_noise
from netweight.methods.forget.masking import Blocked, RowMasks
from netweight.methods.forget.similarity import noise_difference, similarity
from netweight.probe.diffusion import Text, TextToImage

__all__ = ["Trials", "unblocked_differences"]


@final
class Trials:
    """Trials of one prompt, inside a block of `row_masks`.

    Args:
        model: The model.
        text: The prompt, one row.
        noise: Initial noise of the seeds that count, shape `(seeds, channels, height, width)`.
        timestep: That predictions are made at.
        unblocked: Noise differences without any neuron blocked, of the same shape.
        masks: Of the block.
        batches: How many rows go at once.
        worst: Index of the seed to look at first.
    """

    def __init__(
        self,
        model: TextToImage,
        text: Text,
        *,
        noise: Tensor,
        timestep: Tensor,
        unblocked: Tensor,
        masks: RowMasks,
        batches: Batches,
        worst: int = 0,
    ) -> None:
        self._model, self._text = model, text
        self._noise, self._timestep, self._unblocked = noise, timestep, unblocked
        self._masks, self._batches, self._worst = masks, batches, worst
        self._known: dict[tuple[Hashable, int], float] = {}

    def highest(self, trial: Blocked) -> float:
        """Return the greatest similarity over seeds to what is predicted without blocking."""
        found = self._similarities([(trial, seed) for seed in range(len(self._noise))])
        self._worst = found.index(max(found))
        return max(found)

    def first(self, trials: Sequence[Blocked]) -> list[float]:
        """Return the similarity of each trial at the seed that goes first."""
        return self._similarities([(trial, self._worst) for trial in trials])

    def hold(self, trials: Sequence[Blocked], limit: float) -> list[bool]:
        """Tell for each trial whether all seeds are at or below a limit; the worst seed of one that is not goes first."""
        seeds = len(self._noise)
        found = self._similarities([(trial, seed) for trial in trials for seed in range(seeds)])
        rows = [found[place : place + seeds] for place in range(0, len(found), seeds)]
        above = [row for row in rows if max(row) > limit]
        if above:
            self._worst = above[0].index(max(above[0]))
        return [max(row) <= limit for row in rows]

    @torch.no_grad()
    def _similarities(self, asked: Sequence[tuple[Blocked, int]]) -> list[float]:
        """One similarity for each pair of a trial and a seed; what was asked before is not computed again."""
        keys = [(_key(trial), seed) for trial, seed in asked]
        rows = {key: pair for key, pair in zip(keys, asked, strict=True) if key not in self._known}
        if rows:
            self._known |= zip(rows, self._computed(list(rows.values())), strict=True)
        return [self._known[key] for key in keys]

    def _computed(self, rows: Sequence[tuple[Blocked, int]]) -> list[float]:
        seeds = torch.tensor([seed for _, seed in rows], device=self._noise.device)

        def part(chosen: slice) -> Tensor:
            blocked = [trial for trial, _ in rows[chosen]]
            noise = self._noise[seeds[chosen]]
            with self._masks.blocking(blocked, [seed for _, seed in rows[chosen]]):
                said = self._model.predict(noise, self._timestep, self._text.rows([0] * len(blocked))).noise
            return similarity(noise_difference(said, noise), self._unblocked[seeds[chosen]])

        return [float(value) for value in self._batches.run(part, len(rows)).cpu()]


def unblocked_differences(model: TextToImage, text: Text, noise: Tensor, timestep: Tensor, batches: Batches) -> Tensor:
    """Return the noise differences of a prompt with nothing blocked, one per seed."""
    said = predicted_noise(model, noise, timestep, text.rows([0] * len(noise)), batches)
    return noise_difference(said, noise)


def _key(trial: Blocked) -> Hashable:
    """What makes two trials the same."""
    return frozenset((name, frozenset(indices)) for name, indices in trial.items() if indices)
