"""NeuZip's tables 3(a), 3(b) and 4 and figure 3: what lossless and lossy weights cost in perplexity, bytes and speed.

All of them are views of the same measurements, which are kept in `OUT/neuzip-inference/` beside the tables' own
folders: table 4 and figure 3 take what table 3(a) has measured there, and measure what is missing. Bounds of findings
are ours and are marked so; the paper gives none. Points of figure 3 are kinds of weight formats; a line joins those
that no other format beats in both.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from netweight.core.progress import Progress
from netweight.report.finding import Figure, Finding, Table
from netweight.report.plots import canvas, series_color, to_figure
from netweight_experiments.tables.grid import Cell, grid, interval_finding
from netweight_experiments.tables.neuzip import inference_runs as models
from netweight_experiments.tables.neuzip.inference_runs import (
    BITS,
    BLOCKS,
    SEED,
    Opened,
    Outcome,
    WeightFormat,
    measure,
    weight_formats,
)
from netweight_experiments.tables.registry import Column, MeasuredTable, PublishedTable, Scale, published, table

Point = tuple[str, str, float, float]  # kind, label or "", memory, perplexity

# Kind → color, marker, size.
_KINDS = {
    "bf16": (5, "*", 70),
    "bitsandbytes": (1, "s", 26),
    "torchao": (4, "^", 30),
    "NeuZip": (0, "o", 30),
    "NeuZip, other blocks": (0, ".", 22),
    "NeuZip, as the reference code": (3, "x", 24),
    "NeuZip, embeddings too": (2, "D", 24),
}
_PAPER_MODEL = "Llama-3 8B"


def front(points: Sequence[tuple[float, float]]) -> set[int]:
    """Return which points no other point beats: none is as good in both and better in one."""
    return {
        number
        for number, (x, y) in enumerate(points)
        if not any(a <= x and b <= y and (a < x or b < y) for a, b in points)
    }


def trade_off(
    points: Sequence[tuple[WeightFormat, float, float]], *, name: str, unit: str, paper: PublishedTable | None
) -> Figure:
    """Draw the figure: the paper's model on the left, if there are numbers, the measured one on the right."""
    measured = [(_kind(way), _label(way), memory, value) for way, memory, value in points]
    panels = [(f"{_PAPER_MODEL}, published", "GiB", _published(paper))] if paper else []
    panels.append((f"{name}, measured", unit, measured))
    with canvas(len(panels), width=3.9 * len(panels), height=4.3) as (drawing, axes):
        for panel, (title, memory_unit, shown) in zip(axes, panels, strict=True):
            _draw(panel, shown)
            panel.set_title(title)
            panel.set_xlabel(f"memory of the whole model, {memory_unit}")
            panel.set_ylabel("perplexity per word")
        handles: dict[str, Any] = {}
        for panel in axes:
            found, names = panel.get_legend_handles_labels()
            handles.update(zip(names, found, strict=True))
        drawing.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=4, fontsize=8)
        drawing.draw_without_rendering()  # so that places in pixels hold
        for panel, (_, _, shown) in zip(axes, panels, strict=True):
            _write_labels(panel, shown)
        best = [points[number][0].name for number in sorted(front([(x, y) for _, x, y in points]))]
        alt = f"Perplexity against memory of {name}. No other way beats these in both: {', '.join(best)}."
        return to_figure(drawing, alt=alt, caption="Perplexity against memory; the line joins what nothing else beats.")


def _draw(panel: Any, points: Sequence[Point]) -> None:
    from matplotlib import ticker

    chosen = front([(x, y) for *_, x, y in points])
    line = sorted((points[number][2], points[number][3]) for number in chosen)
    panel.plot(*zip(*line, strict=True), color=series_color(5), linewidth=0.9, alpha=0.6, zorder=1)
    for kind, (color, marker, size) in _KINDS.items():
        own = [(x, y) for found, _, x, y in points if found == kind]
        if own:
            xs, ys = zip(*own, strict=True)
            panel.scatter(xs, ys, s=size, color=series_color(color), marker=marker, label=kind, zorder=2)
    panel.set_yscale("log")
    panel.yaxis.set_major_locator(ticker.MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    panel.yaxis.set_minor_locator(ticker.NullLocator())
    panel.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
    panel.grid(axis="y")
    panel.margins(x=0.2, y=0.12)


def _write_labels(panel: Any, points: Sequence[Point]) -> None:
    """Put each label at the first of some places around its point where it covers no point, line or other label."""
    from matplotlib.text import Text

    renderer = panel.figure.canvas.get_renderer()
    taken = [panel.transData.transform((x, y)) for *_, x, y in points]
    corners = [panel.transData.transform(place) for place in zip(*panel.lines[0].get_data(), strict=True)]
    for left, right in itertools.pairwise(corners):
        taken += [left + (right - left) * step / 40 for step in range(1, 40)]
    boxes: list[Any] = []
    for _, label, x, y in sorted(points, key=lambda point: (point[0] != "NeuZip", point[2])):
        if not label:
            continue
        for dx, dy, ha, va in _PLACES:
            text = panel.annotate(
                label, (x, y), (dx, dy), textcoords="offset points", fontsize=7, ha=ha, va=va, zorder=3,
                arrowprops=_LEADER if max(abs(dx), abs(dy)) > 6 else None,
            )  # fmt: skip
            text.update_positions(renderer)
            box = Text.get_window_extent(text, renderer)  # without the leader, which begins at the point
            point = panel.transData.transform((x, y))
            leader = [point + (box.get_points().mean(0) - point) * step / 10 for step in range(10)]
            if _is_free(box, leader, boxes, taken, panel.bbox):
                break
            text.remove()
        else:
            continue  # crowded: the table has the numbers
        boxes.append(box)


def _is_free(box: Any, leader: Sequence[Any], boxes: Sequence[Any], taken: Sequence[Any], panel: Any) -> bool:
    """Whether a label at `box` lies within the panel and meets neither points nor labels, and its leader no label."""
    within = all(panel.contains(*corner) for corner in box.corners())
    crossed = any(other.overlaps(box) or any(other.contains(*at) for at in leader) for other in boxes)
    return within and not crossed and not any(box.padded(_RADIUS).contains(*place) for place in taken)


_LEADER = {"arrowstyle": "-", "linewidth": 0.5, "shrinkA": 0, "shrinkB": 3, "color": series_color(5)}
_RADIUS = 3.5  # of a marker, in pixels
# Where a label may be put, from its point: beside it first, then farther away with a line to it.
_PLACES = [
    (6, 0, "left", "center"), (-6, 0, "right", "center"), (0, 6, "center", "bottom"), (0, -6, "center", "top"),
    *((x, y, "left" if x > 0 else "right", "bottom" if y > 0 else "top")
      for side, height in ((5, 5), (14, 12)) for y in (height, -height) for x in (side, -side)),
    (26, 30, "left", "bottom"), (-8, 30, "right", "bottom"), (-8, 44, "right", "bottom"),
]  # fmt: skip


def _kind(way: WeightFormat) -> str:
    if way.quantizer:
        return "torchao" if way.name.startswith("torchao") else "bitsandbytes"
    if way.bits is None:
        return "bf16"
    if way.whole:
        return "NeuZip, embeddings too"
    if way.fidelity == "reference":
        return "NeuZip, as the reference code"
    return "NeuZip" if way.block == BLOCKS[-1] or way.bits == 7 else "NeuZip, other blocks"


def _label(way: WeightFormat) -> str:
    """A short label for the points that a reader looks for; none for the sweep."""
    kind = _kind(way)
    if kind == "NeuZip":
        return "lossless" if way.bits == 7 else f"{way.bits}-bit"
    if kind in ("bitsandbytes", "torchao"):
        return way.name.removeprefix("Quant ").removeprefix("torchao ").replace(", groups of ", "/")
    return "bf16" if kind == "bf16" else ""


def _published(paper: PublishedTable) -> list[Point]:
    names = [column.name for column in paper.columns]
    at: Mapping[str, int] = {what: names.index(f"{_PAPER_MODEL} {what}") for what in ("memory", "perplexity")}
    points: list[Point] = []
    for row in paper.rows:
        memory, value = row.values[at["memory"]], row.values[at["perplexity"]]
        if memory is None or value is None:
            continue
        kind = "NeuZip" if row.name.startswith("NeuZip") else "bf16" if row.name == "Vanilla" else "bitsandbytes"
        label = row.name.removeprefix("NeuZip ").removeprefix("Quant ").replace("7-bit (lossless)", "lossless")
        points.append((kind, "bf16" if kind == "bf16" else label, float(memory), float(value)))
    return points


_NEEDS = ("evidence", "llm", "data:text")
_PAPER = ("one of the paper's models: --model FOLDER", "memory for it twice")
_WITH_TABLE3 = "Measured with table 3(a), in the same results folder."
# Lossy formats of the usual layers, by bits, block and fidelity.
Lossy = dict[tuple[int, int | None, str], Outcome]


@table("neuzip-table3-decoder", needs=_NEEDS, paper_needs=_PAPER, stand_in=True)
def table3_decoder(scale: Scale, out: Path, *, model: str | None = None) -> MeasuredTable:
    """Perplexity, memory and speed of a decoder under lossless and lossy compression and under quantizers."""
    opened, outcomes = _measure("decoder", scale, out, model, afresh=(out / "result.json").exists())
    return _table3("neuzip-table3-decoder", "per word", opened, outcomes)


@table("neuzip-table3-encdec", needs=_NEEDS, paper_needs=(*_PAPER, "text/wmt14-de-en.src and .ref"), stand_in=True)
def table3_encdec(scale: Scale, out: Path, *, model: str | None = None) -> MeasuredTable:
    """The same of an encoder-decoder."""
    opened, outcomes = _measure("encoder-decoder", scale, out, model, afresh=(out / "result.json").exists())
    return _table3("neuzip-table3-encdec", "per token", opened, outcomes)


def _measure(
    kind: str, scale: Scale, out: Path, model: str | None, *, afresh: bool = False
) -> tuple[Opened, list[Outcome]]:
    """Open the model and measure all formats; `afresh` forgets what is kept, but for the trained stand-in."""
    folder, name = out.parent / "neuzip-inference", f"{kind}-{scale}"
    if afresh:
        (folder / f"{name}.jsonl").unlink(missing_ok=True)
    progress, extent = Progress(), models.EXTENTS[scale]
    opened = (models.open_decoder if kind == "decoder" else models.open_encoder_decoder)(scale, model, folder, progress)
    formats = weight_formats(extras=extent.extras)
    return opened, measure(opened.subject, formats, folder, name, rounds=extent.rounds, progress=progress)


def _table3(table_id: str, unit: str, opened: Opened, outcomes: Sequence[Outcome]) -> MeasuredTable:
    name, same = opened.subject.name, opened.published

    def perplexity(text: str) -> Callable[[Outcome], float]:
        return lambda outcome: outcome.perplexity(text).estimate

    first, *others = (text.name for text in opened.subject.texts)
    cells: list[Cell[Outcome]] = [
        (Column(f"{name} perplexity", unit, "lower"), perplexity(first)),
        (Column(f"{name} memory", opened.unit, "lower"), lambda outcome: opened.memory(outcome.held)),
        (Column(f"{name} speed", "iterations/s", "higher"), Outcome.iterations),
        *((Column(f"{name} perplexity, {text}", unit, "lower"), perplexity(text)) for text in others),
        (Column(f"{name} converted layers", opened.unit, "lower"), lambda outcome: opened.memory(outcome.layers)),
        (Column(f"{name} bits per converted weight", "bits", "lower"), lambda outcome: outcome.bits),
    ]
    numbers = published(table_id)
    return grid(
        {outcome.way.name: outcome for outcome in outcomes if not outcome.missing},
        cells,
        differs=opened.differs,
        labels={f"{name} {what}": f"{same} {what}" for what in ("perplexity", "memory", "speed")} if same else {},
        findings=_findings(opened, outcomes),
        tables=_ratio_tables(opened, outcomes, numbers) if numbers else (),
        notes=(
            "All ways convert the same layers, the linear ones but the output layer, unless they say otherwise.",
            "NeuZip's lossy rows share a normalizer in blocks of 512 unless they say otherwise.",
            "“As the reference code” is its arithmetic; the bytes are of netweight's own format in all rows.",
            "Quant INT8, FP4 and NF4 are bitsandbytes; ^2 quantizes scales too, by tables that small layers feel.",
            *_notes(outcomes),
        ),
        inputs=opened.inputs,
    )


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    """What was not measured and why, and what an earlier run had measured."""
    notes = [f"{outcome.way.name} was not measured: {outcome.missing}." for outcome in outcomes if outcome.missing]
    earlier = sum(outcome.earlier for outcome in outcomes)
    return [*notes, f"{earlier} of {len(outcomes)} ways had been measured by an earlier run."] if earlier else notes


@table("neuzip-table4", needs=_NEEDS, paper_needs=_PAPER, stand_in=True)
def table4(scale: Scale, out: Path, *, model: str | None = None) -> MeasuredTable:
    """Perplexity and memory of a decoder at 0 and 1 mantissa bits, by the number of weights that share a normalizer."""
    opened, outcomes = _measure("decoder", scale, out, model)
    lossy: Lossy = {
        (outcome.way.bits, outcome.way.block, outcome.way.fidelity): outcome
        for outcome in outcomes
        if outcome.way.bits is not None and not outcome.way.whole
    }

    def cells(block: int) -> tuple[Cell[tuple[int, str]], ...]:
        name = f"{opened.subject.name}, block {block}"
        return (
            (
                Column(f"{name}: perplexity", "per word", "lower"),
                lambda row: lossy[row[0], block, row[1]].perplexity(opened.text).estimate,
            ),
            (
                Column(f"{name}: memory", opened.unit, "lower"),
                lambda row: opened.memory(lossy[row[0], block, row[1]].held),
            ),
        )

    kinds = (("corrected", ""), ("reference", ", as the reference code"))
    unknown = "The paper does not name the model of this table; its memory suggests some 70 billion weights."
    return grid(
        {f"NeuZip {bits}-bit{how}": (bits, fidelity) for fidelity, how in kinds for bits in BITS},
        [cell for block in BLOCKS for cell in cells(block)],
        differs=(*opened.differs, unknown),
        findings=_block_findings(lossy, opened.text),
        tables=(_block_table(opened, lossy),),
        notes=(_WITH_TABLE3, *_notes(outcomes)),
        inputs=opened.inputs,
    )


@table("neuzip-fig3", needs=_NEEDS, paper_needs=_PAPER, stand_in=True)
def figure3(scale: Scale, out: Path, *, model: str | None = None) -> MeasuredTable:
    """Perplexity against memory, all formats of table 3(a) in one picture, beside the paper's."""
    opened, outcomes = _measure("decoder", scale, out, model)
    found = [outcome for outcome in outcomes if not outcome.missing]
    points = [(one.way, opened.memory(one.held), one.perplexity(opened.text).estimate) for one in found]
    on_front = front([point[1:] for point in points])
    picture = trade_off(
        points, name=opened.published or opened.subject.name, unit=opened.unit, paper=published("neuzip-table3-decoder")
    )
    return grid(
        {point[0].name: (*point[1:], number in on_front) for number, point in enumerate(points)},
        [
            (Column("memory", opened.unit, "lower"), lambda row: row[0]),
            (Column("perplexity", "per word", "lower"), lambda row: row[1]),
            (Column("on the front"), lambda row: row[2]),
        ],
        differs=opened.differs,
        findings=_equal_memory_findings(found, opened.text),
        figures=(picture,),
        notes=(_WITH_TABLE3, *_notes(outcomes)),
        inputs=opened.inputs,
    )


# ---- findings --------------------------------------------------------------------------------------------------------


def _findings(opened: Opened, outcomes: Sequence[Outcome]) -> tuple[Finding, ...]:
    """What table 3 says."""
    vanilla, *others = found = [outcome for outcome in outcomes if not outcome.missing]
    whole = [outcome for outcome in others if not outcome.way.whole and outcome.way.block == BLOCKS[-1]]
    return (
        *([_trained(opened.training)] if opened.training else []),
        *(_lossless(outcome, vanilla, opened.text) for outcome in others if outcome.way.bits == 7),
        *(_cost(outcome, vanilla, opened.text) for outcome in whole if outcome.way.bits in BITS),
        *_equal_memory_findings(found, opened.text),
    )


def _trained(training: Mapping[str, Any]) -> Finding:
    unit = "per word" if "held-out perplexity per word" in training else "per token"
    ratio = training[f"held-out perplexity {unit}"] / training[f"held-out perplexity {unit} of token frequencies"]
    detail = {"bound": "ours", "steps": training["fit"]["steps"], "overfits": training["fit"]["overfits"]}
    name = "the stand-in is trained: held-out perplexity over that of token frequencies"
    return Finding(name, ratio, better="lower", target=0.5, seeds=(SEED,), detail=detail)


def _lossless(outcome: Outcome, vanilla: Outcome, text: str) -> Finding:
    same = all(outcome.losses[name].nats == vanilla.losses[name].nats for name in vanilla.losses)
    name = f"{outcome.way.name}: every loss equals vanilla's to the last bit"
    shares = {"layers, × vanilla": outcome.layers / vanilla.layers, "model, × vanilla": outcome.held / vanilla.held}
    return Finding(name, same, n=len(vanilla.losses[text].nats), target=True, detail=shares)


def _cost(outcome: Outcome, vanilla: Outcome, text: str) -> Finding:
    detail = {"bits per weight": outcome.bits, "largest relative change of a weight": outcome.change}
    return _ratio(f"{outcome.way.name}: perplexity over vanilla's", outcome, vanilla, text, detail)


def _ratio(name: str, one: Outcome, other: Outcome, text: str, detail: Mapping[str, Any]) -> Finding:
    ratio = one.against(other, text)
    detail = {**detail, "interval": ratio.method}
    return interval_finding(name, ratio, better="lower", seeds=(SEED,), detail=detail)


def _block_findings(lossy: Lossy, text: str) -> tuple[Finding, ...]:
    """What table 4 says: smallest against largest blocks, in perplexity and in bytes."""
    made = []
    for bits in (0, 1):
        small, large = (lossy[bits, block, "corrected"] for block in (BLOCKS[0], BLOCKS[-1]))
        name = f"perplexity at {bits} bits, blocks of {BLOCKS[0]} over blocks of {BLOCKS[-1]}"
        made.append(_ratio(name, small, large, text, {"bits per weight": [small.bits, large.bits]}))
    return tuple(made)


def _equal_memory_findings(found: Sequence[Outcome], text: str) -> tuple[Finding, ...]:
    """Each quantizer against the best of netweight's formats whose converted layers hold no more bytes."""
    ours = [one for one in found if one.way.bits is not None and not one.way.whole and one.way.fidelity == "corrected"]
    made = []
    for theirs in (outcome for outcome in found if outcome.way.quantizer):
        fitting = [outcome for outcome in ours if outcome.layers <= theirs.layers]
        name = f"perplexity of NeuZip's best way in no more bytes than {theirs.way.name}, over its perplexity"
        detail: dict[str, Any] = {"bits per weight there": theirs.bits}
        if not fitting:
            detail["reason"] = "no way of NeuZip's is that small"
            made.append(Finding(name, None, better="lower", detail=detail))
            continue
        best = min(fitting, key=lambda outcome: outcome.losses[text].mean)
        detail |= {"chosen, on the same text, among": len(fitting)}
        detail |= {"way": best.way.name, "bits per weight": best.bits}
        made.append(_ratio(name, best, theirs, text, detail))
    return tuple(made)


# ---- tables of ratios, which compare although the models differ ------------------------------------------------------


def _ratio_tables(opened: Opened, outcomes: Sequence[Outcome], numbers: PublishedTable) -> tuple[Table, ...]:
    """Ratios to the uncompressed model, published beside measured: a table each for perplexity, memory and speed."""
    papers = _published_ratios(numbers)
    paper_models = list(dict.fromkeys(model for model, _, _ in papers))
    name, note = opened.subject.name, f"{', '.join(paper_models)}: published, on GPUs. "
    if not opened.published:
        note += f"{name} is another model than these, so only ratios compare."
    vanilla = outcomes[0]

    def worse(outcome: Outcome) -> list[Any]:
        if outcome is vanilla:
            return [1.0, "", outcome.bits]
        ratio = outcome.against(vanilla, opened.text)
        return [ratio.estimate, f"{ratio.low:.4f}–{ratio.high:.4f}", outcome.bits]

    def held(outcome: Outcome) -> list[Any]:
        return [outcome.held / vanilla.held, outcome.layers / vanilla.layers]

    def faster(outcome: Outcome) -> list[Any]:
        ratio = outcome.speed()
        return [1.0, ""] if outcome is vanilla else [ratio.estimate, f"{ratio.low:.2f}–{ratio.high:.2f}"]

    def of(
        what: str, better: Literal["higher", "lower"], cells: Any, own: Sequence[Any], empty: Sequence[Any]
    ) -> Table:
        columns: list[Column | str] = ["way", *(Column(model, "published") for model in paper_models)]
        rows = [
            (
                outcome.way.name,
                *(papers.get((model, outcome.way.name, what)) for model in paper_models),
                *(empty if outcome.missing else cells(outcome)),
            )
            for outcome in outcomes
        ]
        title = f"{what.capitalize()} as a ratio to the uncompressed model's, published beside measured"
        columns += [Column(name, "measured", better), *own]
        return Table(title, tuple(columns), tuple(rows), (note,))

    bits, layers = (
        Column("per converted weight", "bits", "lower"),
        Column("converted layers alone", "measured", "lower"),
    )
    return (
        of("perplexity", "lower", worse, ["95 % interval", bits], [None, "", None]),
        of("memory", "lower", held, [layers], [None, None]),
        of("speed", "higher", faster, ["95 % interval"], [None, ""]),
    )


def _published_ratios(numbers: PublishedTable) -> dict[tuple[str, str, str], float]:
    """Model, row, quantity → ratio to the row "Vanilla", for models whose uncompressed run the paper has."""
    by_row = {row.name: dict(zip([c.name for c in numbers.columns], row.values, strict=True)) for row in numbers.rows}
    found = {}
    for column in numbers.columns:
        model, what = column.name.rsplit(" ", 1)
        base = by_row["Vanilla"][column.name]
        for row, values in by_row.items():
            value = values[column.name]
            if base is not None and value is not None:
                found[model, row, what] = value / base
    return found


def _block_table(opened: Opened, lossy: Lossy) -> Table:
    """Perplexity and memory by block size side by side, as ratios to those at 512."""
    columns: list[Column | str] = ["way"]
    for block in BLOCKS[:-1]:
        columns += [Column(f"perplexity, block {block}", "× block 512"), Column("memory", "× block 512")]
    rows: list[tuple[Any, ...]] = []
    numbers = published("neuzip-table4")
    for row in numbers.rows if numbers else ():
        *values, last, base = row.values
        ratios = (
            None if value is None else value / (base if place % 2 else last)  # type: ignore[operator]
            for place, value in enumerate(values)
        )
        rows.append((f"{row.name}, published", *ratios))
    for fidelity in ("corrected", "reference"):
        for bits in BITS:
            whole = lossy[bits, BLOCKS[-1], fidelity]
            pairs = (
                (one.against(whole, opened.text).estimate, one.held / whole.held)
                for one in (lossy[bits, block, fidelity] for block in BLOCKS[:-1])
            )
            rows.append((f"NeuZip {bits}-bit, {fidelity}, measured", *(value for pair in pairs for value in pair)))
    return Table("By block size, as ratios to blocks of 512", tuple(columns), tuple(rows))
