"""Searches of several prompts side by side: what they ask of the denoiser goes through it in the same batches.

A search is a generator: it yields rows that it wants predicted, is sent an `Answer`, and returns what it found.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias, TypeVar, final

import torch
from torch import Tensor

from netweight.methods.forget.config import DetectionConfig
from netweight.methods.forget.detection import first_step
from netweight.methods.forget.layers import ValueLayer
from netweight.methods.forget.masking import Row, RowMasks
from netweight.methods.forget.similarity import noise_difference
from netweight.probe.batches import Batches, Costs, clock
from netweight.probe.diffusion import TextToImage

__all__ = ["Answer", "Predictions", "Search", "predicted", "side_by_side"]

R = TypeVar("R")


@final
@dataclass(frozen=True)
class Answer:
    """What a search is told.

    Attributes:
        differences: Noise differences of the rows that it asked for, see `noise_difference`.
        cost: What they cost, see `Costs`: of what several searches share, the share of its rows.
    """

    differences: Tensor
    cost: Mapping[str, float]


Search: TypeAlias = Generator[Sequence[Row], Answer, R]


@final
class Predictions:
    """Predictions with neurons switched off, for rows of whichever prompts.

    Args:
        model: The model.
        layers: Of which neurons may be switched off.
        config: How prompts are looked at.

    Attributes:
        model: The model.
        layers: The layers.
        masks: Reads prompts.
    """

    def __init__(self, model: TextToImage, layers: Mapping[str, ValueLayer], config: DetectionConfig) -> None:
        self.model, self.layers = model, layers
        self.masks = RowMasks(model.denoiser, layers)
        self._noise, self._timestep = first_step(model, config)
        self._batches = Batches(config.rows)

    def answers(self, asked: Sequence[Sequence[Row]]) -> list[Answer | Exception]:
        """Answer what several searches asked for, together; an error stays with those whose rows alone raise it.

        Args:
            asked: Rows of each search.

        Returns:
            One answer per search, in their order.
        """
        try:
            return list(self._together(asked))
        except Exception as error:
            if len(asked) == 1:
                return [error]
            return [answer for rows in asked for answer in self.answers([rows])]

    def _together(self, asked: Sequence[Sequence[Row]]) -> Iterator[Answer]:
        before, calls = clock(), self._batches.calls
        differences = self._of([row for rows in asked for row in rows])
        cost = {name: value - before[name] for name, value in clock().items()}
        cost["calls"] = self._batches.calls - calls
        for part in torch.split(differences, [len(rows) for rows in asked]):
            share = len(part) / len(differences)
            yield Answer(part, {"rows": len(part)} | {name: share * value for name, value in cost.items()})

    @torch.no_grad()
    def _of(self, rows: Sequence[Row]) -> Tensor:
        noises = self._noise[[row.seed for row in rows]]

        def part(chosen: slice) -> Tensor:
            with self.masks.blocking(rows[chosen]) as text:
                said = self.model.predict(noises[chosen], self._timestep, text).noise
            return noise_difference(said, noises[chosen])

        return self._batches.run(part, len(rows))


def predicted(rows: Sequence[Row], costs: Costs) -> Search[Tensor]:
    """Ask for rows within a search, and return their noise differences.

    Args:
        rows: What to predict.
        costs: Goes on with this search's share of the cost.

    Returns:
        Noise differences, shape `(rows, channels, height, width)`.
    """
    costs.pause()
    answer = yield rows
    costs.resume(answer.cost)
    return answer.differences


def side_by_side(
    searches: Iterable[Search[R]], predictions: Predictions, most: int
) -> Iterator[tuple[int, R | Exception]]:
    """Run searches to their ends, several at a time.

    Args:
        searches: The searches; each is taken when its turn comes.
        predictions: Answers them.
        most: So many at a time; where one ends, the next begins.

    Yields:
        The number of a search that ended, and what it returned or raised.
    """
    waiting = ((number, search, None) for number, search in enumerate(searches))
    ready: list[tuple[int, Search[R], Answer | Exception | None]] = list(islice(waiting, most))
    while ready:
        asking: list[tuple[int, Search[R], Sequence[Row]]] = []
        for number, search, answer in ready:
            try:
                if isinstance(answer, Exception):
                    rows = search.throw(answer)
                else:
                    rows = next(search) if answer is None else search.send(answer)
            except StopIteration as end:
                result: R | Exception = end.value
            except Exception as error:
                result = error
            else:
                asking.append((number, search, rows))
                continue
            ready.extend(islice(waiting, 1))  # its turn comes in this very loop
            yield number, result
        answers = predictions.answers([rows for _, _, rows in asking]) if asking else []
        ready = [(number, search, answer) for (number, search, _), answer in zip(asking, answers, strict=True)]
