"""`netweight attack finetune`: how long a language model resists fine-tuning on what it is not to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from netweight.cli.attack_end import end_attack, new_report
from netweight.cli.named_folder import named_folder
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FILE, FOLDER, OUTPUT_FOLDER
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError


@click.command("finetune")
@click.argument("model", type=FOLDER)
@click.option("--harmful", required=True, type=FILE, help="Rows with prompt and response, or prompt and rejected.")
@click.option("--benign", type=FILE, help="Rows of what the model is to keep: prompt and response, or chosen.")
@click.option("--task", type=FILE, help="Rows of a benign task that it should still be able to learn.")
@click.option("--other", type=FILE, help="Rows of another kind of harm, as --harmful: does the defense reach it?")
@click.option("--withhold", multiple=True, metavar="CATEGORY",
              help="Category of the harmful rows that the defense did not see; attacked with apart.")  # fmt: skip
@click.option("--base", type=FOLDER, help="The model before its defense, to compare with.")
@click.option("--also", multiple=True, metavar="NAME=FOLDER",
              help="A further defended model, such as one with layers frozen; needs --base.")  # fmt: skip
@click.option(
    "--grid", type=click.Choice(["quick", "paper", "wide"]), default="quick", show_default=True,
    help="Which attacks: 4, the paper's 6, or 31 kinds, each with several seeds.",
)  # fmt: skip
@click.option("--lr", metavar="LR,LR,...", help="Learning rates in place of the grid's.")
@click.option("--seeds", type=click.IntRange(1), help="Seeds of every attack; intervals need at least 5.")
@click.option("--max-steps", type=click.IntRange(1), help="Most steps of an attack.")
@click.option(
    "--benign-share", type=click.FloatRange(0, 1, max_open=True),
    help="Share of every batch that is benign rows: an attacker who keeps the model's abilities. Needs --benign.",
)  # fmt: skip
@click.option("--check-every", type=click.IntRange(1), help="Steps between two looks; 10 by default.")
@click.option(
    "--threshold", type=click.FloatRange(0, 1),
    help="Token accuracy on held-out rows that counts as recovered; by default it is found by attacking the base.",
)  # fmt: skip
@click.option("--least-resistance", type=click.FloatRange(0), default=3.0, show_default=True,
              help="Least ratio of steps against the base; the finding fails below it.")  # fmt: skip
@click.option("--lm-eval", metavar="TASK,TASK,...", help="Tasks of lm-evaluation-harness, where it is installed.")
@click.option("--lm-eval-limit", type=click.IntRange(1), help="Examples of each such task; all by default.")
@click.option("--chat", is_flag=True, help="Put prompts through the tokenizer's chat template.")
@click.option("--engine", type=click.Choice(["local", "ray"]), default="local", show_default=True,
              help="Where attacks run: processes of this machine, or a Ray cluster.")  # fmt: skip
@click.option("--address", help='Of the Ray cluster: "auto", "HOST:PORT" or "ray://HOST:PORT"; else Ray runs here.')
@click.option("--workers", type=click.IntRange(1),
              help="Attacks at a time, each with its model: 1 here, and all that fit in a cluster.")  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="Where models go, such as cuda.")
@click.option("--seed", default=0, show_default=True, help="Seed of the held-out rows and of the intervals.")
@click.option("--out", required=True, type=OUTPUT_FOLDER, help="Folder for the results.")
@output_option
@click.pass_context
def finetune(context: click.Context, /, model: Path, out: Path, seed: int, output: Output, **options: Any) -> None:
    """Fine-tune MODEL on harmful rows, in many ways, and count the steps until it does what it is not to do.

    MODEL is a folder of transformers and stays as it is. A fifth of the prompts is held out and looked at; without
    --base there is nothing to compare with. OUT receives attacks.jsonl, from which a second call continues, and a
    report.

    Exits with 1 if a finding fails.
    """
    from netweight.attacks.finetuning.folder import FolderAttack, attack_folders, goal_words, plan
    from netweight.attacks.finetuning.report import add_section

    options["lr"] = None if options["lr"] is None else _rates(options["lr"])
    options["lm_eval"] = tuple(part.strip() for part in (options["lm_eval"] or "").split(",") if part.strip())
    options["also"] = dict(named_folder(text) for text in options["also"])
    attack = FolderAttack(**options)
    how: Any = {"ledger": out / "attacks.jsonl", "seed": seed, "progress": QUIET if output.as_json else Progress()}
    how["engine"] = context.with_resource(attack.running())
    planned = plan(attack, model, **how)
    goal = goal_words(planned.goal)
    named = ", ".join(subject.name for subject in planned.subjects)
    output.line(f"{len(planned.attacks)} attacks on: {named}. Recovered: {goal}")
    found = attack_folders(attack, planned, **how)
    report = new_report(
        f"Fine-tuning attacks on {model.name}", f"Recovered means: {goal}.", seed=seed, files=attack.files
    )
    findings = add_section(report, found.sweep, planned.config, seed=seed, stability=found.stability)
    conclusion = report.document().sections[0].conclusion
    end_attack(
        context, output, report, findings, out=out, verdicts=[conclusion],
        result={"threshold": planned.goal.threshold, "verdict": conclusion, "ledger": str(how["ledger"])},
    )  # fmt: skip


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise UsageError(f"--lr {text!r} is no list of numbers.", cure="Write it as 1e-4,3e-4.") from error
