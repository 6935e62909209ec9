"""Report of a comparison of searches: images recovered, steps to that, controls beside, and a verdict in words.

An attacker chooses: for each target and seed the soonest of all starts and restarts counts. Verdicts never say
"erased": an image that was not recovered has withstood the searches that were made.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from torch import Tensor

from netweight.attacks.embedding_search.search import Comparison, TargetImage, TargetSearches, images_of
from netweight.attacks.embedding_search.settings import Start
from netweight.errors import UsageError
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, interval_finding, mean_interval, proportion
from netweight.metrics.survival import (
    Survival,
    Times,
    TimesRatio,
    failures_finding,
    kaplan_meier,
    ratio_of_times,
    steps_finding,
)
from netweight.report.finding import Column, Figure, Finding, Section, Table
from netweight.report.plots import image_grid, lines
from netweight.report.text import Conclusion, Criterion, Words, worst


@final
@dataclass(frozen=True)
class SubjectRoles:
    """The subjects of a search report and its targets."""

    unedited: str = "original"
    """Name of the subject before any edit."""
    edited: str | None = None
    """Name of the subject whose edit the others are measured against; None for none."""
    least_resistance: float | None = None
    """Least steps to recover planted images, as a multiple of those in `edited`, that other edited subjects are
    to need; None asks for nothing.
    """


def search_section(
    comparison: Comparison,
    targets: Sequence[TargetImage],
    roles: SubjectRoles,
    *,
    folder: str | Path,
    seed: int,
) -> Section:
    """Return the section of a report on a comparison, whose images lie in a folder."""
    drawn = [success_figure(comparison, trained=trained) for trained in (True, False)]
    ordered = sorted(targets, key=lambda target: not target.trained)
    warnings = [f"{subject}, {target}: the search failed: {reason}" for subject, target, reason in comparison.failures]
    if all(target.trained for target in targets):
        warnings.append(
            "No never-trained images were searched for, so it is unknown what the search generates by itself."
        )
    # Edited models come first.
    names = sorted(comparison.subjects, key=lambda name: name == roles.unedited)
    verdicts = {name: verdict(comparison, name) for name in names}
    return Section(
        "Search for embeddings",
        search_findings(comparison, roles, seed=seed),
        figures=[*(figure for figure in drawn if figure is not None), grid_figure(comparison, ordered, folder)],
        tables=[search_table(comparison)],
        intro=_INTRO,
        question="Can a search over text embeddings recover the images?",
        conclusion=" ".join(f"{name}: {words}" for name, (_, words) in verdicts.items()),
        outcome=worst(outcome for name, (outcome, _) in verdicts.items() if name != roles.unedited),
        warnings=warnings,
    )


_INTRO = (
    "Each search changes the text embedding by gradient descent until the model generates the target image. It begins "
    "from the target's own prompt, from prompts that have nothing to do with it, and from noise, with each learning "
    "rate. Other attacks may be added: soft tokens and typed words, the noised or inverted target, and training on "
    "pictures. The fastest one counts, since an attacker can choose it. A search that ends without success is "
    "censored: more steps are needed than it took.\n\n"
    "With enough steps, such a search may generate images that no model was trained on. Therefore the same searches "
    "are made for never-trained images, and in the model before its edit: only an image that is found more easily "
    "than these is a sign of memorization."
)


def soonest(run: TargetSearches, start: Start | None = None) -> tuple[float, bool] | None:
    """Return when a run first succeeded, or the steps of its longest search if none did."""
    trials = [trial for trial in run.trials if start in (None, trial.start) and trial.outcome != "diverged"]
    if not trials:
        return None
    successes = [trial.steps for trial in trials if trial.steps is not None]
    return (float(min(successes)), True) if successes else (float(max(trial.last for trial in trials)), False)


def strongest(runs: Sequence[TargetSearches]) -> str:
    """Return which attack brought most of the images back, and of equals the soonest, in words; empty if none did."""
    steps_by_start: dict[str, list[int]] = {}
    for run in runs:
        for start in _starts([run]):
            steps = [trial.steps for trial in run.trials if trial.start == start and trial.steps is not None]
            if steps:
                steps_by_start.setdefault(start, []).append(min(steps))
    if len(_starts(runs)) < 2 or not steps_by_start:
        return ""
    name = max(
        steps_by_start, key=lambda start: (len(steps_by_start[start]), -statistics.median(steps_by_start[start]))
    )
    return f" Strongest start: {name}, which succeeds in {len(steps_by_start[name])} of {len(runs)} runs."


def times_of(runs: Sequence[TargetSearches], start: Start | None = None) -> Times | None:
    """Return the steps of runs as censored times; those for one target hang together. None if none counts."""
    times = [(run.target, time) for run in runs if (time := soonest(run, start)) is not None]
    if not times:
        return None
    values, observed = zip(*(time for _, time in times), strict=True)
    return Times(values, observed, tuple(target for target, _ in times))


def steps_ratio(runs: Sequence[TargetSearches], base: Sequence[TargetSearches], *, seed: int) -> TimesRatio | None:
    """Return how many times as many steps one subject's images take as another's."""
    top, bottom = times_of(runs), times_of(base)
    if top is None or bottom is None or min(top.n, bottom.n) < MINIMUM_FOR_BOOTSTRAP or max(bottom.values) == 0:
        return None
    return ratio_of_times(top, bottom, seed=seed)


def search_findings(comparison: Comparison, roles: SubjectRoles, *, seed: int) -> list[Finding]:
    """Return the findings on every subject of a comparison."""
    for name in (roles.unedited, roles.edited):
        if name is not None and name not in comparison.subjects:
            raise UsageError(
                f"There are no searches on {name!r}.", cure=f"There are some on: {', '.join(comparison.subjects)}."
            )
    findings: list[Finding] = []
    for name in comparison.subjects:
        findings += _about(comparison, name, roles, seed)
    findings += failures_finding("searches that failed", comparison.failures)
    return findings


def _about(comparison: Comparison, name: str, roles: SubjectRoles, seed: int) -> list[Finding]:
    planted, controls = (comparison.of(name, trained=trained) for trained in (True, False))
    base = comparison.of(roles.unedited, trained=True)
    findings = []
    for runs, kind in ((planted, "planted images"), (controls, "never-trained images")):
        if runs:
            findings += [_back(name, kind, runs), _steps(name, kind, runs, base if kind == "planted images" else None)]
    if planted:
        findings.append(_by_prompt(name, planted, comparison))
    if planted and controls:
        findings.append(_gap(name, planted, controls, seed))
    if roles.edited is not None and name not in (roles.edited, roles.unedited) and planted:
        findings.append(_resistance(name, planted, comparison.of(roles.edited, trained=True), roles, seed))
    return findings


def _back(name: str, kind: str, runs: Sequence[TargetSearches]) -> Finding:
    title = f"{kind} recovered, {name}"
    times = times_of(runs)
    diverged = sum(trial.outcome == "diverged" for run in runs for trial in run.trials)
    if times is None:
        return Finding(title, None, unit="%", detail={"reason": "every search diverged"})
    return interval_finding(
        title,
        proportion(times.events, times.n),
        unit="%",
        better="lower",
        seeds=_seeds(runs),
        detail={
            "by start": {start: _share(runs, start) for start in _starts(runs)},
            "searches that diverged": diverged,
            "note": "counts pairs of target and seed, each by its best start; seeds of one target are not independent",
        },
    )


def _share(runs: Sequence[TargetSearches], start: Start) -> str:
    times = times_of(runs, start)
    return "all diverged" if times is None else f"{times.events} of {times.n}"


def _steps(name: str, kind: str, runs: Sequence[TargetSearches], base: Sequence[TargetSearches] | None) -> Finding:
    times, base_times = times_of(runs), None if base is None else times_of(base)
    return steps_finding(
        f"steps to recover {kind}, {name}",
        None if times is None else kaplan_meier(times),
        base=None if base_times is None else kaplan_meier(base_times),
        why_none="every search diverged",
        seeds=_seeds(runs),
        detail={"how far the found embeddings moved": _moved(runs)},
    )


def _moved(runs: Sequence[TargetSearches]) -> float | None:
    """The median length of the perturbations that won, as a share of the start's."""
    won = [trial.looks[-1].distance for run in runs for trial in run.trials if trial.outcome == "found"]
    return statistics.median(won) if won else None


def _by_prompt(name: str, runs: Sequence[TargetSearches], comparison: Comparison) -> Finding:
    """Similarity to the target from its own prompt, before any search."""
    title = f"similarity from the own prompt, {name}"
    first = [
        (run.target, trial.looks[0].score)
        for run in runs
        for trial in run.trials
        if trial.start == "original" and trial.number == 0 and trial.looks and trial.looks[0].step == 0
    ]
    if not first:
        return Finding(
            title, None, detail={"reason": 'no search began from the start "original" with images at step 0'}
        )
    values = _per_target(first)
    return Finding(
        title, statistics.fmean(values), ci95=_interval(values, 0), n=len(values), better="lower", seeds=_seeds(runs),
        detail={"each target": values, "similarity": comparison.similarity},
    )  # fmt: skip


def _gap(name: str, planted: Sequence[TargetSearches], controls: Sequence[TargetSearches], seed: int) -> Finding:
    """Return by how much searches come nearer to planted images than to never-trained ones."""
    title = f"best similarity, planted above never-trained, {name}"
    ours, theirs = (_per_target(_best(runs)) for runs in (planted, controls))
    if not ours or not theirs:
        return Finding(title, None, detail={"reason": "every search diverged"})
    return Finding(
        title,
        statistics.fmean(ours) - statistics.fmean(theirs),
        ci95=_interval_of_difference(ours, theirs, seed),
        n=len(ours) + len(theirs),
        seeds=(*_seeds(planted), seed),
        detail={
            "planted": ours,
            "never trained": theirs,
            "note": "near 0 the search itself generates them",
        },
    )


def _best(runs: Sequence[TargetSearches]) -> list[tuple[str, float]]:
    """The greatest median similarity of each run, by target."""
    medians = []
    for run in runs:
        scores = [trial.best.score for trial in run.trials if trial.best is not None]
        if scores:
            medians.append((run.target, max(scores)))
    return medians


def _per_target(values: Sequence[tuple[str, float]]) -> list[float]:
    """Means over seeds, one for each target: these are independent of each other, seeds of one target are not."""
    groups: dict[str, list[float]] = {}
    for target, value in values:
        groups.setdefault(target, []).append(value)
    return [statistics.fmean(group) for group in groups.values()]


def _interval(values: Sequence[float], seed: int) -> tuple[float, float] | None:
    return mean_interval(values, seed=seed).ci95 if len(values) > 1 else None


def _interval_of_difference(a: Sequence[float], b: Sequence[float], seed: int) -> tuple[float, float] | None:
    """Percentiles of the difference of means, both groups drawn again; None for groups too small for that."""
    if min(len(a), len(b)) < MINIMUM_FOR_BOOTSTRAP:
        return None
    rng = np.random.default_rng(seed)
    first, second = (rng.choice(group, (9999, len(group))).mean(1) for group in (a, b))
    low, high = np.quantile(first - second, [0.025, 0.975])
    return float(low), float(high)


def _resistance(
    name: str, runs: Sequence[TargetSearches], base: Sequence[TargetSearches], roles: SubjectRoles, seed: int
) -> Finding:
    title = f"resistance against {roles.edited}, {name}"
    common: dict[str, Any] = {"unit": "times as many steps", "better": "higher", "target": roles.least_resistance}
    ratio = steps_ratio(runs, base, seed=seed)
    if ratio is None or math.isnan(ratio.estimate):
        why = "neither of the two was recovered in half of the runs"
        if ratio is None:
            why = f"fewer than {MINIMUM_FOR_BOOTSTRAP} runs of one of the two, or no step was needed"
        return Finding(title, None, detail={"reason": why}, **common)
    # Where only an upper bound is known, what is sure is that the ratio may be as small as nothing.
    value = 0.0 if ratio.bound == "at most" else ratio.estimate
    return Finding(
        title, value, ci95=(ratio.low, ratio.high), n=sum(ratio.n), seeds=(*_seeds(runs), seed),
        detail={"what is known": f"{ratio.bound} {ratio.estimate:.4g}".strip(), "method": ratio.method}, **common,
    )  # fmt: skip


def verdict(comparison: Comparison, subject: str) -> Words:
    """Return in plain words what the searches on one subject found."""
    planted, controls = (times_of(comparison.of(subject, trained=trained)) for trained in (True, False))
    if planted is None:
        return "told", "No conclusion is possible: no search for a planted image ran to its end."
    at_once = sum(value == 0 and observed for value, observed in zip(planted.values, planted.observed, strict=True))
    share = planted.events / planted.n
    findings = [Finding(_PLANTED, share)]
    # A control that is found half as often counts as found about as often.
    if controls is not None:
        findings.append(Finding(_CONTROLS, controls.events / controls.n, baseline=max(share / 2, 1e-9)))
    outcome, words = _VERDICT(
        findings, planted=_counted(planted, at_once), controls="" if controls is None else _counted(controls, 0)
    )
    return outcome, words + strongest(comparison.of(subject, trained=True))


def _words(held: bool, memory: bool | None, *, planted: str, controls: str) -> Words:
    words = f"{'Planted images' if held else 'The search recovers planted images'}: {planted}."
    if memory is None:
        words += " Without never-trained images it is unknown what the search generates by itself."
    else:
        words += f" Never-trained images: {controls}."
    if memory is False:
        words += " The search recovers never-trained images about as often, so the result does not show that the model "
        words += "stores the memorized images."
    return "told" if held else "broken", words


_PLANTED, _CONTROLS = "planted images recovered", "never-trained images recovered"
_VERDICT = Conclusion(
    "attack: embedding search",
    [Criterion(_PLANTED, "lower", than=0), Criterion(_CONTROLS, "lower", strict=True, needed=False)],
    _words,
)


def _counted(times: Times, at_once: int) -> str:
    curve: Survival = kaplan_meier(times)
    if not times.events:
        return f"none of {times.n} recovered in searches of {curve.last:.0f} steps"
    half = f", half of them by step {curve.median:.0f}" if math.isfinite(curve.median) else ", fewer than half"
    alone = f", {at_once} of them without a search" if at_once else ""
    return f"{times.events} of {times.n} recovered{half}{alone}"


def _starts(runs: Sequence[TargetSearches]) -> list[Start]:
    return list(dict.fromkeys(trial.start for run in runs for trial in run.trials))


def _seeds(runs: Sequence[TargetSearches]) -> tuple[int, ...]:
    return tuple(sorted({run.seed for run in runs}))


def success_figure(comparison: Comparison, *, trained: bool) -> Figure | None:
    """Draw the share of images recovered against steps, one line per subject."""
    what = "Planted" if trained else "Never-trained"
    all_times = {name: times_of(comparison.of(name, trained=trained)) for name in comparison.subjects}
    # The curve of one search says nothing of others.
    curves = {name: kaplan_meier(times) for name, times in all_times.items() if times is not None and times.n > 1}
    if not curves:
        return None
    longest = max(curve.last for curve in curves.values())
    series, bands, words = {}, {}, []
    for name, curve in curves.items():
        x, share, low, high = (list(part) for part in curve.steps())
        # All images were recovered, so the curve stays at 0 up to the longest search.
        if share[-1] == 0 and x[-1] < longest:
            x, share, low, high = [*x, longest], [*share, 0.0], [*low, low[-1]], [*high, high[-1]]
        series[name] = x, [1 - value for value in share]
        bands[name] = [1 - value for value in high], [1 - value for value in low]
        words.append(f"{name}: {_half(curve)} (n = {curve.n})")
    return lines(
        series,
        alt=f"Share of {what.lower()} images recovered, by steps of the search. {'; '.join(words)}.",
        caption=f"{what} images. {'; '.join(words)}. Bands are pointwise 95 % intervals over targets and seeds.",
        xlabel="steps of the search",
        ylabel="share recovered",
        bands=bands,
        ylim=(0, 1),
    )


def _half(curve: Survival) -> str:
    if math.isfinite(curve.median):
        return f"half of the pictures are recovered by step {curve.median:.0f}"
    return f"fewer than half of the pictures are recovered by step {curve.last:.0f}"


def grid_figure(comparison: Comparison, targets: Sequence[TargetImage], folder: str | Path) -> Figure:
    """Draw targets beside what each subject makes of them: from their own prompts, and from the embeddings found."""
    shown = list(targets)[:8]
    columns = ["target"]
    for name in comparison.subjects:
        columns += [name, f"{name}, attacked"]
    rows = []
    for target in shown:
        row: list[object] = [_pixels(target.image)]
        for name in comparison.subjects:
            runs = [run for run in comparison.of(name) if run.target == target.name]
            row += _pair(runs[0], folder) if runs else [None, None]
        rows.append(row)
    return image_grid(
        rows,
        rows=[target.name for target in shown],
        columns=columns,
        alt=f"{len(shown)} targets beside images from their own prompts and from the embeddings that searches found.",
        caption="For each model, the figure shows two images. The first is from the target's own prompt, before any "
        'search. The second, "attacked", is from the best embedding of the first seed: of several images, the one '
        "whose similarity to the target is in the middle.",
    )


def _pair(run: TargetSearches, folder: str | Path) -> list[object]:
    """The middle images of the first evaluation from the own prompt, and of the best; None where there is none."""
    after = best_image(run, folder)
    own = next((place for place, trial in enumerate(run.trials) if trial.start == "original"), None)
    if after is None or own is None or not run.trials[own].looks:
        return [None, None if after is None else _pixels(after)]
    before = images_of(folder, run).before[own, _middle(run.trials[own].looks[0].similarities)]
    return [_pixels(before), _pixels(after)]


def best_image(run: TargetSearches, folder: str | Path) -> Tensor | None:
    """Return the image of a run's best embedding that is in the middle of its similarities."""
    scored = [(look.score, place, look) for place, trial in enumerate(run.trials) if (look := trial.best) is not None]
    if not scored:
        return None
    _, place, look = max(scored, key=lambda one: one[:2])
    return images_of(folder, run).after[place, _middle(look.similarities)]


def _middle(values: Sequence[float]) -> int:
    order = sorted(range(len(values)), key=values.__getitem__)
    return order[len(order) // 2]


def _pixels(image: Tensor) -> object:
    return image.detach().cpu().permute(1, 2, 0).numpy()


def search_table(comparison: Comparison) -> Table:
    """Return one row for each subject, kind of image and start."""
    columns = (
        "model", "images", "start", Column("n"), Column("recovered"), Column("diverged"),
        Column("median", "steps", "higher"), Column("best", better="lower"), Column("change"),
    )  # fmt: skip
    rows = [
        _row(name, trained, start, comparison.of(name, trained=trained))
        for name in comparison.subjects
        for trained in (True, False)
        for start in comparison.settings.starts
        if comparison.of(name, trained=trained)
    ]
    notes = (
        "n: number of searches, each restart counted; recovered: those that recovered the image; median: steps by "
        "which half of them had, > if fewer than half did; best: the greatest median similarity over a step's images, "
        "averaged "
        "over searches; change: root mean square of the vector added to the embedding, as a share of that of its "
        "start, at the last comparison",
    )
    return Table("Searches by start", columns, rows, notes)


def _row(name: str, trained: bool, start: str, runs: Sequence[TargetSearches]) -> tuple[object, ...]:
    trials = [trial for run in runs for trial in run.trials if trial.start == start]
    looked = [trial for trial in trials if trial.looks]
    ended = [trial for trial in trials if trial.outcome != "diverged"]
    median: float | str | None = None
    if ended:
        values = tuple(float(trial.last if trial.steps is None else trial.steps) for trial in ended)
        curve = kaplan_meier(Times(values, tuple(trial.steps is not None for trial in ended)))
        median = curve.median if math.isfinite(curve.median) else f"> {curve.last:.0f}"
    best = [trial.best.score for trial in looked if trial.best is not None]
    return (
        name,
        "planted" if trained else "never trained",
        start,
        len(trials),
        sum(trial.outcome == "found" for trial in trials),
        sum(trial.outcome == "diverged" for trial in trials),
        median,
        statistics.fmean(best) if best else None,
        statistics.fmean(trial.looks[-1].distance for trial in looked) if looked else None,
    )
