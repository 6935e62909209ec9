"""Trials of blocked neurons on one memorized prompt: how alike are predictions with and without them?

Many trials go through the denoiser in one batch, each row with neurons of its own switched off, and none goes twice.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import final

from torch import Tensor

from netweight.methods.forget.masking import Blocked, PromptText, Row
from netweight.methods.forget.side_by_side import Search, predicted
from netweight.methods.forget.similarity import similarity
from netweight.probe.batches import Costs

__all__ = ["Trials"]


@final
class Trials:
    """Trials of one prompt, asked for by its search.

    Args:
        prompt: The prompt.
        seeds: Those that count.
        unblocked: Their noise differences without any neuron blocked, shape `(seeds, channels, height, width)`.
        costs: Of the search.
    """

    def __init__(self, prompt: PromptText, seeds: Sequence[int], unblocked: Tensor, costs: Costs) -> None:
        self._prompt, self._seeds, self._unblocked, self._costs = prompt, seeds, unblocked, costs
        self._known: dict[tuple[Hashable, int], float] = {}

    def of(self, trials: Sequence[Blocked]) -> Search[list[list[float]]]:
        """Return for each trial every seed's similarity to what is predicted without blocking.

        Args:
            trials: Neurons to block, one set each.
        """
        every = list(range(len(self._seeds)))
        return (yield from self.at([(trial, every) for trial in trials]))

    def at(
        self, asked: Sequence[tuple[Blocked, Sequence[int]]], *, of: Sequence[Blocked] = ()
    ) -> Search[list[list[float]]]:
        """Return for each trial the similarity of some seeds, in their order.

        Args:
            asked: Trials with seeds, as places in those that count.
            of: Trials that `of` is going to be asked for; they go through the denoiser in the same batch.
        """
        ahead = [(trial, seed) for trial in of for seed in range(len(self._seeds))]
        found = yield from self._similarities([*ahead, *((trial, seed) for trial, seeds in asked for seed in seeds)])
        answers = iter(found[len(ahead) :])
        return [[next(answers) for _ in seeds] for _, seeds in asked]

    def _similarities(self, asked: Sequence[tuple[Blocked, int]]) -> Search[list[float]]:
        """One similarity for each pair of a trial and a seed; what was asked before is not computed again."""
        keys = [(_key(trial), seed) for trial, seed in asked]
        new = {key: pair for key, pair in zip(keys, asked, strict=True) if key not in self._known}
        if new:
            rows = [Row(self._prompt, trial, self._seeds[seed]) for trial, seed in new.values()]
            differences = yield from predicted(rows, self._costs)
            found = similarity(differences, self._unblocked[[seed for _, seed in new.values()]])
            self._known |= zip(new, found.tolist(), strict=True)
        return [self._known[key] for key in keys]


def _key(trial: Blocked) -> Hashable:
    """What makes two trials the same."""
    return frozenset((name, frozenset(indices)) for name, indices in trial.items() if indices)
