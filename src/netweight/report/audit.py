"""Audits, and the register that keeps the rule of the library: no treatment without its audit.

A treatment (compress, federate, immunize, forget, space) names its audits when it is declared; each audit is registered
by the module that defines it. `of_treatment` compares what a treatment names with what was run, and a report shows the
difference in red.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from netweight.core.names import nearest_names
from netweight.core.progress import QUIET, Progress
from netweight.errors import NameNotFound, UsageError
from netweight.report.finding import Finding, Section


class Audit(Protocol):
    """A function that tests the result of a treatment and returns a section: what it found, good or bad."""

    def __call__(self, run: Any, settings: Any, /, *, seed: int, progress: Progress) -> Section | list[Finding]:
        """Test a run: a model, a path, what the audit says. The same seed gives the same section.

        A failed test is a finding that has not passed, never an exception. A list of findings stands for a section of
        these alone.
        """


_NAMED: dict[str, tuple[str, ...]] = {}  # treatment -> names of its audits
_AUDITS: dict[tuple[str, str], Audit] = {}  # (treatment, name) -> the audit
_F = TypeVar("_F", bound=Callable[..., Section | list[Finding]])


def register_treatment(treatment: str, *, audits: Iterable[str]) -> None:
    """Declare a treatment, by its verb on the command line, and name the audits that prove it."""
    names = tuple(audits)
    if not names:
        raise UsageError(f"Treatment {treatment!r} names no audit.", cure="No treatment without its audit: name one.")
    if _NAMED.setdefault(treatment, names) != names:
        raise UsageError(
            f"Treatment {treatment!r} was declared with audits {_NAMED[treatment]} and now with {names}.",
            cure="Declare it once.",
        )


def register_audit(treatment: str, name: str) -> Callable[[_F], _F]:
    """Register the decorated function as the audit `name` of a treatment that names it."""
    if name not in _named(treatment):
        raise NameNotFound(f"Treatment {treatment!r} names the audits {_NAMED[treatment]}, not {name!r}.")

    def register(audit: _F) -> _F:
        if _AUDITS.setdefault((treatment, name), audit) is not audit:
            raise UsageError(f"Audit {name!r} of {treatment!r} is registered twice.", cure="Choose another name.")
        return audit

    return register


def treatments() -> tuple[str, ...]:
    """Return the treatments declared so far; a method declares its own when it is imported."""
    return tuple(_NAMED)


def audits_of(treatment: str) -> dict[str, Audit]:
    """Return the audits of a treatment that are written, by name, in the order in which it names them."""
    return {name: _AUDITS[treatment, name] for name in _named(treatment) if (treatment, name) in _AUDITS}


def unwritten_audits(treatment: str) -> tuple[str, ...]:
    """Return the audits that a treatment names and nobody registered: a broken promise."""
    return tuple(name for name in _named(treatment) if (treatment, name) not in _AUDITS)


def missing_audits(treatment: str, ran: Iterable[str]) -> tuple[str, ...]:
    """Return the audits that a treatment names and that are not among those that ran."""
    done = set(ran)
    return tuple(name for name in _named(treatment) if name not in done)


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
    found = {name: audits[name](run, settings, seed=seed, progress=progress) for name in chosen}
    return {
        name: each if isinstance(each, Section) else Section(f"{treatment}: {name}", each)
        for name, each in found.items()
    }


def _named(treatment: str) -> tuple[str, ...]:
    if treatment not in _NAMED:
        near = ", ".join(nearest_names(treatment, _NAMED)) or "none; import the method first"
        raise NameNotFound(f"No treatment {treatment!r} is declared.", cure=f"Nearest: {near}.")
    return _NAMED[treatment]
