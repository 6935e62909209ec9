"""NeuZip's inference tables side by side: ratios that compare although the models differ, published beside measured.

Used by `neuzip_inference.py`; the report shows these tables above the plain list of numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from netweight.report.finding import Column, Table
from netweight.reproduce.inference_ways import BITS, BLOCKS
from netweight.reproduce.published import Published, published

if TYPE_CHECKING:
    from netweight.reproduce.inference_rows import Outcome
    from netweight.reproduce.inference_subjects import Opened

__all__ = ["block_table", "ratio_tables"]


def ratio_tables(opened: Opened, outcomes: Sequence[Outcome], numbers: Published) -> tuple[Table, ...]:
    """Lay ratios to the uncompressed model side by side, a table each for perplexity, memory and speed.

    Args:
        opened: What was measured.
        outcomes: Vanilla first.
        numbers: The published table 3(a) or 3(b).
    """
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
        columns: list[Column | str] = ["way", *(Column(model, "published") for model in models)]
        columns += [Column(name, "measured", cast("Any", better)), *own]
        rows = [
            (outcome.way.name, *(papers.get((model, outcome.way.name, what)) for model in models), *measured)
            for outcome, measured in zip(outcomes, cells, strict=True)
        ]
        title = f"{what.capitalize()} as a ratio to the uncompressed model's, published beside measured"
        made.append(Table(title, tuple(columns), tuple(rows), (note,)))
    return tuple(made)


_Ratios = tuple[list["Column | str"], list[list[Any]]]


def _worse(opened: Opened, outcomes: Sequence[Outcome]) -> _Ratios:
    cells: list[list[Any]] = []
    for outcome in outcomes:
        if outcome.missing or outcome is outcomes[0]:
            cells.append([None if outcome.missing else 1.0, "", None if outcome.missing else outcome.bits])
            continue
        ratio = outcome.against(outcomes[0], opened.subject.texts[0].name)
        cells.append([ratio.estimate, f"{ratio.low:.4f}–{ratio.high:.4f}", outcome.bits])
    return ["95 % interval", Column("per converted weight", "bits", "lower")], cells


def _held(opened: Opened, outcomes: Sequence[Outcome]) -> _Ratios:
    vanilla = outcomes[0]
    cells = [
        [None, None] if outcome.missing else [outcome.held / vanilla.held, outcome.layers / vanilla.layers]
        for outcome in outcomes
    ]
    return [Column("converted layers alone", "measured", "lower")], cells


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
    """Lay perplexity and memory by block size side by side, as ratios to those at 512.

    Args:
        opened: What was measured.
        by_way: Lossy outcomes by bits, block and fidelity.
    """
    numbers = published("neuzip-table4")
    columns: list[Column | str] = ["way"]
    for block in BLOCKS[:-1]:
        columns += [Column(f"perplexity, block {block}", "× block 512"), Column("memory", "× block 512")]
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
