"""`netweight attack embedding`: whether an edit of a diffusion model keeps its images from being found again."""

from __future__ import annotations

from pathlib import Path

import click

from netweight.attacks.embedding_search.settings import FolderSearch
from netweight.cli.attack_end import end_attack, new_report
from netweight.cli.generated import options
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FOLDER, OUTPUT_FOLDER
from netweight.core.progress import QUIET, Progress


@click.command("embedding")
@click.argument("model", type=FOLDER)
@options(FolderSearch)
@click.option("--seed", default=0, show_default=True, help="First seed of the searches, and that of the intervals.")
@click.option("--out", required=True, type=OUTPUT_FOLDER, help="Folder for the results.")
@output_option
@click.pass_context
def embedding(
    context: click.Context, /, model: Path, settings: FolderSearch, out: Path, seed: int, output: Output
) -> None:
    """Search for text embeddings that make MODEL, an edited diffusion pipeline, generate memorized images again.

    The same searches are made in the pipeline before its edit and for images that were never trained on: without
    these nobody knows what the search generates by itself. OUT receives searches.jsonl, from which a second call
    continues, the embeddings and images of every search, and a report.

    Exits with 1 if a finding fails.
    """
    from netweight.attacks.embedding_search.compare import LEDGER
    from netweight.attacks.embedding_search.folder import prepare
    from netweight.attacks.embedding_search.report import search_section, verdict

    prepared = prepare(settings, model)
    names = ", ".join(subject.name for subject in prepared.subjects)
    planted, controls = len(prepared.pairs), len(prepared.targets) - len(prepared.pairs)
    output.line(f"{planted} memorized images and {controls} controls, searched in: {names}.")
    progress = QUIET if output.as_json else Progress()
    found = prepared.compare(range(seed, seed + settings.seeds), folder=out, progress=progress)
    report = new_report(
        f"Search for embeddings in {model.name}", f"Brought back means: {prepared.goal}.", seed=seed,
        files=settings.files,
    )  # fmt: skip
    section = search_section(found, prepared.targets, prepared.wanted, folder=out, seed=seed)
    report.add(section)
    verdicts = {name: verdict(found, name) for name in found.subjects}
    end_attack(
        context, output, report, section.findings, out=out,
        verdicts=[f"{name}: {words}" for name, words in verdicts.items()],
        result={"verdicts": verdicts, "ledger": str(out / LEDGER)},
    )  # fmt: skip
