"""`netweight space edit`: points moved along directions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from netweight.cli.opened_space import opened, points_of, space_argument
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FILE, NEW


@click.command()
@space_argument
@click.argument("point")
@click.option("--move", "moves", required=True, multiple=True, type=(FILE, float), metavar="DIRECTION STRENGTH",
              help="A direction's file and how far to go, negative for back; may come several times.")  # fmt: skip
@click.option("--unit", type=click.Choice(["deviations", "reach", "raw"]), default="deviations", show_default=True,
              help="What strengths count: models' deviations, their farthest, or the vector.")  # fmt: skip
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@click.option("--out", required=True, type=NEW, help="The .json file of points to write.")
@output_option
def edit(
    folder: Path, bank: Path | None, point: str, moves: tuple[tuple[Path, float], ...], unit: Any, overwrite: bool,
    out: Path, output: Output,
) -> None:  # fmt: skip
    """Move POINT along directions; `netweight space export` makes an adapter of the result.

    POINT is a model of the space, a file of points (FILE.json, or FILE.json:NAME for one of them), an adapter's file or
    folder, which is projected into the space, or mean. The order of moves does not matter.
    """
    from netweight.core.files import refuse_existing
    from netweight.methods.space.edits import Move
    from netweight.methods.space.edits import edit as edited
    from netweight.methods.space.points import Points, read_direction, write_points

    refuse_existing(out, overwrite=overwrite)
    space = opened(folder, bank)
    before = points_of(space, point)
    steps = [Move(read_direction(file), strength, unit) for file, strength in moves]
    for step in steps:
        step.direction.check(space.scores)
    told = [{"direction": step.direction.name, "strength": step.strength, "unit": unit} for step in steps]
    after = Points(before.names, edited(before.scores, steps), before.space, {"from": point, "moves": told})
    write_points(after, out, overwrite=overwrite)
    words = ", ".join(f"{step.direction.name} {step.strength:+g}" for step in steps)
    many = "point" if len(after.names) == 1 else "points"
    output.line(f"{len(after.names)} {many} moved by {words} ({unit}): {out}")
    output.result({"points": str(out), "names": list(after.names), "moves": told})
