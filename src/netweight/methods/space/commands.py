"""Commands of `netweight space`, and their output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from netweight.core import quantities
from netweight.core.atomic_writes import refuse_existing
from netweight.errors import UsageError
from netweight.job import check_destination
from netweight.methods.space.audits import LEAST_AUDITED, neighbor_findings
from netweight.methods.space.baking import bake_model
from netweight.methods.space.converting import convert_file
from netweight.methods.space.duplicates import find_duplicates
from netweight.methods.space.extraction import extract_files
from netweight.methods.space.fit import Accuracy
from netweight.methods.space.merging import merge_files
from netweight.methods.space.points import nearest, write_direction, write_points
from netweight.methods.space.settings import (
    BakeSettings,
    ConvertSettings,
    DirectionSettings,
    DuplicateSettings,
    EditSettings,
    ExtractSettings,
    FolderExport,
    FolderFit,
    FolderInversion,
    FolderView,
    ImportSettings,
    InfoSettings,
    IngestSettings,
    MergeSettings,
    NeighborSettings,
    PredictSettings,
    RenderSettings,
    SampleSettings,
    SimilarSettings,
)
from netweight.methods.space.space import WeightSpace, read_about, read_published
from netweight.methods.space.space_files import (
    draw,
    export_record,
    find_direction,
    find_similar,
    invert_files,
    moved,
    places_of,
    plan_inversion,
    points_of,
    predict_files,
    view_folder,
)
from netweight.methods.space.steps import fit as fit_step
from netweight.methods.space.steps import moves_of
from netweight.methods.space.view.page import View, write_view
from netweight.registry import Context, PrintedTable, Result, shell_line
from netweight.report.finding import Section
from netweight.store.bank.bank import AdapterBank
from netweight.store.bank.published import import_published, stable_diffusion_dimensions
from netweight.store.lora_formats.writing import ExportResult

_SHOWN = 20  # adapters that are listed
# Characters of the files' records.
_WIDE = 48


def _opened(space: Path, bank: Path | None) -> WeightSpace:
    return WeightSpace.open(space, None if bank is None else AdapterBank.open(bank))


def fit(settings: FolderFit, context: Context, bank: Path, space: Path) -> Result:
    """Fit a space to a bank, resumably, and say how good the fit is."""
    check_destination(space, overwrite=None)
    fit_step(bank, space, settings, context.progress)
    return _space(space, written=True)


def direction(
    settings: DirectionSettings, context: Context, space: Path, bank: Path | None, out: Path, overwrite: bool
) -> Result:
    """Find the direction of an attribute."""
    refuse_existing(out, overwrite=overwrite)
    opened, column = _opened(space, bank), settings.column
    line, findings, labeled = find_direction(opened, settings, context.progress)
    write_direction(line, out, overwrite=overwrite)
    # A corrected step is the whole way of one point, and another point's would differ.
    corrected = line.kind == "corrected"
    point, move = (settings.at, (f"{out}=1", "--unit", "raw")) if corrected else ("mean", (f"{out}=2",))
    return Result(
        [
            f"{column} ({line.kind}): {labeled} of {len(opened.names)} models have a label.",
            f"One standard deviation of the models is {line.deviation:.4g}, and the farthest model is at "
            f"{line.reach:.4g}.",
        ],
        [Section("Direction", findings)],
        payload={"direction": str(out), "column": column, "kind": line.kind, "known": labeled,
                 "deviation": line.deviation, "reach": line.reach},
        written=(out,), advises=False, next=(
            shell_line("netweight", "space", "edit", space, point, "--move", *move, "--out", "points.json"),
        ),
    )  # fmt: skip


def edit(
    settings: EditSettings, context: Context, space: Path, point: str, bank: Path | None, out: Path, overwrite: bool
) -> Result:
    """Move points along directions."""
    refuse_existing(out, overwrite=overwrite)
    opened = _opened(space, bank)
    steps = moves_of(opened, settings)
    after = moved(points_of(opened, point), steps, point)
    write_points(after, out, overwrite=overwrite)
    words = ", ".join(f"{step.direction.name} {step.strength:+g}" for step in steps)
    return Result(
        [f"{quantities.many(len(after.names), 'point')} moved by {words} ({settings.unit})."],
        payload={"points": str(out), "names": list(after.names), "moves": after.origin["moves"]}, written=(out,),
        next=(shell_line("netweight", "space", "export", space, out, "adapter"),),
    )  # fmt: skip


def sample(
    settings: SampleSettings, context: Context, space: Path, bank: Path | None, out: Path, overwrite: bool
) -> Result:
    """Draw points of a space."""
    refuse_existing(out, overwrite=overwrite)
    opened = _opened(space, bank)
    points = draw(opened, settings)
    write_points(points, out, overwrite=overwrite)
    enough = min(settings.count, len(opened.names)) >= LEAST_AUDITED
    sections = [Section("Neighbors", neighbor_findings(points.scores, opened.scores))] if enough else []
    return Result(
        [f"{quantities.many(settings.count, 'point')} drawn by {settings.sampler}."], sections,
        payload={"points": str(out), "names": list(points.names)}, written=(out,), advises=False,
        next=(shell_line("netweight", "space", "export", space, out, "adapters"),),
    )  # fmt: skip


def neighbors(settings: NeighborSettings, context: Context, space: Path, point: str, bank: Path | None) -> Result:
    """List the models nearest to points."""
    opened = _opened(space, bank)
    points = points_of(opened, point)
    near = nearest(points.scores, opened.scores, opened.names, count=settings.count, measure=settings.measure)
    pairs = list(zip(points.names, near, strict=True))
    rows = [
        (name, each.name, "–" if math.isnan(each.cosine) else f"{each.cosine:.3f}", f"{each.distance:.4g}")
        for name, part in pairs
        for each in part
    ]
    payload = {
        name: [{**vars(each), "cosine": None if math.isnan(each.cosine) else each.cosine} for each in part]
        for name, part in pairs
    }
    return Result([PrintedTable(("point", "model", "cosine", "distance"), rows)], payload=payload)


def invert(
    settings: FolderInversion, context: Context, space: Path, images: tuple[Path, ...], bank: Path | None, out: Path,
    overwrite: bool, plan: bool,
) -> Result:  # fmt: skip
    """Find the points whose models generate images."""
    if plan:
        return plan_inversion(images, settings)
    refuse_existing(out, overwrite=overwrite)
    points = invert_files(images, settings, lambda: _opened(space, bank), out=out, progress=context.progress)
    write_points(points, out, overwrite=overwrite)
    distances, improvements = points.origin["distances"], points.origin["improvements"]
    rows = [(name, f"{distances[name]:.2f}", f"{improvements[name]:.2f}") for name in points.names]
    return Result(
        [
            PrintedTable(
                ("target", "distance from the mean (about 1 for trained models)", "first loss / last loss"), rows
            )
        ],
        payload={"points": str(out), "distances": distances, "improvements": improvements}, written=(out,),
        warnings=points.origin["remarks"],
        next=(shell_line("netweight", "space", "export", space, out, "adapter"),),
    )  # fmt: skip


def export(
    settings: FolderExport, context: Context, space: Path, point: str, destination: Path, bank: Path | None,
    overwrite: bool,
) -> Result:  # fmt: skip
    """Write points as adapters."""
    opened = _opened(space, bank)
    points = points_of(opened, point)
    made: dict[str, ExportResult] = {}
    places: list[Path] = []
    how: Any = {name: value for name, value in settings if name != "point"}
    for name, place, scores in zip(points.names, places_of(points), points.scores, strict=True):
        path = destination if len(points.names) == 1 else destination / place
        places.append(path)
        made[name] = opened.point(scores).export(path, overwrite=overwrite, **how)
        if path.is_dir():
            export_record(opened, name, made[name]).write(path)
    return Result(
        [
            PrintedTable(
                ("point", "rank", "relative error", "where"), [(name, *_cells(each)) for name, each in made.items()]
            )
        ],
        payload={name: _payload(each) for name, each in made.items()},
        written=tuple(places),
    )  # fmt: skip


def merge(
    settings: MergeSettings, context: Context, adapters: tuple[Path, ...], destination: Path, overwrite: bool
) -> Result:
    """Merge adapters of one base model into one."""
    return _written(merge_files(adapters, destination, settings, overwrite=overwrite))


def convert(settings: ConvertSettings, context: Context, adapter: Path, destination: Path, overwrite: bool) -> Result:
    """Convert an adapter to another layout, rank or kind."""
    return _written(convert_file(adapter, destination, settings, overwrite=overwrite))


def extract(
    settings: ExtractSettings, context: Context, source: Path, tuned: Path, destination: Path, overwrite: bool
) -> Result:
    """Write what training changed as a LoRA."""
    return _written(extract_files(source, tuned, destination, settings, overwrite=overwrite, progress=context.progress))


def bake(
    settings: BakeSettings, context: Context, model: Path, adapters: tuple[str, ...], destination: Path, overwrite: bool
) -> Result:
    """Add adapters to the weights of a model."""
    made = bake_model(
        model, adapters, destination, architecture=settings.architecture, compress=settings.compress,
        overwrite=overwrite, progress=context.progress,
    )  # fmt: skip
    lines = [
        *made.remarks,
        *(f"{name}: all of its {count} changes were added." for name, count in made.changed.items()),
    ]
    lines.append(f"{made.modules} weights changed; {made.copied} tensors were copied as they are.")
    if away := made.rounded_away:
        lines.append(
            f"{len(away)} weights did not change, because the change is smaller than the rounding of their data type: "
            f"{', '.join(away[:3])}{' and others' if len(away) > 3 else ''}. Bake into a model in fp32 to keep it."
        )
    if made.left_out:
        lines.append(f"Left out, since they may contain the weights before the change: {', '.join(made.left_out)}.")
    payload = {"path": str(destination), "modules": made.modules, "copied": made.copied, "changed": dict(made.changed),
               "rounded_away": list(away), "left_out": list(made.left_out)}  # fmt: skip
    return Result(lines, payload=payload, written=(destination,))


def predict(settings: PredictSettings, context: Context, bank: Path, adapters: tuple[Path, ...]) -> Result:
    """Predict attributes from weights alone."""
    predicted = predict_files(bank, adapters, settings, context.progress)
    rows = [
        (name, *(f"{values[column]:.3g}" for column in settings.columns)) for name, values in predicted.values.items()
    ]
    return Result(
        [PrintedTable(("adapter", *settings.columns), rows)], [Section("Held-out scores", predicted.findings)],
        payload={"predicted": dict(predicted.values)}, advises=False,
    )  # fmt: skip


def similar(settings: SimilarSettings, context: Context, adapter: Path, bank: Path) -> Result:
    """List the adapters of a bank that are most similar to one."""
    near = find_similar(adapter, bank, settings.count, context.progress)
    rows = [(each.name, f"{each.cosine:.4f}", f"{each.shared_cosine:.4f}", f"{each.shared:.1%}") for each in near]
    heads = ("adapter", "cosine", "in shared modules", "of FILE in these")
    return Result([PrintedTable(heads, rows)], payload={"similar": [vars(each) for each in near]})


def dedupe(settings: DuplicateSettings, context: Context, folder: Path) -> Result:
    """List adapters that change what another one changes."""
    pairs, bad = find_duplicates(folder, settings.least, context.progress)
    rows = [(each.name, each.of, f"{each.cosine:.4f}", f"{each.ranks[0]} and {each.ranks[1]}") for each in pairs]
    warnings = [f"{name} cannot be read: {reason}" for name, reason in list(bad.items())[:_SHOWN]]
    what = "is a copy of another one" if len(pairs) == 1 else "are copies of another one"
    count = f"{quantities.many(len(pairs), 'adapter')} {what} (cosine of at least {settings.least:g})."
    return Result(
        [count, PrintedTable(("adapter", "copy of", "cosine", "ranks"), rows)], warnings=warnings,
        payload={"duplicates": [vars(each) for each in pairs], "unread": bad},
    )  # fmt: skip


def view(
    settings: FolderView, context: Context, space: Path | None, bank: Path | None, out: Path, overwrite: bool
) -> Result:
    """Write a page about a space."""
    refuse_existing(out, overwrite=overwrite)
    how: Any = {"command": context.command, "progress": context.progress}
    if space is None:
        shown = _miniature(settings, bank, how)
    else:
        shown = view_folder(space, _opened(space, bank), settings, **how)
    write_view(shown, out, overwrite=overwrite)
    sliders = [each.name for each in shown.traversals]
    return Result(
        [f"The page has {quantities.many(len(sliders), 'slider')}: {', '.join(sliders)}."], written=(out,),
        payload={"page": str(out), "sliders": sliders, "nbytes": out.stat().st_size, "facts": dict(shown.facts)},
    )  # fmt: skip


def _miniature(settings: FolderView, bank: Path | None, how: Mapping[str, Any]) -> View:
    from netweight.core.lazy import lazy

    allowed = {*RenderSettings.model_fields, "noises", "name_column", "device"} - {"prompts"}
    given = ["bank"] * (bank is not None) + [name for name in settings.given if name not in allowed]
    if given:
        option = given[0] if given[0] == "labels" else given[0].rstrip("s")
        raise UsageError(
            f"--{option} needs a SPACE.",
            cure="Name the folder of a space; without one, the page is about the miniature as it is.",
        )
    usual = lazy("netweight.toys.faces_pipeline:FACES_SETTINGS").value
    shown: View = lazy("netweight.toys.faces_pipeline:faces_view")(settings=settings.rendering(usual), **how)
    return shown


def ingest(settings: IngestSettings, context: Context, source: Path, destination: Path) -> Result:
    """Collect adapters into a bank."""
    how = {name: value for name, value in settings if name != "stable_diffusion"}
    if not settings.stable_diffusion:
        return _bank(AdapterBank.ingest(source, destination, progress=context.progress, **how), written=True)
    import_published(
        source, destination, dimensions=stable_diffusion_dimensions(), compress=settings.compress,
        skip_bad=settings.skip_bad, progress=context.progress,
    )  # fmt: skip
    return _bank(AdapterBank.open(destination), written=True)


def import_space(settings: ImportSettings, context: Context, source: Path, space: Path) -> Result:
    """Convert the published space of weights2weights."""
    check_destination(space, overwrite=None)
    read_published(source, components=settings.components, stable_diffusion=settings.stable_diffusion).save(space)
    return _space(space, written=True)


def info(settings: InfoSettings, context: Context, folder: Path) -> Result:
    """Show what a bank of adapters holds, or how good the fit of a space is."""
    if (folder / "space.json").is_file() and not settings.verify:
        return _space(folder)
    bank = AdapterBank.open(folder)
    if settings.verify:
        bank.verify(progress=context.progress)
    return _bank(bank, verified=settings.verify)


def _cells(made: ExportResult) -> tuple[str, str, str]:
    low, high = made.ranks
    return (f"{low}" if low == high else f"{low} to {high}", f"{made.relative_error:.2e}", str(made.path))


def _payload(made: ExportResult) -> dict[str, Any]:
    return {
        "path": str(made.path), "layout": made.layout, "ranks": list(made.ranks),
        "relative_error": made.relative_error, "modules": made.modules, "changed": made.changed or made.modules,
        "left_out": dict(made.left_out), "remarks": list(made.remarks),
    }  # fmt: skip


def _written(made: ExportResult) -> Result:
    count = f"{made.modules} of {made.changed} changed tensors" if made.changed else f"{made.modules} modules"
    lines: list[str | PrintedTable] = [PrintedTable(("rank", "relative error", "where"), [_cells(made)]), *made.remarks]
    lines.append(f"Layout {made.layout}: {count} written and read back.")
    reasons: dict[str, list[str]] = {}
    for name, reason in made.left_out.items():
        reasons.setdefault(reason, []).append(name)
    warnings = []
    for reason, names in reasons.items():
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} others" if len(names) > _SHOWN else "")
        warnings.append(f"{len(names)} left out ({reason}): {shown}")
    return Result(lines, payload=_payload(made), written=(made.path,), warnings=warnings)


def _bank(bank: AdapterBank, *, verified: bool = False, written: bool = False) -> Result:
    ranks = bank.ranks
    span = f"{ranks[0]}" if ranks[0] == ranks[1] else f"{ranks[0]} to {ranks[1]}"
    weights = sum(rows * columns for rows, columns in bank.shapes.values())
    lines: list[str | PrintedTable] = [
        f"{bank.path}: {quantities.many(len(bank), 'adapter')} of {quantities.many(len(bank.modules), 'module')}, "
        f"rank {span}, {quantities.size(bank.nbytes)} in {quantities.many(bank.shards, 'shard')}",
        f"{weights:,} weights are changed" + (f" of {bank.base}" if bank.base else ""),
        f"digest {bank.digest}" + (", all shards intact" if verified else ""),
        *_provenance(bank),
    ]
    warnings = [f"Skipped {name}: {reason}" for name, reason in list(bank.skipped.items())[:_SHOWN]]
    if len(bank.skipped) > _SHOWN:
        warnings.append(f"{len(bank.skipped) - _SHOWN} more were skipped; --json names them.")
    payload = {
        "path": str(bank.path), "adapters": len(bank), "ranks": list(ranks), "shards": bank.shards,
        "nbytes": bank.nbytes, "base": bank.base, "digest": bank.digest, "verified": verified,
        "shapes": bank.shapes, "kernels": bank.kernels, "names": bank.names, "skipped": dict(bank.skipped),
        "provenance": {name: dict(facts) for name, facts in bank.provenance.items()},
    }  # fmt: skip
    step = (shell_line("netweight", "space", "fit", bank.path, "space"),) if written else ()
    return Result(lines, payload=payload, warnings=warnings, written=(bank.path,) * written, next=step)


# What files say of themselves, by its heading; the first that is there is shown.
_FACTS = {
    "title": ("modelspec.title", "ss_output_name"),
    "words": ("modelspec.trigger_phrase", "trained_words", "tags"),
    "licence": ("modelspec.license", "license"),
    "source": ("source", "modelspec.author", "ss_sd_model_name"),
    "converted": ("converted",),
}


def _provenance(bank: AdapterBank) -> list[str | PrintedTable]:
    """Return what the adapters' files state about their origin."""
    lines: list[str | PrintedTable] = []
    rows = [
        (name, *(next((facts[key] for key in keys if key in facts), "") for keys in _FACTS.values()))
        for name, facts in bank.provenance.items()
    ]
    rows = [row for row in rows if any(row[1:])]
    if rows:
        filled = [0, *(place for place in range(1, len(rows[0])) if any(row[place] for row in rows))]
        heads = ("adapter", *_FACTS)
        cells = [[row[place][:_WIDE] for place in filled] for row in rows[:_SHOWN]]
        lines.append(PrintedTable([heads[place] for place in filled], cells))
        if len(rows) > _SHOWN:
            lines.append(f"... and {len(rows) - _SHOWN} more; --json has all.")
    if licences := sorted({row[3] for row in rows if row[3]}):
        lines.append(f"Licences: {', '.join(licence[:_WIDE] for licence in licences)}")
    return lines


def _space(folder: Path, *, written: bool = False) -> Result:
    """Describe a fitted space and the quality of its fit; its bank is not needed."""
    about = read_about(folder)
    accuracy = Accuracy.from_json(about["accuracy"])
    ways = {
        "dual": "found exactly",
        "streaming": f"found by {len(accuracy.passes)} passes",
        "published": "as published",
    }
    appended = len(about["names"]) - about["fitted"]
    lines: list[str | PrintedTable] = [
        f"{folder}: {about['components']} components of {about['fitted']} adapters capture {accuracy.captured:.1%} of "
        f"their variance, {ways[accuracy.solver]}",
        f"Representation {about['config']['representation']}, {len(about['shapes'])} modules"
        + (f", {appended} more adapters appended" if appended else ""),
        *_remarks(accuracy),
    ]
    payload = {
        "space": str(folder), "adapters": len(about["names"]), "fitted": about["fitted"],
        "components": about["components"], "representation": about["config"]["representation"],
        "config": about["config"], "bank": about["bank"], "accuracy": accuracy.to_json(),
    }  # fmt: skip
    step = (
        ((shell_line("netweight", "space", "sample", folder, "--count", 8, "--out", "points.json"),)) if written else ()
    )
    warnings = [accuracy.warning] if accuracy.warning else []
    return Result(lines, payload=payload, warnings=warnings, written=(folder,) * written, next=step)


def _remarks(accuracy: Accuracy) -> list[str]:
    remarks = []
    if len(accuracy.passes) > 1:
        remarks.append("Captured pass by pass: " + ", ".join(f"{share:.2%}" for share in accuracy.passes))
    if accuracy.halves is not None:
        halves = accuracy.halves
        agreement = ", ".join(f"{number}: {share:.2f}" for number, share in halves.agreement.items())
        remarks.append(
            f"Half of the adapters, with {halves.components} components, capture {halves.held_out:.1%} of the other "
            f"half's variance, {halves.fitted:.1%} of their own."
        )
        remarks.append(f"Agreement of the halves by leading components (1 for the same): {agreement}")
    if accuracy.sketch is not None:
        sketch = accuracy.sketch
        remarks.append(
            f"Through a sketch: inner products of {sketch.adapters} adapters have an error of {sketch.products:.1%}, "
            f"{sketch.components} components capture {sketch.captured:.1%} of what exact ones do."
        )
    return remarks
