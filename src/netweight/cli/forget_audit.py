"""`netweight forget audit`: what an edit suppresses, what it costs others, and whether a search gets images back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from netweight.cli.attack_end import end_attack, new_report
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FILE, FOLDER, OUTPUT_FOLDER
from netweight.cli.search_options import folder_search, search_options
from netweight.core.progress import QUIET, Progress


@click.command()
@click.argument("edited", type=FOLDER)
@search_options
@click.option("--ordinary", required=True, type=FILE,
              help="Prompts that are not memorized, 100 or more: they calibrate detection, and what becomes of their "
              "images is looked at.")  # fmt: skip
@click.option("--column", default="prompt", show_default=True, help="Column of prompts in --ordinary.")
@click.option("--per-prompt", type=click.IntRange(1), default=8, show_default=True, help="Images of every prompt.")
@click.option("--look-seeds", type=click.IntRange(2), default=10, show_default=True,
              help="Initial noises per prompt that detection compares.")  # fmt: skip
@click.option("--clip", type=FOLDER, help="A folder of transformers with a CLIP: how well images follow prompts.")
@click.option("--search/--no-search", "searched", default=True, show_default=True,
              help="Search for embeddings; without it the report says in red what was not proved.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="First seed of images and searches, that of intervals.")
@click.option("--out", required=True, type=OUTPUT_FOLDER, help="Folder for the results.")
@output_option
@click.pass_context
def audit(context: click.Context, /, edited: Path, out: Path, seed: int, output: Output, **options: Any) -> None:
    """Say what an edit of a pipeline came to: EDITED beside the pipeline before, on its memorized prompts and others.

    Four audits: how well detection tells prompts apart, which neurons were found, what the same seeds paint before and
    after the edit and with as many random neurons off, and whether a search for embeddings brings images back. OUT
    receives the report, and scores, images and searches, from which a second call continues.

    Exits with 1 if a finding fails.
    """
    from netweight.methods.forget.folder import FolderAudit, audit_folder

    seeds = options.pop("seeds")
    search = folder_search(options)
    asked = FolderAudit(
        search, options["ordinary"], options["column"], images=options["per_prompt"],
        look_seeds=options["look_seeds"], clip=options["clip"], searched=options["searched"],
        search_seeds=range(seed, seed + seeds),
    )  # fmt: skip
    report = new_report(
        f"{edited.name}: what was forgotten",
        "Suppressed means that no image of the seeds looked at copies the training image; whether it can still be "
        "found is what the search asks.",
        seed=seed, files=[*search.files, asked.ordinary],
    )  # fmt: skip
    done = audit_folder(
        asked, edited, report, folder=out, seed=seed, progress=QUIET if output.as_json else Progress()
    )  # fmt: skip
    told = [*done.suppressed.items(), *done.searched.items()]
    end_attack(
        context, output, report, done.findings, out=out, verdicts=[f"{name}: {words}" for name, words in told],
        result={"suppressed": dict(done.suppressed), "searched": dict(done.searched)},
    )  # fmt: skip
