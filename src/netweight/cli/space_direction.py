"""`netweight space direction`: a direction that changes one attribute, from labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from netweight.cli.opened_space import opened, space_argument
from netweight.cli.output import Output, output_option
from netweight.cli.paths import FILE, NEW


@click.command()
@space_argument
@click.option("--labels", "labels_file", required=True, type=FILE,
              help="Attributes of models: .csv, .tsv, .json or .jsonl with one row per model.")  # fmt: skip
@click.option("--column", required=True, help="The attribute.")
@click.option("--name-column", default="name", show_default=True, help="The column that names the model.")
@click.option("--confounder", "confounders", multiple=True, metavar="COLUMN",
              help="An attribute that should stay as it is; may be given several times.")  # fmt: skip
@click.option("--kind", type=click.Choice(["encoder", "decoder", "difference"]), default="encoder", show_default=True,
              help="How models change with it, how it is read off them, or a difference of means.")  # fmt: skip
@click.option("--fidelity", type=click.Choice(["corrected", "reference"]), default="corrected", show_default=True,
              help="The authors' code's numbers, or without its quirks; see docs/differences.md.")  # fmt: skip
@click.option("--folds", type=click.IntRange(2), default=5, show_default=True, help="Of the cross-validation.")
@click.option("--resamples", type=click.IntRange(0), default=0, show_default=True,
              help="Also resample the labeled models so often, to see how stable the direction is.")  # fmt: skip
@click.option("--seed", default=0, show_default=True, help="Of folds and resamples.")
@click.option("--overwrite", is_flag=True, help="Replace the file if it is there.")
@click.option("--out", required=True, type=NEW, help="The .json file to write.")
@output_option
def direction(
    folder: Path, bank: Path | None, labels_file: Path, column: str, name_column: str, confounders: tuple[str, ...],
    kind: Any, fidelity: Any, folds: int, resamples: int, seed: int, overwrite: bool, out: Path, output: Output,
) -> None:  # fmt: skip
    """Find the direction of an attribute and say how well it tells held-out models apart."""
    from netweight.core.files import refuse_existing
    from netweight.methods.space.directions import bootstrap_cosine, fit_direction, read_labels
    from netweight.methods.space.points import write_direction

    refuse_existing(out, overwrite=overwrite)
    space = opened(folder, bank)
    labels = read_labels(labels_file, space.names, columns=[column, *confounders], key=name_column)
    found = fit_direction(
        space.scores, labels, column, kind=kind, confounders=confounders, fidelity=fidelity, folds=folds, seed=seed
    )
    findings = list(found.findings)
    if resamples:
        findings.append(
            bootstrap_cosine(
                space.scores, labels, column, kind=kind, confounders=confounders, resamples=resamples, seed=seed
            )
        )
    write_direction(found, out, overwrite=overwrite)
    known = int(labels[column].known.sum())
    output.line(f"{column}, {labels[column].kind}, known of {known} of {len(space.names)} models: {out}")
    output.findings(findings)
    output.line(f"One standard deviation of the models is {found.deviation:.4g}, the farthest {found.reach:.4g}.")
    output.result({
        "direction": str(out), "column": column, "kind": found.kind, "known": known, "deviation": found.deviation,
        "reach": found.reach, "findings": [each.to_json() for each in findings],
    })  # fmt: skip
