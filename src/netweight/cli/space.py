"""`netweight space`: many customized models as one space. This file collects them; other files add commands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from netweight.cli.output import Output, output_option
from netweight.cli.paths import FOLDER, NEW
from netweight.cli.space_direction import direction
from netweight.cli.space_edit import edit
from netweight.cli.space_export import export, merge
from netweight.cli.space_fit import fit, show_space
from netweight.cli.space_invert import invert
from netweight.cli.space_neighbors import neighbors
from netweight.cli.space_sample import sample
from netweight.cli.space_view import view
from netweight.core.progress import QUIET, Progress

if TYPE_CHECKING:
    from netweight.store.bank.bank import AdapterBank

_SHOWN = 20  # skipped adapters that are listed


@click.group()
def space() -> None:
    """See many customized models as one space: collect adapters, find its directions, edit, sample and invert."""


for _command in (fit, direction, edit, sample, neighbors, invert, export, merge, view):
    space.add_command(_command)


@space.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path, exists=True))
@click.argument("destination", metavar="DST", type=NEW)
@click.option("--compress", is_flag=True, help="Keep the adapters compressed, bit for bit.")
@click.option("--skip-bad", is_flag=True, help="Leave out adapters that cannot be used, and list them.")
@click.option("--stable-diffusion", is_flag=True,
              help="A published matrix has no weight_dimensions.pt: take Stable Diffusion 1's order.")  # fmt: skip
@output_option
def ingest(
    source: Path, destination: Path, compress: bool, skip_bad: bool, stable_diffusion: bool, output: Output
) -> None:
    """Collect adapters into a bank, or add them to one.

    SRC is a folder with LoRAs in the layouts of peft, diffusers and kohya, at any depth, or the published files of
    weights2weights. Headers are checked first, and all problems are said at once. A run that was interrupted goes on
    where it stopped when it is started again.
    """
    from netweight.store.bank.bank import AdapterBank
    from netweight.store.published_w2w import import_published, stable_diffusion_dimensions

    progress = QUIET if output.as_json else Progress()
    if stable_diffusion:
        import_published(
            source, destination, dimensions=stable_diffusion_dimensions(), compress=compress, skip_bad=skip_bad,
            progress=progress,
        )  # fmt: skip
        bank = AdapterBank.open(destination)
    else:
        bank = AdapterBank.ingest(source, destination, compress=compress, skip_bad=skip_bad, progress=progress)
    _show(bank, output)


@space.command()
@click.argument("path", type=FOLDER)
@click.option("--verify", is_flag=True, help="Compare every shard with its digest.")
@output_option
def info(path: Path, verify: bool, output: Output) -> None:
    """Say what a bank of adapters holds, or how good the fit of a space is.

    With --verify it exits with 3 if a bank's shard is damaged.
    """
    if (path / "space.json").is_file() and not verify:
        show_space(path, output)
        return
    from netweight.store.bank.bank import AdapterBank

    bank = AdapterBank.open(path)
    if verify:
        bank.verify(progress=QUIET if output.as_json else Progress())
    _show(bank, output, verified=verify)


def _show(bank: AdapterBank, output: Output, *, verified: bool = False) -> None:
    from tqdm import tqdm

    ranks = bank.ranks
    span = f"{ranks[0]}" if ranks[0] == ranks[1] else f"{ranks[0]} to {ranks[1]}"
    weights = sum(rows * columns for rows, columns in bank.shapes.values())
    output.line(
        f"{bank.path}: {len(bank)} adapters of {len(bank.modules)} modules, rank {span}, "
        f"{tqdm.format_sizeof(bank.nbytes, 'B', 1000)} in {bank.shards} {'shard' if bank.shards == 1 else 'shards'}"
    )
    output.line(f"{weights:,} weights are changed" + (f" of {bank.base}" if bank.base else ""))
    output.line(f"digest {bank.digest}" + (", all shards intact" if verified else ""))
    for name, reason in list(bank.skipped.items())[:_SHOWN]:
        output.line(f"Skipped {name}: {reason}", fg="yellow")
    if len(bank.skipped) > _SHOWN:
        output.line(f"... and {len(bank.skipped) - _SHOWN} more were skipped; --json names them.", fg="yellow")
    output.result(
        {
            "path": str(bank.path), "adapters": len(bank), "ranks": list(ranks), "shards": bank.shards,
            "nbytes": bank.nbytes, "base": bank.base, "digest": bank.digest, "verified": verified,
            "shapes": bank.shapes, "kernels": bank.kernels, "names": bank.names, "skipped": dict(bank.skipped),
        }
    )  # fmt: skip
