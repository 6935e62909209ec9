"""The attacks that a recipe may name: a verb, the type of its settings, and what runs it on the recipe's last model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.evidence.finding import Finding
from netweight.evidence.report import Report

T = TypeVar("T")


@final
@dataclass(frozen=True)
class Target:
    """What an attack of a recipe is about."""

    model: Path  # the model that the recipe's last treatment made, or its subject where it has none
    before: Path | None  # the recipe's subject, if a treatment came between
    output: Path  # the recipe's folder: ledgers go there
    seed: int  # the recipe's
    title: str  # heading of the attack's section


@final
@dataclass(frozen=True)
class Attack(Generic[T]):
    """An attack that recipes know."""

    verb: str  # its key in the YAML file
    config: type[T]  # the frozen dataclass of its settings
    # Takes `(target, settings, report, progress)`, adds a section to the report and returns its findings; what an
    # earlier run did is not done again.
    run: Callable[[Target, T, Report, Progress], list[Finding]]
    # Takes `(model, settings)` and raises what work could only find out later; `model` is None where a treatment makes
    # it.
    check: Callable[[Path | None, T], object] | None = None
    reads: Callable[[T], Iterable[Path]] | None = None  # as of `Treatment`
    takes: tuple[str, ...] = ("model",)  # the kinds of results that it can be run on


_ATTACKS: dict[str, Attack[Any]] = {}


def register_attack(attack: Attack[Any]) -> None:
    """Make an attack known to recipes."""
    if _ATTACKS.setdefault(attack.verb, attack) is not attack:
        raise UsageError(f"The attack {attack.verb!r} is registered already.", cure="Choose another verb.")


def known_attacks() -> Mapping[str, Attack[Any]]:
    """Return the attacks that recipes know, by verb."""
    return _ATTACKS
