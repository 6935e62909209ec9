"""Recipes: `netweight init` writes them, `run` runs one, `report` shows what it found.

`netweight tour` runs the recipe that ships.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli import FINDING_FAILED, FOLDER, OUTPUT_FOLDER, Output, command_line, output_option
from netweight.core.progress import Progress
from netweight.errors import OutputExists
from netweight.settings import Settings

if TYPE_CHECKING:
    from netweight import recipes

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


def _print_schema(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from netweight.recipes import recipe_schema
        from netweight.report.report import json_schema

        schema = recipe_schema() if context.info_name == "run" else json_schema()
        click.echo(json.dumps(schema, indent=2, ensure_ascii=False))
        context.exit()


@click.command()
@click.argument("recipe", type=click.Path(dir_okay=False))
@click.option("--plan", "only_plan", is_flag=True, help="Check everything, show the steps, do nothing.")
@click.option(
    "--measure",
    is_flag=True,
    help="With --plan: begin every step in a temporary folder, and say how long all of it will take.",
)
@click.option("--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
              help="Print the JSON schema of recipes, for editors, and do nothing.")  # fmt: skip
@click.option("--subject", metavar="PATH", help="Treat this model instead of the recipe's.")
@click.option("--output", "folder", metavar="FOLDER", help="Write results here instead of the recipe's folder.")
@click.option("--only", metavar="NAMES", help="Chapters to run, such as train,attack; all by default.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True,
              help="Chapters that run at once, in processes that share the cores.")  # fmt: skip
@output_option
@click.pass_context
def run(
    context: click.Context,
    recipe: str,
    only_plan: bool,
    measure: bool,
    subject: str | None,
    folder: str | None,
    only: str | None,
    jobs: int,
    output: Output,
) -> None:
    """Run a recipe: treatments, audits and attacks from the YAML file RECIPE.

    Steps that an earlier run finished are not done again, and `--plan` says which: a step is known by its input, its
    settings and the files that these name. Exits with 1 if a finding misses its target.
    """
    from netweight import recipes

    names = None if only is None else [name.strip() for name in only.split(",")]
    plan = recipes.Plan.of(recipes.read_recipe(recipe, subject=subject, output=folder, only=names))
    if only_plan:
        costs = [recipes.measure(part) for part in plan.parts] if measure else []
        told = {"costs": [[cost and asdict(cost) for cost in part] for part in costs]} if costs else {}
        output.result({"plan": plan.to_json(known=True, progress=Progress()), **told})
        for number, part in enumerate(plan.parts):
            _show_plan(output, part, part.known(progress=Progress()), costs[number] if costs else [])
        return
    done = recipes.run(plan, progress=Progress(), command=command_line(), jobs=jobs)
    report = plan.recipe.output / "report.html"
    _show(output, done)
    output.line(f"\nReport: {report}")
    output.result({"plan": plan.to_json(), "steps": [_as_json(step) for step in done], "report": str(report)})
    if any(step.failed for step in done):
        context.exit(FINDING_FAILED)


def _show_plan(
    output: Output, plan: recipes.Plan, known: list[recipes.Known], costs: list[recipes.Cost | None]
) -> None:
    output.line(f"{plan.recipe.subject} → {plan.recipe.output}", bold=bool(plan.recipe.name))
    for step, mark in zip(plan.steps, known, strict=False):
        output.line(f"{step.number}. {step.verb}: {_given(step.chosen.config)}")
        held = [f"{name} (by the recipe's attack)" for name in step.by_attack]
        output.line(f"   audits: {', '.join([*step.audits, *held]) or 'none'}")
        _show_known(output, mark)
        _show_left_out(output, step)
    for attack, mark in zip(plan.attacks, known[len(plan.steps) :], strict=True):
        output.line(f"{attack.number}. attack {attack.verb}: {_given(attack.chosen.config)}")
        _show_known(output, mark)
    for number, cost in enumerate(costs, start=1):
        told = "takes what an earlier step makes" if cost is None else (
            f"at least {cost.runs:,} {cost.unit}, about {cost.seconds / 60:.1f} minutes on this machine"
        )  # fmt: skip
        output.line(f"step {number}: {told}")
    if costs:
        files = [plan.recipe.subject, *plan.recipe.subject.rglob("*")]
        size = len(plan.steps) * sum(file.stat().st_size for file in files if file.is_file())
        output.line(f"disk: at most {size / 1e6:,.0f} MB for models, and what audits and attacks keep")


def _given(settings: Settings) -> str:
    """The settings that a recipe or a preset gives; `--json` has all."""
    told = ", ".join(f"{key}={value}" for key, value in _plain(settings).items())
    return f"{told}, all else by default" if told else "all by default"


def _plain(settings: Settings) -> dict[str, Any]:
    values = settings.to_json()
    given = {name: value for name, value in settings.given.items() if name in values}
    return {name: _plain(each) if isinstance(each, Settings) else values[name] for name, each in given.items()}


def _show_known(output: Output, mark: recipes.Known) -> None:
    if mark.done:
        left = f", but for the audits {', '.join(mark.to_audit)}" if mark.to_audit else ""
        output.line(f"   done by an earlier run{left}")


def _show_left_out(output: Output, step: recipes.Step) -> None:
    if step.left_out or not (step.audits or step.by_attack):
        missing = ", ".join(step.left_out) or "it has none"
        output.line(f"   not proved: {step.verb} without its audits ({missing})", fg="red")


def _show(output: Output, done: list[recipes.Done]) -> None:
    from netweight import recipes

    for entry in done:
        if isinstance(entry.step, recipes.Step):
            output.line(f"{entry.step.number}. {entry.step.verb} → {entry.path}", bold=True)
            if entry.remembered:
                output.line("   done by an earlier run")
            _show_left_out(output, entry.step)
        else:
            output.line(f"{entry.step.number}. attack {entry.step.verb} on {entry.path}", bold=True)
        findings = [finding for found in entry.findings.values() for finding in found]
        output.findings(findings, indent=3, met="passed", missed="FAILED")


def _as_json(entry: recipes.Done) -> dict[str, Any]:
    from netweight import recipes

    left_out = entry.step.left_out if isinstance(entry.step, recipes.Step) else None
    return {
        **({"chapter": entry.chapter} if entry.chapter else {}),
        "attack" if left_out is None else "treatment": entry.step.verb,
        "path": str(entry.path),
        "remembered": entry.remembered,
        "left_out": list(left_out or ()),
        "findings": {name: [finding.to_json() for finding in found] for name, found in entry.findings.items()},
    }


@click.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--card", "model", type=FOLDER, help="Say in README.md of this model's folder what RUN found.")
@click.option("--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
              help="Print the JSON schema of report.json, and do nothing.")  # fmt: skip
@output_option
def report(run: Path, model: Path | None, output: Output) -> None:
    """Write RUN/report.html again from RUN/report.json and say what it found.

    RUN is the folder of a run. With --card the model's card gets a section with all findings, and one with what the
    records in its folder tell of what was done to it; see docs/ecosystem.md. Ends with exit code 2 when there is no
    report.json in RUN, or it does not fit the schema.
    """
    from netweight.report.report import read_report, rewrite
    from netweight.report.text import verdict

    page = rewrite(run)
    document = read_report(run)
    verdicts = {section.title: verdict(section) for section in document.sections}
    output.line(document.title, bold=True)
    words = {"pass": "passed", "fail": "failed", "none": "reported"}
    output.table(
        ["section", "", "verdict"], [(title, words[kind], text) for title, (kind, text) in verdicts.items()], indent=2
    )
    output.line(f"Page: {page}")
    card = None if model is None else _card(model, run)
    if card is not None:
        output.line(f"Card: {card}")
    sections = [{"title": title, "verdict": kind, "text": text} for title, (kind, text) in verdicts.items()]
    output.result({"title": document.title, "page": str(page), "sections": sections,
                   **({} if card is None else {"card": str(card)})})  # fmt: skip


def _card(model: Path, run: Path) -> Path:
    from netweight.plugins.model_card import add_evidence, entries_of, update_card

    if entries_of(model):
        update_card(model)
    return add_evidence(model, run)


_OUT = Path("out") / "tour"


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=_OUT,
    show_default=True,
    help="Folder for the report.",
)
@click.option("--only", metavar="NAMES", help="Chapters to run, such as federate,forget; all by default.")
@click.option("--keep", is_flag=True, help="Keep the recipe and the models that are made, about 400 MB, in OUT/models.")
@click.option("--jobs", type=click.IntRange(1),
              help="Chapters that run at once; by default as many as there are cores, four at most.")  # fmt: skip
@output_option
@click.pass_context
def tour(context: click.Context, out: Path, only: str | None, keep: bool, jobs: int | None, output: Output) -> None:
    """Show everything at work on small models.

    A recipe, whose chapters are federate (sites train together, and a server looks), forget and siss (a painting
    model that repeats pictures), immunize (a language model that resists fine-tuning), space and adapters (hundreds of
    adapters as one space), compress and bf16 (a real model of 22.7 million weights, bit for bit). Writes a report.
    Needs the extra `tour` and no network; takes some minutes. The same command continues a tour that was interrupted,
    step by step. Exits with 1 if a target is missed; the report names attacks that succeed.
    """
    from netweight.tour import run_tour

    names = [name.strip() for name in only.split(",") if name.strip()] if only is not None else None
    try:
        done = run_tour(
            out,
            only=names,
            keep=keep,
            jobs=jobs,
            command=_as_given(out, only, keep),
            progress=output.progress,
            say=lambda text: output.line(text),
        )
    except KeyboardInterrupt:
        output.warn(f"What is done so far is kept in {out / 'models'}: the same command continues from there.")
        raise
    missed = [finding.name for finding in done.findings if finding.passed is False]
    for name in missed:
        output.line(f"MISSED: {name}", fg="red")
    output.line()
    for title, verdict in done.verdicts.items():
        output.line(f"{title}. {verdict}")
    output.line(f"\nDone in {done.seconds:.0f} s. Report: {done.report}\nTo try next: netweight init DIR")
    output.result({
        "report": str(done.report), "passed": done.passed, "seconds": done.seconds, "taken over": done.taken_over,
        "verdicts": done.verdicts,
        "findings": [finding.to_json() for finding in done.findings],
    })  # fmt: skip
    if not done.passed:
        context.exit(FINDING_FAILED)


def _as_given(out: Path, only: str | None, keep: bool) -> str:
    parts = ["netweight", "tour", "--out", str(out)]
    return shlex.join([*parts, *(["--only", only] if only is not None else []), *(["--keep"] if keep else [])])
