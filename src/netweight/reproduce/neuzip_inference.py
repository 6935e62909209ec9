"""NeuZip's tables 3(a), 3(b) and 4 and figure 3: what lossless and lossy weights cost in perplexity, bytes and speed.

All of them are views of the same measurements, which are kept in `OUT/neuzip-inference/` beside the tables' own
folders: table 4 and figure 3 take what table 3(a) has measured there, and measure what is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.core.progress import Progress
from netweight.report.finding import Column
from netweight.reproduce.inference_tables import block_table, ratio_tables
from netweight.reproduce.inference_ways import BITS, BLOCKS, ways
from netweight.reproduce.published import published
from netweight.reproduce.registry import Measured, Row, Scale, table

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
        tables=(block_table(opened, by_way),),
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
