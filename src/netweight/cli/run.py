"""`netweight run` runs a recipe, `report` shows what it measured, `tour` runs the recipe that ships."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli import FINDING_FAILED, FOLDER, GroupedCommand, Output, command_line, output_option
from netweight.cli.generate import size_of
from netweight.core import quantities
from netweight.core.progress import Progress
from netweight.registry import shell_line
from netweight.settings import Settings

if TYPE_CHECKING:
    from netweight import recipes


def _print_schema(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        from netweight.recipes import recipe_schema
        from netweight.report.report import json_schema

        schema = recipe_schema() if context.info_name == "run" else json_schema()
        click.echo(json.dumps(schema, indent=2, ensure_ascii=False))
        context.exit()


@click.command(cls=GroupedCommand, short_help="Run a recipe.", example="netweight run recipe.yaml --plan")
@click.argument("recipe", type=click.Path(dir_okay=False))
@click.option("--plan", "only_plan", is_flag=True,
              help="Check the recipe and show its steps with an estimate of their time; write nothing.")  # fmt: skip
@click.option("--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
              help="Print the JSON schema of recipes, for editors; run nothing.")  # fmt: skip
@click.option(
    "--subject", metavar="MODEL", help="Use this model instead of the recipe's subject: a path, or an id on the hub."
)
@click.option("--output", "folder", metavar="FOLDER", help="Write results here instead of the recipe's folder.")
@click.option("--only", metavar="NAMES", help="Chapters to run, such as train,attack; all by default.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True,
              help="Number of chapters that run at the same time, in processes that share the cores.")  # fmt: skip
@output_option
@click.pass_context
def run(
    context: click.Context,
    recipe: str,
    only_plan: bool,
    subject: str | None,
    folder: str | None,
    only: str | None,
    jobs: int,
    output: Output,
) -> None:
    """Run a recipe: treatments, audits and attacks from the YAML file RECIPE.

    Steps and attacks that an earlier run finished are not run again; `--plan` shows which. The output begins with
    a list of them. A step is the same if its input, its settings and the files that they name are unchanged. Exits with
    1 if a target is missed or could not be measured.
    """
    from netweight import recipes
    from netweight.report.report import read_report
    from netweight.report.verdict import decide

    names = None if only is None else [name.strip() for name in only.split(",")]
    plan = recipes.Plan.of(recipes.read_recipe(recipe, subject=subject, output=folder, only=names))
    if only_plan:
        times = [recipes.estimates(part) for part in plan.parts]
        remarks = [part.previews() for part in plan.parts]
        payload = {"estimates": [[vars(each) for each in part] for part in times], "remarks": remarks}
        output.result({"plan": plan.to_json(states=True, progress=Progress()), **payload})
        for part, estimates, sentences in zip(plan.parts, times, remarks, strict=True):
            _show_plan(output, part, part.states(progress=Progress()), estimates, sentences)
        return
    try:
        done = recipes.run(plan, progress=Progress(), command=command_line(), jobs=jobs)
    except KeyboardInterrupt:
        kept = (
            f"The finished steps and checkpoints are kept in {plan.recipe.output}. The same command continues after "
            "the last of them; a step without checkpoints begins again."
        )
        nothing = "Nothing was kept: no step had ended or written a checkpoint."
        output.warn((kept if plan.recipe.output.exists() else nothing) + _without_checkpoints(plan))
        raise
    page = plan.recipe.output / "report.html"
    continued = [
        recipes.describe_continued(entry.chapter, entry.step, entry.continued) for entry in done if entry.continued
    ]
    if continued:
        output.line(f"Continued an earlier run: {'; '.join(continued)}.")
    _show(output, done)
    verdict = decide(read_report(plan.recipe.output).sections)
    output.line(f"\nReport: {page}")
    made = [entry.path for entry in done if isinstance(entry.step, recipes.Step)]
    if made:
        output.line(f"Written: {made[-1]} ({size_of(made[-1])}).")
        release = f"{plan.recipe.output.resolve().name}-release"
        output.line(f"Next: {shell_line('cp', '-r', made[-1], release)}")
        output.line(f"Next: {shell_line('netweight', 'report', plan.recipe.output, '--card', release)}")
    output.verdict(verdict)
    output.result({
        "plan": plan.to_json(), "steps": [_as_json(step) for step in done], "report": str(page),
        "verdict": verdict.to_json(), **({"continued": continued} if continued else {}),
    })  # fmt: skip
    if verdict.failed:
        context.exit(FINDING_FAILED)


def _without_checkpoints(plan: recipes.Plan) -> str:
    """Return a sentence about unfinished treatments that could write checkpoints and do not; empty without any."""
    names = [
        f"step {step.number}, {step.verb}" for part in plan.parts for step in part.steps
        if getattr(step.choice.settings, "checkpoint_every", 0) is None
        and not any(part.recipe.output.glob(f"{step.number:02d}-{step.verb}-*"))
    ]  # fmt: skip
    return f" With the setting checkpoint_every, {' and '.join(names)} would write checkpoints." if names else ""


def _show_plan(
    output: Output,
    plan: recipes.Plan,
    states: list[recipes.StepState],
    estimates: list[recipes.Estimate],
    remarks: list[list[str]],
) -> None:
    output.line(f"{plan.recipe.subject} → {plan.recipe.output}", bold=bool(plan.recipe.name))
    for step, mark, estimate, sentences in zip(plan.steps, states, estimates, remarks, strict=False):
        output.line(f"{step.number}. {step.verb}: {_given(step.choice.settings)}")
        by_attack = [f"{name} (by the recipe's attack)" for name in step.by_attack]
        output.line(f"   audits: {', '.join([*step.audits, *by_attack]) or 'none'}")
        _show_tested(output, step, sentences)
        _show_known(output, mark, estimate)
        _show_left_out(output, step)
    count = len(plan.steps)
    rest = zip(plan.attacks, states[count:], estimates[count:], remarks[count:], strict=True)
    for attack, mark, estimate, sentences in rest:
        output.line(f"{attack.number}. attack {attack.verb}: {_given(attack.choice.settings)}")
        _show_tested(output, attack, sentences)
        _show_known(output, mark, estimate)
    size = sum(file.stat().st_size for file in [plan.recipe.subject, *plan.recipe.subject.rglob("*")] if file.is_file())
    output.line(
        f"Disk: at most {quantities.size(count * size)} for models (the subject has {quantities.size(size)}), plus the "
        "files of audits and attacks."
    )


def _show_tested(output: Output, step: recipes.Step | recipes.AttackStep, remarks: list[str]) -> None:
    """Show what a step tests and how strongly, and what a reader should know of its files."""
    if step.tested:
        output.line("   what is tested, and how strongly:")
        output.table((), list(step.tested.items()), indent=5)
    for sentence in remarks:
        output.warn(sentence)


def _given(settings: Settings) -> str:
    """The settings that a recipe or a preset gives; `--json` has all."""
    given = ", ".join(f"{key}={value}" for key, value in _plain(settings).items())
    return f"{given}; all other settings have their defaults" if given else "all by default"


def _plain(settings: Settings) -> dict[str, Any]:
    return settings.given_json()


def _show_known(output: Output, mark: recipes.StepState, estimate: recipes.Estimate) -> None:
    if mark.finished:
        left = f", except for the audits {', '.join(mark.to_audit)}" if mark.to_audit else ""
        output.line(f"   done by an earlier run{left}")
    elif estimate.seconds is None:
        output.line(f"   time: {estimate.reason}")
    else:
        output.line(f"   time: about {estimate.seconds / 60:.1f} minutes ({estimate.reason})")


def _show_left_out(output: Output, step: recipes.Step) -> None:
    if step.left_out or not (step.audits or step.by_attack):
        missing = ", ".join(step.left_out) or "all"
        output.line(f"   audits left out: {missing}", fg="red")


def _show(output: Output, done: list[recipes.StepResult]) -> None:
    from netweight import recipes

    for entry in done:
        if isinstance(entry.step, recipes.Step):
            output.line(f"{entry.step.number}. {entry.step.verb} → {entry.path}", bold=True)
            if entry.from_ledger:
                output.line("   done by an earlier run")
            _show_left_out(output, entry.step)
        else:
            output.line(f"{entry.step.number}. attack {entry.step.verb} on {entry.path}", bold=True)
            if entry.from_ledger:
                output.line("   done by an earlier run")
        findings = [finding for each in entry.findings.values() for finding in each]
        output.findings(findings, indent=3)


def _as_json(entry: recipes.StepResult) -> dict[str, Any]:
    from netweight import recipes

    left_out = entry.step.left_out if isinstance(entry.step, recipes.Step) else None
    return {
        **({"chapter": entry.chapter} if entry.chapter else {}),
        "attack" if left_out is None else "treatment": entry.step.verb,
        "path": str(entry.path),
        "from_ledger": entry.from_ledger,
        "left_out": list(left_out or ()),
        "findings": {name: [finding.to_json() for finding in each] for name, each in entry.findings.items()},
    }


@click.command(cls=GroupedCommand, example="netweight report runs/release --card my-model-release")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--card", "model", type=FOLDER, help="Add the results of RUN to the README.md of this model's folder.")
@click.option("--schema", is_flag=True, is_eager=True, expose_value=False, callback=_print_schema,
              help="Print the JSON schema of report.json; read no run.")  # fmt: skip
@output_option
@click.pass_context
def report(context: click.Context, run: Path, model: Path | None, output: Output) -> None:
    """Show the verdict and the findings of RUN, and write RUN/report.html again from RUN/report.json.

    RUN is the folder of a run. With --card, two sections are written into the README.md of a model's folder: one with
    all findings, and one that describes the treatment as the records in the folder state it. The first line of the card
    states the worst verdict of all runs that were added and are about the present weights. Exits with 1 if the
    verdict is not to publish, and with 2 if RUN contains no report.json or one that does not fit the schema.
    """
    from netweight.report.report import read_report, rewrite
    from netweight.report.verdict import decide

    page = rewrite(run)
    document = read_report(run)
    verdicts = {section.title: decide(section) for section in document.sections}
    verdict = decide(document.sections)
    output.line(document.title, bold=True)
    words = {"passed": "passed", "failed": "failed", "none": "reported"}
    output.table(
        ["section", "", "verdict"], [(title, words[each.outcome], each.sentence) for title, each in verdicts.items()],
        indent=2,
    )  # fmt: skip
    output.line(f"Page: {page}")
    card = None if model is None else _card(model, run)
    if model is not None:
        from netweight.plugins.model_card import verdict_of, worse_verdict
        from netweight.report.verdict import stated_outcome

        output.line(f"Card: {card}")
        # The card may state the worse verdict of an earlier report, with which publishing would be refused.
        if stated_outcome(verdict_of(model) or "") == "passed":
            output.line(f"Next: {shell_line('netweight', 'publish', model)}")
        if worse := worse_verdict(model, verdict):
            output.warn(worse)
    output.verdict(verdict)
    sections = [{"title": title, "verdict": each.outcome, "text": each.sentence} for title, each in verdicts.items()]
    output.result({"title": document.title, "page": str(page), "sections": sections, "verdict": verdict.to_json(),
                   **({} if card is None else {"card": str(card)})})  # fmt: skip
    if verdict.failed:
        context.exit(FINDING_FAILED)


def _card(model: Path, run: Path) -> Path:
    from netweight.errors import UsageError
    from netweight.plugins.model_card import add_evidence, entries_of, update_card

    if model.resolve().is_relative_to(run.resolve()):
        raise UsageError(
            f"{model} is a result of the run in {run}. With a card, it would no longer be what the run recorded, and "
            "the run could not be continued.",
            cure="Copy the folder of the model to another place, and name the copy as --card.",
        )
    if entries_of(model):
        update_card(model)
    return add_evidence(model, run)


_OUT = Path("out") / "tour"


@click.command(cls=GroupedCommand, example="netweight tour --only federate,forget")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    default=_OUT,
    show_default=True,
    help="Folder for the report.",
)
@click.option("--only", metavar="NAMES", help="Chapters to run, such as federate,forget; all by default.")
@click.option("--keep", is_flag=True, help="Keep the recipe and the models, about 400 MB, in OUT/models.")
@click.option("--jobs", type=click.IntRange(1),
              help="Number of chapters that run at the same time; by default one for each core, at most "
              "four.")  # fmt: skip
@output_option
@click.pass_context
def tour(context: click.Context, out: Path, only: str | None, keep: bool, jobs: int | None, output: Output) -> None:
    """Run every method once on small models, and write a report.

    The chapters are: federate (clients train together, and the server's view is attacked), forget and siss (a
    text-to-image model that repeats training pictures), immunize (a language model that resists fine-tuning), space and
    adapters (hundreds of LoRA adapters as one space), compress and bf16 (a model of 22.7 million weights, compressed
    without loss). labels.html shows the labels of the models that were made. The tour needs the extra `tour`, no
    network and some minutes; the same command continues a tour that was interrupted. Exits with 1 if a target is
    missed; the report names attacks that succeed.
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
        output.warn(f"The finished work is kept in {out / 'models'}. The same command continues from there.")
        raise
    for title, sentence in done.verdicts.items():
        output.line(f"{title}. {sentence}")
    output.line(f"\nDone in {done.seconds:.0f} s. Report: {done.report}")
    if done.labels is not None:
        output.line(f"Labels of the models: {done.labels}")
    output.line("Next: netweight init DIR")
    output.verdict(done.verdict)
    output.result({
        "report": str(done.report), "passed": not done.verdict.failed, "verdict": done.verdict.to_json(),
        "seconds": done.seconds, "taken over": done.taken_over,
        "labels": None if done.labels is None else str(done.labels),
        "verdicts": done.verdicts,
        "findings": [finding.to_json() for finding in done.findings],
    })  # fmt: skip
    if done.verdict.failed:
        context.exit(FINDING_FAILED)


def _as_given(out: Path, only: str | None, keep: bool) -> str:
    parts = ["netweight", "tour", "--out", str(out)]
    return shlex.join([*parts, *(["--only", only] if only is not None else []), *(["--keep"] if keep else [])])
