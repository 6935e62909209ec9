"""The JSON schema of recipes, made of the settings of the treatments and attacks that are known; editors check by it.

`netweight run --schema` prints it. A recipe names it in its first line: `# yaml-language-server: $schema=FILE`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from netweight.recipes.recipe import Entry, outlines
from netweight.registry import known_attacks, known_methods


def recipe_schema() -> dict[str, Any]:
    """Return the schema (JSON Schema 2020-12) of the treatments and attacks that are registered."""
    # What it cannot say is checked by `read_recipe`: that files are there, and what settings mean together.
    schemas = outlines()
    definitions: dict[str, Any] = {}
    for key, known in (("treatments", known_methods()), ("attacks", known_attacks())):
        entries = [each for entry in known.values() for each in _entry(entry, definitions)]
        definitions[key] = {"items": {"anyOf": entries}}
        for name in ("recipe", "chapter"):
            schemas[name]["properties"][key] |= {"$ref": f"#/$defs/{key}"}
            schemas[name]["anyOf"] = [{"required": ["treatments"]}, {"required": ["attacks"]}]
    schemas["chapters"]["properties"]["chapters"]["additionalProperties"] = {"$ref": "#/$defs/chapter"}
    definitions["chapter"] = schemas["chapter"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of netweight",
        "description": "Treatments of a model, in order, with audits and attacks; or chapters of such.",
        "if": {"required": ["chapters"]},
        "then": schemas["chapters"],
        "else": schemas["recipe"],
        "$defs": dict(sorted(definitions.items())),
    }


def _entry(entry: Entry, definitions: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """What may stand in a list for a verb: a mapping from it to its settings, or it alone where none is needed."""
    settings = entry.config.json_schema()
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
