"""What a stop of the tour is given, and what it hands over: plain data, which is kept until the tour has finished."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from pydantic import BaseModel, ConfigDict

from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.metrics.intervals import proportion
from netweight.report.finding import Chapter, Finding, Section
from netweight.report.report import Report


@final
@dataclass(frozen=True)
class Place:
    """Where a stop works."""

    folder: Path  # an empty folder of its own for what it makes
    progress: Progress  # where progress is shown
    say: Callable[[str], None]  # is told in one line each what was done
    models: Mapping[str, Path]  # what the stops before have made, by name: files and folders of weights


@final
class Stop(BaseModel):
    """What a stop found.

    Attributes:
        chapter: What was asked, what was found, and the verdict.
        sections: Those of its chapter.
        inputs: Name of each input → its digest.
        models: Name of each model that was made → its place within the stop's folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    chapter: Chapter
    sections: tuple[Section, ...]
    inputs: dict[str, str] = {}
    models: dict[str, str] = {}


def handed_over(
    report: Report,
    chapter: Chapter,
    *,
    seeds: tuple[int, ...] = (),
    shares: Collection[str] = (),
    inputs: Mapping[str, str],
    models: Mapping[str, str],
) -> Stop:
    """Make a stop of the sections of a report, each number with what it rests on."""

    def rested(section: Section) -> Section:
        findings = [
            replace(
                each,
                n=each.n if each.n is not None else 1,  # one model, looked at once
                seeds=tuple(dict.fromkeys(each.seeds)) or seeds,
                command=each.command or chapter.command,
                ci95=_wilson(each) if each.name in shares else each.ci95,
            )
            for each in section.findings
        ]
        return replace(section, findings=findings)

    absent = set(shares) - {each.name for each in report.findings}
    if absent:
        raise UsageError(f"The report {report.title!r} has no finding {sorted(absent)}.")
    sections = tuple(rested(section) for section in report.sections)
    return Stop(chapter=chapter, sections=sections, inputs=dict(inputs), models=dict(models))


def _wilson(share: Finding) -> tuple[float, float]:
    """The interval of a share of n trials."""
    value, n = share.value or 0.0, share.n or 1
    return proportion(round(value * n), n).ci95
