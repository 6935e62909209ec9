"""Searches of several prompts side by side: what they ask of the denoiser goes through it in the same batches.

A search is a generator: it yields rows that it wants predicted, is sent an `Answer`, and returns what it found.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias, TypeVar, final

import torch
from torch import Tensor

from netweight.methods.forget.detect import first_step
from netweight.methods.forget.layers import ValueLayer
from netweight.methods.forget.masking import Blocked, PromptText, Row, RowMasks
from netweight.methods.forget.settings import DetectionConfig
from netweight.methods.forget.similarity import noise_difference, similarity
from netweight.nn.batching import Batches, Costs, clock
from netweight.nn.text_to_image import TextToImage

R = TypeVar("R")


@final
@dataclass(frozen=True)
class Answer:
    """What a search is told."""

    differences: Tensor  # noise differences of the rows that it asked for, see `noise_difference`
    cost: Mapping[str, float]  # what they cost, see `Costs`: of what several searches share, the share of its rows


Search: TypeAlias = Generator[Sequence[Row], Answer, R]


@final
class Predictions:
    """Predictions with neurons switched off, for rows of whichever prompts."""

    def __init__(self, model: TextToImage, layers: Mapping[str, ValueLayer], config: DetectionConfig) -> None:
        self.model, self.layers = model, layers
        self.masks = RowMasks(model.denoiser, layers)  # reads prompts
        self._noise, self._timestep = first_step(model, config)
        self._batches = Batches(config.rows)

    def answers(self, asked: Sequence[Sequence[Row]]) -> list[Answer | Exception]:
        """Answer what several searches asked for, together; an error stays with those whose rows alone raise it."""
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
    """Ask for rows within a search, and return their noise differences."""
    costs.pause()
    answer = yield rows
    costs.resume(answer.cost)
    return answer.differences


def side_by_side(
    searches: Iterable[Search[R]], predictions: Predictions, most: int
) -> Iterator[tuple[int, R | Exception]]:
    """Run searches to their ends, several at a time."""
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


@final
class Trials:
    """Trials of one prompt, asked for by its search."""

    # `unblocked`: their noise differences without any neuron blocked, shape `(seeds, channels, height, width)`

    def __init__(self, prompt: PromptText, seeds: Sequence[int], unblocked: Tensor, costs: Costs) -> None:
        self._prompt, self._seeds, self._unblocked, self._costs = prompt, seeds, unblocked, costs
        self._known: dict[tuple[Hashable, int], float] = {}

    def of(self, trials: Sequence[Blocked]) -> Search[list[list[float]]]:
        """Return for each trial every seed's similarity to what is predicted without blocking."""
        every = list(range(len(self._seeds)))
        return (yield from self.at([(trial, every) for trial in trials]))

    def at(
        self, asked: Sequence[tuple[Blocked, Sequence[int]]], *, of: Sequence[Blocked] = ()
    ) -> Search[list[list[float]]]:
        """Return for each trial the similarity of some seeds, in their order."""
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


Neuron: TypeAlias = tuple[str, int]

_LEAST_AHEAD = 8
_LIKELIEST = 2  # seeds that a removal is tried at before all others


def greedy(
    trials: Trials,
    neurons: Sequence[Neuron],
    removals: Sequence[Sequence[int]],
    limit: float,
    *,
    ahead: int,
    every_seed: bool = True,
) -> Search[list[int]]:
    """Un-block neurons group by group, keeping a group un-blocked where all seeds stay at or below the limit."""

    def without(places: Iterable[int]) -> Blocked:
        return blocked_by_layer(neurons[place] for place in sorted(places))

    left, position = set(range(len(neurons))), 0
    foresight = _Foresight(len(removals), limit)
    if ahead > 1:
        yield from foresight.learn_alone(trials, without(left), [without(left - set(removal)) for removal in removals])
    count, unseen = min(ahead, 2 * _LEAST_AHEAD), list[_Held]()
    (now,) = yield from trials.of([without(left)])
    while position < len(removals) or unseen:
        tried = range(position, min(position + count, len(removals)))
        steps = foresight.steps(tried, now)
        attempts, base = [], left
        for place, step in zip(tried, steps, strict=True):
            attempts.append(base - set(removals[place]))
            base = attempts[-1] if step.holds else base
        blocked = [without(attempt) for attempt in attempts]
        asked = [(trial, step.seeds) for trial, step in zip(blocked, steps, strict=True)]
        found = yield from trials.at(asked, of=[each.blocked for each in (unseen if every_seed else unseen[-1:])])
        refused = yield from _refused(trials, [each.blocked for each in unseen], limit, every_seed=every_seed)
        if refused is not None:
            left, position = unseen[refused].before, unseen[refused].place + 1
            unseen = []
            (now,) = yield from trials.of([without(left)])
            continue
        (now,) = yield from trials.of([without(left)])
        foresight.learn(steps, now, found)
        held = [max(values) <= limit for values in found]
        held = held[: _sure(held, steps)]
        unseen = []
        for place, attempt, trial, holds in zip(tried, attempts, blocked, held, strict=False):
            if holds:
                unseen.append(_Held(place, left, trial))
                left, now = attempt, foresight.after(place, now)
        position += len(held)
        count = min(ahead, max(_LEAST_AHEAD, 2 * len(held)))  # as far ahead as foresight was right
    return sorted(left)


def blocked_by_layer(neurons: Iterable[Neuron]) -> Blocked:
    """Gather neurons by layer."""
    sets: Blocked = {}
    for name, index in neurons:
        sets.setdefault(name, set()).add(index)
    return sets


@final
@dataclass(frozen=True)
class _Step:
    """A removal that is tried, whether it is expected to hold, and the seeds that it is tried at first."""

    place: int
    holds: bool
    seeds: list[int]


@final
@dataclass(frozen=True)
class _Held:
    """A removal that held at the likeliest seeds; the others are looked at along with what is tried next."""

    place: int
    before: set[int]
    blocked: Blocked


@final
class _Foresight:
    """What removals are expected to add to a seed's similarity: what they were last seen to add, to it or to others."""

    def __init__(self, removals: int, limit: float) -> None:
        self._adds: list[dict[int, float]] = [{} for _ in range(removals)]
        self._limit = limit

    def learn_alone(self, trials: Trials, blocked: Blocked, alone: Sequence[Blocked]) -> Search[None]:
        """See what each removal adds by itself, to the seed that is nearest to the limit."""
        (values,) = yield from trials.of([blocked])
        seed = values.index(max(values))
        found = yield from trials.at([(trial, [seed]) for trial in alone])
        for place, (value,) in enumerate(found):
            self._adds[place][seed] = value - values[seed]

    def steps(self, places: Iterable[int], now: Sequence[float]) -> list[_Step]:
        """Foresee removals one after the other, from the similarities of all seeds now."""
        steps = []
        for place in places:
            after = self.after(place, now)
            nearest = sorted(range(len(after)), key=lambda seed, after=after: -after[seed])  # type: ignore[misc]
            holds = after[nearest[0]] <= self._limit
            steps.append(_Step(place, holds, nearest[: _LIKELIEST if holds else 1]))
            now = after if holds else now
        return steps

    def learn(self, steps: Sequence[_Step], now: Sequence[float], found: Sequence[Sequence[float]]) -> None:
        """Remember what removals did add."""
        for step, values in zip(steps, found, strict=True):
            after = self.after(step.place, now)
            for seed, value in zip(step.seeds, values, strict=True):
                self._adds[step.place][seed] = value - now[seed]
                after[seed] = value
            now = after if step.holds else now

    def after(self, place: int, now: Sequence[float]) -> list[float]:
        """Foresee the similarities of all seeds after a removal."""
        known = self._adds[place]
        usual = sum(known.values()) / len(known) if known else 0.0
        return [value + known.get(seed, usual) for seed, value in enumerate(now)]


def _refused(trials: Trials, blocked: Sequence[Blocked], limit: float, *, every_seed: bool) -> Search[int | None]:
    """The first of the trials, each of which builds on those before, that does not hold at all seeds."""
    if every_seed:
        found = yield from trials.of(blocked)
        return next((place for place, values in enumerate(found) if max(values) > limit), None)
    holds, refused = 0, len(blocked) + 1  # so many hold, and the trial of this number does not
    asked = len(blocked)
    while asked > holds:
        (values,) = yield from trials.of([blocked[asked - 1]])
        if max(values) <= limit:
            holds = asked
        else:
            refused = asked
        asked = (holds + refused) // 2
    return refused - 1 if refused <= len(blocked) else None


def _sure(held: Sequence[bool], steps: Sequence[_Step]) -> int:
    """How many answers count: those up to the first that is not as foreseen."""
    surprises = (number + 1 for number, answer in enumerate(held) if answer != steps[number].holds)
    return next(surprises, len(held))
