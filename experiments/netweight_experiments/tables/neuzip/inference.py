"""NeuZip's tables 3(a), 3(b) and 4 and figure 3: what lossless and lossy weights cost in perplexity, bytes and speed.

All of them are views of the same measurements, which are kept in `OUT/neuzip-inference/` beside the tables' own
folders: table 4 and figure 3 take what table 3(a) has measured there, and measure what is missing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from netweight.core.progress import Progress
from netweight.evidence.figures import Figure, canvas, series_color, to_figure
from netweight.evidence.finding import Finding
from netweight.evidence.report import Column as ReportColumn
from netweight.evidence.report import Table
from netweight_experiments.tables.neuzip import inference_models as subjects
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
from netweight_experiments.tables.published import Published, published
from netweight_experiments.tables.registry import Column, Measured, Row, Scale, table

_NEEDS = ("evidence", "llm", "data:text")
_PAPER = ("one of the paper's models: --model FOLDER", "memory for it twice")
_GIB, _MB = 1 << 30, 10**6


@table("neuzip-table3-decoder", needs=_NEEDS, paper_needs=_PAPER, stand_in=True)
def table3_decoder(scale: Scale, out: Path, *, model: str | None = None) -> Measured:
    """Perplexity, memory and speed of a decoder under lossless and lossy compression and under quantizers."""
    opened, outcomes = _measure("decoder", scale, out, model, afresh=(out / "result.json").exists())
    return _table3("neuzip-table3-decoder", "per word", opened, outcomes)


@table("neuzip-table3-encdec", needs=_NEEDS, paper_needs=(*_PAPER, "text/wmt14-de-en.src and .ref"), stand_in=True)
def table3_encdec(scale: Scale, out: Path, *, model: str | None = None) -> Measured:
    """The same of an encoder-decoder."""
    opened, outcomes = _measure("encoder-decoder", scale, out, model, afresh=(out / "result.json").exists())
    return _table3("neuzip-table3-encdec", "per token", opened, outcomes)


@table("neuzip-table4", needs=_NEEDS, paper_needs=_PAPER, stand_in=True)
def table4(scale: Scale, out: Path, *, model: str | None = None) -> Measured:
    """Perplexity and memory of a decoder at 0 and 1 mantissa bits, by the number of weights that share a normalizer."""
    opened, outcomes = _measure("decoder", scale, out, model)
    by_way = _lossy(outcomes)
    columns, name, unit = [], opened.subject.name, _memory_unit(opened)
    for block in BLOCKS:
        columns += [Column(f"{name}, block {block}: perplexity", "per word", "lower")]
        columns += [Column(f"{name}, block {block}: memory", unit, "lower")]
    rows = []
    for fidelity, how in (("corrected", ""), ("reference", ", as the reference code")):
        for bits in BITS:
            cells: list[float] = []
            for block in BLOCKS:
                outcome = by_way[bits, block, fidelity]
                cells += [outcome.perplexity(_text(opened)).estimate, _memory(opened, outcome.held)]
            rows.append(Row(f"NeuZip {bits}-bit{how}", tuple(cells)))
    unknown = "The paper does not name the model of this table; its memory suggests some 70 billion weights."
    return Measured(
        columns=tuple(columns),
        rows=tuple(rows),
        differs=(*opened.differs, unknown),
        findings=block_findings(by_way, _text(opened)),
        tables=(block_table(opened, by_way),),
        notes=("Measured with table 3(a), in the same results folder.", *_notes(outcomes)),
        inputs=opened.inputs,
    )


@table("neuzip-fig3", needs=_NEEDS, paper_needs=_PAPER, stand_in=True)
def figure3(scale: Scale, out: Path, *, model: str | None = None) -> Measured:
    """Perplexity against memory, all ways of table 3(a) in one picture, beside the paper's."""
    opened, outcomes = _measure("decoder", scale, out, model)
    found = [outcome for outcome in outcomes if not outcome.missing]
    text, unit = _text(opened), _memory_unit(opened)
    points = [(outcome, _memory(opened, outcome.held), outcome.perplexity(text).estimate) for outcome in found]
    on_front = front([(memory, value) for _, memory, value in points])
    columns = (Column("memory", unit, "lower"), Column("perplexity", "per word", "lower"), Column("on the front"))
    rows = [
        Row(outcome.way.name, (memory, value, number in on_front))
        for number, (outcome, memory, value) in enumerate(points)
    ]
    picture = trade_off(
        [(outcome.way, memory, value) for outcome, memory, value in points],
        name=opened.published or opened.subject.name,
        unit=unit,
        paper=published("neuzip-table3-decoder"),
    )
    return Measured(
        columns=columns,
        rows=tuple(rows),
        differs=opened.differs,
        findings=equal_memory_findings(found, text),
        figures=(picture,),
        notes=("Measured with table 3(a), in the same results folder.", *_notes(outcomes)),
        inputs=opened.inputs,
    )


def _measure(
    kind: str, scale: Scale, out: Path, model: str | None, *, afresh: bool = False
) -> tuple[Opened, list[Outcome]]:
    """Open the model and measure all ways; `afresh` forgets what is kept, but for the trained stand-in."""
    folder = out.parent / "neuzip-inference"
    ledger = folder / f"{kind}-{scale}.jsonl"
    if afresh:
        ledger.unlink(missing_ok=True)
    opening: Callable[..., Opened] = subjects.open_decoder if kind == "decoder" else subjects.open_encoder_decoder
    progress = Progress()
    opened = opening(scale, model, folder, progress)
    extent = subjects.EXTENTS[scale]
    chosen = weight_formats(extras=extent.extras)
    return opened, measure(opened.subject, chosen, ledger, rounds=extent.rounds, progress=progress)


def _table3(table_id: str, unit: str, opened: Opened, outcomes: Sequence[Outcome]) -> Measured:
    name, texts = opened.subject.name, opened.subject.texts
    columns = (
        Column(f"{name} perplexity", unit, "lower"),
        Column(f"{name} memory", _memory_unit(opened), "lower"),
        Column(f"{name} speed", "iterations/s", "higher"),
        *(Column(f"{name} perplexity, {text.name}", unit, "lower") for text in texts[1:]),
        Column(f"{name} converted layers", _memory_unit(opened), "lower"),
        Column(f"{name} bits per converted weight", "bits", "lower"),
    )
    rows = tuple(Row(outcome.way.name, _cells(opened, outcome)) for outcome in outcomes if not outcome.missing)
    same = opened.published
    labels = {f"{name} {what}": f"{same} {what}" for what in ("perplexity", "memory", "speed")} if same else {}
    numbers = published(table_id)
    return Measured(
        columns=columns,
        rows=rows,
        differs=opened.differs,
        labels=labels,
        findings=findings(opened, outcomes),
        tables=ratio_tables(opened, outcomes, numbers) if numbers else (),
        notes=(
            "All ways convert the same layers, the linear ones but the output layer, unless they say otherwise.",
            "NeuZip's lossy rows share a normalizer in blocks of 512 unless they say otherwise.",
            "“As the reference code” is its arithmetic; the bytes are of netweight's own format in all rows.",
            "Quant INT8, FP4 and NF4 are bitsandbytes; ^2 quantizes scales too, by tables that small layers feel.",
            *_notes(outcomes),
        ),
        inputs=opened.inputs,
    )


def _cells(opened: Opened, outcome: Outcome) -> tuple[float, ...]:
    first, *others = (outcome.perplexity(text.name).estimate for text in opened.subject.texts)
    held, layers = _memory(opened, outcome.held), _memory(opened, outcome.layers)
    return (first, held, outcome.iterations(), *others, layers, outcome.bits)


def _lossy(outcomes: Sequence[Outcome]) -> dict[tuple[int, int | None, str], Outcome]:
    """Lossy ways over the usual layers, by bits, block and fidelity."""
    return {
        (outcome.way.bits, outcome.way.block, outcome.way.fidelity): outcome
        for outcome in outcomes
        if outcome.way.bits is not None and not outcome.way.whole
    }


def _notes(outcomes: Sequence[Outcome]) -> list[str]:
    """What was not measured and why, and what an earlier run had measured."""
    notes = [f"{outcome.way.name} was not measured: {outcome.missing}." for outcome in outcomes if outcome.missing]
    earlier = sum(outcome.earlier for outcome in outcomes)
    return [*notes, f"{earlier} of {len(outcomes)} ways had been measured by an earlier run."] if earlier else notes


def _text(opened: Opened) -> str:
    return opened.subject.texts[0].name


def _memory_unit(opened: Opened) -> str:
    return "GiB" if opened.published else "MB"


def _memory(opened: Opened, count: int) -> float:
    return count / (_GIB if opened.published else _MB)


_OURS = {"bound": "ours"}


def findings(opened: Opened, outcomes: Sequence[Outcome]) -> tuple[Finding, ...]:
    """Return the findings of table 3."""
    text = opened.subject.texts[0].name
    found = [outcome for outcome in outcomes if not outcome.missing]
    vanilla, *others = found
    made = [_trained(opened.training)] if opened.training else []
    for outcome in others:
        if outcome.way.bits == 7:
            made.append(_lossless(outcome, vanilla, text))
    for outcome in others:
        way = outcome.way
        if way.bits in BITS and way.block == BLOCKS[-1] and not way.whole:
            made.append(_cost(outcome, vanilla, text))
    made += equal_memory_findings(found, text)
    return tuple(made)


def block_findings(by_way: Mapping[tuple[int, int | None, str], Outcome], text: str) -> tuple[Finding, ...]:
    """Return the findings of table 4: smallest against largest blocks, in perplexity and in bytes."""
    made = []
    for bits in (0, 1):
        small, large = (by_way[bits, block, "corrected"] for block in (BLOCKS[0], BLOCKS[-1]))
        ratio = small.against(large, text)
        made.append(
            Finding(
                f"perplexity at {bits} bits, blocks of {BLOCKS[0]} over blocks of {BLOCKS[-1]}",
                ratio.estimate,
                ci95=ratio.ci95,
                n=ratio.n,
                better="lower",
                seeds=(SEED,),
                detail={"bits per weight": [small.bits, large.bits], "interval": ratio.method},
            )
        )
    return tuple(made)


def equal_memory_findings(found: Sequence[Outcome], text: str) -> tuple[Finding, ...]:
    """Compare each quantizer with the best of netweight's ways whose converted layers hold no more bytes."""
    ours = [outcome for outcome in found if outcome.way.bits is not None and not outcome.way.whole]
    ours = [outcome for outcome in ours if outcome.way.fidelity == "corrected"]
    made = []
    for theirs in (outcome for outcome in found if outcome.way.quantizer):
        fitting = [outcome for outcome in ours if outcome.layers <= theirs.layers]
        name = f"perplexity of NeuZip's best way in no more bytes than {theirs.way.name}, over its perplexity"
        detail: dict[str, Any] = {"bits per weight there": theirs.bits}
        if not fitting:
            reason = "no way of NeuZip's is that small"
            made.append(Finding(name, None, better="lower", detail={**detail, "reason": reason}))
            continue
        best = min(fitting, key=lambda outcome: outcome.losses[text].mean)
        ratio = best.against(theirs, text)
        detail |= {"chosen, on the same text, among": len(fitting)}
        detail |= {"way": best.way.name, "bits per weight": best.bits, "interval": ratio.method}
        made.append(
            Finding(name, ratio.estimate, ci95=ratio.ci95, n=ratio.n, better="lower", seeds=(SEED,), detail=detail)
        )
    return tuple(made)


def _trained(training: Mapping[str, Any]) -> Finding:
    unit = "per word" if "held-out perplexity per word" in training else "per token"
    model = training[f"held-out perplexity {unit}"]
    return Finding(
        "the stand-in is trained: held-out perplexity over that of token frequencies",
        model / training[f"held-out perplexity {unit} of token frequencies"],
        better="lower",
        target=0.5,
        seeds=(SEED,),
        detail={**_OURS, "steps": training["fit"]["steps"], "overfits": training["fit"]["overfits"]},
    )


def _lossless(outcome: Outcome, vanilla: Outcome, text: str) -> Finding:
    same = all(outcome.losses[name].nats == vanilla.losses[name].nats for name in vanilla.losses)
    return Finding(
        f"{outcome.way.name}: every loss equals vanilla's to the last bit",
        same,
        n=len(vanilla.losses[text].nats),
        target=True,
        detail={"layers, × vanilla": outcome.layers / vanilla.layers, "model, × vanilla": outcome.held / vanilla.held},
    )


def _cost(outcome: Outcome, vanilla: Outcome, text: str) -> Finding:
    ratio = outcome.against(vanilla, text)
    return Finding(
        f"{outcome.way.name}: perplexity over vanilla's",
        ratio.estimate,
        ci95=ratio.ci95,
        n=ratio.n,
        better="lower",
        seeds=(SEED,),
        detail={
            "bits per weight": outcome.bits,
            "largest relative change of a weight": outcome.change,
            "interval": ratio.method,
        },
    )


def ratio_tables(opened: Opened, outcomes: Sequence[Outcome], numbers: Published) -> tuple[Table, ...]:
    """Lay ratios to the uncompressed model side by side, a table each for perplexity, memory and speed."""
    papers = _published_ratios(numbers)
    models = list(dict.fromkeys(model for model, _, _ in papers))
    name, note = opened.subject.name, f"{', '.join(models)}: published, on GPUs. "
    if not opened.published:
        note += f"{opened.subject.name} is another model than these, so only ratios compare."
    made = []
    for what, better, kind in (
        ("perplexity", "lower", _worse),
        ("memory", "lower", _held),
        ("speed", "higher", _faster),
    ):
        own, cells = kind(opened, outcomes)
        columns: list[ReportColumn | str] = ["way", *(ReportColumn(model, "published") for model in models)]
        columns += [ReportColumn(name, "measured", cast("Any", better)), *own]
        rows = [
            (outcome.way.name, *(papers.get((model, outcome.way.name, what)) for model in models), *measured)
            for outcome, measured in zip(outcomes, cells, strict=True)
        ]
        title = f"{what.capitalize()} as a ratio to the uncompressed model's, published beside measured"
        made.append(Table(title, tuple(columns), tuple(rows), (note,)))
    return tuple(made)


_Ratios = tuple[list["ReportColumn | str"], list[list[Any]]]


def _worse(opened: Opened, outcomes: Sequence[Outcome]) -> _Ratios:
    cells: list[list[Any]] = []
    for outcome in outcomes:
        if outcome.missing or outcome is outcomes[0]:
            cells.append([None if outcome.missing else 1.0, "", None if outcome.missing else outcome.bits])
            continue
        ratio = outcome.against(outcomes[0], opened.subject.texts[0].name)
        cells.append([ratio.estimate, f"{ratio.low:.4f}–{ratio.high:.4f}", outcome.bits])
    return ["95 % interval", ReportColumn("per converted weight", "bits", "lower")], cells


def _held(opened: Opened, outcomes: Sequence[Outcome]) -> _Ratios:
    vanilla = outcomes[0]
    cells = [
        [None, None] if outcome.missing else [outcome.held / vanilla.held, outcome.layers / vanilla.layers]
        for outcome in outcomes
    ]
    return [ReportColumn("converted layers alone", "measured", "lower")], cells


def _faster(opened: Opened, outcomes: Sequence[Outcome]) -> _Ratios:
    cells: list[list[Any]] = []
    for outcome in outcomes:
        if outcome.missing or outcome is outcomes[0]:
            cells.append([None if outcome.missing else 1.0, ""])
            continue
        ratio = outcome.speed()
        cells.append([ratio.estimate, f"{ratio.low:.2f}–{ratio.high:.2f}"])
    return ["95 % interval"], cells


def _published_ratios(numbers: Published) -> dict[tuple[str, str, str], float]:
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


def block_table(opened: Opened, by_way: Mapping[tuple[int, int | None, str], Outcome]) -> Table:
    """Lay perplexity and memory by block size side by side, as ratios to those at 512."""
    numbers = published("neuzip-table4")
    columns: list[ReportColumn | str] = ["way"]
    for block in BLOCKS[:-1]:
        columns += [ReportColumn(f"perplexity, block {block}", "× block 512"), ReportColumn("memory", "× block 512")]
    rows: list[Sequence[Any]] = []
    for row in numbers.rows if numbers else ():
        *cells, last, base = row.values
        pairs = zip(cells[::2], cells[1::2], strict=True)
        rows.append((f"{row.name}, published", *_over(pairs, last, base)))
    text = opened.subject.texts[0].name
    for fidelity in ("corrected", "reference"):
        for bits in BITS:
            whole = by_way[bits, BLOCKS[-1], fidelity]
            own: list[Any] = [f"NeuZip {bits}-bit, {fidelity}, measured"]
            for block in BLOCKS[:-1]:
                outcome = by_way[bits, block, fidelity]
                own += [outcome.against(whole, text).estimate, outcome.held / whole.held]
            rows.append(own)
    return Table("By block size, as ratios to blocks of 512", tuple(columns), tuple(tuple(row) for row in rows))


def _over(pairs: Iterable[tuple[Any, Any]], last: Any, base: Any) -> list[float | None]:
    cells: list[float | None] = []
    for value, memory in pairs:
        cells += [value / last if value is not None else None, memory / base if memory is not None else None]
    return cells


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
    points: Sequence[tuple[WeightFormat, float, float]], *, name: str, unit: str, paper: Published | None
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
                label,
                (x, y),
                (dx, dy),
                textcoords="offset points",
                fontsize=7,
                ha=ha,
                va=va,
                zorder=3,
                arrowprops=_LEADER if max(abs(dx), abs(dy)) > 6 else None,
            )
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
_PLACES = [
    (6, 0, "left", "center"),
    (-6, 0, "right", "center"),
    (0, 6, "center", "bottom"),
    (0, -6, "center", "top"),
    (5, 5, "left", "bottom"),
    (-5, 5, "right", "bottom"),
    (5, -5, "left", "top"),
    (-5, -5, "right", "top"),
    (14, 12, "left", "bottom"),
    (-14, 12, "right", "bottom"),
    (14, -12, "left", "top"),
    (-14, -12, "right", "top"),
    (26, 30, "left", "bottom"),
    (-8, 30, "right", "bottom"),
    (-8, 44, "right", "bottom"),
]


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


def _published(paper: Published) -> list[Point]:
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
