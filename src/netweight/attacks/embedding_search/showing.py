"""A comparison of searches in a report: success against steps, a grid of images, a table, and a section of it all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from netweight.attacks.embedding_search.comparison import Comparison, Run, Target, images_of
from netweight.attacks.embedding_search.findings import Wanted, search_findings, times_of, verdict
from netweight.metrics.survival import Survival, Times, kaplan_meier
from netweight.report.finding import Column, Figure, Finding, Table
from netweight.report.plots import image_grid, lines
from netweight.report.report import Report

__all__ = ["add_section", "best_image", "grid_figure", "search_table", "success_figure"]

INTRO = (
    "Each search changes the text embedding by gradient descent until the model paints the target image. It begins "
    "from the target's own prompt, from prompts that have nothing to do with it, and from noise; the soonest counts, "
    "as an attacker chooses. A search that ends without success is censored: more steps are needed than it took.\n\n"
    "With steps enough such a search may paint images that no model was trained on. Therefore the same searches are "
    "made for never-trained images, and in the model before its edit: only what planted images give more easily than "
    "these is memory."
)


def success_figure(comparison: Comparison, *, trained: bool) -> Figure | None:
    """Draw the share of images brought back against steps, one line per subject.

    Args:
        comparison: The searches.
        trained: Planted images, or never-trained ones.

    Returns:
        None if no search counts.

    Raises:
        MissingExtra: scipy or matplotlib is not installed.
    """
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
        if share[-1] == 0 and x[-1] < longest:  # all were brought back, and so they remain
            x, share, low, high = [*x, longest], [*share, 0.0], [*low, low[-1]], [*high, high[-1]]
        series[name] = x, [1 - value for value in share]
        bands[name] = [1 - value for value in high], [1 - value for value in low]
        words.append(f"{name}: {_words(curve)} (n = {curve.n})")
    return lines(
        series,
        alt=f"Share of {what.lower()} images brought back, by steps of the search. {'; '.join(words)}.",
        caption=f"{what} images. {'; '.join(words)}. Bands are pointwise 95 % intervals over targets and seeds.",
        xlabel="steps of the search",
        ylabel="share brought back",
        bands=bands,
        ylim=(0, 1),
    )


def _words(curve: Survival) -> str:
    if math.isfinite(curve.median):
        return f"half by step {curve.median:.0f}"
    return f"fewer than half by step {curve.last:.0f}"


def grid_figure(comparison: Comparison, targets: Sequence[Target], folder: str | Path, *, most: int = 8) -> Figure:
    """Draw targets beside what each subject makes of them: from their own prompts, and from the embeddings found.

    Args:
        comparison: The searches.
        targets: Those to show; the first `most` of them.
        folder: Of the comparison.
        most: Most rows.

    Raises:
        MissingExtra: matplotlib is not installed.
        UsageError: A file of images is missing.
    """
    shown = list(targets)[:most]
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
        caption='Of each model: an image from the target\'s own prompt before any search, and "attacked", the one from '
        "the best embedding of the first seed that is in the middle of its look's similarities.",
    )


def _pair(run: Run, folder: str | Path) -> list[object]:
    """The middle images of the first look from the own prompt and of the best look of all; None where there is none."""
    after = best_image(run, folder)
    own = next((place for place, trial in enumerate(run.trials) if trial.start == "original"), None)
    if after is None or own is None or not run.trials[own].looks:
        return [None, None if after is None else _pixels(after)]
    before = images_of(folder, run).before[own, _middle(run.trials[own].looks[0].similarities)]
    return [_pixels(before), _pixels(after)]


def best_image(run: Run, folder: str | Path) -> Tensor | None:
    """Return what a run's best embedding painted: of its best look the image in the middle of its similarities.

    Args:
        run: The run.
        folder: Of the comparison.

    Returns:
        Shape `(3, height, width)`, within 0 and 1; None if all of its searches diverged unseen.

    Raises:
        UsageError: The file of images is missing.
    """
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
    """Return one row for each subject, kind of image and start.

    Args:
        comparison: The searches.

    Raises:
        MissingExtra: scipy is not installed.
    """
    columns = (
        "model", "images", "start", Column("n"), Column("found"), Column("diverged"),
        Column("median", "steps", "higher"), Column("best", better="lower"), Column("moved"),
    )  # fmt: skip
    rows = [
        _row(name, trained, start, comparison.of(name, trained=trained))
        for name in comparison.subjects
        for trained in (True, False)
        for start in comparison.settings.starts
        if comparison.of(name, trained=trained)
    ]
    notes = (
        "n: searches, every restart being one of its own here; found: those that brought the image back; median: steps "
        "by which half had, > where fewer had; best: the greatest median similarity over a look's images, averaged "
        "over searches; moved: root mean square of what was added to the embedding, as a share of that of its start, "
        "at the last look",
    )
    return Table("Searches by start", columns, rows, notes)


def _row(name: str, trained: bool, start: str, runs: Sequence[Run]) -> tuple[object, ...]:
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
        statistics.fmean(trial.looks[-1].moved for trial in looked) if looked else None,
    )


def add_section(
    report: Report,
    comparison: Comparison,
    targets: Sequence[Target],
    wanted: Wanted,
    *,
    folder: str | Path,
    seed: int,
    title: str = "Search for embeddings",
    treatment: str | None = None,
    audits: Sequence[str] = (),
) -> list[Finding]:
    """Add what a comparison found to a report.

    Args:
        report: The report.
        comparison: The searches.
        targets: Its targets, for their images.
        wanted: Which subject is which.
        folder: Of the comparison, where the images lie.
        seed: Of the intervals.
        title: Heading of the section.
        treatment: The treatment that was attacked, if it has a name; see `Report.section`.
        audits: Which of its audits this section holds.

    Returns:
        The findings.

    Raises:
        UsageError: A subject that is named was not searched, or a file of images is missing.
        MissingExtra: scipy or matplotlib is not installed.
    """
    findings = search_findings(comparison, wanted, seed=seed)
    drawn = [success_figure(comparison, trained=trained) for trained in (True, False)]
    ordered = sorted(targets, key=lambda target: not target.trained)
    warnings = [f"{subject}, {target}: the search failed: {reason}" for subject, target, reason in comparison.failures]
    if all(target.trained for target in targets):
        warnings.append("No never-trained images were searched for: what the search paints by itself is not known.")
    report.section(
        title,
        findings,
        figures=[*(figure for figure in drawn if figure is not None), grid_figure(comparison, ordered, folder)],
        tables=[search_table(comparison)],
        intro=INTRO,
        question="Can a search over text embeddings bring the images back?",
        conclusion=" ".join(f"{name}: {verdict(comparison, name)}" for name in comparison.subjects),
        treatment=treatment,
        audits=audits,
        warnings=warnings,
    )
    return findings
