"""`netweight init`: writes recipes, and the files that they name."""

from __future__ import annotations

import json
import re
import shutil
from importlib import resources
from pathlib import Path

import click

from netweight.cli import OUTPUT_FOLDER, Output, output_option
from netweight.errors import OutputExists

# What tells the kind of a subject → the recipe for it.
_KINDS = {
    "model_index.json": "release-forgotten.yaml",
    "bank.json": "space.yaml",
    "config.json": "release-immunized.yaml",
}


@click.command()
@click.argument("folder", type=OUTPUT_FOLDER)
@click.option(
    "--subject", type=click.Path(path_type=Path, exists=True),
    help="A model or bank of yours: its recipe alone, with rows to replace by your own.",
)  # fmt: skip
@click.option("--federation", is_flag=True, help="An app for Flower alone, with your model and data to be put in.")
@output_option
def init(folder: Path, subject: Path | None, federation: bool, output: Output) -> None:
    """Write recipes and the files that they name into FOLDER.

    Without `--subject` everything is small and can be run at once: a language model, a pipeline, LoRAs, rows and
    pictures, and a recipe for each use. Their checkpoints are in the package netweight-toys.
    """
    if federation:
        _federation(folder, output)
        return
    recipes = {each.name: each for each in resources.files("netweight.recipes").iterdir() if each.suffix == ".yaml"}  # type: ignore[attr-defined]
    if subject is not None:
        found = next((recipe for file, recipe in _KINDS.items() if (subject / file).is_file()), "quickstart.yaml")
        recipes = {"recipe.yaml": recipes[found]}
    taken = [name for name in ("my-model", "pairs.jsonl", *recipes) if (folder / name).exists()]
    if taken:
        raise OutputExists(f"{folder / taken[0]} exists already.", cure="Choose a folder without it.")
    folder.mkdir(parents=True, exist_ok=True)
    named = "".join(each.read_text(encoding="utf-8") for each in recipes.values())
    if "pairs.jsonl" in named:
        from netweight.tour import write_ciphers

        write_ciphers(folder, pairs=400, attacked=400, seed=0)
    if "targets.csv" in named:
        from netweight.tour import write_pictures

        write_pictures(folder)
    if subject is None:
        _toys(folder)
    from netweight.recipes import recipe_schema
    from netweight.report.report import write_text

    for name, each in recipes.items():
        text = each.read_text(encoding="utf-8")
        if subject is not None:
            own = f"subject: {json.dumps(str(subject.resolve()), ensure_ascii=False)}"
            text = "\n".join(own if line.startswith("subject: ") else line for line in text.split("\n"))
        write_text(folder / name, text)
    write_text(folder / "recipe.schema.json", json.dumps(recipe_schema(), indent=2, ensure_ascii=False) + "\n")
    first = f"netweight run {'quickstart.yaml' if subject is None else 'recipe.yaml'} --plan"
    output.line(f"Written to {folder}: {', '.join(sorted(each.name for each in folder.iterdir()))}.", bold=True)
    output.line("To try next:\n  " + ("" if folder == Path() else f'cd "{folder}"\n  ') + first)
    output.result({"folder": str(folder), "recipes": sorted(recipes)})


def _federation(folder: Path, output: Output) -> None:
    """The app of examples/federate, which a wheel holds, too."""
    with resources.as_file(resources.files("netweight")) as netweight:
        places = (above / "examples" / "federate" for above in (netweight, netweight.parents[1]))
        source = next(place for place in places if place.is_dir())
        if (folder / "app.py").exists():
            raise OutputExists(f"{folder / 'app.py'} exists already.", cure="Choose a folder without it.")
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    project = folder / "pyproject.toml"
    name = re.sub("[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-") or "federation"
    project.write_text(project.read_text(encoding="utf-8").replace('name = "digits"', f'name = "{name}"'), "utf-8")
    output.line(f"Written to {folder}: {', '.join(sorted(each.name for each in folder.iterdir()))}.", bold=True)
    output.line(f"Put your model and data into {folder / 'app.py'}; {folder / 'README.md'} says how to run it.")
    output.result({"folder": str(folder), "recipes": []})


def _toys(folder: Path) -> None:
    """A language model, a pipeline, and a folder of LoRAs with labels."""
    from netweight.store.bank.bank import AdapterBank
    from netweight.store.lora_formats.files import write_adapter
    from netweight.toys import checkpoint
    from netweight.toys.language import cipher_world

    cipher_world().save(folder / "my-model")
    shutil.copytree(checkpoint("shapes-diffusion"), folder / "my-pipeline")
    shutil.copy(checkpoint("faces-bank") / "labels.csv", folder)
    bank = AdapterBank.open(checkpoint("faces-bank") / "bank")
    for name in bank.names:
        write_adapter(bank.adapter(name), folder / "my-loras" / name, layout="peft")
