"""What netweight can do with models, by name: methods with their audits, and attacks; found by entry point.

A package adds a method by an entry point of the group `netweight.methods` that names a `Method`, and an attack by one
of `netweight.attacks` that names an `Attack`. It then has a command, a verb in recipes and their schema, sections in
reports, and entries in model cards. netweight's own methods are found the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.report.audit import Audit, declare_audits
from netweight.report.finding import Section

S = TypeVar("S")


def _as_it_is(audit: str, destination: Path, source: Path, settings: S, progress: Progress) -> tuple[Any, S]:
    return (destination, source), settings


@final
@dataclass(frozen=True)
class CardEntry:
    """What a method did to a model, for the model's card."""

    title: str  # in a few words
    text: str  # what it means, and what it does not
    facts: tuple[tuple[str, str], ...]  # names and values
    tags: tuple[str, ...]  # for the hub


@final
@dataclass(frozen=True)
class Method(Generic[S]):
    """A treatment of files, with the audits that prove it: what a command or a recipe applies.

    Attributes:
        verb: Its key in recipes and its command's name.
        config: The class of its settings.
        apply: Takes `(source, destination, settings, progress)` and makes `destination`, which does not exist, whole
            or not at all; it never changes `source`.
        audits: Name → the audit; None for one that an attack holds or that needs what only its user has.
        examine: Takes `(audit, destination, source, settings, progress)` and returns the subject and the config that
            the audit of that name takes, `(destination, source)` and the settings by default. It may work, such as
            generate images: what an earlier run's audits returned is remembered, and it is not called for them.
        by_attack: Audits that an attack holds where a recipe has it: audit's name → the attack's verb.
        check: Takes `(source, settings)` and raises what work could only find out later; `source` is None where an
            earlier step makes it.
        reads: Takes the settings and returns files that they lead to without naming them, such as the images of a
            table: another content makes another step.
        takes: What it can be applied to: the kinds that methods before it make.
        makes: What comes out: "model", "bank", "space", "points", "adapters" or "federation".
        named: Subjects that it knows by name and that are no files here.
        card: Reads the method's record in a folder and returns an entry for the model's card; None where it left none.

    Raises:
        UsageError: It has no audit.
    """

    verb: str
    config: type[S]
    apply: Callable[[Path, Path, S, Progress], object]
    audits: Mapping[str, Audit | None]
    examine: Callable[[str, Path, Path, S, Progress], tuple[Any, Any]] = _as_it_is
    by_attack: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[Path | None, S], object] | None = None
    reads: Callable[[S], Iterable[Path]] | None = None
    takes: tuple[str, ...] = ("model",)
    makes: str = "model"
    named: Container[str] = ()
    card: Callable[[Path], CardEntry | None] | None = None

    def __post_init__(self) -> None:
        """Declare the audits: no treatment without its audit."""
        declare_audits(self.verb, self.audits)

    @property
    def runnable(self) -> tuple[str, ...]:
        """The names of the audits that a recipe or a command can run."""
        return tuple(name for name, audit in self.audits.items() if audit is not None)


@final
@dataclass(frozen=True)
class Target:
    """What an attack of a recipe is about."""

    model: Path  # the model that the recipe's last method made, or its subject where it has none
    before: Path | None  # the recipe's subject, if a method came between
    output: Path  # the recipe's folder: ledgers go there
    seed: int  # the recipe's


@final
@dataclass(frozen=True)
class Attack(Generic[S]):
    """An attack on files.

    Attributes:
        verb: Its key in recipes.
        config: The class of its settings.
        run: Takes `(target, settings, progress)` and returns a section. It continues what was stopped; the section of
            an attack that ended is remembered.
        check: Takes `(model, settings)` and raises what work could only find out later; `model` is None where a
            method makes it.
        reads: As of `Method`.
        takes: The kinds of results that it can be run on.
    """

    verb: str
    config: type[S]
    run: Callable[[Target, S, Progress], Section]
    check: Callable[[Path | None, S], object] | None = None
    reads: Callable[[S], Iterable[Path]] | None = None
    takes: tuple[str, ...] = ("model",)


_METHODS: dict[str, Method[Any]] = {}
_ATTACKS: dict[str, Attack[Any]] = {}


def register(entry: Method[Any] | Attack[Any]) -> None:
    """Add an `entry`, a method or an attack, in this process; packages use entry points.

    Raises:
        UsageError: Another one has its verb.
    """
    known: dict[str, Any] = _METHODS if isinstance(entry, Method) else _ATTACKS
    if entry.verb in known:
        kind = "method" if isinstance(entry, Method) else "attack"
        raise UsageError(f"The {kind} {entry.verb!r} is registered already.", cure="Choose another verb.")
    known[entry.verb] = entry


def known_methods() -> Mapping[str, Method[Any]]:
    """Return all methods by verb; importing them takes seconds."""
    return _loaded("netweight.methods", _METHODS)


def known_attacks() -> Mapping[str, Attack[Any]]:
    """Return all attacks by verb; importing them takes seconds."""
    return _loaded("netweight.attacks", _ATTACKS)


def entry_named(verb: str, *, attacks: bool) -> Any:
    """Return a method, or an attack, by its verb; others are not imported."""
    group, known = ("netweight.attacks", _ATTACKS) if attacks else ("netweight.methods", _METHODS)
    return _loaded(group, known, verb)[verb]


def _loaded(group: str, known: dict[str, Any], only: str | None = None) -> Mapping[str, Any]:
    for point in entry_points(group=group):
        if point.name not in known and only in (None, point.name):
            register(point.load())
    return known
