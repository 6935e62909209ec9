"""NeuZip's tables 3(a), 3(b) and 4 and figure 3: what lossless and lossy weights cost in perplexity, bytes and speed.

All of them are views of the same measurements, which are kept in `OUT/neuzip-inference/` beside the tables' own
folders: table 4 and figure 3 take what table 3(a) has measured there, and measure what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from netweight.core.progress import Progress
from netweight.evidence.report import Column as ReportColumn
from netweight.evidence.report import Table
from netweight.reproduce.inference_ways import BITS, BLOCKS, ways
from netweight.reproduce.published import Published, published
from netweight.reproduce.registry import Column, Measured, Row, Scale, table

if TYPE_CHECKING:
    from netweight.reproduce.inference_rows import Outcome
    from netweight.reproduce.inference_subjects import Opened

__all__ = ["figure3", "table3_decoder", "table3_encdec", "table4"]

_NEEDS = ("evidence", "llm", "data:text")
_PAPER = ("one of the paper's models: --model FOLDER", "memory for it twice")
_GIB, _MB = 1 << 30, 10**6


@table("neuzip-table3-decoder", needs=_NEEDS, paper_needs=_PAPER, stand_in=True)
def table3_decoder(scale: Scale, out: Path, *, model: str | None = None) -> Measured:
    """Perplexity, memory and speed of a decoder under lossless and lossy compression and under quantizers.

    Args:
        scale: "small" measures `model`, or a stand-in that it trains first; "paper" needs `model`.
        out: The table's folder; measurements and the stand-in are kept beside it.
        model: A folder of a causal language model with its tokenizer.

    Raises:
        UsageError: No model was named at paper scale, or the folder is no such model.
        MissingExtra: A text is not there.
    """
    opened, outcomes = _measure("decoder", scale, out, model, afresh=(out / "result.json").exists())
    return _table3("neuzip-table3-decoder", "per word", opened, outcomes)


@table("neuzip-table3-encdec", needs=_NEEDS, paper_needs=(*_PAPER, "text/wmt14-de-en.src and .ref"), stand_in=True)
def table3_encdec(scale: Scale, out: Path, *, model: str | None = None) -> Measured:
    """The same of an encoder-decoder.

    Args:
        scale: "small" measures SQL from questions by `model`, or by a stand-in that it trains first; "paper" needs
            `model` and measures translation.
        out: The table's folder; measurements and the stand-in are kept beside it.
        model: A folder of an encoder-decoder with its tokenizer.

    Raises:
        UsageError: No model was named at paper scale, or the folder is no such model.
        MissingExtra: A text is not there.
    """
    opened, outcomes = _measure("encoder-decoder", scale, out, model, afresh=(out / "result.json").exists())
    return _table3("neuzip-table3-encdec", "per token", opened, outcomes)


@table("neuzip-table4", needs=_NEEDS, paper_needs=_PAPER, stand_in=True)
def table4(scale: Scale, out: Path, *, model: str | None = None) -> Measured:
    """Perplexity and memory of a decoder at 0 and 1 mantissa bits, by the number of weights that share a normalizer.

    Args:
        scale: As for table 3(a).
        out: The table's folder; measurements and the stand-in are kept beside it.
        model: A folder of a causal language model with its tokenizer.

    Raises:
        UsageError: No model was named at paper scale, or the folder is no such model.
        MissingExtra: A text is not there.
    """
    from netweight.reproduce.inference_findings import block_findings

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
        tables=(_block_table(opened, by_way),),
        notes=("Measured with table 3(a), in the same results folder.", *_notes(outcomes)),
        inputs=opened.inputs,
    )


@table("neuzip-fig3", needs=_NEEDS, paper_needs=_PAPER, stand_in=True)
def figure3(scale: Scale, out: Path, *, model: str | None = None) -> Measured:
    """Perplexity against memory, all ways of table 3(a) in one picture, beside the paper's.

    Args:
        scale: As for table 3(a).
        out: The figure's folder; measurements and the stand-in are kept beside it.
        model: A folder of a causal language model with its tokenizer.

    Raises:
        UsageError: No model was named at paper scale, or the folder is no such model.
        MissingExtra: A text is not there.
    """
    from netweight.reproduce.inference_figure import front, trade_off
    from netweight.reproduce.inference_findings import equal_memory_findings

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
    from netweight.reproduce import inference_subjects as subjects
    from netweight.reproduce.inference_rows import measure

    folder = out.parent / "neuzip-inference"
    ledger = folder / f"{kind}-{scale}.jsonl"
    if afresh:
        ledger.unlink(missing_ok=True)
    opening: Callable[..., Opened] = subjects.open_decoder if kind == "decoder" else subjects.open_encoder_decoder
    progress = Progress()
    opened = opening(scale, model, folder, progress)
    extent = subjects.EXTENTS[scale]
    chosen = ways(extras=extent.extras)
    return opened, measure(opened.subject, chosen, ledger, rounds=extent.rounds, progress=progress)


def _table3(table_id: str, unit: str, opened: Opened, outcomes: Sequence[Outcome]) -> Measured:
    from netweight.reproduce.inference_findings import findings

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


def _cells(opened: Opened, outcome: Outcome) -> tuple[float, ...]:
    first, *others = (outcome.perplexity(text.name).estimate for text in opened.subject.texts)
    held, layers = _memory(opened, outcome.held), _memory(opened, outcome.layers)
    return (first, held, outcome.iterations(), *others, layers, outcome.bits)


def _ratio_tables(opened: Opened, outcomes: Sequence[Outcome], numbers: Published) -> tuple[Table, ...]:
    """What can be laid side by side although the models differ: ratios to the uncompressed model."""
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
        ratio = outcome.against(outcomes[0], _text(opened))
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


def _block_table(opened: Opened, by_way: Mapping[tuple[int, int | None, str], Outcome]) -> Table:
    """Perplexity and memory by block size as ratios to those at 512, published beside measured."""
    numbers = published("neuzip-table4")
    columns: list[ReportColumn | str] = ["way"]
    for block in BLOCKS[:-1]:
        columns += [ReportColumn(f"perplexity, block {block}", "× block 512"), ReportColumn("memory", "× block 512")]
    rows: list[Sequence[Any]] = []
    for row in numbers.rows if numbers else ():
        *cells, last, base = row.values
        pairs = zip(cells[::2], cells[1::2], strict=True)
        rows.append((f"{row.name}, published", *_over(pairs, last, base)))
    text = _text(opened)
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
