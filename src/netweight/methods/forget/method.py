"""Detection and localization of many prompts: resumable prompt by prompt, and none is dropped in silence.

found = localize(model, prompts, statistics, threshold, ledger="neurons.jsonl")
apply_edit_(model, found[0].neurons)
"""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from netweight.core import digest
from netweight.core.engines import Outcome
from netweight.core.progress import QUIET, Progress
from netweight.core.runs import map_runs
from netweight.errors import UsageError
from netweight.methods.forget.config import DetectionConfig, LocalizationConfig
from netweight.methods.forget.detection import Score, Threshold, detect, look_of
from netweight.methods.forget.layers import value_layers
from netweight.methods.forget.localization import search
from netweight.methods.forget.results import Localization
from netweight.methods.forget.side_by_side import Predictions, Search, side_by_side
from netweight.methods.forget.statistics import Statistics
from netweight.probe.diffusion import TextToImage

__all__ = ["check_threshold", "detect_resumably", "localize"]

_NO_INFLUENCE = ("rows", "ahead", "prompts")  # settings that change how long a result takes, not what it is


def localize(
    model: TextToImage,
    prompts: Sequence[str],
    statistics: Statistics,
    threshold: Threshold,
    config: LocalizationConfig | None = None,
    *,
    ledger: str | Path,
    progress: Progress = QUIET,
) -> list[Localization]:
    """Find the neurons of prompts, remembering each as soon as it is done.

    Args:
        model: The model.
        prompts: At least one.
        statistics: Of the same model.
        threshold: Of the same model, see `calibrate`.
        config: How; None takes the defaults.
        ledger: The file to remember results in; a second call continues the first.
        progress: Told of every prompt.

    Returns:
        One per prompt, in order. A prompt whose search ended in an error has the status "failed"; the next call tries
        it again.

    Raises:
        UsageError: There is no prompt, statistics or threshold are of another model, or the threshold of another look.
        Unsupported: See `value_layers`.

    Source: arXiv 2406.02366, section 3.
    """
    if not prompts:
        raise UsageError("There is no prompt to localize.", cure="Give at least one.")
    config = config or LocalizationConfig()
    identity = model.digest()
    layers = value_layers(model.denoiser, scope=config.scope)
    statistics.check(layers, identity)
    check_threshold(threshold, identity, look_of(model, config.detection))
    about = {
        "model": identity,
        "statistics": _statistics_digest(statistics),
        "threshold": [threshold.value, threshold.broken],
        "config": _settings(config),
    }
    items: list[dict[str, Any]] = [{"prompt": prompt, **about} for prompt in prompts]
    predictions = Predictions(model, layers, config.detection)

    def localized(item: Mapping[str, Any]) -> Search[dict[str, Any]]:
        return (yield from search(predictions, item["prompt"], statistics, threshold, config)).to_json()

    def engine(fn: Callable[..., Search[Any]], waiting: Sequence[Any], /) -> Iterator[tuple[int, Outcome]]:
        """Search several prompts side by side; seconds are those since another one's search ended."""
        began = time.perf_counter()
        for index, value in side_by_side(map(fn, waiting), predictions, config.prompts):
            seconds, began = time.perf_counter() - began, time.perf_counter()
            if isinstance(value, Exception):
                yield index, Outcome(None, "".join(traceback.format_exception(value)), seconds)
            else:
                yield index, Outcome(value, None, seconds)

    results = map_runs(localized, items, ledger=ledger, engine=engine, ordered=True)
    found = []
    with progress.task("localize", len(items), unit="prompts") as task:
        for result in results:
            failed = Localization.failed(result.config["prompt"], result.error or "")
            found.append(Localization.from_json(result.value) if result.ok else failed)
            task.update()
    return found


def detect_resumably(
    model: TextToImage,
    prompts: Sequence[str],
    config: DetectionConfig | None = None,
    *,
    ledger: str | Path,
    progress: Progress = QUIET,
) -> list[Score]:
    """Score prompts as `detect` does, remembering each as soon as it is done.

    Args:
        model: The model.
        prompts: At least one.
        config: How; None takes the defaults.
        ledger: The file to remember scores in; a second call continues the first.
        progress: Told of every prompt.

    Returns:
        One score per prompt, in order.

    Raises:
        UsageError: There is no prompt, or one could not be scored; the reason is in the message.
    """
    if not prompts:
        raise UsageError("There is no prompt to look at.", cure="Give at least one.")
    config = config or DetectionConfig()
    identity = model.digest()
    items = [{"prompt": prompt, "model": identity, "config": _settings(config)} for prompt in prompts]
    at_once = max(1, config.rows // len(config.seeds))

    def detected(item: Mapping[str, Any]) -> dict[str, Any]:
        return dataclasses.asdict(detect(model, [item["prompt"]], config)[0])

    def engine(_: Callable[..., Any], waiting: Sequence[Any], /) -> Iterator[tuple[int, Outcome]]:
        """Score as many prompts at once as fit in a batch."""
        for start in range(0, len(waiting), at_once):
            began = time.perf_counter()
            group = waiting[start : start + at_once]
            try:
                values: list[Any] = [
                    dataclasses.asdict(each) for each in detect(model, [item["prompt"] for item in group], config)
                ]
                error = None
            except Exception:
                values, error = [None] * len(group), traceback.format_exc()
            seconds = (time.perf_counter() - began) / len(group)
            for offset, value in enumerate(values):
                yield start + offset, Outcome(value, error, seconds)

    scores = []
    with progress.task("detect", len(items), unit="prompts") as task:
        for result in map_runs(detected, items, ledger=ledger, engine=engine, ordered=True):
            if not result.ok:
                reason = (result.error or "").strip().splitlines()[-1]
                raise UsageError(
                    f"The prompt {result.config['prompt']!r} could not be scored: {reason}",
                    cure=f"The whole reason is in {ledger}; those scored before are kept there.",
                )
            scores.append(Score.from_json(result.value))
            task.update()
    return scores


def check_threshold(threshold: Threshold, identity: str, look: Mapping[str, Any]) -> None:
    """Refuse a threshold that was calibrated on another model, or by looking at prompts in another way.

    Args:
        threshold: The threshold; what it does not say of itself is not checked.
        identity: Digest of the model.
        look: How prompts are to be looked at, from `look_of`.

    Raises:
        UsageError: It was.
    """
    if threshold.model is not None and threshold.model != identity:
        raise UsageError(
            f"The threshold was calibrated on another model: on {threshold.model}, not {identity}.",
            cure="Calibrate it on this one: netweight forget detect --ordinary.",
        )
    others = {name: value for name, value in (threshold.look or {}).items() if look.get(name) != value}
    if others:
        told = ", ".join(f"{name} {value}, not {look.get(name)}" for name, value in others.items())
        raise UsageError(
            f"The threshold was calibrated in another way: {told}.",
            cure="Give the same settings here, or calibrate it with these: netweight forget detect --ordinary.",
        )


def _settings(config: DetectionConfig | LocalizationConfig) -> dict[str, Any]:
    values = dataclasses.asdict(config)
    inner = values.get("detection", {})
    for name in _NO_INFLUENCE:
        values.pop(name, None)
        inner.pop(name, None)
    return values


def _statistics_digest(statistics: Statistics) -> str:
    parts = [
        [name, digest.of_tensor(mean), digest.of_tensor(statistics.deviations[name])]
        for name, mean in statistics.means.items()
    ]
    return digest.of_config(parts)
