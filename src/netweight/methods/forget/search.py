"""Searches of several prompts in the same batches, and the pruning of one prompt's neurons.

A search is a generator: it yields requests, rows to be predicted, is sent a `Reply` to each, and returns its result.
What several searches request goes through the denoiser together: every row of a batch may be another trial, of another
prompt, with neurons of its own switched off. Keys and values of a prompt depend on its text alone, and are computed
once.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, zip_longest
from typing import Any, TypeAlias, TypeVar, final

import torch
from torch import Tensor, nn

from netweight.methods.forget.detect import first_step, noise_difference, noise_in
from netweight.methods.forget.layers import ValueLayer, text_values, value_layers
from netweight.methods.forget.settings import DetectionConfig
from netweight.metrics.structural_similarity import published_structural_similarity, structural_similarity
from netweight.nn.hooks import edit_outputs
from netweight.nn.text_to_image import Batches, Costs, Text, TextToImage, clock, most_rows

R = TypeVar("R")
# Similarities of single precision in another order of operations differ by less.
_ROUNDING = 1e-4
Neuron: TypeAlias = tuple[str, int]  # layer and index
Blocked: TypeAlias = dict[str, set[int]]


@final
@dataclass(frozen=True, eq=False)
class PromptText:
    """A prompt with what the text alone decides; made by `RowMasks.read`."""

    text: Text
    """The prompt, one row."""
    values: Mapping[str, Tensor]
    """Values of each layer, shape `(1, tokens, width)`."""
    keys: Mapping[str, Tensor]
    """Keys of each layer, shape `(1, tokens, width)`."""


@final
@dataclass(frozen=True)
class MaskedRow:
    """A row of a batch."""

    prompt: PromptText
    """Embedded prompt."""
    blocked: Blocked
    """Neurons by layer."""
    seed: int
    """Number of the noise that it starts from."""


@final
class RowMasks:
    """Neurons that every row of the next run blocks."""

    # `denoiser`: the network; while rows are blocked it must be run with their texts

    def __init__(self, denoiser: nn.Module, layers: Mapping[str, ValueLayer]) -> None:
        self._denoiser, self._layers = denoiser, layers
        self._every = value_layers(denoiser, scope="all")
        self._prompts: list[PromptText] = []
        self._places = torch.zeros(0, dtype=torch.long)
        self._factors: dict[str, Tensor] = {}

    def read(self, text: Text) -> PromptText:
        """Compute keys and values of a prompt, one row; not while rows are blocked."""
        values = text_values(self._denoiser, self._every, text)
        return PromptText(text, values, text_values(self._denoiser, self._every, text, keys=True))

    @contextmanager
    def blocking(self, rows: Sequence[MaskedRow]) -> Iterator[Text]:
        """Block neurons row by row for the runs in a block."""
        places = {prompt: place for place, prompt in enumerate(dict.fromkeys(row.prompt for row in rows))}
        self._prompts, self._places = list(places), torch.tensor([places[row.prompt] for row in rows])
        self._factors = self._factors_of([row.blocked for row in rows])
        replaced: list[tuple[Any, Any]] = []
        try:
            for name, layer in self._every.items():
                _replace(replaced, layer.module, self._values(name))
                _replace(replaced, layer.attention.to_k, self._values(name, keys=True))
            yield Text.joined([prompt.text for prompt in self._prompts]).rows(self._places)
        finally:
            for module, before in replaced:
                if before is None:
                    del module.forward
                else:
                    module.forward = before

    def _values(self, name: str, *, keys: bool = False) -> Any:
        """Return the replacement of a layer's output: values of each row's prompt, less what is blocked, or keys."""

        def forward(*_: Any, **__: Any) -> Tensor:
            outputs = torch.cat([(prompt.keys if keys else prompt.values)[name] for prompt in self._prompts])
            values = outputs[self._places.to(outputs.device)]
            factors = None if keys else self._factors.get(name)
            return values if factors is None else values * factors[:, None].to(values)

        return forward

    def _factors_of(self, trials: Sequence[Blocked]) -> dict[str, Tensor]:
        factors: dict[str, Tensor] = {}
        for name, layer in self._layers.items():
            sets = [frozenset(trial.get(name, ())) for trial in trials]
            places = {indices: place for place, indices in enumerate(dict.fromkeys(sets))}
            if any(places):
                table = torch.ones(len(places), layer.width)
                for indices, place in places.items():
                    table[place, list(indices)] = 0
                factors[name] = table[[places[indices] for indices in sets]]
        return factors


def _replace(replaced: list[tuple[Any, Any]], module: Any, forward: Any) -> None:
    """Put another forward before a module's own, and remember what was there."""
    replaced.append((module, vars(module).get("forward")))
    module.forward = forward


Request: TypeAlias = Sequence[MaskedRow]


@final
@dataclass(frozen=True)
class Reply:
    """Predictions for a request."""

    differences: Tensor
    """Noise differences of its rows, see `noise_difference`."""
    cost: Mapping[str, float]
    """See `Costs`; of a batch that several searches share, the share of its rows."""


Search: TypeAlias = Generator[Request, Reply, R]


def run_searches(
    searches: Iterable[Search[R]], predictions: BlockedPredictions, at_once: int,
    *, replied: Callable[[], object] = lambda: None,
) -> Iterator[tuple[int, R | Exception]]:  # fmt: skip
    """Run searches to their ends, `at_once` together; yield number and result of each, call `replied` in between."""
    waiting = ((number, search, None) for number, search in enumerate(searches))
    ready: list[tuple[int, Search[R], Reply | Exception | None]] = list(islice(waiting, at_once))
    while ready:
        requests: list[tuple[int, Search[R], Request]] = []
        for number, search, reply in ready:
            try:
                if isinstance(reply, Exception):
                    rows = search.throw(reply)
                else:
                    rows = next(search) if reply is None else search.send(reply)
            except StopIteration as end:
                result: R | Exception = end.value
            except Exception as error:
                result = error
            else:
                requests.append((number, search, rows))
                continue
            # The next search starts in this iteration of the loop.
            ready.extend(islice(waiting, 1))
            yield number, result
        replies = predictions.reply([rows for _, _, rows in requests]) if requests else []
        replied()
        ready = [(number, search, reply) for (number, search, _), reply in zip(requests, replies, strict=True)]


@final
class BlockedPredictions:
    """Predictions with neurons switched off, for rows of any prompts."""

    def __init__(self, model: TextToImage, layers: Mapping[str, ValueLayer], config: DetectionConfig) -> None:
        self.model, self.layers = model, layers
        self.masks = RowMasks(model.denoiser, layers)  # reads prompts
        self._noise, self._timestep = first_step(model, config)
        self._batches = Batches(most_rows(model, config.rows))
        self.rows = 0

    def reply(self, requests: Sequence[Request]) -> list[Reply | Exception]:
        """Reply to several searches together; an error stays with those whose rows alone raise it."""
        try:
            return list(self._together(requests))
        except Exception as error:
            if len(requests) == 1:
                return [error]
            return [reply for request in requests for reply in self.reply([request])]

    def _together(self, requests: Sequence[Request]) -> Iterator[Reply]:
        before, calls = clock(), self._batches.calls
        self.rows += sum(map(len, requests))
        differences = self._differences([row for rows in requests for row in rows])
        cost = {name: value - before[name] for name, value in clock().items()}
        cost["calls"] = self._batches.calls - calls
        for part in torch.split(differences, [len(rows) for rows in requests]):
            share = len(part) / len(differences)
            yield Reply(part, {"rows": len(part)} | {name: share * value for name, value in cost.items()})

    @torch.no_grad()
    def _differences(self, rows: Sequence[MaskedRow]) -> Tensor:
        noises = self._noise[[row.seed for row in rows]]

        def part(chosen: slice) -> Tensor:
            with self.masks.blocking(rows[chosen]) as text:
                predicted = noise_in(self.model, noises[chosen], self._timestep, text)
            return noise_difference(predicted, noises[chosen])

        return self._batches.run(part, len(rows))

    @torch.no_grad()
    def alone(self, prompt: PromptText, blocked: Blocked, seeds: Sequence[int], costs: Costs) -> Tensor:
        """Noise differences of one trial as the released code computes them: a batch of its seeds, nothing shared."""

        def zeroed(indices: set[int]) -> Callable[[Tensor], Tensor]:
            def edit(values: Tensor) -> Tensor:
                values[..., sorted(indices)] = 0
                return values

            return edit

        noise = self._noise[list(seeds)]
        with edit_outputs(self.model.denoiser, {name: zeroed(indices) for name, indices in blocked.items()}):
            predicted = noise_in(self.model, noise, self._timestep, prompt.text.rows([0] * len(noise)))
        costs.pause()
        costs.resume({"rows": len(noise), "calls": 1})
        return noise_difference(predicted, noise)


def predicted(rows: Request, costs: Costs) -> Search[Tensor]:
    """Request rows within a search, and return their noise differences."""
    costs.pause()
    reply = yield rows
    costs.resume(reply.cost)
    return reply.differences


@final
class Trials:
    """Similarities of one prompt's predictions with neurons blocked to those without; no trial is computed twice."""

    # `unblocked`: noise differences of the seeds without any neuron blocked, `(seeds, channels, height, width)`
    # `released`: predictions, to compare all seeds of a trial at once, as the released code does, whose range of values
    # is theirs; where rounding could decide, by its very operations. Of some seeds of a trial only what their
    # similarities are at least is known

    def __init__(
        self, prompt: PromptText, seeds: Sequence[int], unblocked: Tensor, costs: Costs,
        *, released: BlockedPredictions | None = None, limit: float = 0.0,
    ) -> None:  # fmt: skip
        self._prompt, self._seeds, self._unblocked, self._costs = prompt, seeds, unblocked, costs
        # The limit with which the greatest similarities are compared.
        self._released, self.limit = released, limit
        self._known: dict[tuple[Hashable, int], float] = {}
        self._least: dict[tuple[Hashable, int], float] = {}
        # The noise differences of the rows that were bounded or predicted last.
        self._seen: dict[tuple[Hashable, int], Tensor] = {}
        self._released_similarities: dict[Hashable, list[float]] = {}

    def released_similarities(self, trial: Blocked) -> list[float]:
        """Similarities of every seed as the released code computes them, to the last bit."""
        assert self._released is not None
        key = _key(trial)
        if key not in self._released_similarities:
            differences = self._released.alone(self._prompt, trial, self._seeds, self._costs)
            self._released_similarities[key] = published_structural_similarity(self._unblocked, differences).tolist()
            self._known |= {(key, seed): value for seed, value in enumerate(self._released_similarities[key])}
        return self._released_similarities[key]

    def evaluate(
        self, trials: Sequence[Blocked], seeds: Sequence[int] | None = None,
        foreseen: Sequence[tuple[Blocked, int]] = (),
    ) -> Search[list[list[float]]]:  # fmt: skip
        """Return the similarities of some seeds, or all, for each trial; predict foreseen ones where anything runs."""
        chosen = range(len(self._seeds)) if seeds is None else seeds
        together = len(self._seeds) if self._released and seeds is None else 0
        bounded = bool(self._released) and not together
        similarities = ChainMap(self._known, self._least)
        pairs = {(_key(trial), seed): (trial, seed) for trial in trials for seed in chosen}
        new = {key: pair for key, pair in pairs.items() if key not in (similarities if bounded else self._known)}
        if new:
            missing, ahead = {key: pair for key, pair in new.items() if key not in self._seen}, {}
            if missing:
                ahead = {key: pair for pair in foreseen if (key := (_key(pair[0]), pair[1])) not in similarities}
            rows = [MaskedRow(self._prompt, trial, self._seeds[seed]) for trial, seed in (missing | ahead).values()]
            made = (yield from predicted(rows, self._costs)) if rows else ()
            noise_differences = self._seen | dict(zip(missing | ahead, made, strict=True))
            scored = new if together else new | ahead
            differences, unblocked = (
                torch.stack([noise_differences[key] for key in scored]),
                self._unblocked[[at for _, at in scored]],
            )
            values = structural_similarity(differences, unblocked, together=1 if bounded else together, bound=bounded)
            self._seen = {key: noise_differences[key] for key in new | ahead} if self._released else {}
            if bounded:
                values = values - _ROUNDING
            (self._least if bounded else self._known).update(zip(scored, values.tolist(), strict=True))
        for trial in trials if together else ():
            highest = max(self._known[_key(trial), seed] for seed in chosen)
            if abs(highest - self.limit) <= _ROUNDING:
                self.released_similarities(trial)
        return [[similarities[_key(trial), seed] for seed in chosen] for trial in trials]


def _key(trial: Blocked) -> Hashable:
    """Equal for equal trials."""
    return frozenset((name, frozenset(indices)) for name, indices in trial.items() if indices)


def prune(
    trials: Trials, neurons: Sequence[Neuron], removals: Sequence[Sequence[int]], limit: float
) -> Search[list[int]]:
    """Un-block groups of neurons one after another, and keep each un-blocked where all seeds stay within the limit."""

    def without(places: Iterable[int]) -> Blocked:
        return blocked_by_layer(neurons[place] for place in sorted(places))

    left = set(range(len(neurons)))
    (now,) = yield from trials.evaluate([without(left)])
    # This seed is the most likely one to prevent a removal.
    seed = now.index(max(now))
    for removal, following in zip_longest(removals, removals[1:], fillvalue=()):
        trial, after = left - set(removal), [left - set(following), left - {*removal, *following}]
        rejected, accepted = ([(without(each), seed)] if following else [] for each in after)
        ((first,),) = yield from trials.evaluate([without(trial)], [seed], rejected)
        if first <= limit:
            (values,) = yield from trials.evaluate([without(trial)], foreseen=accepted)
            if max(values) <= limit:
                left = trial
            else:
                seed = values.index(max(values))
    return sorted(left)


def blocked_by_layer(neurons: Iterable[Neuron]) -> Blocked:
    """Gather neurons by layer."""
    sets: Blocked = {}
    for name, index in neurons:
        sets.setdefault(name, set()).add(index)
    return sets
