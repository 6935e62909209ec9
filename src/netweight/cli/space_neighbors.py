"""`netweight space neighbors`: the models nearest to a point."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import click

from netweight.cli.opened_space import opened, points_of, space_argument
from netweight.cli.output import Output, output_option


@click.command()
@space_argument
@click.argument("point")
@click.option("--count", type=click.IntRange(1), default=5, show_default=True, help="How many.")
@click.option("--measure", type=click.Choice(["cosine", "distance"]), default="cosine", show_default=True,
              help="Which are nearest.")  # fmt: skip
@output_option
def neighbors(folder: Path, bank: Path | None, point: str, count: int, measure: Any, output: Output) -> None:
    """List the models nearest to POINT by the changes of weights that lie between.

    POINT is what `netweight space edit` takes.
    """
    from netweight.methods.space.points import nearest

    space = opened(folder, bank)
    points = points_of(space, point)
    found = nearest(points.scores, space.scores, space.names, count=count, measure=measure)
    rows = [
        (name, each.name, "–" if math.isnan(each.cosine) else f"{each.cosine:.3f}", f"{each.distance:.4g}")
        for name, part in zip(points.names, found, strict=True)
        for each in part
    ]
    output.table(("point", "model", "cosine", "distance"), rows)
    output.result({
        name: [{"name": each.name, "number": each.number, "distance": each.distance,
                "cosine": None if math.isnan(each.cosine) else each.cosine} for each in part]
        for name, part in zip(points.names, found, strict=True)
    })  # fmt: skip
