"""`netweight forget harden`: a pipeline trained so that embeddings which would bring images back lead elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from netweight.cli.output import Output, output_option
from netweight.cli.paths import FILE, FOLDER, NEW
from netweight.core.progress import QUIET, Progress

_TRAINED = ("rounds", "steps", "batch", "lr", "keep", "seed")
_SEARCHED = ("search_steps", "restarts", "guidance", "generation_steps")


@click.command()
@click.argument("pipeline", type=FOLDER)
@click.argument("destination", type=NEW)
@click.option("--targets", required=True, type=FILE, help="Rows with prompt and image (a file): memorized pairs.")
@click.option("--ordinary", required=True, type=FILE, help="Prompts whose answers are to stay.")
@click.option("--column", default="prompt", show_default=True, help="Column of prompts in --ordinary.")
@click.option("--surrogates", type=FILE,
              help="Rows likewise: what to paint instead, row by row; else images of ordinary prompts.")  # fmt: skip
@click.option("--layers", default="**.attn2.to_v", show_default=True,
              help='Modules whose weights are trained, by name with wildcards; "all" trains everything.')  # fmt: skip
@click.option("--rounds", type=click.IntRange(1), help="Searches, each followed by training; 8 by default.")
@click.option("--steps", type=click.IntRange(1), help="Training steps per round; 50 by default.")
@click.option("--batch", type=click.IntRange(1), help="Latents per step, twice; 16 by default.")
@click.option("--lr", type=click.FloatRange(0, min_open=True), help="Of Adam; 0.001 by default.")
@click.option("--keep", type=click.FloatRange(0), help="Weight of staying with the original; 1 by default.")
@click.option("--search-steps", type=click.IntRange(1), help="Steps of each search; 40 by default.")
@click.option("--restarts", type=click.IntRange(1), help="Searches from each of the three starts; 2 by default.")
@click.option("--guidance", type=float, help="Of generated surrogates and ordinary images; 7 by default.")
@click.option("--generation-steps", type=click.IntRange(1), help="Of their scheduler; 50 by default.")
@click.option("--seed", type=int, help="Of everything random; 0 by default.")
@click.option("--device", default="cpu", show_default=True, help="Where the pipeline goes, such as cuda.")
@output_option
def harden(pipeline: Path, destination: Path, output: Output, **options: Any) -> None:
    """Train PIPELINE against the search for embeddings and write it to DESTINATION, an ordinary folder.

    In rounds, embeddings that bring memorized images back are searched for, and the model is trained to paint other
    images under all found so far, and to answer ordinary prompts as before. This delays a search; by how much, and at
    what cost, is for `netweight forget audit` to say. The same command goes on where an earlier one was stopped.
    """
    from netweight.attacks.embedding_search.settings import SearchSettings
    from netweight.methods.forget.folder import FolderHardening, harden_folder
    from netweight.methods.forget.harden import HardenSettings

    search = {name.removeprefix("search_"): value for name in _SEARCHED if (value := options[name]) is not None}
    given = {name: value for name in _TRAINED if (value := options[name]) is not None}
    layers = None if options["layers"] == "all" else options["layers"]
    settings = HardenSettings(layers=layers, search=SearchSettings(**{"steps": 40, **search}), **given)
    hardening = FolderHardening(
        options["targets"], options["ordinary"], options["column"], options["surrogates"], settings, options["device"]
    )
    record = harden_folder(pipeline, destination, hardening, progress=QUIET if output.as_json else Progress())
    rows = [(log.number + 1, *(f"{value:.4g}" for value in (log.searched, log.surrogate, log.kept)))
            for log in record.rounds]  # fmt: skip
    output.table(("round", "error of searches", "of surrogates", "of what is kept"), rows, indent=2)
    output.line(f"{record.trained} weights trained in {len(record.rounds)} rounds: {destination}", bold=True)
    output.line(
        f"See what it came to: netweight forget audit {destination} --base {pipeline} --targets {options['targets']} "
        f"--ordinary {options['ordinary']} --out audit"
    )
    output.result({
        "pipeline": str(destination), "trained": record.trained, "before": record.digests["before"],
        "after": record.digests["after"], "rounds": [vars(log) for log in record.rounds],
    })  # fmt: skip
