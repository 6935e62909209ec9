"""`netweight space view`: a page with sliders, a map of the models, and samples."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli.output import Output, output_option
from netweight.cli.paths import FILE, FOLDER, NEW
from netweight.core.progress import QUIET, Progress

if TYPE_CHECKING:
    from netweight.methods.space.page import View
    from netweight.methods.space.page_data import Look

_AMOUNTS = ("components", "adapters", "samples")


@click.command()
@click.argument("folder", metavar="[SPACE]", type=FOLDER, required=False)
@click.option("--bank", type=FOLDER, help="The bank that SPACE was fitted to, where it has moved.")
@click.option("--pipeline", type=FOLDER, help="A diffusers pipeline, of whose adapters the space is made.")
@click.option("--prompt", "prompts", multiple=True, help="One for all noises, or one for each.")
@click.option("--direction", "directions", multiple=True, type=FILE,
              help="A file of `netweight space direction`; gets a slider.")  # fmt: skip
@click.option("--labels", "labels_file", type=FILE, help="Attributes of models: the map is colored by them.")
@click.option("--name-column", default="name", show_default=True, help="The column that names the model.")
@click.option("--attribute", "attributes", multiple=True, metavar="COLUMN",
              help="A column of --labels that gets a slider, with the other such columns held.")  # fmt: skip
@click.option("--pair", "pairs", multiple=True, nargs=2, metavar="NAME NAME",
              help="Two sliders that can be moved together, such as 'component 1' 'component 2'.")  # fmt: skip
@click.option("--start", default="mean", show_default=True, metavar="POINT", help="Where sliders begin.")
@click.option("--noises", type=click.IntRange(1), help="Pictures of every point, of seeds 0, 1, …; by default 4.")
@click.option("--components", type=click.IntRange(0), default=4, show_default=True, help="That get a slider.")
@click.option("--adapters", type=click.IntRange(1), default=400, show_default=True, help="Most on the map.")
@click.option("--samples", type=click.IntRange(0), default=12, show_default=True, help="Models that are drawn.")
@click.option("--guidance", type=float, help="Of classifier-free guidance; by default 3, the miniature's 1.")
@click.option("--steps", type=click.IntRange(1), help="Of the scheduler; by default 50, the miniature's 20.")
@click.option("--device", default="cpu", show_default=True, help="Where the pipeline paints.")
@click.option("--seed", default=0, show_default=True, help="Of samples and folds.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@click.option("--out", required=True, type=NEW, help="The .html file to write.")
@output_option
def view(folder: Path | None, seed: int, overwrite: bool, out: Path, output: Output, **options: Any) -> None:
    """Write a page about SPACE that opens anywhere, without network.

    Sliders walk along directions and principal components, a map shows the models, and models are drawn from the space.
    Every picture is painted by the pipeline, with the weights of just that point; long for a large pipeline, as so many
    images are. Without SPACE the page is about the miniature in the package: some hundred models of drawn faces.
    """
    from netweight.core.files import refuse_existing
    from netweight.methods.space.page import write_view

    refuse_existing(out, overwrite=overwrite)
    options["command"] = shlex.join(["netweight", *sys.argv[1:]])
    progress = QUIET if output.as_json else Progress()
    shown = _miniature(options, seed, progress) if folder is None else _of_folder(folder, options, seed, progress)
    write_view(shown, out, overwrite=overwrite)
    size = out.stat().st_size
    sliders = [each.name for each in shown.traversals]
    output.line(f"{out}: {len(sliders)} sliders ({', '.join(sliders)}), {size / 1e6:.1f} MB")
    output.result({"page": str(out), "sliders": sliders, "nbytes": size, "facts": dict(shown.facts)})


def _miniature(options: dict[str, Any], seed: int, progress: Progress) -> View:
    from netweight.errors import UsageError
    from netweight.toys.faces_pipeline import FACES_LOOK, faces_view

    given = [name for name in ("bank", "pipeline", "labels_file", "prompts", "directions", "attributes", "pairs")
             if options[name]]  # fmt: skip
    if given or options["start"] != "mean":
        raise UsageError(
            f"There is no SPACE, and --{given[0].rstrip('s').replace('_', '-') if given else 'start'} belongs to one.",
            cure="Name the folder of a space; without one, the page is about the miniature as it is.",
        )
    return faces_view(look=_look(options, FACES_LOOK, seed), command=options["command"], progress=progress)


def _of_folder(folder: Path, options: dict[str, Any], seed: int, progress: Progress) -> View:
    from netweight.cli.opened_space import opened, points_of
    from netweight.errors import UsageError
    from netweight.methods.space.directions import fit_direction, read_labels
    from netweight.methods.space.page_data import Look, painted_view
    from netweight.methods.space.points import read_direction

    missing = [name for name, key in (("--pipeline", "pipeline"), ("--prompt", "prompts")) if not options[key]]
    if missing or (options["attributes"] and options["labels_file"] is None):
        needed = missing[0] if missing else "--labels, for --attribute"
        raise UsageError(f"{needed} is missing.", cure="A page about a space is painted by its pipeline.")
    look = _look(options, Look(prompts=tuple(options["prompts"])), seed)
    space = opened(folder, options["bank"])
    file, chosen = options["labels_file"], options["attributes"]
    labels = None if file is None else read_labels(file, space.names, key=options["name_column"])
    directions = [read_direction(each) for each in options["directions"]]
    if labels is not None:
        directions += [
            fit_direction(space.scores, labels, each, confounders=[x for x in chosen if x != each], seed=seed)
            for each in chosen
        ]
    start = points_of(space, options["start"])
    if len(start.names) != 1:
        raise UsageError(f"--start {options['start']} holds {len(start.names)} points.", cure="Name one of them.")
    from netweight.hf.load_pipeline import load_text_to_image

    return painted_view(
        load_text_to_image(options["pipeline"], device=options["device"]),
        space,
        title=f"{folder.name}: {len(space.names)} models as one space",
        directions=directions,
        pairs=options["pairs"],
        labels=labels,
        start=("the mean of the adapters" if options["start"] == "mean" else options["start"], start.scores[0]),
        look=look,
        command=options["command"],
        progress=progress,
    )


def _look(options: dict[str, Any], usual: Look, seed: int) -> Look:
    """Take over what was asked for; several prompts take turns over the noises."""
    given = {name: options[name] for name in ("guidance", "steps") if options[name] is not None}
    noises = options["noises"] or max(len(usual.prompts), len(usual.seeds))
    many = len(usual.prompts) > 1
    prompts = tuple(usual.prompts[each % len(usual.prompts)] for each in range(noises if many else 1))
    amounts = {name: options[name] for name in _AMOUNTS}
    return replace(usual, prompts=prompts, seeds=tuple(range(noises)), seed=seed, **amounts, **given)
