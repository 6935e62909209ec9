"""An edit in a report: images side by side, what each prompt's came to, and the sections that hold its audits."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from netweight.attacks.embedding_search.comparison import Comparison, Run
from netweight.attacks.embedding_search.showing import best_image
from netweight.core.progress import QUIET
from netweight.methods.forget.audit import (
    DETECTION,
    IMAGES,
    NEURONS,
    TREATMENT,
    DetectionSubject,
    detection_findings,
    neuron_findings,
)
from netweight.methods.forget.images import ImagesConfig, copies, image_findings, verdicts
from netweight.methods.forget.painting import Painted
from netweight.methods.forget.results import Localization
from netweight.report.finding import Column, Figure, Finding, Table
from netweight.report.plots import image_grid
from netweight.report.report import Report

__all__ = ["add_finding_sections", "add_images_section", "attacked_images", "images_figure", "images_table"]

_INTRO = (
    "Each prompt is painted with the same seeds by the model before the edit and after. Images are compared with the "
    "prompt's training image, seed by seed since medians hide single copies, and with all other memorized images: an "
    "edit may only divert a prompt to another one's.\n\n"
    "Suppressed for this prompt means that no image of these seeds copies the training image. It does not mean that "
    "the image is gone from the weights: whether other embeddings bring it back is what the search asks."
)
_ATTACKED = "found by search"


def add_finding_sections(
    report: Report, scores: DetectionSubject | None, found: Sequence[Localization] | None, *, title: str = ""
) -> list[Finding]:
    """Add how prompts were found and which neurons were: the audits that need no image.

    Args:
        report: The report.
        scores: Of memorized and ordinary prompts; None leaves the section out.
        found: Localizations; None leaves the section out.
        title: What the headings begin with.

    Returns:
        The findings.
    """
    findings: list[Finding] = []
    if scores is not None:
        part = detection_findings(scores, None, seed=0, progress=QUIET)
        report.section(
            f"{title}detection" if title else "Detection", part, tables=[_scores_table(scores)],
            question="Do first predictions tell memorized prompts from ordinary ones?",
            conclusion=_detected(scores),
            intro="Predicted minus initial noise is compared between seeds. The threshold was calibrated on ordinary "
            "prompts; those it is tested on are others.",
        )  # fmt: skip
        findings += part
    if found is not None:
        part = neuron_findings(found, None, seed=0, progress=QUIET)
        report.section(
            f"{title}neurons" if title else "Neurons", part, tables=[_neurons_table(found)],
            question="Which neurons were switched off, and did that reach the threshold?",
            conclusion=_localized(found),
            intro="A prompt is resolved if blocking its neurons brings the similarity of first predictions down to the "
            "threshold. What that does to images is another question.",
        )  # fmt: skip
        findings += part
    return findings


def add_images_section(
    report: Report,
    painted: Painted,
    config: ImagesConfig,
    *,
    seed: int,
    attacked: Mapping[str, Tensor] | None = None,
    title: str = "Images before and after the edit",
    audits: Sequence[str] = (DETECTION, NEURONS, IMAGES),
    warnings: Sequence[str] = (),
) -> list[Finding]:
    """Add what painted images say to a report.

    Args:
        report: The report.
        painted: The images.
        config: How they are compared.
        seed: Of the intervals.
        attacked: By prompt, an image that a search found in the edited model, shape `(3, height, width)`.
        title: Heading of the section.
        audits: Which of the treatment's audits the report holds; others are shown in red.
        warnings: Further sentences to show in red.

    Returns:
        The findings.

    Raises:
        UsageError, MissingExtra: See `image_findings` and `images_figure`.
    """
    findings = image_findings(painted, config, seed=seed)
    report.section(
        title,
        findings,
        figures=[images_figure(painted, config, attacked=attacked)],
        tables=[images_table(painted, config)],
        intro=_INTRO,
        question="Do the prompts still bring their training images back, and what became of others?",
        conclusion=_conclusion(verdicts(painted, config)),
        treatment=TREATMENT,
        audits=audits,
        warnings=warnings,
    )
    return findings


def images_figure(
    painted: Painted, config: ImagesConfig, *, attacked: Mapping[str, Tensor] | None = None, most: int = 8
) -> Figure:
    """Draw training images beside what is painted before the edit, after it, by controls, and after a search.

    Args:
        painted: The images.
        config: How they are compared, which decides on the seed that is shown.
        attacked: By prompt, an image that a search found in the edited model.
        most: Most rows.

    Raises:
        MissingExtra: matplotlib is not installed.
    """
    columns = ["training image", "original", "edited", *painted.controls]
    found = attacked or {}
    rows = []
    shown = list(zip(painted.memorized, copies(painted, painted.edited, config), strict=True))[:most]
    for each, row in shown:
        order = sorted(range(len(row.to_image)), key=row.to_image.__getitem__)
        place = order[len(order) // 2]
        images = [each.image, painted.original[each.prompt][place], painted.edited[each.prompt][place]]
        images += [control[each.prompt][place] for control in painted.controls.values()]
        cells: list[object] = [_pixels(image) for image in images]
        if found:
            cells.append(_pixels(found[each.prompt]) if each.prompt in found else None)
        rows.append(cells)
    return image_grid(
        rows,
        rows=[each.prompt for each, _ in shown],
        columns=[*columns, _ATTACKED] if found else columns,
        alt=f"{len(shown)} training images beside what the models paint for their prompts.",
        caption="All images of a row but the first and the last are of one seed: the one in the middle of the edited "
        "model's similarities to the training image."
        + (" The last is what the search found in the edited model from other embeddings." if found else ""),
    )


def images_table(painted: Painted, config: ImagesConfig) -> Table:
    """Return one row for each memorized prompt: copies before and after, and the verdict.

    Args:
        painted: Images before and after the edit.
        config: When an image is a copy.
    """
    before, after = (copies(painted, images, config) for images in (painted.original, painted.edited))
    told = verdicts(painted, config)
    rows = [
        (
            row.prompt, row.kind, old.copies(config.threshold), row.copies(config.threshold),
            row.any_match(config.threshold), statistics.median(old.to_image), statistics.median(row.to_image),
            told[row.prompt].partition(":")[0],
        )
        for row, old in zip(after, before, strict=True)
    ]  # fmt: skip
    columns = (
        "prompt", "kind", Column("copies before"), Column("copies after", better="lower"),
        Column("of any", better="lower"), Column(f"{config.measure} before"),
        Column(f"{config.measure} after", better="lower"), "verdict",
    )  # fmt: skip
    note = (
        f"of {len(after[0].to_image)} images each; a copy has a {config.measure} of {config.threshold:g} or more; of "
        f"any: copies of any memorized image after the edit; {config.measure}: medians"
    )
    return Table("Memorized prompts", columns, rows, (note,))


def attacked_images(comparison: Comparison, subject: str, folder: str | Path) -> dict[str, Tensor]:
    """Return what searches in a subject found for planted images: by target, an image of the best embedding.

    Args:
        comparison: The searches.
        subject: Name of the subject.
        folder: Of the comparison.

    Raises:
        UsageError: It was not searched, or a file of images is missing.
    """
    best: dict[str, tuple[float, Run]] = {}
    for run in comparison.of(subject, trained=True):
        scores = [trial.best.score for trial in run.trials if trial.best is not None]
        if scores and max(scores) > best.get(run.target, (-torch.inf, run))[0]:
            best[run.target] = max(scores), run
    found = {target: best_image(run, folder) for target, (_, run) in best.items()}
    return {target: image for target, image in found.items() if image is not None}


def _conclusion(told: Mapping[str, str]) -> str:
    """The verdict of a single prompt; of several, how many are suppressed and which are not."""
    if len(told) == 1:
        return "".join(f"{prompt}: {words}." for prompt, words in told.items())
    left = [prompt for prompt, words in told.items() if not words.startswith("suppressed")]
    rest = f" Not so: {'; '.join(left)}." if left else ""
    return f"{len(told) - len(left)} of {len(told)} images are suppressed for their prompts.{rest}"


def _detected(scores: DetectionSubject) -> str:
    counts = [
        f"{sum(each.similarity > scores.threshold.value for each in group)} of {len(group)}"
        for group in (scores.memorized, scores.ordinary)
    ]
    return f"{counts[0]} memorized prompts lie above the threshold, and {counts[1]} ordinary ones."


def _localized(found: Sequence[Localization]) -> str:
    counts = Counter(each.status for each in found)
    told = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"{len({unit for each in found for unit in each.neurons})} neurons for {len(found)} prompts: {told}."


def _scores_table(scores: DetectionSubject) -> Table:
    limit = scores.threshold.value
    groups = (("memorized", scores.memorized), ("ordinary", scores.ordinary))
    rows = [
        (each.prompt, kind, each.similarity, each.highest, each.wen, "yes" if each.similarity > limit else "no")
        for kind, group in groups
        for each in sorted(group, key=lambda score: -score.similarity)[: None if kind == "memorized" else 12]
    ]
    columns = ("prompt", "known as", Column("similarity"), Column("highest"), Column("Wen's norm"), "found")
    notes = (
        f"threshold {limit:.3f}: {scores.threshold.rule}; of {len(scores.ordinary)} ordinary prompts the 12 that look "
        "most memorized are shown",
    )
    return Table("Scores", columns, rows, notes)


def _neurons_table(found: Sequence[Localization]) -> Table:
    columns = (
        "prompt", "status", Column("neurons"), Column("layers"), Column("threshold"), Column("similarity left"),
    )  # fmt: skip
    rows = [
        (each.prompt, each.status, len(each.neurons), len(each.neurons.modules), each.threshold,
         each.refined_similarity)
        for each in found
    ]  # fmt: skip
    return Table("Neurons by prompt", columns, rows)


def _pixels(image: Tensor) -> object:
    return image.detach().cpu().permute(1, 2, 0).numpy()
