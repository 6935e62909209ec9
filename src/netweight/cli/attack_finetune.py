"""`netweight attack finetune`: how long a language model resists fine-tuning on what it is not to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from netweight.attacks.finetuning.settings import FolderAttack
from netweight.cli.attack_end import end_attack, new_report
from netweight.cli.generated import options
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FOLDER, OUTPUT_FOLDER
from netweight.core.progress import QUIET, Progress


@click.command("finetune")
@click.argument("model", type=FOLDER)
@options(FolderAttack)
@click.option("--seed", default=0, show_default=True, help="Seed of the held-out rows and of the intervals.")
@click.option("--out", required=True, type=OUTPUT_FOLDER, help="Folder for the results.")
@output_option
@click.pass_context
def finetune(
    context: click.Context, /, model: Path, settings: FolderAttack, out: Path, seed: int, output: Output
) -> None:
    """Fine-tune MODEL on harmful rows, in many ways, and count the steps until it does what it is not to do.

    MODEL is a folder of transformers and stays as it is. A fifth of the prompts is held out and looked at; without
    --base there is nothing to compare with. OUT receives attacks.jsonl, from which a second call continues, and a
    report.

    Exits with 1 if a finding fails.
    """
    from netweight.attacks.finetuning.folder import attack_folders, goal_words, plan
    from netweight.attacks.finetuning.report import add_section

    how: Any = {"ledger": out / "attacks.jsonl", "seed": seed, "progress": QUIET if output.as_json else Progress()}
    how["engine"] = context.with_resource(settings.running())
    planned = plan(settings, model, **how)
    goal = goal_words(planned.goal)
    named = ", ".join(subject.name for subject in planned.subjects)
    output.line(f"{len(planned.attacks)} attacks on: {named}. Recovered: {goal}")
    found = attack_folders(settings, planned, **how)
    report = new_report(
        f"Fine-tuning attacks on {model.name}", f"Recovered means: {goal}.", seed=seed, files=settings.files
    )
    findings = add_section(report, found.sweep, planned.config, seed=seed, stability=found.stability)
    conclusion = report.sections[0].conclusion
    end_attack(
        context, output, report, findings, out=out, verdicts=[conclusion],
        result={"threshold": planned.goal.threshold, "verdict": conclusion, "ledger": str(how["ledger"])},
    )  # fmt: skip
