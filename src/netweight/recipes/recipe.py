"""Reading a recipe's YAML file into a `Recipe`, with all checks that are possible before the work, and its schema.

`netweight run --schema` prints the schema, made of the settings of the treatments and attacks that are known. A recipe
names it in its first line, by which editors check it: `# yaml-language-server: $schema=FILE`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar, cast, final

import yaml
from pydantic import Field

from netweight.core.digests import digest_file
from netweight.core.hub import is_hub_id, local_model
from netweight.core.lazy import value_of
from netweight.core.names import nearest, not_found
from netweight.errors import NetweightError, UsageError
from netweight.registry import Attack, Method, known_attacks, known_methods
from netweight.settings import Settings, leaves

# An option of a command, in a message.
_OPTION = re.compile(r"(?<!\S)\(?(--[a-z][a-z0-9-]*[a-z0-9])")
E = TypeVar("E", Method[Any], Attack[Any])


@final
@dataclass(frozen=True)
class Choice(Generic[E]):
    """A treatment or an attack with the settings that a recipe gives it."""

    registration: E
    """The method or attack."""
    settings: Any
    """Settings of the method or attack."""

    @property
    def values(self) -> dict[str, Any]:
        """The settings by name, as JSON values, in their order."""
        values: dict[str, Any] = self.settings.to_json()
        return values

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the verb and the given settings: another process looks the verb up among its own registrations."""
        attacks = isinstance(self.registration, Attack)
        work: Any = getattr(self.registration, "attack" if attacks else "apply")
        # Only the given settings are kept, because other defaults may depend on them.
        given = self.settings.given
        return _chosen_again, (self.registration.verb, attacks, work.__module__, given)


def _chosen_again(verb: str, attacks: bool, module: str, given: dict[str, Any]) -> Choice[Any]:
    # The import registers what has no entry point.
    importlib.import_module(module)
    registration: Any = (known_attacks() if attacks else known_methods())[verb]
    return Choice(registration, registration.settings_class.of(given))


@final
@dataclass(frozen=True)
class Recipe:
    """A recipe as it was read; all of it is known to be well-formed."""

    subject: Path
    """The model that is processed: a folder or a file."""
    treatments: tuple[Choice[Method[Any]], ...]
    """Treatments with their settings, in order; at least one, unless there are attacks."""
    attacks: tuple[Choice[Attack[Any]], ...]
    """Attacks, with their settings, on the result of the last treatment, or on the subject if there is no treatment."""
    audits: Literal["all"] | tuple[str, ...]
    """Names of the audits to run, or "all"."""
    output: Path
    """Folder of results; it is created if it does not exist."""
    seed: int
    """Seed of every random choice."""
    name: str = ""
    """Name of the chapter; empty for a recipe without chapters."""
    title: str = ""
    """Heading of the report or chapter."""
    summary: str = ""
    """Sentence below the heading."""
    question: str = ""
    """Question that the chapter answers."""
    intro: str = ""
    """Introduction of the chapter."""
    chapters: tuple[Recipe, ...] = ()
    """Recipes whose results form one report, instead of treatments and attacks."""
    left_out: tuple[str, ...] = ()
    """Names of the chapters that are not run."""


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses a key given twice instead of forgetting the first."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        merge = "tag:yaml.org,2002:merge"
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        for twice in (key for place, key in enumerate(keys) if key in keys[:place]):
            raise yaml.MarkedYAMLError(problem=f"the key {twice!r} was given twice", problem_mark=node.start_mark)
        return super().construct_mapping(node, deep)


class _Steps(Settings):
    """Steps for a subject; treatments are checked one by one, each against its own settings."""

    title: str = Field(default="", description="Heading of the report.")
    subject: str = Field(
        min_length=1, description="The model: a folder, a file or an id on the hub. It is never changed."
    )
    treatments: tuple[Any, ...] = Field(
        default=(), min_length=1, description="Treatments of the subject, in the order in which they are applied."
    )
    attacks: tuple[Any, ...] = Field(
        default=(), min_length=1, description="Attacks on the result of the last treatment."
    )
    audits: Literal["all"] | tuple[str, ...] = Field(
        default="all", description="Names of the audits to run; the report states which ones were left out."
    )
    seed: int = Field(default=0, description="Seed of audits and attacks.")
    placeholders: dict[str, str] = Field(
        default={},
        description="Files of example rows that only show the format, with their digests. The recipe does not run "
        "while a file still has this digest.",
    )


class _Chapter(_Steps):
    """A chapter of a recipe: steps of its own, which share a report with those of other chapters."""

    title: str = Field(min_length=1, description="Heading of the chapter.")
    question: str = Field(min_length=1, description="Question that the chapter answers.")
    intro: str = Field(default="", description="Introduction below the question.")


class _Recipe(_Steps):
    """A recipe without chapters."""

    output: str = Field(
        min_length=1, description="Folder of the results, the record of finished steps, and the report."
    )
    summary: str = Field(default="", description="A sentence below the report's heading.")


class _Chapters(Settings):
    """A recipe of chapters."""

    title: str = Field(min_length=1, description="Heading of the report.")
    summary: str = Field(default="", description="A sentence below the report's heading.")
    output: str = Field(
        min_length=1, description="Folder of the report; the results of each chapter are in a subfolder."
    )
    chapters: dict[str, Any] = Field(min_length=1, description="Name → a recipe with a question, without an output.")


def outlines() -> dict[str, dict[str, Any]]:
    """Return the JSON schemas of the keys of a recipe, of one of chapters, and of a chapter; lists are left open."""
    schemas = {}
    for name, kind in (("recipe", _Recipe), ("chapters", _Chapters), ("chapter", _Chapter)):
        schema = kind.model_json_schema()
        schema.pop("title")
        # The fields are tuples, which cannot be None.
        for key in ("treatments", "attacks"):
            schema["properties"].get(key, {}).pop("default", None)
        schemas[name] = {**schema, "description": str(kind.__doc__), "additionalProperties": False}
    return schemas


def read_mapping(path: Path, needs: str) -> dict[str, Any]:
    """Read a YAML file that is a mapping, no key given twice."""
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except OSError as error:
        raise UsageError(
            f"The recipe {path} could not be read: {error.strerror}.",
            cure="To get recipes to begin with, run: netweight init DIR",
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"The recipe {path} is not valid YAML: {error}.") from error
    if not isinstance(content, dict):
        raise UsageError(f"The recipe {path} is empty or not a mapping.", cure=f"It needs {needs}.")
    return content


def read_recipe(
    path: str | Path, *, subject: str | None = None, output: str | None = None, only: Sequence[str] | None = None
) -> Recipe:
    """Read a recipe and check everything that can be known before work; all problems are reported at once.

    Args:
        path: The YAML file.
        subject: Path of another subject than the file names.
        output: Path of another folder of results.
        only: Names of chapters; others are left out.
    """
    content = read_mapping(Path(path), "subject, output, and treatments or attacks")
    content |= {key: value for key, value in (("subject", subject), ("output", output)) if value is not None}
    problems: list[str] = []
    read = _read_chapters if "chapters" in content else _read_steps
    recipe = read(content, problems)
    if recipe is None or problems:
        raise refusal(path, problems)
    return recipe if only is None else _chapters_of(recipe, only)


def _read_chapters(content: dict[str, Any], problems: list[str]) -> Recipe | None:
    fields = _Chapters.checked(content, "", problems)
    if fields is None:
        return None
    chapters = []
    for name, chapter in fields.chapters.items():
        if not isinstance(chapter, dict) or Path(name).name != name:
            problems.append(
                f"chapters.{name}: a chapter must be a mapping, and its name must be usable as the name of a folder."
            )
            continue
        chapters.append(_read_steps(chapter, problems, name, Path(fields.output) / name))
    return Recipe(
        Path(), (), (), "all", Path(fields.output), 0, title=fields.title, summary=fields.summary,
        chapters=tuple(chapter for chapter in chapters if chapter is not None),
    )  # fmt: skip


def _chapters_of(recipe: Recipe, only: Sequence[str]) -> Recipe:
    """The recipe with these chapters alone, in its own order."""
    names = [chapter.name for chapter in recipe.chapters]
    for name in only:
        if name not in names:
            raise not_found(f"The recipe has no chapter {name!r}.", name, names, f"It has: {names}.")
    chosen = tuple(chapter for chapter in recipe.chapters if chapter.name in only)
    return replace(recipe, chapters=chosen, left_out=tuple(name for name in names if name not in only))


def _read_steps(
    content: dict[str, Any], problems: list[str], name: str = "", output: Path | None = None
) -> Recipe | None:
    """Check the keys of a recipe, or of a chapter of this name."""
    kind: type[_Steps] = _Chapter if name else _Recipe
    all_problems: list[str] = []
    fields: Any = kind.checked(content, "", all_problems)
    # Unknown keys must not hide other errors.
    if fields is None:
        fields = kind.checked({key: content[key] for key in content if key in kind.model_fields}, "", [])
    if "treatments" not in content and "attacks" not in content:
        all_problems.append("the recipe has neither treatments nor attacks, and needs at least one of them.")
    treatments = _chosen(content, "treatments", known_methods(), all_problems)
    attacks = _told_of_training(_chosen(content, "attacks", known_attacks(), all_problems), treatments)
    recipe = None
    if fields is not None:
        texts: Any = {key: getattr(fields, key, "") for key in ("title", "summary", "question", "intro")}
        recipe = Recipe(
            _subject(fields.subject, all_problems), treatments, attacks, fields.audits, output or Path(fields.output),
            fields.seed, name, **texts,
        )  # fmt: skip
        all_problems += _path_problems(recipe)
        all_problems += _placeholder_problems(fields.placeholders)
        all_problems += _chain_problems(recipe)
        # Otherwise it is not known which audits there are.
        if len(treatments) == len(fields.treatments):
            all_problems += _audit_problems(recipe)
            if len(attacks) == len(fields.attacks):
                all_problems += _work_problems(recipe)
    problems += [f"chapters.{name}.{problem}" if name else problem for problem in all_problems]
    return recipe


def choose(entry: Any, entries: Mapping[str, E], where: str, kind: str, problems: list[str]) -> Choice[E] | None:
    """Check one entry."""
    if isinstance(entry, str):
        entry = {entry: None}
    if not isinstance(entry, dict) or len(entry) != 1:
        article = "an" if kind[0] in "aeiou" else "a"
        problems.append(f"{where}: write {article} {kind} as `- verb` or `- verb: {{settings}}`, not {entry!r}.")
        return None
    ((verb, settings),) = entry.items()
    if verb not in entries:
        problems.append(f"{where}: there is no {kind} {verb!r}. {nearest(str(verb), entries, 2)}")
        return None
    kind_of_settings, found = cast("type[Settings]", entries[verb].settings_class), list[str]()
    config = kind_of_settings.checked({} if settings is None else settings, f"{where}.{verb}.", found)
    problems += [f"{each} {in_words_of_recipes(each, kind_of_settings)}".rstrip() for each in found]
    return None if config is None else Choice(entries[verb], config)


def _chosen(
    content: dict[str, Any], key: Literal["treatments", "attacks"], registered: Mapping[str, E], problems: list[str]
) -> tuple[Choice[E], ...]:
    """Check the entries of a list; those that are wrong are left out, and problems say why."""
    listed = content.get(key)
    entries = listed if isinstance(listed, list) else []
    chosen = [choose(entry, registered, f"{key}.{place}", key[:-1], problems) for place, entry in enumerate(entries)]
    return tuple(each for each in chosen if each is not None)


def _told_of_training(
    attacks: tuple[Choice[Attack[Any]], ...], treatments: Sequence[Choice[Method[Any]]]
) -> tuple[Choice[Attack[Any]], ...]:
    """Return attacks that know the rows on which the recipe's treatments train, where they have a setting for them."""
    rows = [
        source for chosen in treatments if chosen.registration.trains_on is not None
        for source in chosen.registration.trains_on(chosen.settings)
    ]  # fmt: skip
    told = []
    for chosen in attacks:
        settings = chosen.settings
        if rows and "trained_on" in type(settings).model_fields:
            settings = settings.replace(trained_on=tuple(dict.fromkeys((*settings.trained_on, *rows))))
        told.append(replace(chosen, settings=settings))
    return tuple(told)


def in_words_of_recipes(text: str, settings: type[Settings]) -> str:
    """Return a sentence that says which settings of a step the options in a message are; empty without options.

    Args:
        text: The message, with the cure that a command has.
        settings: The class of the step's settings.
    """
    places = {leaf.flag: leaf.place for leaf in reversed(list(leaves(settings, variants=False)))}
    named = [flag for flag in dict.fromkeys(_OPTION.findall(text)) if flag in places]
    if not named:
        return ""
    return "In the recipe: " + ", ".join(f"{flag} is the setting {places[flag]}" for flag in named) + "."


def refusal(path: str | Path, problems: Sequence[str], *, cure: str | None = None) -> UsageError:
    """Return the error that lists everything that is wrong with a recipe."""
    count = "one problem" if len(problems) == 1 else f"{len(problems)} problems"
    listed = "\n".join(f"  {problem}" for problem in problems)
    return UsageError(f"The recipe {path} has {count}:\n{listed}", cure=cure)


def _subject(text: str, problems: list[str]) -> Path:
    """The subject's path; a model on the hub is fetched into its cache, or found there."""
    if not is_hub_id(text):
        return Path(text)
    try:
        return local_model(text)
    except NetweightError as error:
        problems.append(f"subject: {error}")
        return Path(text)


def _is_there(recipe: Recipe) -> bool:
    """Return whether the subject is a file or folder, or something that the first treatment knows by name."""
    named = value_of(recipe.treatments[0].registration.named) if recipe.treatments else ()
    return recipe.subject.exists() or str(recipe.subject) in named


def _path_problems(recipe: Recipe) -> list[str]:
    problems = []
    if not _is_there(recipe):
        problems.append(f"subject: {recipe.subject} does not exist.")
    elif recipe.output.resolve().is_relative_to(recipe.subject.resolve()):
        problems.append(f"output: {recipe.output} is inside the subject, which must not be changed.")
    if recipe.output.exists() and not recipe.output.is_dir():
        problems.append(f"output: {recipe.output} is a file; it must be a folder.")
    return problems


def _placeholder_problems(placeholders: Mapping[str, str]) -> list[str]:
    """Files that still hold the rows that `netweight init` wrote."""
    same = [name for name, digest in placeholders.items() if Path(name).is_file() and digest_file(Path(name)) == digest]
    return [
        f"placeholders.{name}: the file still contains placeholder data. Replace it by "
        "your own, or delete this line to "
        "run with them."
        for name in same
    ]


def _chain_problems(recipe: Recipe) -> list[str]:
    """Treatments and attacks that cannot follow what is made before them."""
    problems, made = [], None
    entries: list[tuple[str, Method[Any] | Attack[Any]]] = [
        *((f"treatments.{place}", chosen.registration) for place, chosen in enumerate(recipe.treatments)),
        *((f"attacks.{place}", chosen.registration) for place, chosen in enumerate(recipe.attacks)),
    ]
    for where, what in entries:
        if made is not None and made not in what.takes:
            inputs = " or ".join(what.takes)
            problems.append(f"{where}.{what.verb}: needs a {inputs}, but the treatment before it produces a {made}.")
        if isinstance(what, Method):
            made = what.makes
    return problems


def _work_problems(recipe: Recipe) -> list[str]:
    """Return the problems that treatments and attacks find in their files before any of them begins."""
    problems = []
    source: Path | None = recipe.subject if _is_there(recipe) else None
    lists: list[tuple[str, tuple[Choice[Any], ...]]] = [("treatments", recipe.treatments), ("attacks", recipe.attacks)]
    for key, entries in lists:
        for place, chosen in enumerate(entries):
            try:
                if chosen.registration.check is not None:
                    chosen.registration.check(source, chosen.settings)
            except NetweightError as error:
                also = in_words_of_recipes(str(error), type(chosen.settings))
                problems.append(f"{key}.{place}.{chosen.registration.verb}: {error} {also}".rstrip())
            source = None if key == "treatments" else source
    return problems


def _audit_problems(recipe: Recipe) -> list[str]:
    audits = sorted({name for chosen in recipe.treatments for name in chosen.registration.runnable})
    return [
        f"audits: no treatment of this recipe has an audit {name!r}. {nearest(name, audits, 2)}"
        for name in (recipe.audits if recipe.audits != "all" else ())
        if name not in audits
    ]


def recipe_schema() -> dict[str, Any]:
    """Return the schema (JSON Schema 2020-12) of the treatments and attacks that are registered."""
    # What it cannot say is checked by `read_recipe`: that files are there, and what settings mean together.
    schemas = outlines()
    definitions: dict[str, Any] = {}
    for key, registered in (("treatments", known_methods()), ("attacks", known_attacks())):
        entries = [each for entry in registered.values() for each in _entry(entry, definitions)]
        definitions[key] = {"items": {"anyOf": entries}}
        for name in ("recipe", "chapter"):
            schemas[name]["properties"][key] |= {"$ref": f"#/$defs/{key}"}
            schemas[name]["anyOf"] = [{"required": ["treatments"]}, {"required": ["attacks"]}]
    schemas["chapters"]["properties"]["chapters"]["additionalProperties"] = {"$ref": "#/$defs/chapter"}
    definitions["chapter"] = schemas["chapter"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of netweight",
        "description": "Treatments of a model, in order, with audits and attacks; or chapters that have their own.",
        "if": {"required": ["chapters"]},
        "then": schemas["chapters"],
        "else": schemas["recipe"],
        "$defs": dict(sorted(definitions.items())),
    }


def _entry(entry: Method[Any] | Attack[Any], definitions: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Return the schema of a list entry for a verb: a mapping to its settings, or the verb alone."""
    settings = cast("type[Settings]", entry.settings_class).json_schema()
    definitions.update(settings.pop("$defs", {}))
    settings["title"] = entry.verb
    definitions[entry.verb] = settings
    reference: dict[str, Any] = {"$ref": f"#/$defs/{entry.verb}"}
    if not settings.get("required"):
        yield {"const": entry.verb, "description": settings["description"]}
        reference = {"anyOf": [reference, {"type": "null"}]}
    yield {
        "type": "object",
        "properties": {entry.verb: reference},
        "required": [entry.verb],
        "additionalProperties": False,
    }
