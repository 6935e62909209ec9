"""Audits of forgetting, as sections of a report: detection, neurons, images before and after an edit, and searches.

Images are generated with the same seeds. Verdicts say "suppressed for this prompt" and never "erased": other embeddings
may bring an image back, which is for the search of `attacks/embedding_search` to find out.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Literal, Protocol, final

import torch
from torch import Tensor

from netweight.attacks.embedding_search.report import best_image
from netweight.attacks.embedding_search.search import Comparison, TargetSearches
from netweight.core.progress import QUIET, Progress
from netweight.methods.forget.check import EditCheck
from netweight.methods.forget.detect import MemorizationScore, Threshold, roc
from netweight.methods.forget.images import GeneratedImages
from netweight.methods.forget.localize import Localization
from netweight.methods.forget.membership import Membership, two_sided
from netweight.metrics.copies import COPY, PromptCopies, copies_of_prompt, copy_findings, similarity_to_memorized
from netweight.metrics.descriptors import CenteredPixels, Descriptor, similarity
from netweight.metrics.intervals import ends_if_enough, interval_finding, proportion
from netweight.metrics.region_copies import region_copies, region_findings
from netweight.report.finding import Column, Figure, Finding, Section, Table
from netweight.report.plots import bars, heat_maps, histogram, image_grid
from netweight.report.text import Conclusion, Criterion, Words, worst

# Below this similarity to the image before the edit, a prompt's images count as changed.
_SAME = 0.5


class Alignment(Protocol):
    """Measure of how well images follow prompts, such as `metrics.descriptors.Clip`."""

    @property
    def name(self) -> str: ...

    def alignment(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return how well each image follows its prompt, shape `(n,)`."""


@final
@dataclass(frozen=True)
class ImagesConfig:
    """Settings of the comparison of images."""

    descriptor: Descriptor | None = None
    """Descriptor of images; None compares centered pixels, for a template only where the template is fixed."""
    threshold: float = COPY
    """Similarity from which an image is a copy."""
    alignment: Alignment | None = None
    """Measure of how well images follow prompts; None leaves that out."""

    @property
    def measure(self) -> str:
        """The name of similarities."""
        return (self.descriptor or CenteredPixels()).name


def copies(images: GeneratedImages, made: Mapping[str, Tensor], config: ImagesConfig) -> list[PromptCopies]:
    """Compare the images of every memorized prompt with its training image, all others, and the unedited generation."""
    return [
        copies_of_prompt(
            each, made[each.prompt], images.memorized, descriptor=config.descriptor,
            unedited=images.original[each.prompt],
        )
        for each in images.memorized
    ]  # fmt: skip


def image_findings(images: GeneratedImages, config: ImagesConfig, *, seed: int) -> list[Finding]:
    """Return what an edit did to images; the original's are the baseline of each finding."""

    def of(made: Mapping[str, Tensor]) -> list[Finding]:
        rows = copies(images, made, config)
        regions = [region_copies(each, made[each.prompt]) for each in images.memorized]
        similarities = copy_findings(rows, measure=config.measure, threshold=config.threshold, seed=seed)
        return [*similarities, *region_findings(regions, threshold=config.threshold)]

    before = {finding.name: finding.value for finding in of(images.original)}
    words = verdicts(images, config)
    suppressed = sum(outcome == "holds" for outcome, _ in words.values())
    each = {prompt: verdict for prompt, (_, verdict) in words.items()}
    findings = [Finding("prompts suppressed", suppressed, n=len(words), better="higher", detail={"each": each})]
    findings += [replace(finding, baseline=before.get(finding.name)) for finding in of(images.edited)]
    for name, control in images.controls.items():
        beside = [finding for finding in of(control) if "training image" in finding.name]
        findings += [replace(each, name=f"{each.name}, {name}", better=None) for each in beside]
    for kind, prompts in (("ordinary prompts", images.ordinary), ("other prompts", images.others)):
        if prompts:
            findings += _kept_as_they_were(images, kind, prompts, config, seed)
    if config.alignment is not None:
        findings += _alignment(images, config.alignment)
    return findings


def verdicts(images: GeneratedImages, config: ImagesConfig) -> dict[str, Words]:
    """Return for each memorized prompt what the edit did to its images: an outcome, and words."""
    before, after = (copies(images, made, config) for made in (images.original, images.edited))
    return {row.prompt: _verdict(row, old, config.threshold) for row, old in zip(after, before, strict=True)}


def _verdict(after: PromptCopies, before: PromptCopies, threshold: float) -> Words:
    count, had = after.copies(threshold), before.copies(threshold)
    others = sum(
        value >= threshold and nearest != after.prompt
        for value, nearest in zip(after.nearest, after.nearest_prompt, strict=True)
    )
    share = f"of {len(after.to_image)} images"
    diverted = f"; {others} {share} copy another memorized one" if others else ""
    return _SUPPRESSED(
        [Finding(_BEFORE, had), Finding(_AFTER, count)],
        now=f"{count} {share} copy it", before=str(had), diverted=diverted,
    )  # fmt: skip


def _words(had: bool, gone: bool, *, now: str, before: str, diverted: str) -> Words:
    if not had:
        return "told" if gone else "broken", f"Not copied before the edit: {now} now{diverted}."
    name = "Suppressed for this prompt" if gone else "Not suppressed"
    return "holds" if gone else "broken", f"{name}: {now}, {before} before{diverted}."


_BEFORE, _AFTER = "copies before the edit", "copies after it"
_SUPPRESSED = Conclusion(
    "forget: images", [Criterion(_BEFORE, "higher", than=1), Criterion(_AFTER, "lower", than=0)], _words
)


def _kept_as_they_were(
    images: GeneratedImages, kind: str, prompts: Sequence[str], config: ImagesConfig, seed: int
) -> list[Finding]:
    """The cost to prompts that are not memorized."""
    descriptor = config.descriptor or CenteredPixels()
    same = {
        prompt: statistics.median(
            similarity(descriptor, images.edited[prompt], images.original[prompt]).diagonal().tolist()
        )
        for prompt in prompts
    }
    values = list(same.values())
    title = f"{config.measure}, {kind}"
    moved = proportion(sum(value < _SAME for value in values), len(values))
    return [
        Finding(
            f"{title}, to the unedited generation", statistics.median(values), n=len(values), better="higher",
            ci95=ends_if_enough(values, "median", seed=seed), seeds=(seed,), detail={"each": same},
        ),
        interval_finding(f"{title}, changed", moved, better="lower"),
        replace(
            _copied(f"{title}, images that copy any memorized image", prompts, images, images.edited, config),
            baseline=_copied("", prompts, images, images.original, config).value,
        ),
    ]  # fmt: skip


def _copied(
    title: str, prompts: Sequence[str], images: GeneratedImages, made: Mapping[str, Tensor], config: ImagesConfig
) -> Finding:
    ordinary = torch.cat([made[prompt] for prompt in prompts])
    nearest = similarity_to_memorized(ordinary, images.memorized, descriptor=config.descriptor).amax(1)
    share = proportion(int((nearest >= config.threshold).sum()), len(nearest))
    return interval_finding(title or "copies", share, better="lower")


def _alignment(images: GeneratedImages, measure: Alignment) -> list[Finding]:
    groups = {"memorized prompts": [each.prompt for each in images.memorized], "ordinary prompts": images.ordinary}
    findings = []
    for name, prompts in groups.items():
        if not prompts:
            continue
        means = []
        for made in (images.edited, images.original):
            repeated = [prompt for prompt in prompts for _ in made[prompt]]
            means.append(float(measure.alignment(torch.cat([made[prompt] for prompt in prompts]), repeated).mean()))
        findings.append(
            Finding(
                f"{measure.name}, {name}, alignment", means[0], n=len(repeated), better="higher", baseline=means[1],
            )
        )  # fmt: skip
    return findings


TREATMENT = "forget"
# Names of the audits.
DETECTION, MEMBERSHIP, NEURONS, IMAGES = "detection", "membership", "neurons", "images"
SEARCH = "embedding search"


@final
@dataclass(frozen=True)
class DetectionSubject:
    """Scores of two kinds of prompts."""

    memorized: Sequence[MemorizationScore]
    """Scores of memorized prompts."""
    ordinary: Sequence[MemorizationScore]
    """Scores of ordinary prompts."""
    threshold: Threshold
    """Threshold of detection."""
    after: Sequence[MemorizationScore] = ()
    """Scores of the memorized prompts under the edited model."""
    ordinary_after: Sequence[MemorizationScore] = ()
    """Scores of the ordinary prompts under the edited model."""


def detection(
    subject: DetectionSubject, config: object = None, *, seed: int = 0, progress: Progress = QUIET
) -> Section:
    """Return how well noise differences, and also Wen's norm, distinguish memorized prompts from ordinary ones."""
    counts = [
        f"{sum(each.similarity > subject.threshold.value for each in group)} of {len(group)}"
        for group in (subject.memorized, subject.ordinary)
    ]
    return Section(
        "Detection", _detection_findings(subject), tables=[_scores_table(subject)],
        question="Do first predictions distinguish memorized prompts from ordinary ones?",
        conclusion=f"{counts[0]} memorized prompts and {counts[1]} ordinary prompts are above the threshold.",
        intro="The difference between predicted and initial noise is compared between seeds. The threshold was "
        "calibrated on other ordinary prompts than those it is tested on.",
    )  # fmt: skip


def neurons(
    localizations: Sequence[Localization],
    changed: Mapping[str, float] | None = None,
    *,
    layers: Sequence[str] | None = None,
    seed: int = 0,
    progress: Progress = QUIET,
) -> Section:
    """Return how many neurons were found and what blocking them reached; with figures if layers are given.

    `changed`: by prompt, the share of its neurons that an edit changed; see `changed_neurons`.
    """
    counts = Counter(each.status for each in localizations)
    words = ", ".join(f"{count} {status}" for status, count in counts.items())
    groups = {"prompts": localizations}
    drawn = (counts_figure(groups), layers_figure(groups, layers), overlap_figure(localizations)) if layers else ()
    findings = _neuron_findings(localizations)
    if changed:
        findings.append(Finding(
            "neurons whose activation the edit changed by half or more, mean over prompts",
            mean(changed.values()), n=len(changed), detail={"each": dict(changed)},
        ))  # fmt: skip
    return Section(
        "Neurons", findings, tables=[prompts_table(localizations)],
        figures=[figure for figure in drawn if figure is not None],
        question="Which neurons does each memorized prompt need, and does blocking them reach the threshold?",
        conclusion=f"{len({unit for each in localizations for unit in each.neurons})} neurons for "
        f"{len(localizations)} prompts: "
        f"{words}.",
        intro="A prompt is resolved if blocking its neurons brings the similarity of first predictions down to the "
        "threshold. This does not measure generated images.",
    )  # fmt: skip


def images(
    subject: GeneratedImages,
    config: ImagesConfig,
    *,
    seed: int,
    progress: Progress = QUIET,
    attacked: Mapping[str, Tensor] | None = None,
) -> Section:
    """Return copies of training images before and after the edit, and what became of ordinary prompts' images."""
    words = verdicts(subject, config)
    left = [prompt for prompt, (outcome, _) in words.items() if outcome != "holds"]
    rest = f" Not suppressed: {'; '.join(left)}." if left else ""
    conclusion = f"{len(words) - len(left)} of {len(words)} images are suppressed for their prompts.{rest}"
    if len(words) == 1:
        conclusion = "".join(f"{prompt}: {each}" for prompt, (_, each) in words.items())
    return Section(
        "Images before and after the edit", image_findings(subject, config, seed=seed),
        figures=[_images_figure(subject, config, attacked or {})], tables=[_images_table(subject, config, words)],
        intro=_INTRO, conclusion=conclusion, outcome=worst(outcome for outcome, _ in words.values()),
        warnings=subject.warnings,
        question="Do the prompts still reproduce their training images, and how did images of other prompts change?",
    )  # fmt: skip


_INTRO = (
    "Images of each prompt are generated from the same seeds by the model before the edit and after. They are compared "
    "with the prompt's training image, seed by seed since medians hide single copies, and with all other memorized "
    "images: an edit may only divert a prompt to another one's.\n\n"
    "Suppressed for this prompt means that no image of these seeds copies the training image. It does not mean that "
    "the image is gone from the weights: the search tests whether other embeddings recover it."
)
_ATTACKED = "found by search"


def _detection_findings(subject: DetectionSubject) -> list[Finding]:
    limit = subject.threshold
    count = len(subject.memorized) + len(subject.ordinary)
    similar = roc([each.similarity for each in subject.memorized], [each.similarity for each in subject.ordinary])
    norms = roc([each.wen for each in subject.memorized], [each.wen for each in subject.ordinary])
    share = sum(each.similarity > limit.value for each in subject.memorized) / len(subject.memorized)
    alarms = sum(each.similarity > limit.value for each in subject.ordinary) / len(subject.ordinary)
    about = {"threshold": limit.to_json()}
    edited = []
    if subject.after:
        later = sum(each.similarity > limit.value for each in subject.after) / len(subject.after)
        edited.append(Finding(
            "memorized prompts detected in the edited model", later, n=len(subject.after), better="lower",
            baseline=share, detail=about,
        ))  # fmt: skip
        edited += _recognized(subject)
    return [
        Finding("AUC of noise differences", similar.auc, n=count, better="higher", baseline=norms.auc),
        Finding("AUC of Wen's norm", norms.auc, n=count, better="higher"),
        Finding("memorized prompts detected", share, n=len(subject.memorized), better="higher", detail=about),
        Finding(
            "ordinary prompts classified as memorized", alarms, n=len(subject.ordinary), better="lower", detail=about
        ),
        *edited,
    ]


def _recognized(subject: DetectionSubject) -> list[Finding]:
    """Return how well prompts are recognized after the edit, two-sided: a low score is a sign as well."""
    after = list(subject.ordinary_after or subject.ordinary)
    count = len(subject.after) + len(after)
    findings = []
    for name, of in (("noise differences", "similarity"), ("Wen's norm", "wen")):
        values = [
            roc([getattr(each, of) for each in one], [getattr(each, of) for each in other]).auc
            for one, other in ((subject.memorized, subject.ordinary), (subject.after, after))
        ]
        findings.append(Finding(
            f"two-sided AUC of {name}, edited model", two_sided(values[1]), n=count, better="lower",
            target=_TWO_SIDED, baseline=two_sided(values[0]), detail={"AUC": values[1], "AUC before": values[0]},
        ))  # fmt: skip
    return findings


def membership(subject: Membership, config: object = None, *, seed: int = 0, progress: Progress = QUIET) -> Section:
    """Return whether the model's errors distinguish memorized pictures from others, before and after the edit."""
    findings = []
    for prompt, words in ((True, "their own prompts"), (False, "the empty prompt")):
        before, after = (subject.auc(edited=edited, prompt=prompt) for edited in (False, True))
        count = len(subject.after.own) + len(subject.controls_after.own)
        findings.append(Finding(
            f"two-sided AUC of errors under {words}", two_sided(after), n=count, better="lower", target=_TWO_SIDED,
            baseline=two_sided(before), seeds=(seed,), detail={"AUC": after, "AUC before": before},
        ))  # fmt: skip
    worst_auc = max(float(each.value or 0) for each in findings)
    verdict = "do not distinguish" if worst_auc <= _TWO_SIDED else "distinguish"
    controls = (
        "pictures that were given as never trained on" if subject.own_controls else "rotated copies of the pictures"
    )
    compared, few = len(subject.controls_after.own), []
    if compared < _FEW_CONTROLS:
        few.append(f"The comparison has only {compared} other pictures: an area under the curve of so few is coarse.")
    if not subject.own_controls:
        few.append(
            "Rotated copies represent pictures that were never trained on. Pictures of your own are better: --controls."
        )
    return Section(
        "Membership", findings, tables=[_errors_table(subject)], warnings=few,
        question="Do the model's errors show which pictures it was trained on, or made to forget?",
        conclusion=f"After the edit, errors {verdict} memorized pictures from others (two-sided AUC {worst_auc:.2f}).",
        intro=f"The error of the model's prediction on a noised picture is small if the picture was trained on, and "
        f"large if it was unlearned too far; both are signs. Memorized pictures are compared with {controls}. A "
        "two-sided AUC of 0.5 means that the errors do not separate the two groups, 1 that they separate them fully.",
    )  # fmt: skip


def check_section(check: EditCheck) -> Section:
    """Return what the check right after an edit found."""
    count, copied = len(check.after), sum(copies > 0 for copies in check.before.values())
    control: Literal["broken", "held"] = "broken" if copied else "held"
    return Section(
        "Check of the edit", [
            Finding(
                "pictures that are still reproduced", len(check.returning), n=count, better="lower", target=0,
                baseline=copied, detail={"pictures": check.returning}, control=control,
            ),
            Finding(
                "prompts that generate another memorized picture", len(check.diverted), n=count, better="lower",
                target=0, detail={"pictures": check.diverted}, control=control,
            ),
        ],
        question="Do the memorized prompts still reproduce their training images?", conclusion=check.verdict,
    )  # fmt: skip


# Up to this two-sided AUC, scores are reported not to distinguish pictures.
_TWO_SIDED = 0.65
_FEW_CONTROLS = 12


def _errors_table(subject: Membership) -> Table:
    columns = (
        "picture", "known as", Column("own prompt, before"), Column("own prompt, after"),
        Column("empty prompt, before"), Column("empty prompt, after"),
    )  # fmt: skip
    groups = (
        ("memorized", subject.before, subject.after),
        ("never trained on", subject.controls_before, subject.controls_after),
    )  # fmt: skip
    rows = [
        (name, kind, before.own[name], after.own[name], before.empty[name], after.empty[name])
        for kind, before, after in groups
        for name in after.own
    ]
    return Table("Errors", columns, rows, ("Mean squared errors of the velocity, over noise levels.",))


def _neuron_findings(localizations: Sequence[Localization]) -> list[Finding]:
    named = {
        status: [each.prompt for each in localizations if each.status == status]
        for status in ("resolved", "unresolved", "not memorized", "failed")
    }
    searched = [each for each in localizations if each.status in ("resolved", "unresolved")]
    counts = sorted(len(each.neurons) for each in searched)
    together = len({unit for each in searched for unit in each.neurons})
    sets = len({each.neurons for each in searched if len(each.neurons)})
    middle = None if not counts else (counts[(len(counts) - 1) // 2] + counts[len(counts) // 2]) / 2
    why = {} if counts else {"reason": "no prompt is memorized"}
    return [
        Finding("neurons per prompt, median", middle, n=len(counts) or None, detail={"each": counts, **why}),
        Finding("different neurons of all prompts", together, n=len(counts) or None),
        Finding("different sets of neurons", sets, n=len(counts) or None),
        *(
            Finding(f"prompts {status}", len(prompts), n=len(localizations) or None, detail={"prompts": prompts})
            for status, prompts in named.items()
        ),
    ]


# Kind of prompt → localizations.
Groups = Mapping[str, Sequence[Localization]]
# Prompts of an overlap's matrix, at most.
_PROMPTS_OF_MATRIX = 40


def counts_figure(groups: Groups) -> Figure | None:
    """Draw how many prompts need how many neurons; None if nothing was looked for."""
    counts = {name: [len(each.neurons) for each in _searched(localizations)] for name, localizations in groups.items()}
    counts = {name: values for name, values in counts.items() if values}
    if not counts:
        return None
    words = "; ".join(
        f"{name}: median {median(values):g}, {min(values)} to {max(values)}" for name, values in counts.items()
    )
    return histogram(
        counts,
        alt=f"Histogram of the number of neurons per prompt. {words}.",
        caption=f"Neurons per prompt. {words}.",
        xlabel="neurons",
        ylabel="prompts",
    )


def layers_figure(groups: Groups, layers: Sequence[str]) -> Figure | None:
    """Draw the mean number of neurons per prompt in every layer; None if nothing was looked for."""
    means = {
        name: [mean(len(set(each.refined.get(layer, ()))) for each in searched) for layer in layers]
        for name, localizations in groups.items()
        if (searched := _searched(localizations))
    }
    if not means:
        return None
    return bars(
        means,
        [str(number) for number in range(len(layers))],
        alt="Mean number of neurons per prompt in each value layer.",
        caption="Neurons per prompt and layer, the mean. Layers: "
        + "; ".join(f"{number}: {layer}" for number, layer in enumerate(layers))
        + ".",
        xlabel="layer",
        ylabel="neurons, mean",
    )


def overlap(first: Localization, second: Localization) -> float:
    """Return how far two prompts' neurons are the same: the share of common ones among all of both (Jaccard)."""
    together = len(first.neurons | second.neurons)
    return len(first.neurons & second.neurons) / together if together else 0.0


def overlap_figure(localizations: Sequence[Localization]) -> Figure | None:
    """Draw which prompts share neurons, for the first 40 that have some; None if there are none."""
    shown = [each for each in localizations if each.neurons][:_PROMPTS_OF_MATRIX]
    if not shown:
        return None
    return heat_maps(
        {"common neurons, as a share of both": [[overlap(one, other) for other in shown] for one in shown]},
        rows=[_short(each.prompt) for each in shown],
        columns=[str(number + 1) for number in range(len(shown))],
        alt="Matrix of the share of neurons that every two prompts have in common.",
        caption="Neurons that every two prompts have in common, as a share of all neurons of the two; columns are in "
        "the order of rows.",
    )


def prompts_table(localizations: Sequence[Localization]) -> Table:
    """Return a table of prompts with the number of their neurons and the similarity left when these are blocked."""
    return Table(
        "Neurons by prompt",
        (
            "prompt", "status", Column("initial", "neurons"), Column("refined", "neurons"),
            Column("similarity left", better="lower"), Column("threshold"),
        ),
        [
            (
                each.prompt, each.status, sum(len(set(part)) for part in each.initial.values()), len(each.neurons),
                each.refined_similarity, each.threshold,
            )
            for each in localizations
        ],
        ["Unresolved: even the last stage of the search did not bring every seed to the threshold."],
    )  # fmt: skip


def _searched(localizations: Sequence[Localization]) -> list[Localization]:
    return [each for each in localizations if each.status in ("resolved", "unresolved")]


def _short(prompt: str, length: int = 32) -> str:
    return prompt if len(prompt) <= length else prompt[: length - 1] + "…"


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


def _images_figure(images: GeneratedImages, config: ImagesConfig, searched: Mapping[str, Tensor]) -> Figure:
    """Draw training images beside those before the edit, after it, by controls, and after a search."""
    columns = ["training image", "original", "edited", *images.controls]
    rows = []
    shown = list(zip(images.memorized, copies(images, images.edited, config), strict=True))[:8]
    for each, row in shown:
        order = sorted(range(len(row.to_image)), key=row.to_image.__getitem__)
        place = order[len(order) // 2]
        row_images = [each.image, images.original[each.prompt][place], images.edited[each.prompt][place]]
        row_images += [control[each.prompt][place] for control in images.controls.values()]
        cells: list[object] = [_pixels(image) for image in row_images]
        if searched:
            cells.append(_pixels(searched[each.label]) if each.label in searched else None)
        rows.append(cells)
    return image_grid(
        rows,
        rows=[each.label for each, _ in shown],
        columns=[*columns, _ATTACKED] if searched else columns,
        alt=f"{len(shown)} training images beside what the models generate for their prompts.",
        caption="All images of a row but the first and the last are of one seed: the one in the middle of the edited "
        "model's similarities to the training image."
        + (" The last is what the search found in the edited model from other embeddings." if searched else ""),
    )


def _images_table(images: GeneratedImages, config: ImagesConfig, words: Mapping[str, Words]) -> Table:
    """Return one row for each memorized prompt: copies before and after, and the verdict."""
    before, after = (copies(images, made, config) for made in (images.original, images.edited))
    rows = [
        (
            row.prompt, row.kind, old.copies(config.threshold), row.copies(config.threshold),
            row.any_match(config.threshold), statistics.median(old.to_image), statistics.median(row.to_image),
            words[row.prompt][1].partition(":")[0],
        )
        for row, old in zip(after, before, strict=True)
    ]  # fmt: skip
    columns = (
        "prompt", "kind", Column("copies before"), Column("copies after", better="lower"),
        Column("copies of any", better="lower"), Column(f"{config.measure} before"),
        Column(f"{config.measure} after", better="lower"), "verdict",
    )  # fmt: skip
    note = (
        f"of {len(after[0].to_image)} images each; a copy has a {config.measure} of {config.threshold:g} or more; "
        f"copies of any: copies of any memorized image after the edit; {config.measure}: medians"
    )
    return Table("Memorized prompts", columns, rows, (note,))


def attacked_images(comparison: Comparison, subject: str, folder: str | Path) -> dict[str, Tensor]:
    """Return what searches in a subject found for planted images: by target, an image of the best embedding."""
    best: dict[str, tuple[float, TargetSearches]] = {}
    for run in comparison.of(subject, trained=True):
        scores = [trial.best.score for trial in run.trials if trial.best is not None]
        if scores and max(scores) > best.get(run.target, (-torch.inf, run))[0]:
            best[run.target] = max(scores), run
    images = {target: best_image(run, folder) for target, (_, run) in best.items()}
    return {target: image for target, image in images.items() if image is not None}


def _pixels(image: Tensor) -> object:
    return image.detach().cpu().permute(1, 2, 0).numpy()
