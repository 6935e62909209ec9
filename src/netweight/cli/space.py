"""`netweight space`: many customized models as one space, from a folder of adapters to points written as adapters."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from netweight.cli import FILE, FOLDER, NEW, Output, card_option, command_line, output_option, write_card
from netweight.errors import UsageError
from netweight.methods.space.settings import (
    ConvertSettings,
    DirectionSettings,
    ExportSettings,
    FolderFit,
    FolderInversion,
    FolderView,
    MergeSettings,
    PredictSettings,
    RenderSettings,
    SampleSettings,
)
from netweight.settings import options

if TYPE_CHECKING:
    from netweight.methods.space.fit import Accuracy
    from netweight.methods.space.space import WeightSpace
    from netweight.methods.space.view.page import View
    from netweight.store.bank.bank import AdapterBank
    from netweight.store.lora_formats.files import Exported

F = TypeVar("F", bound=Callable[..., Any])

_SHOWN = 20  # adapters that are listed
_WIDE = 48  # characters of what their files say

_overwrite = click.option("--overwrite", is_flag=True, help="Replace what is there.")
_bank = click.option("--bank", type=FOLDER, help="The bank that SPACE was fitted to, where it has moved.")


def _space_argument(command: F) -> F:
    """The argument SPACE and the option --bank."""
    return click.argument("folder", metavar="SPACE", type=FOLDER)(_bank(command))


def _out(what: str) -> Callable[[F], F]:
    """The options --out and --overwrite."""
    return lambda command: _overwrite(click.option("--out", required=True, type=NEW, help=what)(command))


def _opened(folder: Path, bank: Path | None) -> WeightSpace:
    from netweight.methods.space.space import WeightSpace
    from netweight.store.bank.bank import AdapterBank

    return WeightSpace.open(folder, None if bank is None else AdapterBank.open(bank))


def _many(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


@click.group()
def space() -> None:
    """See many customized models as one space: collect adapters, find its directions, edit, sample and invert."""


@space.command()
@click.argument("bank", type=FOLDER)
@click.argument("space", type=NEW)
@options(FolderFit)
@click.option("--work", type=NEW, help="Where to keep finished parts, to continue after a kill or fit a grown bank.")
@click.option("--processes", type=click.IntRange(2), help="Processes that share the work; needs --work.")
@output_option
def fit(bank: Path, space: Path, settings: FolderFit, work: Path | None, processes: int | None, output: Output) -> None:
    """Find the principal components of the adapters in BANK and write them to SPACE, a new folder.

    The default, --representation delta, looks at what adapters change, however their factors are written. SPACE holds
    every adapter's scores; how good the fit is, and what of it would come back from other adapters, is printed and kept
    in SPACE/space.json.
    """
    from netweight.core.engines import local_processes
    from netweight.core.files import refuse_existing
    from netweight.methods.space.folder import fit_folder

    refuse_existing(space, overwrite=None)
    engine = None if processes is None else functools.partial(local_processes, workers=processes)
    fitted = fit_folder(bank, settings, output.progress, work=work, engine=engine)
    fitted.save(space, standalone=settings.standalone, bank=bank)
    _show_space(space, output)


@space.command()
@_space_argument
@options(DirectionSettings)
@_out("The .json file to write.")
@output_option
def direction(
    folder: Path, bank: Path | None, settings: DirectionSettings, overwrite: bool, out: Path, output: Output
) -> None:
    """Find the direction of an attribute and say how well it tells held-out models apart."""
    from netweight.core.files import refuse_existing
    from netweight.methods.space.folder import find_direction
    from netweight.methods.space.points import write_direction

    refuse_existing(out, overwrite=overwrite)
    space, column = _opened(folder, bank), settings.column
    found, findings, known = find_direction(space, settings, output.progress)
    write_direction(found, out, overwrite=overwrite)
    output.line(f"{column}, {found.kind}, known of {known} of {len(space.names)} models: {out}")
    output.findings(findings, indent=2)
    output.line(f"One standard deviation of the models is {found.deviation:.4g}, the farthest {found.reach:.4g}.")
    output.result({
        "direction": str(out), "column": column, "kind": found.kind, "known": known, "deviation": found.deviation,
        "reach": found.reach, "findings": [each.to_json() for each in findings],
    })  # fmt: skip


@space.command()
@_space_argument
@click.argument("point")
@click.option("--move", "moves", required=True, multiple=True, type=(FILE, float), metavar="DIRECTION STRENGTH",
              help="A direction's file and how far to go, negative for back; may come several times.")  # fmt: skip
@click.option("--unit", type=click.Choice(["deviations", "reach", "raw"]), default="deviations", show_default=True,
              help="What strengths count: models' deviations, their farthest, or the vector.")  # fmt: skip
@_out("The .json file of points to write.")
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
    from netweight.methods.space.folder import moved, points_of
    from netweight.methods.space.points import read_direction, write_points

    refuse_existing(out, overwrite=overwrite)
    space = _opened(folder, bank)
    steps = [Move(read_direction(file), strength, unit) for file, strength in moves]
    for step in steps:
        step.direction.check(space.scores)
    after = moved(points_of(space, point), steps, point)
    write_points(after, out, overwrite=overwrite)
    words = ", ".join(f"{step.direction.name} {step.strength:+g}" for step in steps)
    output.line(f"{_many(len(after.names), 'point')} moved by {words} ({unit}): {out}")
    output.result({"points": str(out), "names": list(after.names), "moves": after.origin["moves"]})


@space.command()
@_space_argument
@options(SampleSettings)
@_out("The .json file of points to write.")
@output_option
def sample(
    folder: Path, bank: Path | None, settings: SampleSettings, overwrite: bool, out: Path, output: Output
) -> None:
    """Draw points. From five on, it says whether they lie where models lie without being copies of them."""
    from netweight.core.files import refuse_existing
    from netweight.methods.space.folder import draw
    from netweight.methods.space.points import write_points
    from netweight.methods.space.recipe import LEAST_AUDITED, neighbor_findings

    refuse_existing(out, overwrite=overwrite)
    space = _opened(folder, bank)
    points = draw(space, settings)
    write_points(points, out, overwrite=overwrite)
    enough = min(settings.count, len(space.names)) >= LEAST_AUDITED
    findings = neighbor_findings(points.scores, space.scores) if enough else []
    output.line(f"{_many(settings.count, 'point')} by {settings.sampler}: {out}")
    output.findings(findings, indent=2)
    output.result({"points": str(out), "names": list(points.names), "findings": [each.to_json() for each in findings]})


@space.command()
@_space_argument
@click.argument("point")
@click.option("--count", type=click.IntRange(1), default=5, show_default=True, help="How many.")
@click.option("--measure", type=click.Choice(["cosine", "distance"]), default="cosine", show_default=True,
              help="Which are nearest.")  # fmt: skip
@output_option
def neighbors(folder: Path, bank: Path | None, point: str, count: int, measure: Any, output: Output) -> None:
    """List the models nearest to POINT by the changes of weights that lie between.

    POINT is what `netweight space edit` takes.
    """
    from netweight.methods.space.folder import points_of
    from netweight.methods.space.points import nearest

    space = _opened(folder, bank)
    points = points_of(space, point)
    found = nearest(points.scores, space.scores, space.names, count=count, measure=measure)
    rows = [
        (name, each.name, "–" if math.isnan(each.cosine) else f"{each.cosine:.3f}", f"{each.distance:.4g}")
        for name, part in zip(points.names, found, strict=True)
        for each in part
    ]
    output.table(("point", "model", "cosine", "distance"), rows)
    output.result({
        name: [{**vars(each), "cosine": None if math.isnan(each.cosine) else each.cosine} for each in part]
        for name, part in zip(points.names, found, strict=True)
    })  # fmt: skip


@space.command()
@_space_argument
@click.argument("images", metavar="IMAGE...", nargs=-1, required=True, type=click.Path(path_type=Path, exists=True))
@options(FolderInversion)
@_out("The .json file of points to write; what is done is remembered in a .jsonl beside it.")
@output_option
def invert(
    folder: Path, bank: Path | None, images: tuple[Path, ...], settings: FolderInversion, overwrite: bool, out: Path,
    output: Output,
) -> None:  # fmt: skip
    """Find the points whose models make IMAGE: a picture each, or a folder with pictures of the same thing.

    A call that was interrupted continues where it stopped when it is made again.
    """
    from netweight.core.files import refuse_existing
    from netweight.methods.space.folder import invert_files
    from netweight.methods.space.points import write_points

    refuse_existing(out, overwrite=overwrite)
    found = invert_files(images, settings, lambda: _opened(folder, bank), out=out, progress=output.progress)
    write_points(found, out, overwrite=overwrite)
    distances, improvements = found.origin["distances"], found.origin["improvements"]
    rows = [(name, f"{distances[name]:.2f}", f"{improvements[name]:.2f}") for name in found.names]
    output.table(("target", "distance from the mean, in deviations", "loss at first over last"), rows)
    output.line(f"{_many(len(rows), 'point')}: {out}")
    output.result({"points": str(out), "distances": distances, "improvements": improvements})


@space.command()
@_space_argument
@click.argument("point")
@click.argument("destination", metavar="DST", type=NEW)
@_overwrite
@options(ExportSettings)
@card_option
@output_option
def export(
    folder: Path, bank: Path | None, point: str, destination: Path, settings: ExportSettings, overwrite: bool,
    card: bool, output: Output,
) -> None:  # fmt: skip
    """Write POINT as an adapter for diffusers, peft or kohya, and say what the rank left out.

    POINT is what `netweight space edit` takes. DST is a folder, or a .safetensors file; of several points each goes
    into a folder of its name under DST.
    """
    from netweight.methods.space.folder import export_record, places_of, points_of

    if card and destination.suffix == ".safetensors":
        raise UsageError("A single file has no card.", cure="Name a folder, or leave --card out.")
    space = _opened(folder, bank)
    points = points_of(space, point)
    found: dict[str, Exported] = {}
    for name, place, scores in zip(points.names, places_of(points), points.scores, strict=True):
        path = destination if len(points.names) == 1 else destination / place
        found[name] = space.point(scores).export(path, overwrite=overwrite, **dict(settings))
        if card:
            export_record(space, name, found[name]).write(path)
            write_card(path, output)
    output.table(("point", "rank", "relative error", "where"), [(name, *_cells(each)) for name, each in found.items()])
    output.result({name: _payload(each) for name, each in found.items()})


@space.command()
@click.argument("adapters", metavar="ADAPTER...", nargs=-1, required=True,
                type=click.Path(path_type=Path, exists=True))  # fmt: skip
@click.argument("destination", metavar="DST", type=NEW)
@_overwrite
@options(MergeSettings)
@output_option
def merge(
    adapters: tuple[Path, ...], destination: Path, settings: MergeSettings, overwrite: bool, output: Output
) -> None:
    """Merge adapters of one base model into one, with the error of its rank.

    They may be of any rank and layout, of the same modules or of others, from a space or from elsewhere. A weighted sum
    is exact without --rank; ties and dare take the highest rank of ADAPTER where none is given.
    """
    from netweight.methods.space.folder import merge_files

    _show_written(merge_files(adapters, destination, settings, overwrite=overwrite), output)


@space.command()
@click.argument("adapter", type=click.Path(path_type=Path, exists=True))
@click.argument("destination", metavar="DST", type=NEW)
@_overwrite
@options(ConvertSettings)
@output_option
def convert(adapter: Path, destination: Path, settings: ConvertSettings, overwrite: bool, output: Output) -> None:
    """Bring an adapter to another layout (--layout), rank (--rank, --energy) or kind, with its error.

    LoHa, LoKr, DoRA and full differences become a LoRA of --rank by singular values; DoRA needs the base model
    (--weights).
    """
    from netweight.methods.space.folder import convert_file

    _show_written(convert_file(adapter, destination, settings, overwrite=overwrite), output)


space.add_command(convert, "resize")


@space.command()
@click.argument("bank", type=FOLDER)
@click.argument("adapters", metavar="[FILE...]", nargs=-1, type=click.Path(path_type=Path, exists=True))
@options(PredictSettings)
@output_option
def predict(bank: Path, adapters: tuple[Path, ...], settings: PredictSettings, output: Output) -> None:
    """Read attributes off weights alone: of adapters in BANK that have no label, and of each FILE.

    A network that no basis of the factors changes and a linear probe of the changes are fitted to the labels. Both
    held-out scores are reported; the better one of an attribute predicts it.
    """
    from netweight.methods.space.folder import predict_files

    found = predict_files(bank, adapters, settings, output.progress)
    output.findings(found.findings)
    rows = [(name, *(f"{values[column]:.3g}" for column in settings.columns)) for name, values in found.values.items()]
    output.table(("adapter", *settings.columns), rows)
    output.result({"findings": [each.to_json() for each in found.findings], "predicted": dict(found.values)})


@space.command()
@click.argument("adapter", metavar="FILE", type=click.Path(path_type=Path, exists=True))
@click.argument("bank", type=FOLDER)
@click.option("--count", type=click.IntRange(1), default=10, show_default=True, help="How many.")
@output_option
def similar(adapter: Path, bank: Path, count: int, output: Output) -> None:
    """List the adapters of BANK whose changes are nearest to those of FILE.

    Modules that only one of the two changes count as unchanged by the other, and are left out of the second cosine.
    """
    from netweight.methods.space.folder import find_similar

    found = find_similar(adapter, bank, count, output.progress)
    rows = [(each.name, f"{each.cosine:.4f}", f"{each.shared_cosine:.4f}", f"{each.shared:.1%}") for each in found]
    output.table(("adapter", "cosine", "in shared modules", "of FILE in these"), rows)
    output.result({"similar": [vars(each) for each in found]})


def _cells(found: Exported) -> tuple[str, str, str]:
    low, high = found.ranks
    return (f"{low}" if low == high else f"{low} to {high}", f"{found.relative_error:.2e}", str(found.path))


def _payload(found: Exported) -> dict[str, Any]:
    return {"path": str(found.path), "ranks": list(found.ranks), "relative_error": found.relative_error}


def _show_written(found: Exported, output: Output) -> None:
    output.table(("rank", "relative error", "where"), [_cells(found)])
    output.result(_payload(found))


@space.command()
@click.argument("folder", metavar="[SPACE]", type=FOLDER, required=False)
@_bank
@options(FolderView)
@_out("The .html file to write.")
@output_option
def view(
    folder: Path | None, bank: Path | None, settings: FolderView, overwrite: bool, out: Path, output: Output
) -> None:
    """Write a page about SPACE that opens anywhere, without network.

    Sliders walk along directions and principal components, a map shows the models, and models are drawn from the space.
    Every picture is generated by the pipeline, with the weights of just that point, which takes long for a large
    pipeline. Without SPACE the page is about the miniature in the package: some hundred models of drawn faces.
    """
    from netweight.core.files import refuse_existing
    from netweight.methods.space.view.page import write_view

    refuse_existing(out, overwrite=overwrite)
    how: Any = {"command": command_line(), "progress": output.progress}
    if folder is None:
        shown = _miniature(settings, bank, how)
    else:
        from netweight.methods.space.folder import view_folder

        shown = view_folder(folder, _opened(folder, bank), settings, **how)
    write_view(shown, out, overwrite=overwrite)
    size = out.stat().st_size
    sliders = [each.name for each in shown.traversals]
    output.line(f"{out}: {len(sliders)} sliders ({', '.join(sliders)}), {size / 1e6:.1f} MB")
    output.result({"page": str(out), "sliders": sliders, "nbytes": size, "facts": dict(shown.facts)})


def _miniature(settings: FolderView, bank: Path | None, how: Any) -> View:
    from netweight.toys.faces_pipeline import FACES_SETTINGS, faces_view

    allowed = {*RenderSettings.model_fields, "noises", "name_column", "device"} - {"prompts"}
    given = ["bank"] * (bank is not None) + [name for name in settings.given if name not in allowed]
    if given:
        option = given[0] if given[0] == "labels" else given[0].rstrip("s")
        raise UsageError(
            f"There is no SPACE, and --{option} belongs to one.",
            cure="Name the folder of a space; without one, the page is about the miniature as it is.",
        )
    return faces_view(settings=settings.rendering(FACES_SETTINGS), **how)


@space.command()
@click.argument("source", metavar="SRC", type=click.Path(path_type=Path, exists=True))
@click.argument("destination", metavar="DST", type=NEW)
@click.option("--compress", is_flag=True, help="Keep the adapters compressed, bit for bit.")
@click.option("--skip-bad", is_flag=True, help="Leave out adapters that cannot be used, and list them.")
@click.option("--modules", "select", metavar="PATTERN", help="Keep these modules only, as in unet.**.attn2.*.")
@click.option("--base", help="The model that all were trained on, whatever their files say.")
@click.option("--convert", type=click.IntRange(1), metavar="RANK",
              help="Make LoRAs of LoHa, LoKr, DoRA and full differences, at most of this rank.")  # fmt: skip
@click.option("--weights", type=click.Path(path_type=Path, exists=True), metavar="BASE",
              help="The base model, which DoRA's change depends on.")  # fmt: skip
@click.option("--stable-diffusion", is_flag=True,
              help="A published matrix has no weight_dimensions.pt: take Stable Diffusion 1's order.")  # fmt: skip
@output_option
def ingest(source: Path, destination: Path, stable_diffusion: bool, output: Output, **how: Any) -> None:
    """Collect adapters into a bank, or add them to one.

    SRC is a folder with LoRAs in the layouts of peft, diffusers and kohya, at any depth, or the published files of
    weights2weights. They may change different modules of one base: what one lacks, it does not change. Headers are
    checked first, and all problems are reported at once. A run that was interrupted continues where it stopped when
    it is started again.
    """
    from netweight.store.bank.bank import AdapterBank
    from netweight.store.bank.published import import_published, stable_diffusion_dimensions

    if not stable_diffusion:
        _show_bank(AdapterBank.ingest(source, destination, progress=output.progress, **how), output)
        return
    known = {"compress": how["compress"], "skip_bad": how["skip_bad"], "progress": output.progress}
    import_published(source, destination, dimensions=stable_diffusion_dimensions(), **known)
    _show_bank(AdapterBank.open(destination), output)


@space.command("import")
@click.argument("source", metavar="SRC", type=FOLDER)
@click.argument("space", type=NEW)
@click.option("--components", type=click.IntRange(1), help="How many; else as many as models have scores of.")
@click.option("--stable-diffusion", is_flag=True,
              help="Take Stable Diffusion 1's order of weights where weight_dimensions.pt is missing.")  # fmt: skip
@output_option
def import_(source: Path, space: Path, components: int | None, stable_diffusion: bool, output: Output) -> None:
    """Make a space of the one that weights2weights published, which samples, edits, inverts and exports as any other.

    SRC holds V.pt, mean.pt, std.pt, proj_1000pc.pt and adapter_config.json; nothing in them is executed.
    """
    from netweight.core.files import refuse_existing
    from netweight.methods.space.space import read_published

    refuse_existing(space, overwrite=None)
    read_published(source, components=components, stable_diffusion=stable_diffusion).save(space)
    _show_space(space, output)


@space.command()
@click.argument("source", metavar="BASE", type=click.Path(path_type=Path, exists=True))
@click.argument("tuned", metavar="TUNED", type=click.Path(path_type=Path, exists=True))
@click.argument("destination", metavar="DST", type=NEW)
@_overwrite
@options(ExportSettings)
@output_option
def extract(
    source: Path, tuned: Path, destination: Path, settings: ExportSettings, overwrite: bool, output: Output
) -> None:
    """Write what training changed from BASE to TUNED as a LoRA: the best one of --rank, with its error.

    Both are safetensors files or folders of one model, such as a language model or a pipeline's unet. Vectors, such as
    norms, and embeddings are left out: no LoRA changes them.
    """
    from netweight.store.lora_formats.files import differences, export_adapter

    how = {**dict(settings), "base": settings.base or str(source)}
    _show_written(export_adapter(differences(source, tuned), destination, overwrite=overwrite, **how), output)


@space.command()
@click.argument("path", metavar="DIR", type=FOLDER)
@click.option("--least", type=click.FloatRange(0, 1, min_open=True), default=0.98, show_default=True,
              help="The least cosine of what two adapters change.")  # fmt: skip
@output_option
def dedupe(path: Path, least: float, output: Output) -> None:
    """List adapters below DIR that change what another one does: copies, in another layout, rank or strength.

    Nothing is removed. Files that cannot be read are listed with the reason.
    """
    from netweight.methods.space.folder import find_duplicates

    found, bad = find_duplicates(path, least, output.progress)
    rows = [(each.name, each.of, f"{each.cosine:.4f}", f"{each.ranks[0]} and {each.ranks[1]}") for each in found]
    output.table(("adapter", "is nearly", "cosine", "ranks"), rows)
    for name, reason in list(bad.items())[:_SHOWN]:
        output.line(f"Not read, {name}: {reason}", fg="yellow")
    output.result({"duplicates": [vars(each) for each in found], "unread": bad})


@space.command()
@click.argument("path", type=FOLDER)
@click.option("--verify", is_flag=True, help="Compare every shard with its digest.")
@output_option
def info(path: Path, verify: bool, output: Output) -> None:
    """Say what a bank of adapters holds, or how good the fit of a space is.

    With --verify it exits with 3 if a bank's shard is damaged.
    """
    if (path / "space.json").is_file() and not verify:
        _show_space(path, output)
        return
    from netweight.store.bank.bank import AdapterBank

    bank = AdapterBank.open(path)
    if verify:
        bank.verify(progress=output.progress)
    _show_bank(bank, output, verified=verify)


def _show_bank(bank: AdapterBank, output: Output, *, verified: bool = False) -> None:
    from tqdm import tqdm

    ranks = bank.ranks
    span = f"{ranks[0]}" if ranks[0] == ranks[1] else f"{ranks[0]} to {ranks[1]}"
    weights = sum(rows * columns for rows, columns in bank.shapes.values())
    output.line(
        f"{bank.path}: {len(bank)} adapters of {len(bank.modules)} modules, rank {span}, "
        f"{tqdm.format_sizeof(bank.nbytes, 'B', 1000)} in {_many(bank.shards, 'shard')}"
    )
    output.line(f"{weights:,} weights are changed" + (f" of {bank.base}" if bank.base else ""))
    output.line(f"digest {bank.digest}" + (", all shards intact" if verified else ""))
    _show_provenance(bank, output)
    for name, reason in list(bank.skipped.items())[:_SHOWN]:
        output.line(f"Skipped {name}: {reason}", fg="yellow")
    if len(bank.skipped) > _SHOWN:
        output.line(f"... and {len(bank.skipped) - _SHOWN} more were skipped; --json names them.", fg="yellow")
    output.result(
        {
            "path": str(bank.path), "adapters": len(bank), "ranks": list(ranks), "shards": bank.shards,
            "nbytes": bank.nbytes, "base": bank.base, "digest": bank.digest, "verified": verified,
            "shapes": bank.shapes, "kernels": bank.kernels, "names": bank.names, "skipped": dict(bank.skipped),
            "provenance": {name: dict(said) for name, said in bank.provenance.items()},
        }
    )  # fmt: skip


# What files say of themselves, by its heading; the first that is there is shown.
_SAYINGS = {
    "title": ("modelspec.title", "ss_output_name"),
    "words": ("modelspec.trigger_phrase", "trained_words", "tags"),
    "licence": ("modelspec.license", "license"),
    "source": ("source", "modelspec.author", "ss_sd_model_name"),
    "converted": ("converted",),
}


def _show_provenance(bank: AdapterBank, output: Output) -> None:
    """What the adapters' files say of where they come from."""
    rows = [
        (name, *(next((said[key] for key in keys if key in said), "") for keys in _SAYINGS.values()))
        for name, said in bank.provenance.items()
    ]
    rows = [row for row in rows if any(row[1:])]
    if rows:
        told = [0, *(place for place in range(1, len(rows[0])) if any(row[place] for row in rows))]
        heads = ("adapter", *_SAYINGS)
        output.table(
            [heads[place] for place in told], [[row[place][:_WIDE] for place in told] for row in rows[:_SHOWN]]
        )
        if len(rows) > _SHOWN:
            output.line(f"... and {len(rows) - _SHOWN} more; --json has all.")
    if licences := sorted({row[3] for row in rows if row[3]}):
        output.line(f"Licences: {', '.join(licence[:_WIDE] for licence in licences)}")


def _show_space(folder: Path, output: Output) -> None:
    """Say what a fitted space is and how good its fit is; its bank is not needed."""
    from netweight.methods.space.fit import Accuracy
    from netweight.methods.space.space import read_about

    about = read_about(folder)
    accuracy = Accuracy.from_json(about["accuracy"])
    ways = {
        "dual": "found exactly",
        "streaming": f"found by {len(accuracy.passes)} passes",
        "published": "as published",
    }
    output.line(
        f"{folder}: {about['components']} components of {about['fitted']} adapters capture {accuracy.captured:.1%} of "
        f"their variance, {ways[accuracy.solver]}",
        bold=True,
    )
    appended = len(about["names"]) - about["fitted"]
    output.line(f"Representation {about['config']['representation']}, {len(about['shapes'])} modules"
                + (f", {appended} more adapters appended" if appended else ""))  # fmt: skip
    for text in _remarks(accuracy):
        output.line(text)
    output.result({
        "space": str(folder), "adapters": len(about["names"]), "fitted": about["fitted"],
        "components": about["components"], "representation": about["config"]["representation"],
        "config": about["config"], "bank": about["bank"], "accuracy": accuracy.to_json(),
    })  # fmt: skip


def _remarks(accuracy: Accuracy) -> list[str]:
    found = []
    if len(accuracy.passes) > 1:
        found.append("Captured pass by pass: " + ", ".join(f"{share:.2%}" for share in accuracy.passes))
    if accuracy.halves is not None:
        halves = accuracy.halves
        agreement = ", ".join(f"{number}: {share:.2f}" for number, share in halves.agreement.items())
        found.append(
            f"Half of the adapters, with {halves.components} components, capture {halves.held_out:.1%} of the other "
            f"half's variance, {halves.fitted:.1%} of their own."
        )
        found.append(f"Agreement of the halves by leading components (1 for the same): {agreement}")
    if accuracy.sketch is not None:
        sketch = accuracy.sketch
        found.append(
            f"Through a sketch: inner products of {sketch.adapters} adapters have an error of {sketch.products:.1%}, "
            f"{sketch.components} components capture {sketch.captured:.1%} of what exact ones do."
        )
    return found
