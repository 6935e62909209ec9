"""Detection of memorized prompts: scores from first predictions, and the threshold above which they count.

    threshold = calibrate(detect(model, ordinary_prompts))
    for score in detect(model, prompts):
        print(score.prompt, score.similarity > threshold.value)

A model that has memorized the image of a prompt removes noise towards that image whatever it starts from, so the
differences between predicted and initial noise are similar over seeds.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, final

import torch
from torch import Tensor

from netweight.core.engines import Outcome
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, UsageError
from netweight.job import Job
from netweight.methods.forget.settings import DetectionConfig, LocalizationConfig
from netweight.metrics.structural_similarity import similarity_matrix, windows_for
from netweight.nn.text_to_image import Batches, Text, TextToImage, most_rows

# The released code's, for Stable Diffusion 1.4. Its own scripts do not agree on how it was made: calibrate instead.
PUBLISHED_THRESHOLD = 0.428
# Factor of the sample in noisy latents up to which they count as nothing but noise.
_NO_SIGNAL = 1e-6


@final
@dataclass(frozen=True)
class MemorizationScore:
    """Memorization score of a prompt."""

    prompt: str
    seeds: tuple[float, ...]
    """Greatest similarity of each seed's noise difference to that of another seed."""
    wen: float
    """Mean norm of conditional minus unconditional predicted noise, the score of Wen et al. 2024."""

    @property
    def similarity(self) -> float:
        """The mean over seeds: what prompts are compared by."""
        return sum(self.seeds) / len(self.seeds)

    @property
    def highest(self) -> float:
        """The greatest over seeds: what the released code compares."""
        return max(self.seeds)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(values["prompt"], tuple(values["seeds"]), values["wen"])


@final
@dataclass(frozen=True)
class Threshold:
    """Similarity above which a seed, or a prompt's mean, counts as memorized, and below which as broken."""

    value: float
    """The similarity itself."""
    rule: str
    """Rule that it was chosen by."""
    seeds_below: float | None = None
    """Share of the calibration's seeds at or below it; None if it was given."""
    prompts_below: float | None = None
    """Share of the calibration's prompts whose mean lies at or below it: one minus the share of false alarms; None
    if it was given.
    """
    prompts: int = 0
    """Number of ordinary prompts it was calibrated on; 0 if it was given."""
    model: str | None = None
    """Digest of the model's denoiser it was calibrated on; None if it was given."""
    broken: float | None = None
    """At or below which memorization counts as broken: where ordinary prompts are, not where the alarm begins.
    None takes `value`.
    """
    detection: Mapping[str, Any] | None = None
    """Settings of detection, see `detection_settings`; None if it was given."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        try:
            return cls(**values)
        except TypeError as error:
            raise CorruptBlob(f"This is not a threshold: {error}.", cure="Calibrate it anew.") from None


@final
@dataclass(frozen=True)
class Roc:
    """ROC curve of scores that separate two sets."""

    auc: float
    """Area under the curve: the chance that a memorized prompt scores above an ordinary one, ties half."""
    false_alarms: tuple[float, ...]
    """Share of ordinary prompts at or above each threshold, rising from 0 to 1."""
    hits: tuple[float, ...]
    """Share of memorized prompts at or above it."""
    thresholds: tuple[float, ...]
    """Falling, the first infinite."""


@torch.no_grad()
def detect(
    model: TextToImage, prompts: Sequence[str], config: DetectionConfig | None = None, *, progress: Progress = QUIET
) -> list[MemorizationScore]:
    """Score prompts, many at a time; nothing is generated.

    Args:
        model: The model.
        prompts: At least one.
        config: Settings; None takes the defaults.
        progress: Reports every prompt.

    Returns:
        One score per prompt, in order.

    Raises:
        UsageError: There is no prompt.

    Source: arXiv 2406.02366, section 3.1; Wen et al. 2024 for the norm.
    """
    if not prompts:
        raise UsageError("There is no prompt to score.", cure="Give at least one.")
    config = config or DetectionConfig()
    noise, timestep = first_step(model, config)
    batches = Batches(most_rows(model, config.rows))
    count = len(noise)
    without = predicted_noise(model, noise, timestep, model.embed([""]).rows([0] * count), batches)
    scores: list[MemorizationScore] = []
    at_once = max(1, config.rows // count)
    with progress.task("detect", len(prompts), unit="prompts") as task:
        for start in range(0, len(prompts), at_once):
            chosen = list(prompts[start : start + at_once])
            text = model.embed(chosen).rows([row for row in range(len(chosen)) for _ in range(count)])
            predictions = predicted_noise(model, noise.repeat(len(chosen), 1, 1, 1), timestep, text, batches)
            if not bool(predictions.isfinite().all()):
                raise UsageError(
                    f"The predictions of {model.name} for {chosen[0]!r} are NaN or infinite.",
                    cure="Give a variant of the pipeline with a wider range, such as bf16 or fp32: --variant.",
                )
            for prompt, part in zip(chosen, torch.split(predictions, count), strict=True):
                scores.append(_score(prompt, part, without, noise))
            task.update(len(chosen))
    return scores


def _score(prompt: str, predicted: Tensor, without: Tensor, noise: Tensor) -> MemorizationScore:
    seeds = greatest(similarity_matrix(noise_difference(predicted, noise)))
    norms = (predicted - without).flatten(1).norm(dim=1)
    return MemorizationScore(prompt, tuple(seeds.tolist()), float(norms.mean()))


def predicted_noise(model: TextToImage, latents: Tensor, timestep: Tensor, text: Text, batches: Batches) -> Tensor:
    """Return the noise that a model predicts in latents, batch by batch."""

    def part(rows: slice) -> Tensor:
        return noise_in(model, latents[rows], timestep, text.rows(torch.arange(rows.start, rows.stop)))

    return batches.run(part, len(latents))


def noise_in(model: TextToImage, latents: Tensor, timestep: Tensor, text: Text) -> Tensor:
    """Return the noise that a model predicts in latents, less the predicted sample where they are nothing but noise.

    Without any signal, as in flow matching and at zero terminal SNR, the noise is the latents themselves, whatever the
    model answers; what it answers is the sample.
    """
    prediction = model.predict(latents, timestep, text)
    one = latents[:1]
    if float(model.add_noise(torch.ones_like(one), torch.zeros_like(one), timestep).abs().max()) > _NO_SIGNAL:
        return prediction.noise
    return latents.to(prediction.sample) - prediction.sample


def greatest(similarities: Tensor) -> Tensor:
    """Return each sample's greatest similarity to another, from `similarity_matrix`, shape `(n,)`."""
    others = similarities.clone()
    others.fill_diagonal_(-torch.inf)
    return others.amax(1)


def detect_resumably(
    model: TextToImage,
    prompts: Sequence[str],
    config: DetectionConfig | None = None,
    *,
    folder: str | Path | Job,
    progress: Progress = QUIET,
) -> list[MemorizationScore]:
    """Score prompts as `detect` does, remembering each in a folder's `scores.jsonl` as soon as it is done."""
    if not prompts:
        raise UsageError("There is no prompt to score.", cure="Give at least one.")
    config = config or DetectionConfig()
    identity = model.identity()
    items = [{"prompt": prompt, "model": identity, "config": influences(config)} for prompt in prompts]
    at_once = max(1, config.rows // len(config.seeds))
    distinct = list(dict.fromkeys(prompts))
    batches = [distinct[start : start + at_once] for start in range(0, len(distinct), at_once)]

    # Ledgers store the name of this function.
    def detected(item: Mapping[str, Any]) -> dict[str, Any]:
        return asdict(detect(model, [item["prompt"]], config)[0])

    def engine(_: Callable[..., Any], waiting: Sequence[Any], /) -> Iterator[tuple[int, Outcome]]:
        """Score the batches in which prompts are waiting, each whole: the last digits of a score depend on them."""
        places = {item["prompt"]: place for place, item in enumerate(waiting)}
        for batch in batches:
            chosen = [prompt for prompt in batch if prompt in places]
            if not chosen:
                continue
            began = time.perf_counter()
            values: dict[str, Any] = dict.fromkeys(batch)
            try:
                values = {each.prompt: asdict(each) for each in detect(model, batch, config)}
                error = None
            except Exception:
                error = traceback.format_exc()
            seconds = (time.perf_counter() - began) / len(batch)
            for prompt in chosen:
                yield places[prompt], Outcome(values[prompt], error, seconds)

    scores = []
    with Job.open(folder, shared=True) as job, progress.task("detect", len(items), unit="prompts") as task:
        for result in job.map(detected, items, name="scores", engine=engine, ordered=True):
            if not result.ok:
                raise UsageError(
                    f"The prompt {result.config['prompt']!r} could not be scored: {result.reason}",
                    cure=f"The whole reason is in {job.folder / 'scores.jsonl'}; the scores so far are stored there.",
                )
            scores.append(MemorizationScore.from_json(result.value))
            task.update()
    return scores


def calibrate(
    scores: Sequence[MemorizationScore],
    *,
    rule: Literal["mean+std", "quantile"] = "mean+std",
    quantile: float = 0.95,
    model: str | None = None,
    detection: Mapping[str, Any] | None = None,
) -> Threshold:
    """Choose a threshold from the scores of prompts that are not memorized."""
    if len(scores) < 2:
        raise UsageError(f"A threshold needs at least 2 ordinary prompts, not {len(scores)}.", cure="Give 50 or more.")
    seeds = torch.tensor([value for score in scores for value in score.seeds], dtype=torch.float64)
    means = torch.tensor([score.similarity for score in scores], dtype=torch.float64)
    if rule == "mean+std":
        value, words = float(seeds.mean() + seeds.std()), "mean + 1 standard deviation of seeds"
    elif rule == "quantile" and 0 < quantile <= 1:
        value, words = float(means.quantile(quantile)), f"quantile {quantile:g} of prompts"
    else:
        raise UsageError(f"The rule {rule!r} with quantile {quantile} is unknown.", cure="Use mean+std or quantile.")
    below = [float((part <= value).double().mean()) for part in (seeds, means)]
    settings = None if detection is None else dict(detection)
    middle = min(value, float(seeds.mean()))
    return Threshold(value, words, below[0], below[1], len(scores), model, middle, settings)


def roc(memorized: Sequence[float], ordinary: Sequence[float]) -> Roc:
    """Return how well scores distinguish memorized prompts from ordinary ones that the threshold was not set on."""
    if not memorized or not ordinary:
        raise UsageError("A ROC curve needs scores of memorized and of ordinary prompts.", cure="Give both.")
    thresholds = sorted({*memorized, *ordinary}, reverse=True)
    hits = [0.0, *(sum(score >= limit for score in memorized) / len(memorized) for limit in thresholds)]
    alarms = [0.0, *(sum(score >= limit for score in ordinary) / len(ordinary) for limit in thresholds)]
    area = sum(
        (alarms[place] - alarms[place - 1]) * (hits[place] + hits[place - 1]) / 2 for place in range(1, len(hits))
    )
    return Roc(area, tuple(alarms), tuple(hits), (float("inf"), *thresholds))


def check_threshold(threshold: Threshold, identity: str, detection: Mapping[str, Any]) -> None:
    """Refuse a threshold that was calibrated on another model, or with other settings of detection."""
    if threshold.model is not None and threshold.model != identity:
        raise UsageError(
            f"The threshold was calibrated on another model: on {threshold.model}, not {identity}.",
            cure="Calibrate it on this one: netweight forget detect --ordinary.",
        )
    others = {name: value for name, value in (threshold.detection or {}).items() if detection.get(name) != value}
    if others:
        named = ", ".join(f"{name} {value}, not {detection.get(name)}" for name, value in others.items())
        raise UsageError(
            f"The threshold was calibrated in another way: {named}.",
            cure="Give the same settings here, or calibrate it with these: netweight forget detect --ordinary.",
        )


@torch.no_grad()
def first_step(model: TextToImage, config: DetectionConfig) -> tuple[Tensor, Tensor]:
    """Return initial noise, one row per seed, and the timestep that predictions are made at, a scalar."""
    timestep = model.timesteps(config.steps)[0 if config.timing == "paper" else 1]
    return model.initial_noise(config.seeds), timestep


def detection_settings(model: TextToImage, config: DetectionConfig) -> dict[str, Any]:
    """Return the settings that scores depend on beside model and prompt; a threshold is valid for these alone."""
    windows = windows_for(*model.initial_noise(config.seeds[:1]).shape[-2:])
    return {
        "timing": config.timing,
        "steps": config.steps,
        "seeds": list(config.seeds),
        "guidance": 1.0,
        "window": windows.kernel,
        "scales": len(windows.weights),
    }


def influences(config: DetectionConfig | LocalizationConfig) -> dict[str, Any]:
    """Return the settings that change a result; others only change how long it takes."""
    values = config.to_json()
    for part in (values, values.get("detection", {})):
        for name in ("rows", "prompts"):
            part.pop(name, None)
    return values


def noise_difference(noise: Tensor, latents: Tensor) -> Tensor:
    """Return predicted minus initial noise, scaled to 0 to 1 in each channel of each sample.

    Source: arXiv 2406.02366, section 3.1.
    """
    difference = noise.float() - latents.float()
    low, high = difference.amin((2, 3), keepdim=True), difference.amax((2, 3), keepdim=True)
    return (difference - low) / (high - low).clamp_min(torch.finfo(torch.float32).tiny)
