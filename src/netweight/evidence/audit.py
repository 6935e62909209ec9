"""Audits, and the register that keeps the rule of the house: no treatment without its audit.

A treatment (compress, federate, immunize, forget, space) names its audits when it is registered; each audit is
registered by the module that defines it. `missing_audits` compares what a treatment names with what was run, and a
report shows the difference in red.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from netweight.core.names import nearest_names
from netweight.core.progress import QUIET, Progress
from netweight.errors import NameNotFound, UsageError
from netweight.report.finding import Finding

__all__ = [
    "Audit",
    "audits_of",
    "missing_audits",
    "register_audit",
    "register_treatment",
    "run_audits",
    "treatments",
    "unwritten_audits",
]


class Audit(Protocol):
    """A function that tests a treated subject and returns what it found, good or bad."""

    def __call__(self, subject: Any, config: Any, *, seed: int, progress: Progress) -> list[Finding]:
        """Test `subject`.

        Args:
            subject: What was treated: a model, a path, a run; each audit says what it takes.
            config: The frozen config of the audit or of the treatment.
            seed: Every random choice derives from it, so that the same call gives the same findings.
            progress: Where to tell how far the work is.

        Returns:
            At least one finding. A failed test is a finding that has not passed, never an exception.
        """


_NAMED: dict[str, tuple[str, ...]] = {}  # treatment -> names of its audits
_AUDITS: dict[tuple[str, str], Audit] = {}  # (treatment, name) -> the audit
_F = TypeVar("_F", bound=Callable[..., list[Finding]])


def register_treatment(treatment: str, *, audits: Iterable[str]) -> None:
    """Declare a treatment and name the audits that prove it.

    Args:
        treatment: Its verb on the command line, for example "compress".
        audits: Names of its audits; at least one.

    Raises:
        UsageError: No audit is named, or the treatment was declared before with other audits.
    """
    names = tuple(audits)
    if not names:
        raise UsageError(f"Treatment {treatment!r} names no audit.", cure="No treatment without its audit: name one.")
    if _NAMED.setdefault(treatment, names) != names:
        raise UsageError(
            f"Treatment {treatment!r} was declared with audits {_NAMED[treatment]} and now with {names}.",
            cure="Declare it once.",
        )


def register_audit(treatment: str, name: str) -> Callable[[_F], _F]:
    """Register the decorated function as the audit `name` of a treatment that names it.

    Args:
        treatment: A declared treatment.
        name: One of the audits that it names.

    Returns:
        A decorator that returns the function as it is.

    Raises:
        NameNotFound: The treatment is not declared or does not name this audit.
        UsageError: Another function was registered under this name.
    """
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
    """Return the audits of a treatment that are written, by name, in the order in which it names them.

    Args:
        treatment: A declared treatment.

    Raises:
        NameNotFound: The treatment is not declared.
    """
    return {name: _AUDITS[treatment, name] for name in _named(treatment) if (treatment, name) in _AUDITS}


def unwritten_audits(treatment: str) -> tuple[str, ...]:
    """Return the audits that a treatment names and nobody registered: a broken promise.

    Args:
        treatment: A declared treatment.

    Raises:
        NameNotFound: The treatment is not declared.
    """
    return tuple(name for name in _named(treatment) if (treatment, name) not in _AUDITS)


def missing_audits(treatment: str, ran: Iterable[str]) -> tuple[str, ...]:
    """Return the audits that a treatment names and that are not among those that ran.

    Args:
        treatment: A declared treatment.
        ran: Names of the audits that ran.

    Raises:
        NameNotFound: The treatment is not declared.
    """
    done = set(ran)
    return tuple(name for name in _named(treatment) if name not in done)


def run_audits(
    treatment: str,
    subject: Any,
    config: Any,
    *,
    seed: int,
    progress: Progress = QUIET,
    only: Iterable[str] | None = None,
) -> dict[str, list[Finding]]:
    """Run the audits of a treatment one after another.

    Args:
        treatment: A declared treatment.
        subject: Passed to each audit.
        config: Passed to each audit.
        seed: Passed to each audit.
        progress: Passed to each audit.
        only: Names of the audits to run; all of them by default.

    Returns:
        The findings of each audit by its name. Give the names to `Report.section(audits=...)`.

    Raises:
        NameNotFound: The treatment is not declared, or a name in `only` is none of its written audits.
    """
    audits = audits_of(treatment)
    chosen = tuple(audits) if only is None else tuple(only)
    for name in chosen:
        if name not in audits:
            raise NameNotFound(f"Treatment {treatment!r} has no audit {name!r}.", cure=f"It has: {sorted(audits)}.")
    return {name: audits[name](subject, config, seed=seed, progress=progress) for name in chosen}


def _named(treatment: str) -> tuple[str, ...]:
    if treatment not in _NAMED:
        near = ", ".join(nearest_names(treatment, _NAMED)) or "none; import the method first"
        raise NameNotFound(f"No treatment {treatment!r} is declared.", cure=f"Nearest: {near}.")
    return _NAMED[treatment]
