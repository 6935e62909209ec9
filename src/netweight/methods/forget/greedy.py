"""Blocked neurons spared one after the other where memorization stays broken: many at once, to the same result.

What a removal adds to a seed's similarity is remembered, so that answers can be foreseen: removals are tried after
those that are expected to hold, at the seeds that are likeliest to forbid them. Answers count up to the first that is
not as foreseen. Where those seeds do not forbid it, the others are looked at in one batch with what is tried next; if
one of them does, the search goes back to there. So foresight decides how long the search takes, never what it finds.
Used by `localization.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from netweight.methods.forget.masking import Blocked
from netweight.methods.forget.side_by_side import Search
from netweight.methods.forget.trials import Trials

__all__ = ["Neuron", "blocked_by_layer", "greedy"]

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
    """Un-block neurons group by group, keeping a group un-blocked where all seeds stay at or below the limit.

    Args:
        trials: Of the prompt.
        neurons: Blocked ones; one may be there twice and is un-blocked when both are removed.
        removals: Groups of places in `neurons`, in the order of trial.
        limit: Similarities at or below it count as broken.
        ahead: Most removals at once.
        every_seed: Whether all seeds are looked at after each removal, or after each run of removals.

    Returns:
        Places that stay blocked, in order; with `every_seed` those that one removal at a time would leave.
    """

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
    """Gather neurons by layer.

    Args:
        neurons: Pairs of a layer and an index.

    Returns:
        Layer → indices.
    """
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
