"""The treatments that a recipe may name: a verb, the type of its settings, what it does and what its audits look at."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, final

import pydantic

from netweight.core.digest import canonical_json
from netweight.core.names import nearest_names
from netweight.core.progress import Progress
from netweight.errors import NetweightError, UsageError
from netweight.evidence.audit import audits_of
from netweight.evidence.report import Report

__all__ = [
    "Apply",
    "Chosen",
    "Treatment",
    "choose",
    "configured",
    "explain",
    "register",
    "settings_of",
    "unknown_keys",
    "verb_and_settings",
]

T = TypeVar("T")
Apply = Callable[[Path, Path, T, Progress], object]


@final
@dataclasses.dataclass(frozen=True)
class Treatment(Generic[T]):
    """A treatment of model files that recipes know.

    Attributes:
        verb: Its key in the YAML file, and its name in the register of audits.
        config: The frozen dataclass of its settings.
        home: The module that declares and registers its audits when imported.
        apply: Takes `(source, destination, settings, progress)` and makes `destination`, which does not exist, whole
            or not at all; it never changes `source`.
        examine: Takes `(destination, source, settings)` and returns the subject and the config that its audits take.
        by_attack: Those of its audits that an attack of the recipe holds: audit's name → the attack's verb.
        illustrate: Takes `(destination, number, report)` and adds sections with pictures, if there is something to
            see; `number` is the step's, for their titles.
    """

    verb: str
    config: type[T]
    home: str
    apply: Apply[T]
    examine: Callable[[Path, Path, T], tuple[Any, Any]]
    by_attack: Mapping[str, str] = dataclasses.field(default_factory=dict)
    illustrate: Callable[[Path, int, Report], object] | None = None

    @property
    def audits(self) -> tuple[str, ...]:
        """The names of its audits."""
        importlib.import_module(self.home)
        return tuple(audits_of(self.verb))


@final
@dataclasses.dataclass(frozen=True)
class Chosen:
    """A treatment with the settings that a recipe gives it."""

    treatment: Treatment[Any]
    config: Any

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name, as JSON values."""
        return settings_of(self.config)


def settings_of(config: Any) -> dict[str, Any]:
    """Return the fields of a frozen dataclass as JSON values, in their order."""
    values = json.loads(canonical_json(config))
    return {field.name: values[field.name] for field in dataclasses.fields(config)}


_TREATMENTS: dict[type, Treatment[Any]] = {}


def register(treatment: Treatment[Any]) -> None:
    """Make a treatment known to recipes, under the type of its settings.

    Raises:
        UsageError: Its verb or the type of its settings is taken.
    """
    taken = {known.verb for known in _TREATMENTS.values()}
    if treatment.config in _TREATMENTS or treatment.verb in taken:
        raise UsageError(
            f"The treatment {treatment.verb!r} or its settings {treatment.config.__name__} are registered already.",
            cure="Choose another verb and a type of its own.",
        )
    _TREATMENTS[treatment.config] = treatment


def explain(error: pydantic.ValidationError, where: str = "") -> list[str]:
    """Put pydantic's complaints into one line each.

    Args:
        error: What pydantic found.
        where: Place of the checked value in the recipe, ending with a dot unless empty.
    """
    lines = []
    for problem in error.errors(include_url=False):
        place = where + ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing":
            lines.append(f"{place}: is missing.")
        else:
            lines.append(f"{place}: {problem['msg']}, not {problem['input']!r}.")
    return lines


def choose(entry: Any, where: str, problems: list[str]) -> Chosen | None:
    """Check one entry of a recipe's `treatments`: a verb alone, or a verb with its settings.

    Args:
        entry: The entry as YAML gives it.
        where: Its place in the recipe, for messages.
        problems: Receives one line for everything that is wrong.

    Returns:
        The treatment with its settings; None if something is wrong.
    """
    known = {treatment.verb: treatment for treatment in _TREATMENTS.values()}
    named = verb_and_settings(entry, known, where, "treatment", problems)
    if named is None:
        return None
    verb, settings = named
    config = configured(known[verb].config, settings, f"{where}.{verb}.", problems)
    return None if config is None else Chosen(known[verb], config)


def verb_and_settings(
    entry: Any, known: Collection[str], where: str, what: str, problems: list[str]
) -> tuple[str, Any] | None:
    """Read an entry as a verb with its settings; note a problem and return None if it is none that is known.

    Args:
        entry: The entry as YAML gives it.
        known: The verbs there are.
        where: Its place in the recipe, for messages.
        what: What an entry is, for messages.
        problems: Receives a line if something is wrong.
    """
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, dict) or len(entry) != 1:
        article = "an" if what[0] in "aeiou" else "a"
        problems.append(f"{where}: write {article} {what} as `- verb` or `- verb: {{settings}}`, not {entry!r}.")
        return None
    ((verb, settings),) = entry.items()
    if verb not in known:
        near = ", ".join(nearest_names(str(verb), known, count=2))
        problems.append(f"{where}: there is no {what} {verb!r}. Nearest: {near}.")
        return None
    return verb, {} if settings is None else settings


def configured(kind: type[T], settings: Any, where: str, problems: list[str]) -> T | None:
    """Check settings against their type; note every problem and return None if there is one.

    Args:
        kind: A frozen dataclass.
        settings: Its fields as YAML gives them.
        where: Their place in the recipe, ending with a dot.
        problems: Receives one line for everything that is wrong.
    """
    found = unknown_keys(settings, [field.name for field in dataclasses.fields(cast("Any", kind))], where)
    config: T | None = None
    try:
        config = pydantic.TypeAdapter(kind).validate_python(settings)
    except pydantic.ValidationError as error:
        found += explain(error, where)
    except NetweightError as error:
        found.append(f"{where.rstrip('.')}: {error}")
    problems += found
    return None if found else config


def unknown_keys(given: Any, known: list[str], where: str) -> list[str]:
    """Write one line for each key that nothing knows, with the nearest known ones."""
    if not isinstance(given, dict):
        return []
    return [
        f"{where}{key}: there is no such key. Nearest: {', '.join(nearest_names(str(key), known, count=2))}."
        for key in given
        if key not in known
    ]
