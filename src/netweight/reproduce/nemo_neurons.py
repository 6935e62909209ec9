"""Scores, thresholds and neurons of a ground's prompts, remembered prompt by prompt for all of NeMo's tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.core.digest import of_config
from netweight.reproduce.nemo_ground import Ground

if TYPE_CHECKING:
    from netweight.core.units import Units
    from netweight.methods.forget.detect import Score, Threshold
    from netweight.methods.forget.layers import Statistics
    from netweight.methods.forget.localize import Localization
    from netweight.methods.forget.settings import LocalizationConfig

__all__ = ["neurons_of", "scores_of", "searched", "statistics_of", "status_notes", "threshold_of", "union"]


def scores_of(ground: Ground, folder: Path, prompts: Sequence[str]) -> list[Score]:
    """Score prompts by how alike their noise differences are; what the folder remembers is not scored again."""
    from netweight.core.progress import Progress
    from netweight.methods.forget.detect import detect_resumably

    ledger = folder / "scores.jsonl"
    return detect_resumably(ground.model, prompts, ground.detection, ledger=ledger, progress=Progress("auto"))


def threshold_of(ground: Ground, folder: Path) -> Threshold:
    """Calibrate the threshold on the ground's ordinary prompts by the paper's rule."""
    from netweight.methods.forget.detect import calibrate

    return calibrate(scores_of(ground, folder, ground.calibration), model=ground.model.digest())


def statistics_of(ground: Ground, folder: Path) -> Statistics:
    """Return usual activations: read from the user's file, or measured once and kept in the folder."""
    from netweight.core.progress import Progress
    from netweight.methods.forget.layers import Statistics, measure_statistics, value_layers

    given = ground.statistics
    if given is not None:
        layers = value_layers(ground.model.denoiser)
        return Statistics.read_published(given, layers) if given.suffix == ".pt" else Statistics.read(given)
    named = of_config([ground.model.digest(), ground.usual]).rpartition(":")[2][:16]
    kept = folder / f"statistics-{named}.safetensors"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        measure_statistics(ground.model, ground.usual, progress=Progress("auto")).write(kept)
    return Statistics.read(kept)


def neurons_of(
    ground: Ground, folder: Path, config: LocalizationConfig | None = None, *, threshold: Threshold | None = None
) -> dict[str, Localization]:
    """Find every memorized prompt's neurons; what the folder remembers is not searched again.

    Args:
        ground: Where.
        folder: Of `folder_of`.
        config: How; None looks at prompts as the ground does.
        threshold: Another one than the ground's.

    Returns:
        By prompt, in the ground's order; prompts whose search failed are among them.
    """
    from netweight.core.progress import Progress
    from netweight.methods.forget.localize import localize
    from netweight.methods.forget.settings import LocalizationConfig

    found = localize(
        ground.model,
        ground.prompts,
        statistics_of(ground, folder),
        threshold or threshold_of(ground, folder),
        config or LocalizationConfig(detection=ground.detection),
        ledger=folder / "neurons.jsonl",
        progress=Progress("auto"),
    )
    return {each.prompt: each for each in found}


def searched(found: Mapping[str, Localization]) -> dict[str, Localization]:
    """Return those prompts whose neurons were looked for to the end: memorized ones whose search did not fail."""
    return {prompt: each for prompt, each in found.items() if each.status in ("resolved", "unresolved")}


def union(found: Sequence[Localization]) -> Units:
    """Return the neurons of several prompts together, each once."""
    from netweight.core.units import Units

    together = Units()
    for each in found:
        together = together | each.neurons
    return together


def status_notes(found: Mapping[str, Localization]) -> tuple[str, ...]:
    """Name the prompts for which neurons do not suffice, were not looked for, or could not be."""
    words = {
        "unresolved": "Unresolved, as even the last stage of the search did not reach the threshold",
        "not memorized": "Not taken for memorized, so that nothing was looked for",
        "failed": "The search failed and is tried again by the next call; left out of what follows from neurons",
    }
    notes = []
    for status, saying in words.items():
        prompts = [prompt for prompt, each in found.items() if each.status == status]
        if prompts:
            notes.append(f"{saying} ({len(prompts)} of {len(found)} prompts): {'; '.join(prompts)}.")
    return tuple(notes)
