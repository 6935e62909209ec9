"""The command `netweight immunize` and its output."""

from __future__ import annotations

from pathlib import Path

from netweight.methods.immunize.immunize_folder import immunize_folder
from netweight.methods.immunize.record import RECORD
from netweight.methods.immunize.settings import ImmunizeSettings
from netweight.registry import Context, PrintedTable, Result, shell_line


def immunize(settings: ImmunizeSettings, context: Context, model: Path, destination: Path) -> Result:
    """Train a defense into a model and say how its loss developed."""
    done = immunize_folder(model, destination, settings, command=context.command, progress=context.progress)
    rows = [(name, f"{first:.4g}", f"{last:.4g}") for name, first, last in done.record.ends]
    lines: list[str | PrintedTable] = (
        [PrintedTable(("term of the loss", "first step", "last step"), rows)] if rows else []
    )
    lines.append(f"The record of the training is {destination / RECORD}.")
    if done.not_analyzed:
        lines.append(f"The report does not show the depth of the defense: {done.not_analyzed}.")
    attack = shell_line(
        "netweight", "attack", "finetune", destination, "--base", model, "--trained-on", settings.pairs, "--harmful",
        "ROWS", "--out", "attacks",
    )  # fmt: skip
    return Result(
        lines, written=(destination,), report=done.report, next=(attack,),
        payload={"model": str(destination), "record": str(destination / RECORD), "steps": len(done.record.steps),
                 "left_out": list(done.left_out)},
    )  # fmt: skip
