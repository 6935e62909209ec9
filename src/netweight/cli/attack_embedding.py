"""`netweight attack embedding`: whether an edit of a diffusion model keeps its images from being found again."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import click

from netweight.cli import FINDING_FAILED
from netweight.cli.finding_row import finding_row
from netweight.cli.named_folder import named_folder
from netweight.cli.output import Output, output_option
from netweight.core.progress import QUIET, Progress

__all__ = ["embedding"]

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
_SEARCH = ("steps", "lr", "draws", "restarts", "radius", "images", "guidance", "generation_steps", "threshold", "share")


@click.command("embedding")
@click.argument("model", type=_FOLDER)
@click.option("--base", required=True, type=_FOLDER, help="The pipeline before its edit.")
@click.option("--targets", required=True, type=_FILE, help="Rows with prompt and image (a file): memorized pairs.")
@click.option(
    "--controls", type=_FILE,
    help="Rows likewise, of images never trained on; by default targets upside down, colors exchanged.",
)  # fmt: skip
@click.option("--unrelated", type=_FILE, help="Rows with prompt, to start from; by default a dozen plain ones.")
@click.option("--also", multiple=True, metavar="NAME=FOLDER", help="A further edited pipeline, such as a hardened one.")
@click.option("--steps", type=click.IntRange(1), help="Most steps of a search; 200 by default.")
@click.option("--lr", type=click.FloatRange(0, min_open=True),
              help="Learning rate as a share of the embedding's size; 0.1 by default.")  # fmt: skip
@click.option("--draws", type=click.IntRange(1), help="Timesteps and noises per step; 8 by default.")
@click.option("--restarts", type=click.IntRange(1), help="Searches from each of the three starts; 2 by default.")
@click.option("--radius", type=click.FloatRange(0, min_open=True), help="Largest change, as a share of the embedding.")
@click.option("--images", type=click.IntRange(1), help="Images per look; 4 by default.")
@click.option("--guidance", type=float, help="Of their generation; 7 by default.")
@click.option("--generation-steps", type=click.IntRange(1), help="Of their scheduler; 50 by default.")
@click.option("--threshold", type=float, help="Similarity that counts as brought back; 0.7 by default.")
@click.option("--share", type=click.FloatRange(0, 1), help="Share of a look's images that must reach it; 0.5.")
@click.option("--seeds", type=click.IntRange(1), default=1, show_default=True, help="Seeds of every search.")
@click.option("--sscd", type=_FILE, help="SSCD's TorchScript file; without it centered pixels are compared.")
@click.option("--sscd-sha256", metavar="HEX", help="Its digest.")
@click.option(
    "--least-resistance", type=click.FloatRange(0),
    help="Steps that --also models are to need, as a multiple of MODEL's; the finding fails below it.",
)  # fmt: skip
@click.option("--device", default="cpu", show_default=True, help="Where models go, such as cuda.")
@click.option("--seed", default=0, show_default=True, help="First seed of the searches, and that of the intervals.")
@click.option("--out", required=True, type=click.Path(path_type=Path, file_okay=False), help="Folder for the results.")
@output_option
@click.pass_context
def embedding(context: click.Context, /, model: Path, out: Path, seed: int, output: Output, **options: Any) -> None:
    """Search for text embeddings that make MODEL, an edited diffusion pipeline, paint memorized images again.

    The same searches are made in the pipeline before its edit and for images that were never trained on: without
    these nobody knows what the search paints by itself. OUT receives searches.jsonl, from which a second call
    continues, the embeddings and images of every search, and a report.

    Exits with 1 if a finding fails.
    """
    from netweight.attacks.embedding_search.comparison import LEDGER, compare
    from netweight.attacks.embedding_search.findings import verdict
    from netweight.attacks.embedding_search.showing import add_section
    from netweight.core.digest import of_file
    from netweight.evidence.report import Report
    from netweight.zoo.embedding_attack import FolderSearch, prepare

    count = options.pop("seeds")
    search = {name: value for name in _SEARCH if (value := options.pop(name)) is not None}
    options["also"] = dict(named_folder(text) for text in options["also"])
    attack = FolderSearch(**options, search=search)
    prepared = prepare(attack, model)
    names = ", ".join(subject.name for subject in prepared.subjects)
    planted = sum(target.trained for target in prepared.targets)
    output.line(f"{planted} memorized images and {len(prepared.targets) - planted} controls, searched in: {names}.")
    found = compare(
        prepared.subjects, prepared.targets, prepared.unrelated, prepared.settings, seeds=range(seed, seed + count),
        similarity=prepared.similarity, measure=prepared.measure, folder=out,
        progress=QUIET if output.as_json else Progress(),
    )  # fmt: skip
    goal = f"{prepared.settings.needed} of {prepared.settings.images} images with {prepared.measure} of at least "
    goal += f"{prepared.settings.threshold:g} to the target"
    report = Report(
        f"Search for embeddings in {model.name}",
        summary=f"Brought back means: {goal}.",
        command=shlex.join(["netweight", *sys.argv[1:]]),
        seeds=(seed,),
        inputs={path.name: of_file(path) for path in attack.files},
    )
    findings = add_section(report, found, prepared.targets, prepared.wanted, folder=out, seed=seed)
    page = report.write(out)
    output.table((), [finding_row(finding) for finding in findings], indent=2)
    for name in found.subjects:
        output.line(f"{name}: {verdict(found, name)}", bold=True)
    output.line(f"Report: {page}")
    output.result({
        "verdicts": {name: verdict(found, name) for name in found.subjects},
        "findings": [finding.to_json() for finding in findings],
        "report": str(page),
        "ledger": str(out / LEDGER),
    })  # fmt: skip
    if any(finding.passed is False for finding in findings):
        context.exit(FINDING_FAILED)
