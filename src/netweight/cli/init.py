"""`netweight init`: writes recipes, and the files that they name."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import click
import yaml

from netweight.cli import OUTPUT_FOLDER, GroupedCommand, Output, output_option
from netweight.core.digests import digest_file
from netweight.core.hub import is_hub_id, local_model
from netweight.errors import OutputExists
from netweight.hf.language_model_folder import check_language_model
from netweight.hf.load_tokenizer import load_tokenizer
from netweight.recipes import recipe_schema
from netweight.registry import Command, known_attacks, known_methods
from netweight.report.report import write_text
from netweight.tour import write_ciphers, write_pictures

# Uses of a model: the file by which its kind is recognized, and the recipe.
_USES = {
    "forget": ("model_index.json", "release-forgotten.yaml"),
    "space": ("bank.json", "space.yaml"),
    "immunize": ("config.json", "release-immunized.yaml"),
    "compress": ("", "quickstart.yaml"),
}


@click.command(cls=GroupedCommand, example="netweight init release --subject my-model")
@click.argument("folder", type=OUTPUT_FOLDER)
@click.option("--subject", metavar="MODEL",
              help="Your own model or adapter bank: a path, or an id on the hub. Only a recipe for it is written, with "
              "example data to be replaced with your own.")  # fmt: skip
@click.option(
    "--use", type=click.Choice(list(_USES)), help="Recipe for --subject; by default the one for its kind of model."
)
@click.option("--federation", is_flag=True, help="Write only an app for Flower, to which you add your model and data.")
@output_option
def init(folder: Path, subject: str | None, use: str | None, federation: bool, output: Output) -> None:
    """Write recipes and the files that they name into FOLDER.

    Without `--subject`, the command writes a small language model, a pipeline, LoRA adapters, texts and pictures, and
    recipes that can be run on them at once; the models are in the package netweight-toys. With `--subject`, it writes a
    recipe for this model and example data. The recipe does not run until you replace the data, or delete the names of
    their files from its `placeholders`.
    """
    if federation:
        _federation(folder, output)
        return
    model = None if subject is None else local_model(subject)
    recipes = {each.name: each for each in resources.files("netweight.recipes").iterdir() if each.suffix == ".yaml"}  # type: ignore[attr-defined]
    if model is not None:
        recipes = {"recipe.yaml": recipes[_USES[use or _use_of(model)][1]]}
        if (use or _use_of(model)) == "immunize":
            check_language_model(model)
    folder.mkdir(parents=True, exist_ok=True)
    # These names are checked before the work, and all others after it.
    _refuse_taken(folder, ("my-model", "pairs.jsonl", *recipes))
    with tempfile.TemporaryDirectory(prefix=".netweight-init-", dir=folder) as made:
        name = None if model is None else _name_of_subject(str(subject), model)
        chat = model is not None and (use or _use_of(model)) == "immunize" and bool(load_tokenizer(model).chat_template)
        rows = _write_all(Path(made), recipes, name, chat=chat)
        names = _move_into(Path(made), folder)
    first = f"netweight run {'quickstart.yaml' if model is None else 'recipe.yaml'} --plan"
    if model is not None and rows:
        output.warn(
            f"{', '.join(rows)} are placeholders that show the format. Replace them with your own data: the "
            "recipe does not run before that."
        )
    output.line(f"Written to {folder}: {', '.join(names)}.", bold=True)
    output.line("Next: " + ("" if folder == Path() else f'cd "{folder}" && ') + first)
    output.result({"folder": str(folder), "recipes": sorted(recipes)})


def _write_all(
    folder: Path, recipes: Mapping[str, Traversable], subject: str | None, *, chat: bool = False
) -> dict[str, str]:
    """Write recipes and the files that they name; without a subject also small models. Return digests of the rows.

    With `chat`, prompts go through the chat template of the subject.
    """
    named = "".join(each.read_text(encoding="utf-8") for each in recipes.values())
    if "pairs.jsonl" in named:
        write_ciphers(folder, pairs=400, attacked=400, seed=0)
    if "targets.csv" in named:
        write_pictures(folder)
    rows = {file.name: digest_file(file) for file in sorted(folder.iterdir()) if file.suffix in _ROWS}
    if subject is None:
        _toys(folder)
    for name, each in recipes.items():
        text = each.read_text(encoding="utf-8")
        if subject is not None:
            text = _of_subject(text, subject, chat=chat)
            if rows:
                text += _PLACEHOLDERS + "".join(f"  {row}: {digest}\n" for row, digest in rows.items())
        write_text(folder / name, text)
    write_text(folder / "recipe.schema.json", json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n")
    return rows


def _of_subject(recipe: str, subject: str, *, chat: bool) -> str:
    """Return a recipe with another subject; with `chat`, every step that has this setting gets it.

    The recipe is parsed to find the places, and its comments stay.
    """
    entries: dict[str, Command[Any]] = {**known_methods(), **known_attacks()}
    changes: list[tuple[int, int, str]] = []
    root: Any = yaml.compose(recipe)
    for key, value in root.value:
        if key.value == "subject":
            changes.append((value.start_mark.index, value.end_mark.index, json.dumps(subject, ensure_ascii=False)))
        elif chat and key.value in ("treatments", "attacks"):
            steps = [step for entry in value.value if isinstance(entry, yaml.MappingNode) for step in entry.value]
            for verb, settings in steps:
                kind = entries[verb.value].settings_class
                if kind is not None and "chat" in kind.model_fields:
                    changes.append((settings.start_mark.index, settings.start_mark.index + 1, "{chat: true, "))
    for start, end, text in sorted(changes, reverse=True):
        recipe = recipe[:start] + text + recipe[end:]
    return recipe


def _name_of_subject(subject: str, model: Path) -> str:
    return subject if is_hub_id(subject) else str(model.resolve())


def _refuse_taken(folder: Path, names: Iterable[str]) -> None:
    """Refuse a folder that contains one of these names, so that no file of the user is replaced."""
    for name in names:
        if (folder / name).exists():
            raise OutputExists(f"{folder / name} exists already.", cure="Choose a folder without it.")


def _move_into(made: Path, folder: Path) -> list[str]:
    """Move everything that was made into the folder, or nothing if a name is taken; return the names."""
    names = sorted(each.name for each in made.iterdir())
    _refuse_taken(folder, names)
    for name in names:
        (made / name).rename(folder / name)
    return names


_ROWS = (".jsonl", ".csv", ".txt")
_PLACEHOLDERS = """
# Files that show the format, with their digests. The recipe does not run before you replace them by your own data.
placeholders:
"""


def _use_of(model: Path) -> str:
    """The use of a model by its kind."""
    return next((use for use, (file, _) in _USES.items() if file and (model / file).is_file()), "compress")


def _federation(folder: Path, output: Output) -> None:
    """The app of examples/federate, which a wheel holds, too."""
    with resources.as_file(resources.files("netweight")) as netweight:
        places = (above / "examples" / "federate" for above in (netweight, netweight.parents[1]))
        source = next(place for place in places if place.is_dir())
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".netweight-init-", dir=folder) as made:
            shutil.copytree(source, made, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
            names = _move_into(Path(made), folder)
    project = folder / "pyproject.toml"
    name = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "federation"
    project.write_text(project.read_text(encoding="utf-8").replace('name = "digits"', f'name = "{name}"'), "utf-8")
    output.line(f"Written to {folder}: {', '.join(names)}.", bold=True)
    output.line(f"Put your model and data into {folder / 'app.py'}. {folder / 'README.md'} describes how to run it.")
    output.result({"folder": str(folder), "recipes": []})


def _toys(folder: Path) -> None:
    """A language model, a pipeline, and a folder of LoRAs with labels."""
    from netweight.store.bank.bank import AdapterBank
    from netweight.store.lora_formats.writing import write_adapter
    from netweight.toys import checkpoint
    from netweight.toys.language import cipher_world

    cipher_world().save(folder / "my-model")
    shutil.copytree(checkpoint("shapes-diffusion"), folder / "my-pipeline")
    shutil.copy(checkpoint("faces-bank") / "labels.csv", folder)
    bank = AdapterBank.open(checkpoint("faces-bank") / "bank")
    adapters = bank.stack(0, len(bank))
    for number, name in enumerate(bank.names):
        # All have the same modules and shapes, so that the first is checked for all.
        write_adapter(adapters.adapter(number), folder / "my-loras" / name, layout="peft", check=number == 0)
