"""Which prompts a model has memorized: scores from its first predictions, and the threshold above which they count.

threshold = calibrate(detect(model, ordinary_prompts))
for score in detect(model, prompts):
    print(score.prompt, score.similarity > threshold.value)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.forget.settings import DetectionConfig
from netweight.methods.forget.similarity import noise_difference, pairwise, windows_for
from netweight.nn.batching import Batches
from netweight.nn.text_to_image import Text, TextToImage

# The released code's, for Stable Diffusion 1.4. Its own scripts do not agree on how it was made: calibrate instead.
PUBLISHED_THRESHOLD = 0.428


@final
@dataclass(frozen=True)
class Score:
    """How memorized a prompt looks."""

    prompt: str
    seeds: tuple[float, ...]  # for each seed the greatest similarity of its noise difference to that of another
    wen: float  # mean norm of conditional minus unconditional predicted noise, the score of Wen et al. 2024

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
        """Read what `dataclasses.asdict` made of one."""
        return cls(values["prompt"], tuple(values["seeds"]), values["wen"])


@final
@dataclass(frozen=True)
class Threshold:
    """Above which a seed, or a prompt's mean, counts as memorized, and below which it counts as broken."""

    value: float
    rule: str  # how it was chosen
    seeds_below: float | None = None  # share of the calibration's seeds at or below it; None if it was given
    # Share of the calibration's prompts whose mean lies at or below it: one minus the share of false alarms; None if it
    # was given.
    prompts_below: float | None = None
    prompts: int = 0  # number of ordinary prompts it was calibrated on; 0 if it was given
    model: str | None = None  # digest of the model's denoiser it was calibrated on; None if it was given
    # At or below which memorization counts as broken: where ordinary prompts are, not where the alarm begins. None
    # takes `value`.
    broken: float | None = None
    look: Mapping[str, Any] | None = None  # how prompts were looked at, see `look_of`; None if it was given

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned."""
        try:
            return cls(**values)
        except TypeError as error:
            raise CorruptBlob(f"This is no threshold: {error}.", cure="Calibrate it anew.") from None


@final
@dataclass(frozen=True)
class Roc:
    """How well scores tell two sets apart."""

    auc: float  # area under the curve: the chance that a memorized prompt scores above an ordinary one, ties half
    false_alarms: tuple[float, ...]  # share of ordinary prompts at or above each threshold, rising from 0 to 1
    hits: tuple[float, ...]  # share of memorized prompts at or above it
    thresholds: tuple[float, ...]  # falling, the first infinite


@torch.no_grad()
def first_step(model: TextToImage, config: DetectionConfig) -> tuple[Tensor, Tensor]:
    """Return initial noise, one row per seed, and the timestep that predictions are made at, a scalar."""
    timestep = model.timesteps(config.steps)[0 if config.timing == "paper" else 1]
    return model.initial_noise(config.seeds), timestep


def look_of(model: TextToImage, config: DetectionConfig) -> dict[str, Any]:
    """Return what scores depend on beside model and prompt: thresholds hold for one look alone."""
    windows = windows_for(*model.initial_noise(config.seeds[:1]).shape[-2:])
    return {
        "timing": config.timing,
        "steps": config.steps,
        "seeds": list(config.seeds),
        "guidance": 1.0,
        "window": windows.kernel,
        "scales": len(windows.weights),
    }


@torch.no_grad()
def detect(
    model: TextToImage, prompts: Sequence[str], config: DetectionConfig | None = None, *, progress: Progress = QUIET
) -> list[Score]:
    """Score prompts, many at a time; nothing is generated.

    Args:
        model: The model.
        prompts: At least one.
        config: How; None takes the defaults.
        progress: Told of every prompt.

    Returns:
        One score per prompt, in order.

    Raises:
        UsageError: There is no prompt.

    Source: arXiv 2406.02366, section 3.1; Wen et al. 2024 for the norm.
    """
    if not prompts:
        raise UsageError("There is no prompt to look at.", cure="Give at least one.")
    config = config or DetectionConfig()
    noise, timestep = first_step(model, config)
    batches = Batches(config.rows)
    count = len(noise)
    without = predicted_noise(model, noise, timestep, model.embed([""]).rows([0] * count), batches)
    scores: list[Score] = []
    at_once = max(1, config.rows // count)
    with progress.task("detect", len(prompts), unit="prompts") as task:
        for start in range(0, len(prompts), at_once):
            chosen = list(prompts[start : start + at_once])
            text = model.embed(chosen).rows([row for row in range(len(chosen)) for _ in range(count)])
            said = predicted_noise(model, noise.repeat(len(chosen), 1, 1, 1), timestep, text, batches)
            for prompt, part in zip(chosen, torch.split(said, count), strict=True):
                scores.append(_score(prompt, part, without, noise))
            task.update(len(chosen))
    return scores


def predicted_noise(model: TextToImage, latents: Tensor, timestep: Tensor, text: Text, batches: Batches) -> Tensor:
    """Return the noise that a model predicts in latents, batch by batch."""

    def part(rows: slice) -> Tensor:
        chosen = torch.arange(rows.start, rows.stop)
        return model.predict(latents[rows], timestep, text.rows(chosen)).noise

    return batches.run(part, len(latents))


def greatest(similarities: Tensor) -> Tensor:
    """Return each sample's greatest similarity to another, from `pairwise`, shape `(n,)`."""
    others = similarities.clone()
    others.fill_diagonal_(-torch.inf)
    return others.amax(1)


def calibrate(
    scores: Sequence[Score],
    *,
    rule: Literal["mean+std", "quantile"] = "mean+std",
    quantile: float = 0.95,
    model: str | None = None,
    look: Mapping[str, Any] | None = None,
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
    seen = None if look is None else dict(look)
    middle = min(value, float(seeds.mean()))
    return Threshold(value, words, below[0], below[1], len(scores), model, middle, seen)


def roc(memorized: Sequence[float], ordinary: Sequence[float]) -> Roc:
    """Return how well scores tell memorized prompts from ordinary ones that the threshold has not seen."""
    if not memorized or not ordinary:
        raise UsageError("A ROC curve needs scores of memorized and of ordinary prompts.", cure="Give both.")
    thresholds = sorted({*memorized, *ordinary}, reverse=True)
    hits = [0.0, *(sum(score >= limit for score in memorized) / len(memorized) for limit in thresholds)]
    alarms = [0.0, *(sum(score >= limit for score in ordinary) / len(ordinary) for limit in thresholds)]
    area = sum(
        (alarms[place] - alarms[place - 1]) * (hits[place] + hits[place - 1]) / 2 for place in range(1, len(hits))
    )
    return Roc(area, tuple(alarms), tuple(hits), (float("inf"), *thresholds))


def _score(prompt: str, said: Tensor, without: Tensor, noise: Tensor) -> Score:
    seeds = greatest(pairwise(noise_difference(said, noise)))
    norms = (said - without).flatten(1).norm(dim=1)
    return Score(prompt, tuple(seeds.tolist()), float(norms.mean()))
