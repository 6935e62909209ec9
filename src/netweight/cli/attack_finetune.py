"""`netweight attack finetune`: how long a language model resists fine-tuning on what it is not to do."""

from __future__ import annotations

from pathlib import Path

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
    from netweight.attacks.finetuning.folder import SweepPlan, attack_folders

    ledger = out / "attacks.jsonl"

    def announce(plan: SweepPlan) -> None:
        named = ", ".join(subject.name for subject in plan.subjects)
        output.line(f"{len(plan.attacks)} attacks on: {named}. Recovered: {plan.recovered}")

    progress = QUIET if output.as_json else Progress()
    plan, section = attack_folders(settings, model, ledger=ledger, seed=seed, progress=progress, planned=announce)
    report = new_report(
        f"Fine-tuning attacks on {model.name}", f"Recovered means: {plan.recovered}.", seed=seed, files=settings.files
    )
    report.add(section)
    end_attack(
        context, output, report, section.findings, out=out, verdicts=[section.conclusion],
        result={"threshold": plan.goal.threshold, "verdict": section.conclusion, "ledger": str(ledger)},
    )  # fmt: skip
