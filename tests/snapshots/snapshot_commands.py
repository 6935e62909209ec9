"""All commands with their options as data: names, types, choices, defaults, without the prose."""

import json
import re

import click
from click.testing import CliRunner

from netweight.cli import netweight

# Of these pairs a type may become the other: ranges are numbers, and paths are texts.
FAMILIES = {"integer range": "integer", "float range": "float", "path": "text", "file": "text", "directory": "text"}
USUAL = {"kind": "option", "type": "text", "required": False, "multiple": False, "nargs": 1, "default": None}
USUAL["flag"] = False


def commands():
    """Name of each command → its parameters by name, arguments by their place; what is as usual is left out."""
    found = {}

    def walk(command, name):
        if isinstance(command, click.Group):
            context = click.Context(command)
            for each in command.list_commands(context):
                walk(command.get_command(context, each), [*name, each])
        else:
            parameters = found[" ".join(name)] = {}
            for part in command.params:
                options = [max(part.opts, key=len)] if isinstance(part, click.Option) else []
                place = 1 + sum(each.startswith("argument") for each in parameters)
                parameters[[*options, f"argument {place}"][0]] = {
                    key: value for key, value in _described(part).items() if value != USUAL.get(key)
                }

    walk(netweight, [])
    return found


def _described(parameter):
    info = parameter.to_info_dict()
    kind = info["type"]
    described = {
        "kind": info["param_type_name"],
        "type": FAMILIES.get(kind["name"], kind["name"]),
        "required": info["required"],
        "multiple": info["multiple"],
        "nargs": info["nargs"],
        "default": _default(info["default"]),
    }
    if "choices" in kind:
        described["choices"] = list(kind["choices"])
    described |= {key: kind[key] for key in ("min", "max") if kind.get(key) is not None}
    if isinstance(parameter, click.Option):
        if getattr(parameter, "shown", ""):  # settings show a default and leave it to their class to set it
            described["default"] = parameter.shown.partition(";")[0]
            if parameter.is_flag and f"--{described['default']}" in parameter.opts:  # a flag shows the side that holds
                described["default"] = True
        described |= {"names": sorted([*info["opts"], *info["secondary_opts"]]), "flag": info["is_flag"]}
        said = re.search(r"by default (?:it is )?(-?\d[\d.e-]*)|(-?\d[\d.e-]*) by default", parameter.help or "")
        if said and described["default"] is None:
            described["said_default"] = float((said[1] or said[2]).rstrip("."))
    return described


def _default(value):
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if value == ():
        return None
    return [_default(each) for each in value] if isinstance(value, (list, tuple)) else str(value)


def lost(kept, found, of="netweight "):
    """What of the kept commands is not in the found ones, one sentence each."""
    for command, parameters in kept.items():
        if command not in found:
            yield f"{of}{command} is gone"
            continue
        for name, old in parameters.items():
            if name in found[command]:
                yield from _lost(f"{of}{command} {name}", USUAL | old, USUAL | found[command][name])
            else:
                yield f"{of}{command} {name} is gone"


def _lost(here, old, new):
    for key in ("names", "choices"):
        if gone := sorted({*old.get(key, ())} - {*new.get(key, ())}):
            yield f"{here}: the {key} {gone} are gone"
    for key in ("kind", "type", "multiple", "nargs", "flag"):
        parsed = key == "type" and old[key] == "text" and new[key] not in ("integer", "float", "boolean", "choice")
        if old[key] != new[key] and not parsed:  # a text may be read as a list or as NAME=VALUE
            yield f"{here}: {key} is {new[key]!r}, not {old[key]!r}"
    if new["required"] and not old["required"]:
        yield f"{here} is required now"
    for key in ("min", "max"):  # a range that was stated may not become another; one may be stated that was not
        if key in old and new.get(key) != old[key]:
            yield f"{here}: {key} is {new.get(key)}, not {old[key]}"
    if "said_default" in old and new["default"] is not None:
        if not _same(old["said_default"], new["default"]):
            yield f"{here}: the default is {new['default']!r}, and the help said {old['said_default']!r}"
    elif old["default"] and not _same(old["default"], new["default"]):
        yield f"{here}: the default is {new['default']!r}, not {old['default']!r}"


def _same(old, new):
    """Whether two defaults are one: settings show theirs as text, the items of a list after one another."""
    if isinstance(old, list):
        return _same(",".join(map(str, old)), new if isinstance(new, str) else ",".join(map(str, new or ())))
    try:
        return float(old) == float(new)
    except (TypeError, ValueError):
        return str(old) == str(new)


def schema():
    """The JSON schema of recipes as the command prints it."""
    return json.loads(CliRunner().invoke(netweight, ["run", "--schema"]).stdout)


def recipe_keys(schema):
    """Verb (or the recipe itself) → its keys, from the JSON schema of recipes; in the form of `commands`."""
    homes = schema["$defs"]
    found = {"": _keys(schema["else"], homes)}  # a recipe without chapters
    verbs = _verbs(homes["treatments"]) | _verbs(homes["attacks"])
    for verb, part in verbs.items():
        found[verb] = _keys(_resolved(part, homes), homes)
    return found


def _verbs(listed):
    """Name and schema of what a list may hold as a mapping with one key."""
    options = listed["items"].get("anyOf", [listed["items"]])
    return {name: part for option in options for name, part in option.get("properties", {}).items()}


def _resolved(part, homes):
    """The schema of a mapping, past references and null."""
    while "$ref" in part or "anyOf" in part:
        part = part["anyOf"][0] if "anyOf" in part else homes[part["$ref"].rpartition("/")[2]]
    return part


def _keys(part, homes):
    required = part.get("required", ())
    keys = {}
    for name, value in part.get("properties", {}).items():
        branches = [_one(branch, homes) for branch in value.get("anyOf", [value])]
        choices = sorted({each for branch in branches for each in branch.get("enum", ())})
        described = {"choices": choices or None, "required": name in required or None, "default": value.get("default")}
        keys[name] = {
            key: each for key, each in described.items() if each is not None and each is not False and each != []
        }
    return keys


def _one(branch, homes):
    return homes[branch["$ref"].rpartition("/")[2]] if "$ref" in branch else branch
