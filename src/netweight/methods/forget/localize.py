"""Localization: in which neurons a prompt is memorized, and the files that results are kept in.

Stages of ever more neurons are blocked until the first predictions of all seeds lose their similarity to those of the
unblocked model; then as many neurons as possible are spared.
"""

from __future__ import annotations

import ast
import csv
import io
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, final

import torch
from torch import Tensor

from netweight.core.atomic_writes import whole_file
from netweight.core.digests import digest_config, digest_tensor
from netweight.core.engines import Outcome
from netweight.core.names import Units
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, UsageError
from netweight.job import Job
from netweight.methods.forget.detect import Threshold, check_threshold, detection_settings, greatest, influences
from netweight.methods.forget.layers import Statistics, ValueLayer, text_activations, value_layers
from netweight.methods.forget.search import (
    BlockedPredictions,
    MaskedRow,
    Neuron,
    Search,
    Trials,
    blocked_by_layer,
    predicted,
    prune,
    run_searches,
)
from netweight.methods.forget.settings import LocalizationConfig
from netweight.metrics.structural_similarity import similarity_matrix
from netweight.nn.text_to_image import Costs, TextToImage

Status = Literal["resolved", "unresolved", "not memorized", "failed"]

# Similarities that differ by less are equal: the same row in another batch differs in its last bits.
_TOLERANCE = 1e-5
# The number of stages that are tried at once; each further batch is twice as large.
_FIRST_STAGES = 4
# Version of the files of results.
_VERSION = 1
_COLUMNS = ("Caption", "URL", "Initial Neurons", "Initial SSIM", "Refined Neurons", "Refined SSIM")


@final
@dataclass(frozen=True)
class Localization:
    """The neurons of one prompt."""

    prompt: str
    """The prompt."""
    status: Status
    """"resolved" if blocking the neurons brings all seeds to the threshold; "unresolved" if even the last stage
    did not; "not memorized" if no neuron was looked for; "failed" if the search ended in an error.
    """
    neurons: Units
    """The neurons to block."""
    initial: Mapping[str, Sequence[int]]
    """Neurons of each layer that were chosen before refinement, in order. They are repeated if both rules chose one
    and fidelity is "reference".
    """
    refined: Mapping[str, Sequence[int]]
    """Neurons of each layer after refinement."""
    theta: float | None = None
    """Theta of the stage that ended the search; None if there was none."""
    top: int | None = None
    """k of that stage."""
    seeds: tuple[float, ...] = ()
    """Greatest similarity of each seed to another seed without blocked neurons."""
    similar_seeds: int = 0
    """Number of them that lie above the threshold."""
    threshold: float | None = None
    """Threshold of detection."""
    refinement_threshold: float | None = None
    """Similarity that refinement had to keep to: the threshold, or the one that was reached."""
    initial_similarity: float | None = None
    """Greatest over kept seeds of the similarity to what is predicted with nothing blocked."""
    refined_similarity: float | None = None
    rows: int = 0
    """Rows that went through the denoiser."""
    error: str | None = None
    """Last lines of the traceback of a failed search."""
    broken: float | None = None
    """Similarity that had to be reached."""
    steps: Mapping[str, Mapping[str, float]] = field(default_factory=dict, compare=False)
    """Cost of "detection", "initial selection" and "refinement", as far as they ran: "seconds" and "processor
    seconds", and "rows" and "calls" of the denoiser. Work that several prompts shared is divided by its rows.
    Comparisons of localizations ignore this field.
    """

    def to_json(self) -> dict[str, Any]:
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "neurons"}
        return {**values, "seeds": list(self.seeds), "neurons": json.loads(self.neurons.to_json())}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        try:
            neurons = Units.from_json(json.dumps(values["neurons"]))
            return cls(**{**values, "neurons": neurons, "seeds": tuple(values["seeds"])})
        except (KeyError, TypeError, UsageError) as error:
            raise CorruptBlob(f"This is not a localization: {error}.", cure="Localize anew.") from None


def localize(
    model: TextToImage,
    prompts: Sequence[str],
    statistics: Statistics,
    threshold: Threshold,
    config: LocalizationConfig | None = None,
    *,
    folder: str | Path | Job,
    progress: Progress = QUIET,
) -> list[Localization]:
    """Find the neurons of prompts, and store each result as soon as it exists.

    Args:
        model: The model.
        prompts: At least one.
        statistics: Usual activity of the neurons of the same model, see `measure_statistics`.
        threshold: A threshold of the same model, see `calibrate`.
        config: Settings; None takes the defaults.
        folder: A folder, or the job in it, that keeps results in `neurons.jsonl`; a second call continues the first.
        progress: Reports every prompt.

    Returns:
        One per prompt, in order. A prompt whose search ended in an error has the status "failed"; the next call tries
        it again.

    Raises:
        UsageError: There is no prompt, statistics or threshold are of another model, or the threshold of other
            settings.
        Unsupported: See `value_layers`.

    Source: arXiv 2406.02366, section 3.
    """
    if not prompts:
        raise UsageError("There is no prompt to localize.", cure="Give at least one.")
    config = config or LocalizationConfig()
    identity = model.identity()
    layers = value_layers(model.denoiser, scope=config.scope)
    statistics.check(layers, identity)
    check_threshold(threshold, identity, detection_settings(model, config.detection))
    about = {
        "model": identity,
        "statistics": _statistics_digest(statistics),
        "threshold": [threshold.value, threshold.broken],
        "config": influences(config),
    }
    items: list[dict[str, Any]] = [{"prompt": prompt, **about} for prompt in prompts]
    predictions = BlockedPredictions(model, layers, config.detection)

    # Ledgers store the name of this function.
    def localized(item: Mapping[str, Any]) -> Search[dict[str, Any]]:
        return (yield from search(predictions, item["prompt"], statistics, threshold, config)).to_json()

    def describe() -> None:
        task.describe(f"localize ({predictions.rows:,} predictions of the first noise)")

    def engine(fn: Callable[..., Search[Any]], waiting: Sequence[Any], /) -> Iterator[tuple[int, Outcome]]:
        """Search several prompts at a time; seconds are those since another one's search ended."""
        began = time.perf_counter()
        for index, value in run_searches(map(fn, waiting), predictions, config.prompts, replied=describe):
            seconds, began = time.perf_counter() - began, time.perf_counter()
            if isinstance(value, Exception):
                yield index, Outcome(None, "".join(traceback.format_exception(value)), seconds)
            else:
                yield index, Outcome(value, None, seconds)

    localizations = []
    with Job.open(folder, shared=True) as job, progress.task("localize", len(items), unit="prompts") as task:
        for result in job.map(localized, items, name="neurons", engine=engine, ordered=True):
            failed = Localization(result.config["prompt"], "failed", Units(), {}, {}, error=result.error or "")
            localizations.append(Localization.from_json(result.value) if result.ok else failed)
            task.update()
    return localizations


def _statistics_digest(statistics: Statistics) -> str:
    parts = [
        [name, digest_tensor(mean), digest_tensor(statistics.deviations[name])]
        for name, mean in statistics.means.items()
    ]
    return digest_config(parts)


def localize_prompt(
    model: TextToImage,
    prompt: str,
    statistics: Statistics,
    threshold: Threshold,
    config: LocalizationConfig | None = None,
) -> Localization:
    """Find the neurons that a prompt's image is memorized in.

    Source: arXiv 2406.02366, section 3 and its code.
    """
    config = config or LocalizationConfig()
    predictions = BlockedPredictions(model, value_layers(model.denoiser, scope=config.scope), config.detection)
    ((_, localization),) = run_searches([search(predictions, prompt, statistics, threshold, config)], predictions, 1)
    if isinstance(localization, Exception):
        raise localization
    return localization


@torch.no_grad()
def search(
    predictions: BlockedPredictions,
    prompt: str,
    statistics: Statistics,
    threshold: Threshold,
    config: LocalizationConfig,
) -> Search[Localization]:
    """Find a prompt's neurons, as `localize_prompt` does; run by `run_searches`."""
    aim = threshold.value if config.fidelity == "reference" or threshold.broken is None else threshold.broken
    model, layers = predictions.model, predictions.layers
    costs = Costs()
    text = predictions.masks.read(model.embed([prompt]))
    every = range(len(config.detection.seeds))
    released = config.fidelity == "reference"
    if released:
        unblocked = predictions.alone(text, {}, every, costs)
    else:
        unblocked = yield from predicted([MaskedRow(text, {}, seed) for seed in every], costs)
    seeds = greatest(similarity_matrix(unblocked, published=released)).tolist()
    score = max(seeds) if released else sum(seeds) / len(seeds)
    memorized_seeds = [seed for seed in every if seeds[seed] > threshold.value]
    costs.end("detection")
    if not memorized_seeds or score <= threshold.value:
        return Localization(
            prompt, "not memorized", Units(), {}, {}, seeds=tuple(seeds), threshold=threshold.value, rows=len(seeds),
            steps=costs.steps,
        )  # fmt: skip
    initial_limit = aim if config.initial is None else config.initial
    goal = initial_limit if config.refinement is None else config.refinement
    stages = _stages(model, layers, prompt, statistics, config)
    trials = Trials(
        text, memorized_seeds, unblocked[memorized_seeds], costs,
        released=predictions if released else None, limit=initial_limit
    )  # fmt: skip
    stage, reached = yield from _first_stage(
        trials, stages, initial_limit, memorized_seeds.index(max(memorized_seeds, key=seeds.__getitem__))
    )
    initial = _flat(stages[stage])
    (similarities,) = yield from trials.evaluate([blocked_by_layer(initial)])
    # Only in this case is it equal to the limit, to the last bit.
    settled = released and not reached
    first = max(trials.released_similarities(blocked_by_layer(initial)) if settled else similarities)
    limit = trials.limit = goal if reached else max(goal, first)
    costs.end("initial selection")
    demanded = math.nextafter(limit, -math.inf) if released else limit + _TOLERANCE
    refined = yield from _refine(trials, layers, initial, demanded)
    (similarities,) = yield from trials.evaluate([blocked_by_layer(refined)])
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
        similar_seeds=len(memorized_seeds),
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
    """Choose neurons by a prompt's activations: those out of distribution, and the most active ones."""
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
    by_layer = text_activations(model, layers, model.embed([prompt]))
    activations = {name: values[0].cpu() for name, values in by_layer.items()}
    z = statistics.z(activations)
    repeated = config.fidelity == "reference"
    return [
        stage_neurons(activations, {name: z[name] for name in activations}, theta, top, repeated=repeated)
        for top, theta in enumerate(config.thetas)
    ]


def _first_stage(
    trials: Trials, stages: Sequence[dict[str, list[int]]], aim: float, worst: int
) -> Search[tuple[int, bool]]:
    """The first stage that breaks memorization, or the last, and whether it does; the worst seed is tried first."""
    start, count = 0, _FIRST_STAGES
    while start < len(stages):
        group = [blocked_by_layer(_flat(stage)) for stage in stages[start : start + count]]
        place = 0
        while place < len(group):
            at_worst = yield from trials.evaluate(group[place:], [worst])
            place = next((place + step for step, (value,) in enumerate(at_worst) if value <= aim), len(group))
            if place < len(group):
                (values,) = yield from trials.evaluate([group[place]])
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
) -> Search[list[Neuron]]:
    """Spare whole layers, then single neurons, from the last layer to the first."""

    def spared(neurons: Sequence[Neuron], groups: Sequence[Sequence[int]]) -> Search[list[Neuron]]:
        left = yield from prune(trials, neurons, groups, limit)
        return [neurons[place] for place in left]

    backwards = list(layers)[::-1]
    places = {name: [place for place, neuron in enumerate(initial) if neuron[0] == name] for name in backwards}
    whole = [group for group in places.values() if group]
    remaining = yield from spared(initial, whole)
    single = [[place] for name in backwards for place, neuron in enumerate(remaining) if neuron[0] == name]
    return (yield from spared(remaining, single))


def _flat(stage: Mapping[str, Sequence[int]]) -> list[Neuron]:
    return [(name, index) for name, indices in stage.items() for index in indices]


def _by_layer(layers: Mapping[str, ValueLayer], neurons: Sequence[Neuron]) -> dict[str, list[int]]:
    return {name: [index for where, index in neurons if where == name] for name in layers}


def _units(neurons: Sequence[Neuron]) -> Units:
    return Units({name: sorted(units) for name, units in blocked_by_layer(neurons).items()})


def write_results(path: str | Path, localizations: Sequence[Localization], *, model: str) -> None:
    """Write localizations as one JSON file, over one that is there."""
    content = {"version": _VERSION, "model": model, "prompts": [each.to_json() for each in localizations]}
    with whole_file(Path(path), overwrite=True) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())


def read_neurons(path: str | Path, layers: Mapping[str, ValueLayer]) -> tuple[Units, list[Localization], str | None]:
    """Read any file that holds neurons: all of its prompts' together, prompt by prompt if it says, and their model."""
    path, model = Path(path), None
    if path.suffix == ".csv":
        localizations = read_published(path, layers)
    else:
        try:
            text = path.read_text()
            content = json.loads(text)
            if "prompts" not in content:
                return Units.from_json(text), [], None
            localizations, model = [Localization.from_json(each) for each in content["prompts"]], content["model"]
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                f"The neurons in {path} cannot be read: {error}.", cure="Give a file of netweight forget localize."
            ) from None
    return union(localizations), localizations, model


def write_published(path: str | Path, localizations: Sequence[Localization], layers: Mapping[str, ValueLayer]) -> None:
    """Write the table of the paper's code, over one that is there: a row per prompt, neurons as lists of lists."""
    # Prompts without neurons have empty lists; what the columns cannot say, such as their status, is in the JSON.
    rows = io.StringIO()
    writer = csv.writer(rows, delimiter=";", lineterminator="\n")
    writer.writerow(_COLUMNS)
    for each in localizations:
        lists = [[list(part.get(name, ())) for name in layers] for part in (each.initial, each.refined)]
        writer.writerow([each.prompt, "", lists[0], each.initial_similarity, lists[1], each.refined_similarity])
    with whole_file(Path(path), overwrite=True) as file:
        file.write(rows.getvalue().encode())


def read_published(path: str | Path, layers: Mapping[str, ValueLayer]) -> list[Localization]:
    """Read a table of the paper's code; its lists are read as data, nothing is executed."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The neurons in {path} cannot be read: {error}.") from None
    csv.field_size_limit(1 << 24)
    rows = csv.DictReader(io.StringIO(text), delimiter=";")
    lacking = sorted({"Caption", "Initial Neurons", "Refined Neurons"} - set(rows.fieldnames or ()))
    if lacking:
        raise UsageError(f"{path} has no column {lacking[0]!r}.", cure=f"Its columns must be {';'.join(_COLUMNS)}.")
    return [_published(path, row, number, layers) for number, row in enumerate(rows, start=2)]


def _published(path: str | Path, row: Mapping[str, Any], number: int, layers: Mapping[str, ValueLayer]) -> Localization:
    lists = []
    for column in ("Initial Neurons", "Refined Neurons"):
        try:
            value = ast.literal_eval(row[column])
            lists.append(dict(zip(layers, [[int(index) for index in part] for part in value], strict=True)))
        except (ValueError, SyntaxError, TypeError) as error:
            raise UsageError(
                f"{column} in row {number} of {path} are not lists of {len(layers)} layers: {error}.",
                cure="Give a table that was made for this model and scope.",
            ) from None
    initial, refined = lists
    likeness = [_number(row.get(column)) for column in ("Initial SSIM", "Refined SSIM")]
    status: Status = "resolved" if any(refined.values()) else "not memorized"
    return Localization(
        row["Caption"], status, Units(refined), initial, refined,
        initial_similarity=likeness[0], refined_similarity=likeness[1],
    )  # fmt: skip


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def union(localizations: Sequence[Localization]) -> Units:
    """Return the neurons of all prompts together."""
    together: dict[str, set[int]] = {}
    for each in localizations:
        for name, index in each.neurons:
            together.setdefault(name, set()).add(index)
    return Units({name: sorted(indices) for name, indices in together.items()})
