"""`netweight space sample`: new points, drawn as the models of a space lie in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from netweight.cli.opened_space import opened, space_argument
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FILE, NEW

_LEAST_AUDITED = 5


@click.command()
@space_argument
@click.option("--count", type=click.IntRange(1), default=1, show_default=True, help="How many points.")
@click.option("--sampler", type=click.Choice(["gaussian", "kernel", "mixture", "conditional"]), default="gaussian",
              show_default=True, help="How they are drawn; conditional needs --labels.")  # fmt: skip
@click.option("--factor", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
              help="Of the gaussian's standard deviations.")  # fmt: skip
@click.option("--bandwidth", type=click.FloatRange(0, 1),
              help="Of the kernel, and of conditional's rest; by default the likeliest.")  # fmt: skip
@click.option(
    "--clusters", type=click.IntRange(1), help="Of the mixture; by default as many as held-out models ask for."
)
@click.option("--labels", "labels_file", type=FILE, help="Attributes of models, for conditional.")
@click.option("--name-column", default="name", show_default=True, help="The column that names the model.")
@click.option("--emphasis", type=click.FloatRange(0, min_open=True), default=1.0, show_default=True,
              help="Of attributes, for conditional; images of new combinations show less of them.")  # fmt: skip
@click.option("--given", multiple=True, metavar="COLUMN=VALUE", help="An attribute that all points have.")
@click.option("--seed", default=0, show_default=True, help="Of the draw.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@click.option("--out", required=True, type=NEW, help="The .json file of points to write.")
@output_option
def sample(folder: Path, bank: Path | None, overwrite: bool, out: Path, output: Output, **options: Any) -> None:
    """Draw points. From five on, it says whether they lie where models lie without being copies of them."""
    from netweight.core.files import refuse_existing
    from netweight.methods.space.folder import Drawing, draw
    from netweight.methods.space.points import neighbor_findings, write_points

    refuse_existing(out, overwrite=overwrite)
    given = dict(_pair(text) for text in options.pop("given"))
    how = Drawing(labels=options.pop("labels_file"), given=given, **options)
    space = opened(folder, bank)
    points = draw(space, how)
    write_points(points, out, overwrite=overwrite)
    enough = min(how.count, len(space.names)) >= _LEAST_AUDITED
    findings = neighbor_findings(points.scores, space.scores) if enough else []
    output.line(f"{how.count} {'point' if how.count == 1 else 'points'} by {how.sampler}: {out}")
    output.findings(findings)
    output.result({"points": str(out), "names": list(points.names), "findings": [each.to_json() for each in findings]})


def _pair(text: str) -> tuple[str, float]:
    from netweight.errors import UsageError

    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        raise UsageError(f"--given {text} gives no number.", cure="Write COLUMN=VALUE, such as beard=1.") from None
