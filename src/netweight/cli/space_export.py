"""`netweight space export` and `merge`: points and sums of adapters as ordinary adapters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from netweight.cli.card import card_option, write_card
from netweight.cli.opened_space import opened, points_of, space_argument
from netweight.cli.output import Output, output_option
from netweight.cli.paths import NEW

if TYPE_CHECKING:
    from netweight.methods.space.export import Exported

F = TypeVar("F", bound=Callable[..., Any])


def _written(command: F) -> F:
    """The options of what is written."""
    for option in (
        click.option("--overwrite", is_flag=True, help="Replace files that are there."),
        click.option("--layout", type=click.Choice(["diffusers", "peft", "kohya"]), default="diffusers",
                     show_default=True, help="Whose files to write."),
        click.option("--rank", type=click.IntRange(1), help="Of each module; by default as high as is needed."),
    ):  # fmt: skip
        command = option(command)
    return command


@click.command()
@space_argument
@click.argument("point")
@click.argument("destination", metavar="DST", type=NEW)
@_written
@card_option
@output_option
def export(
    folder: Path, bank: Path | None, point: str, destination: Path, rank: int | None, layout: Any, overwrite: bool,
    card: bool, output: Output,
) -> None:  # fmt: skip
    """Write POINT as an adapter for diffusers, peft or kohya, and say what the rank left out.

    POINT is what `netweight space edit` takes. DST is a folder, or a .safetensors file; of several points each goes
    into a folder of its name under DST.
    """
    from netweight.errors import UsageError
    from netweight.methods.space.folder import recorded

    if card and destination.suffix == ".safetensors":
        raise UsageError("A single file has no card.", cure="Name a folder, or leave --card out.")
    space = opened(folder, bank)
    points = points_of(space, point)
    found: dict[str, Exported] = {}
    for name, scores in zip(points.names, points.scores, strict=True):
        path = destination if len(points.names) == 1 else destination / name
        found[name] = space.point(scores).export(path, rank=rank, layout=layout, overwrite=overwrite)
        if card:
            recorded(space, name, found[name], layout).write(path)
            write_card(path, output)
    output.table(("point", "rank", "relative error", "where"), [(name, *_cells(each)) for name, each in found.items()])
    output.result({name: _payload(each) for name, each in found.items()})


@click.command()
@click.argument("adapters", metavar="ADAPTER...", nargs=-1, required=True,
                type=click.Path(path_type=Path, exists=True))  # fmt: skip
@click.argument("destination", metavar="DST", type=NEW)
@click.option("--weight", "weights", multiple=True, type=float, help="Of each adapter, in order; 1 by default.")
@_written
@output_option
def merge(
    adapters: tuple[Path, ...], destination: Path, weights: tuple[float, ...], rank: int | None, layout: Any,
    overwrite: bool, output: Output,
) -> None:  # fmt: skip
    """Add up adapters of one base model: exactly, or at a rank with its error.

    They may be of any rank and layout, of the same modules or of others, from a space or from elsewhere.
    """
    from netweight.methods.space.export import export_adapter, merged
    from netweight.store.lora_formats.files import read_adapter

    whole = merged([read_adapter(path) for path in adapters], list(weights) or None).adapter
    found = export_adapter(whole, destination, rank=rank, layout=layout, overwrite=overwrite)
    output.table(("rank", "relative error", "where"), [_cells(found)])
    output.result(_payload(found))


def _cells(found: Exported) -> tuple[str, str, str]:
    low, high = found.ranks
    return (f"{low}" if low == high else f"{low} to {high}", f"{found.relative_error:.2e}", str(found.path))


def _payload(found: Exported) -> dict[str, Any]:
    return {"path": str(found.path), "ranks": list(found.ranks), "relative_error": found.relative_error}
