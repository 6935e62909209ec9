"""Trials of blocked neurons on one memorized prompt: how alike are predictions with and without them?

Many trials go through the denoiser in one batch, each row with neurons of its own switched off, and none goes twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import final

import torch
from torch import Tensor

from netweight.methods.forget.detection import predicted_noise
from netweight.methods.forget.masking import Blocked, RowMasks
from netweight.methods.forget.similarity import noise_difference, similarity
from netweight.probe.batches import Batches
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
    ) -> None:
        self._model, self._text = model, text
        self._noise, self._timestep, self._unblocked = noise, timestep, unblocked
        self._masks, self._batches = masks, batches
        self._known: dict[tuple[Hashable, int], float] = {}

    def of(self, trials: Sequence[Blocked]) -> list[list[float]]:
        """Return for each trial every seed's similarity to what is predicted without blocking."""
        every = list(range(len(self._noise)))
        return self.at([(trial, every) for trial in trials])

    def at(self, asked: Sequence[tuple[Blocked, Sequence[int]]], *, of: Sequence[Blocked] = ()) -> list[list[float]]:
        """Return for each trial the similarity of some seeds, in their order.

        Args:
            asked: Trials with seeds.
            of: Trials that `of` is going to be asked for; they go through the denoiser in the same batch.
        """
        every = range(len(self._noise))
        ahead = [(trial, seed) for trial in of for seed in every]
        found = self._similarities([*ahead, *((trial, seed) for trial, seeds in asked for seed in seeds)])
        answers = iter(found[len(ahead) :])
        return [[next(answers) for _ in seeds] for _, seeds in asked]

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
