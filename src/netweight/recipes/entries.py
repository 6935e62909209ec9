"""The entries of a recipe's lists, treatments and attacks: a verb alone, or a verb with its settings, checked here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar, cast, final

import pydantic

from netweight.core.digest import canonical_json
from netweight.core.names import nearest_names
from netweight.errors import NetweightError
from netweight.settings import Settings


class Entry(Protocol):
    """What an entry may name: its key in the YAML file, and its class of settings or a frozen dataclass."""

    @property
    def verb(self) -> str: ...

    @property
    def config(self) -> type[Any]: ...


E = TypeVar("E", bound=Entry)
T = TypeVar("T")


@final
@dataclasses.dataclass(frozen=True)
class Chosen(Generic[E]):
    """A treatment or an attack with the settings that a recipe gives it."""

    what: E  # the treatment or attack
    config: Any  # its settings

    @property
    def settings(self) -> dict[str, Any]:
        """The settings by name, as JSON values, in their order."""
        if isinstance(self.config, Settings):
            return self.config.to_json()
        values = json.loads(canonical_json(self.config))
        return {field.name: values[field.name] for field in dataclasses.fields(self.config)}


def choose(entry: Any, known: Mapping[str, E], where: str, kind: str, problems: list[str]) -> Chosen[E] | None:
    """Check one entry."""
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, dict) or len(entry) != 1:
        article = "an" if kind[0] in "aeiou" else "a"
        problems.append(f"{where}: write {article} {kind} as `- verb` or `- verb: {{settings}}`, not {entry!r}.")
        return None
    ((verb, settings),) = entry.items()
    if verb not in known:
        near = ", ".join(nearest_names(str(verb), known, count=2))
        problems.append(f"{where}: there is no {kind} {verb!r}. Nearest: {near}.")
        return None
    config = configured(known[verb].config, {} if settings is None else settings, f"{where}.{verb}.", problems)
    return None if config is None else Chosen(known[verb], config)


def explain(error: pydantic.ValidationError, where: str = "") -> list[str]:
    """Put pydantic's complaints into one line each."""
    lines = []
    for problem in error.errors(include_url=False):
        place = where + ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "missing":
            lines.append(f"{place}: is missing.")
        else:
            lines.append(f"{place}: {problem['msg']}, not {problem['input']!r}.")
    return lines


def unknown_keys(given: Any, known: list[str], where: str) -> list[str]:
    """Write one line for each key that nothing knows, with the nearest known ones."""
    if not isinstance(given, dict):
        return []
    return [
        f"{where}{key}: there is no such key. Nearest: {', '.join(nearest_names(str(key), known, count=2))}."
        for key in given
        if key not in known
    ]


def configured(kind: type[T], settings: Any, where: str, problems: list[str]) -> T | None:
    """Check settings against their type; note every problem and return None if there is one."""
    if issubclass(kind, Settings):
        return cast("T | None", kind.checked(settings, where, problems))
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
