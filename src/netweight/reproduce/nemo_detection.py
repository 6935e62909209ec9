"""NeMo's figures on telling memorized prompts: noise differences, activations, and scores by kind of memorization."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from netweight.report.finding import Column
from netweight.reproduce.nemo_ground import Ground, nemo_table
from netweight.reproduce.nemo_neurons import scores_of, statistics_of, threshold_of
from netweight.reproduce.nemo_painting import kinds_of, paint, painting
from netweight.reproduce.nemo_rows import KINDS, middle, percent
from netweight.reproduce.nemo_ways import NONE
from netweight.reproduce.registry import Measured, Row

if TYPE_CHECKING:
    from netweight.methods.forget.detect import Score
    from netweight.report.finding import Figure

__all__ = ["figure3", "ssim_by_type"]

_ORDINARY = "ordinary, held out"
_AUC = 0.98


@nemo_table("nemo-fig3")
def figure3(ground: Ground, folder: Path) -> Measured:
    """Draw how alike noise differences are, and how far activations lie out, of memorized and of other prompts."""
    from netweight.methods.forget.detect import roc
    from netweight.methods.forget.report import DetectionSubject, detection

    limit = threshold_of(ground, folder)
    scores = _by_kind(ground, folder)
    others = scores[_ORDINARY]
    deviations = {name: _outliers(ground, folder, [each.prompt for each in group]) for name, group in scores.items()}
    rows = []
    for name, group in scores.items():
        similar, norms = [each.similarity for each in group], [each.wen for each in group]
        told: list[float | None] = [None, None]
        if name != _ORDINARY:
            told = [
                roc(similar, [each.similarity for each in others]).auc,
                roc(norms, [each.wen for each in others]).auc,
            ]
        above = percent(sum(value > limit.value for value in similar), len(similar))
        highest = [max(values) for values in deviations[name]]
        values = [len(group), *middle(similar), min(similar), max(similar), above, told[0], median(norms), told[1]]
        rows.append(Row(name, (*values, median(highest))))
    memorized = [score for name, group in scores.items() if name != _ORDINARY for score in group]
    findings = detection(DetectionSubject(memorized, others, limit)).findings
    wanted = _AUC if ground.small and ground.whole else None
    return Measured(
        columns=_columns(),
        rows=tuple(rows),
        differs=ground.differs,
        findings=(dataclasses.replace(findings[0], target=wanted), *findings[1:]),
        figures=(
            _similarities(
                {name: [each.similarity for each in group] for name, group in scores.items()},
                f"(a) Similarity of noise differences, the mean over {len(ground.detection.seeds)} seeds of each "
                f"prompt; the threshold is {limit.value:.3f} ({limit.rule}).",
            ),
            _activations(deviations),
        ),
        notes=(
            f"Threshold {limit.value:.4f} ({limit.rule}), calibrated on {limit.prompts} other ordinary prompts. The "
            "released code has 0.428 for Stable Diffusion 1.4, made by another protocol.",
        ),
    )


@nemo_table("nemo-ssim-by-type")
def ssim_by_type(ground: Ground, folder: Path) -> Measured:
    """Draw the greatest similarity of images to their training image, and that of noise differences, by kind."""
    scores = _by_kind(ground, folder)
    runs = {prompt: painting(ground, NONE, "own", prompt) for prompt in ground.prompts}
    found = paint(ground, folder, list(runs.values()))
    largest: dict[str, list[float]] = {}
    copied: dict[str, list[float]] = {}
    for name, group in scores.items():
        own = [found[runs[each.prompt]] for each in group if each.prompt in runs]
        largest[name] = [max(each["ssim"]) for each in own if each["ssim"] is not None]
        copied[name] = [max(each["to_image"]) for each in own]
    rows = tuple(
        Row(name, (
            len(group), *middle(largest[name]), *_ends(largest[name]), *middle(copied[name]),
            *middle([each.similarity for each in group]),
        )) for name, group in scores.items()
    )  # fmt: skip
    figures = [
        _similarities(
            {name: [each.similarity for each in group] for name, group in scores.items()},
            "Similarity of noise differences by kind of prompt.",
        )
    ]
    if any(largest.values()):
        caption = f"Greatest structural similarity of {ground.images} images to their training image, by kind."
        figures.insert(0, _similarities(largest, caption))
    return Measured(
        columns=(
            Column("prompts", "count"),
            Column("greatest SSIM to the training image, median", "score"),
            Column("greatest SSIM to the training image, MAD", "score"),
            Column("greatest SSIM to the training image, least", "score"),
            Column("greatest SSIM to the training image, most", "score"),
            Column(f"greatest {ground.measure} to the training image, median", "score"),
            Column(f"greatest {ground.measure} to the training image, MAD", "score"),
            Column("similarity of noise differences, median", "score"),
            Column("similarity of noise differences, MAD", "score"),
        ),
        rows=rows,
        differs=ground.differs,
        figures=tuple(figures),
        notes=(
            "Ordinary prompts have no training image. SSIM looks at whole images, a template's changing part too.",
            "Kinds are those that were planted." if ground.labelled else
            f"Verbatim are prompts with an image of {ground.measure} 0.7 or more to the training image.",
        ),
    )  # fmt: skip


def _by_kind(ground: Ground, folder: Path) -> dict[str, list[Score]]:
    kinds = kinds_of(ground, folder)
    scores = scores_of(ground, folder, ground.prompts)
    groups = {kind: [each for each in scores if kinds[each.prompt] == kind] for kind in KINDS}
    groups[_ORDINARY] = scores_of(ground, folder, ground.held_out)
    return {name: group for name, group in groups.items() if group}


def _outliers(ground: Ground, folder: Path, prompts: Sequence[str]) -> list[list[float]]:
    """For each prompt, how many deviations each neuron of the first layer lies from its mean."""
    from netweight.methods.forget.layers import text_activations, value_layers

    layers = value_layers(ground.model.denoiser)
    usual, first = statistics_of(ground, folder), next(iter(layers))
    found = []
    for prompt in prompts:
        z = usual.z(text_activations(ground.model, layers, ground.model.embed([prompt])))
        found.append([float(value) for value in z[first][0].cpu()])
    return found


def _ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    return (min(values), max(values)) if values else (None, None)


def _columns() -> tuple[Column, ...]:
    return (
        Column("prompts", "count"),
        Column("similarity of noise differences, median", "score"),
        Column("similarity of noise differences, MAD", "score"),
        Column("similarity of noise differences, least", "score"),
        Column("similarity of noise differences, most", "score"),
        Column("above the threshold", "%"),
        Column("AUC against ordinary prompts", "", "higher"),
        Column("Wen's norm, median"),
        Column("AUC of Wen's norm", "", "higher"),
        Column("greatest deviation in the first value layer, median", "standard deviations"),
    )


def _similarities(groups: Mapping[str, Sequence[float]], caption: str) -> Figure:
    from netweight.report.plots import histogram

    words = "; ".join(f"{name}: median {median(values):.2f}" for name, values in groups.items() if values)
    return histogram(groups, alt=f"Histogram of similarities. {words}.", caption=caption, xlabel="similarity",
                     ylabel="prompts")  # fmt: skip


def _activations(deviations: Mapping[str, Sequence[Sequence[float]]]) -> Figure:
    """Of each prompt the neuron that lies farthest out; all neurons would hide it among hundreds."""
    from netweight.report.plots import histogram

    highest = {name: [max(values) for values in prompts] for name, prompts in deviations.items()}
    words = "; ".join(f"{name}: median {median(values):.1f}" for name, values in highest.items())
    return histogram(
        highest,
        alt=f"Histogram of the greatest deviation of an activation in the first value layer. {words}.",
        caption="(b) Neurons of the first value layer: how many standard deviations the farthest one of each prompt "
        "lies from its usual activation.",
        xlabel="standard deviations from the mean",
        ylabel="prompts",
    )
