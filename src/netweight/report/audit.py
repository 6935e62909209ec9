"""Audits, and the register by which every treatment has at least one audit.

A treatment (compress, federate, immunize, forget, space) names its audits when it is declared. `of_treatment` compares
what a treatment names with what was run, and a report shows the difference in red.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any, Protocol

from netweight.core.declared import AUDITS
from netweight.core.declared import declare_audits as declare_audits
from netweight.core.lazy import value_of
from netweight.core.names import not_found
from netweight.core.progress import QUIET, Progress
from netweight.errors import NameNotFound
from netweight.report.finding import Section


class Audit(Protocol):
    """A function that tests the result of a treatment and returns a section: what it found, good or bad."""

    def __call__(self, run: Any, settings: Any, /, *, seed: int, progress: Progress) -> Section:
        """Test a run: a model, a path, what the audit says. The same seed gives the same section.

        A failed test is a finding that has not passed, never an exception.
        """


def audits_of(treatment: str) -> dict[str, Audit]:
    """Return the audits of a treatment that can be run, by name, in the order in which it names them."""
    return {name: value_of(audit) for name, audit in _declared(treatment).items() if audit is not None}


def missing_audits(treatment: str, ran: Iterable[str]) -> tuple[str, ...]:
    """Return the audits that a treatment names and that are not among those that ran."""
    done = set(ran)
    return tuple(name for name in _declared(treatment) if name not in done)


def of_treatment(section: Section, treatment: str | None, ran: Iterable[str]) -> Section:
    """Return a section about a treatment, with the audits that ran and those that are missing."""
    names = tuple(ran)
    missing = missing_audits(treatment, names) if treatment else ()
    return replace(section, treatment=treatment, audits=names, missing_audits=missing)


def run_audits(
    treatment: str,
    run: Any,
    settings: Any,
    *,
    seed: int,
    progress: Progress = QUIET,
    only: Sequence[str] | None = None,
) -> dict[str, Section]:
    """Run the audits of a treatment, or those named in `only`, one after another; return their sections by name."""
    audits = audits_of(treatment)
    chosen = tuple(audits) if only is None else tuple(only)
    for name in chosen:
        if name not in audits:
            raise NameNotFound(f"Treatment {treatment!r} has no audit {name!r}.", cure=f"It has: {sorted(audits)}.")
    return {name: audits[name](run, settings, seed=seed, progress=progress) for name in chosen}


def _declared(treatment: str) -> dict[str, Audit | None]:
    # A method declares its audits when it is loaded. Those of netweight load quickly.
    if treatment not in AUDITS:
        points = entry_points(group="netweight.methods")
        for point in sorted(points, key=lambda point: point.name not in treatment):
            point.load()
            if treatment in AUDITS:
                break
    if treatment not in AUDITS:
        more = "" if AUDITS else "Import the method first."
        raise not_found(f"No treatment {treatment!r} is declared.", treatment, AUDITS, more)
    return AUDITS[treatment]
