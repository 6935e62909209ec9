"""Trials of blocked neurons on one memorized prompt: how alike are predictions with and without them?

Many trials go through the denoiser in one batch, each row with neurons of its own switched off. Where only the answer
"all seeds lie below a threshold" is wanted, the seed that was nearest to it goes first, and the others follow for
those trials alone that it leaves open.
"""

from __future__ import annotations

from collections.abc import Sequence
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

    def highest(self, trials: Sequence[Blocked]) -> list[float]:
        """Return for each trial the greatest similarity over seeds to what is predicted without blocking."""
        seeds = len(self._noise)
        found = self._similarities([(trial, seed) for trial in trials for seed in range(seeds)]).reshape(-1, seeds)
        if len(trials):
            self._worst = int(found[-1].argmax())
        return [float(value) for value in found.amax(1)]

    def below(
        self, trials: Sequence[Blocked], limit: float, expected: Sequence[bool] | None = None
    ) -> tuple[list[bool], int]:
        """Tell for each trial whether all seeds are at or below a limit.

        Args:
            trials: The trials.
            limit: The limit.
            expected: What the answers may be, where trials are of use only as far as these are right.

        Returns:
            Answers, and how many of them are certain. The others, behind the first that is not as expected, are of a
            single seed.
        """
        first = self._worst
        holds = [bool(value <= limit) for value in self._similarities([(trial, first) for trial in trials])]
        known = len(trials)
        if expected is not None and holds != list(expected):
            known = 1 + [held == thought for held, thought in zip(holds, expected, strict=True)].index(False)
        left = [place for place in range(known) if holds[place]]
        others = [seed for seed in range(len(self._noise)) if seed != first]
        if left and others:
            found = self._similarities([(trials[place], seed) for place in left for seed in others])
            table = found.reshape(len(left), len(others))
            for place, row in zip(left, table, strict=True):
                holds[place] = bool((row <= limit).all())
                if not holds[place]:
                    self._worst = others[int(row.argmax())]
        return holds, known

    @torch.no_grad()
    def _similarities(self, rows: Sequence[tuple[Blocked, int]]) -> Tensor:
        """One similarity for each pair of a trial and a seed."""
        if not rows:
            return torch.empty(0)
        seeds = torch.tensor([seed for _, seed in rows], device=self._noise.device)

        def part(chosen: slice) -> Tensor:
            blocked = [trial for trial, _ in rows[chosen]]
            noise = self._noise[seeds[chosen]]
            with self._masks.blocking(blocked, [seed for _, seed in rows[chosen]]):
                said = self._model.predict(noise, self._timestep, self._text.rows([0] * len(blocked))).noise
            return similarity(noise_difference(said, noise), self._unblocked[seeds[chosen]])

        return self._batches.run(part, len(rows)).cpu()


def unblocked_differences(model: TextToImage, text: Text, noise: Tensor, timestep: Tensor, batches: Batches) -> Tensor:
    """Return the noise differences of a prompt with nothing blocked, one per seed."""
    said = predicted_noise(model, noise, timestep, text.rows([0] * len(noise)), batches)
    return noise_difference(said, noise)
