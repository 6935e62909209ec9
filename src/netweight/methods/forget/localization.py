"""Which neurons a memorized prompt needs: chosen by their activation, then refined until none can be spared.

The order of the search is the paper's: stages of falling theta, then whole layers from the middle up to the entrance,
then single neurons. `greedy` tries many removals at once and comes to what one at a time would come to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from netweight.core.units import Units
from netweight.methods.forget.batches import Batches, Costs
from netweight.methods.forget.config import LocalizationConfig
from netweight.methods.forget.detection import Threshold, first_step, greatest
from netweight.methods.forget.layers import ValueLayer, value_layers
from netweight.methods.forget.masking import Blocked, row_masks
from netweight.methods.forget.results import Localization
from netweight.methods.forget.similarity import pairwise
from netweight.methods.forget.statistics import Statistics, text_activations
from netweight.methods.forget.trials import Trials, unblocked_differences
from netweight.probe.diffusion import TextToImage

__all__ = ["greedy", "localize_prompt", "stage_neurons"]

Neuron: TypeAlias = tuple[str, int]

_TOLERANCE = 1e-5
"""Similarities that differ by less are equal: the same row in another batch differs in its last bits."""
_FIRST_STAGES = 4  # tried at once; each further batch doubles
_LEAST_AHEAD = 8


@torch.no_grad()
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
        threshold: Seeds above it are looked at; below it memorization counts as broken, unless the configuration says
            below what.
        config: How; None takes the defaults.

    Returns:
        What was found; a prompt that is not memorized has no neurons, and one whose threshold was not reached is
        marked as unresolved.

    Raises:
        Unsupported: See `value_layers`.

    Source: arXiv 2406.02366, section 3 and its code.
    """
    config = config or LocalizationConfig()
    layers = value_layers(model.denoiser, scope=config.scope)
    batches = Batches(config.detection.rows)
    costs = Costs(batches)
    text = model.embed([prompt])
    noise, timestep = first_step(model, config.detection)
    unblocked = unblocked_differences(model, text, noise, timestep, batches)
    seeds = greatest(pairwise(unblocked)).cpu()
    score = float(seeds.max() if config.fidelity == "reference" else seeds.mean())
    kept = (seeds > threshold.value).nonzero().flatten().to(noise.device)
    costs.end("detection")
    if not len(kept) or score <= threshold.value:
        return Localization.not_memorized(prompt, seeds.tolist(), threshold.value, costs.steps)
    wanted = threshold.value if config.initial is None else config.initial
    goal = wanted if config.refinement is None else config.refinement
    stages = _stages(model, layers, prompt, statistics, config)
    with row_masks(model.denoiser, layers, text) as masks:
        trials = Trials(
            model, text, noise=noise[kept], timestep=timestep, unblocked=unblocked[kept],
            masks=masks, batches=batches, worst=int(seeds[kept.cpu()].argmax()),
        )  # fmt: skip
        stage, reached = _first_stage(trials, stages, wanted)
        initial = _flat(stages[stage])
        first = trials.highest([_blocked(initial)])[0]
        limit = goal if reached else max(goal, first)
        costs.end("initial selection")
        demanded = limit - _TOLERANCE if config.fidelity == "reference" else limit + _TOLERANCE
        refined = _refine(trials, layers, initial, demanded, config.ahead)
        last = trials.highest([_blocked(refined)])[0]
        costs.end("refinement")
    return Localization(
        prompt=prompt,
        status="resolved" if last <= goal + _TOLERANCE else "unresolved",
        neurons=_units(refined),
        refined=_by_layer(layers, refined),
        initial=_by_layer(layers, initial),
        theta=config.thetas[stage],
        top=stage,
        seeds=tuple(seeds.tolist()),
        kept=len(kept),
        threshold=threshold.value,
        refinement_threshold=limit,
        initial_similarity=first,
        refined_similarity=last,
        rows=batches.done,
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


def greedy(
    trials: Trials, neurons: Sequence[Neuron], removals: Sequence[Sequence[int]], limit: float, *, ahead: int
) -> list[int]:
    """Un-block neurons group by group, keeping a group un-blocked wherever memorization stays broken.

    Several removals are tried at once, each after what is expected of those before it: that they hold, or what the
    same removal came to in an earlier batch. Answers count up to the first that is not as expected; the next batch
    begins after it. So the places are those that one at a time would leave.

    Args:
        trials: Of the prompt.
        neurons: Blocked ones; one may be there twice and is un-blocked when both are removed.
        removals: Groups of places in `neurons`, in the order of trial.
        limit: Similarities at or below it count as broken.
        ahead: Most removals at once.

    Returns:
        Places that stay blocked, in order.
    """
    left = set(range(len(neurons)))
    expected = [True] * len(removals)
    position, count = 0, ahead
    while position < len(removals):
        end = min(position + count, len(removals))
        attempts, base = [], left
        for place in range(position, end):
            attempts.append(base - set(removals[place]))
            base = attempts[-1] if expected[place] else base
        blocked = [_blocked(neurons[place] for place in sorted(each)) for each in attempts]
        held, known = trials.below(blocked, limit, expected[position:end])
        surprises = [place for place in range(known) if held[place] != expected[position + place]]
        sure = surprises[0] + 1 if surprises else known
        left = next((attempts[place] for place in reversed(range(sure)) if held[place]), left)
        expected[position:end] = held
        position += sure
        count = min(ahead, max(_LEAST_AHEAD, 2 * sure))  # as far ahead as expectations were right
    return sorted(left)


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


def _first_stage(trials: Trials, stages: Sequence[dict[str, list[int]]], threshold: float) -> tuple[int, bool]:
    """The first stage that breaks memorization, or the last, and whether it does."""
    start, count = 0, _FIRST_STAGES
    while start < len(stages):
        group = [_blocked(_flat(stage)) for stage in stages[start : start + count]]
        held, _ = trials.below(group, threshold)
        if any(held):
            return start + held.index(True), True
        start, count = start + count, 2 * count
    return len(stages) - 1, False


def _refine(
    trials: Trials, layers: Mapping[str, ValueLayer], initial: Sequence[Neuron], limit: float, ahead: int
) -> list[Neuron]:
    """Spare whole layers, then single neurons, from the last layer to the first."""
    backwards = list(layers)[::-1]
    places = {name: [place for place, neuron in enumerate(initial) if neuron[0] == name] for name in backwards}
    whole = [group for group in places.values() if group]
    kept = [initial[place] for place in greedy(trials, initial, whole, limit, ahead=ahead)]
    single = [[place] for name in backwards for place, neuron in enumerate(kept) if neuron[0] == name]
    return [kept[place] for place in greedy(trials, kept, single, limit, ahead=ahead)]


def _flat(stage: Mapping[str, Sequence[int]]) -> list[Neuron]:
    return [(name, index) for name, indices in stage.items() for index in indices]


def _blocked(neurons: Iterable[Neuron]) -> Blocked:
    sets: Blocked = {}
    for name, index in neurons:
        sets.setdefault(name, set()).add(index)
    return sets


def _by_layer(layers: Mapping[str, ValueLayer], neurons: Sequence[Neuron]) -> dict[str, list[int]]:
    return {name: [index for where, index in neurons if where == name] for name in layers}


def _units(neurons: Sequence[Neuron]) -> Units:
    return Units({name: sorted(found) for name, found in _blocked(neurons).items()})
