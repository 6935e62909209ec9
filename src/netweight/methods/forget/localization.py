"""Which neurons a memorized prompt needs: chosen by their activation, then refined until none can be spared.

The order of the search is the paper's: stages of falling theta, then whole layers from the middle up to the entrance,
then single neurons.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from netweight.core.units import Units
from netweight.methods.forget.config import LocalizationConfig
from netweight.methods.forget.detection import Threshold, greatest
from netweight.methods.forget.greedy import Neuron, blocked_by_layer, greedy
from netweight.methods.forget.layers import ValueLayer, value_layers
from netweight.methods.forget.masking import Row
from netweight.methods.forget.results import Localization
from netweight.methods.forget.side_by_side import Predictions, Search, predicted, side_by_side
from netweight.methods.forget.similarity import pairwise
from netweight.methods.forget.statistics import Statistics, text_activations
from netweight.methods.forget.trials import Trials
from netweight.probe.batches import Costs
from netweight.probe.diffusion import TextToImage

__all__ = ["localize_prompt", "search", "stage_neurons"]

_TOLERANCE = 1e-5
"""Similarities that differ by less are equal: the same row in another batch differs in its last bits."""
_FIRST_STAGES = 4  # tried at once; each further batch doubles


def localize_prompt(
    model: TextToImage,
    prompt: str,
    statistics: Statistics,
    threshold: Threshold,
    config: LocalizationConfig | None = None,
) -> Localization:
    """Find the neurons that a prompt's image is memorized in.

    Args:
        model: The model.
        prompt: The prompt.
        statistics: Of the same model, see `Statistics.check`.
        threshold: Seeds above its `value` are looked at; at or below `broken` memorization counts as broken, with
            `fidelity="reference"` at its `value`, as in the released code, unless the configuration says below what.
        config: How; None takes the defaults.

    Returns:
        What was found; a prompt that is not memorized has no neurons, and one whose threshold was not reached is
        marked as unresolved.

    Raises:
        Unsupported: See `value_layers`.

    Source: arXiv 2406.02366, section 3 and its code.
    """
    config = config or LocalizationConfig()
    predictions = Predictions(model, value_layers(model.denoiser, scope=config.scope), config.detection)
    ((_, found),) = side_by_side([search(predictions, prompt, statistics, threshold, config)], predictions, 1)
    if isinstance(found, Exception):
        raise found
    return found


@torch.no_grad()
def search(
    predictions: Predictions, prompt: str, statistics: Statistics, threshold: Threshold, config: LocalizationConfig
) -> Search[Localization]:
    """Find a prompt's neurons, as `localize_prompt` does, for `side_by_side`.

    Args:
        predictions: Of the model, for the configuration's scope and detection.
        prompt: The prompt.
        statistics: As for `localize_prompt`, and so are the others.
        threshold: The threshold.
        config: How.

    Returns:
        A search that asks for predictions and ends with what was found.
    """
    aim = threshold.value if config.fidelity == "reference" or threshold.broken is None else threshold.broken
    model, layers = predictions.model, predictions.layers
    costs = Costs()
    text = predictions.masks.read(model.embed([prompt]))
    every = range(len(config.detection.seeds))
    unblocked = yield from predicted([Row(text, {}, seed) for seed in every], costs)
    seeds = greatest(pairwise(unblocked)).tolist()
    score = max(seeds) if config.fidelity == "reference" else sum(seeds) / len(seeds)
    kept = [seed for seed in every if seeds[seed] > threshold.value]
    costs.end("detection")
    if not kept or score <= threshold.value:
        return Localization.not_memorized(prompt, seeds, threshold.value, costs.steps)
    wanted = aim if config.initial is None else config.initial
    goal = wanted if config.refinement is None else config.refinement
    stages = _stages(model, layers, prompt, statistics, config)
    trials = Trials(text, kept, unblocked[kept], costs)
    stage, reached = yield from _first_stage(trials, stages, wanted, kept.index(max(kept, key=seeds.__getitem__)))
    initial = _flat(stages[stage])
    (similarities,) = yield from trials.of([blocked_by_layer(initial)])
    first = max(similarities)
    limit = goal if reached else max(goal, first)
    costs.end("initial selection")
    demanded = limit - _TOLERANCE if config.fidelity == "reference" else limit + _TOLERANCE
    refined = yield from _refine(trials, layers, initial, demanded, config)
    (similarities,) = yield from trials.of([blocked_by_layer(refined)])
    last = max(similarities)
    costs.end("refinement")
    return Localization(
        prompt=prompt,
        status="resolved" if last <= goal + _TOLERANCE else "unresolved",
        neurons=_units(refined),
        refined=_by_layer(layers, refined),
        initial=_by_layer(layers, initial),
        theta=config.thetas[stage],
        top=stage,
        seeds=tuple(seeds),
        kept=len(kept),
        threshold=threshold.value,
        broken=goal,
        refinement_threshold=limit,
        initial_similarity=first,
        refined_similarity=last,
        rows=int(sum(step["rows"] for step in costs.steps.values())),
        steps=costs.steps,
    )


def stage_neurons(
    activations: Mapping[str, Tensor], z: Mapping[str, Tensor], theta: float, top: int, *, repeated: bool = False
) -> dict[str, list[int]]:
    """Choose neurons by a prompt's activations: those out of distribution, and the most active ones.

    Args:
        activations: For each layer, shape `(width,)`.
        z: Deviations from the mean, of the same shapes.
        theta: Neurons beyond so many deviations are chosen, in order of their index.
        top: So many of the most active of each layer follow, the most active first; all where a layer has fewer.
        repeated: Keep a neuron that both rules choose twice, as the released code does.

    Returns:
        For each layer, indices in the order in which refinement tries them.
    """
    chosen = {}
    for name, values in activations.items():
        outside = (z[name] > theta).nonzero().flatten().tolist()
        most = values.topk(min(top, values.numel())).indices.tolist()
        both = [*outside, *most]
        chosen[name] = both if repeated else list(dict.fromkeys(both))
    return chosen


def _stages(
    model: TextToImage,
    layers: Mapping[str, ValueLayer],
    prompt: str,
    statistics: Statistics,
    config: LocalizationConfig,
) -> list[dict[str, list[int]]]:
    """The neurons that every stage chooses."""
    found = text_activations(model, layers, model.embed([prompt]))
    activations = {name: values[0].cpu() for name, values in found.items()}
    z = statistics.z(activations)
    repeated = config.fidelity == "reference"
    return [
        stage_neurons(activations, {name: z[name] for name in activations}, theta, top, repeated=repeated)
        for top, theta in enumerate(config.thetas)
    ]


def _first_stage(
    trials: Trials, stages: Sequence[dict[str, list[int]]], aim: float, worst: int
) -> Search[tuple[int, bool]]:
    """The first stage that breaks memorization, or the last, and whether it does; the worst seed is looked at first."""
    start, count = 0, _FIRST_STAGES
    while start < len(stages):
        group = [blocked_by_layer(_flat(stage)) for stage in stages[start : start + count]]
        place = 0
        while place < len(group):
            at_worst = yield from trials.at([(trial, [worst]) for trial in group[place:]])
            place = next((place + step for step, (value,) in enumerate(at_worst) if value <= aim), len(group))
            if place < len(group):
                (values,) = yield from trials.of([group[place]])
                if max(values) <= aim:
                    return start + place, True
                worst = values.index(max(values))
                place += 1
        start, count = start + count, 2 * count
    return len(stages) - 1, False


def _refine(
    trials: Trials,
    layers: Mapping[str, ValueLayer],
    initial: Sequence[Neuron],
    limit: float,
    config: LocalizationConfig,
) -> Search[list[Neuron]]:
    """Spare whole layers, then single neurons, from the last layer to the first."""

    def spared(neurons: Sequence[Neuron], groups: Sequence[Sequence[int]]) -> Search[list[Neuron]]:
        left = yield from greedy(trials, neurons, groups, limit, ahead=config.ahead, every_seed=config.every_seed)
        return [neurons[place] for place in left]

    backwards = list(layers)[::-1]
    places = {name: [place for place, neuron in enumerate(initial) if neuron[0] == name] for name in backwards}
    whole = [group for group in places.values() if group]
    kept = yield from spared(initial, whole)
    single = [[place] for name in backwards for place, neuron in enumerate(kept) if neuron[0] == name]
    return (yield from spared(kept, single))


def _flat(stage: Mapping[str, Sequence[int]]) -> list[Neuron]:
    return [(name, index) for name, indices in stage.items() for index in indices]


def _by_layer(layers: Mapping[str, ValueLayer], neurons: Sequence[Neuron]) -> dict[str, list[int]]:
    return {name: [index for where, index in neurons if where == name] for name in layers}


def _units(neurons: Sequence[Neuron]) -> Units:
    return Units({name: sorted(found) for name, found in blocked_by_layer(neurons).items()})
