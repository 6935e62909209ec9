"""Rows of a label about the weights: gross and net weight, entropies, and redundant tensors and rows."""

from __future__ import annotations

from collections.abc import Sequence

from netweight.core.quantities import count, many, percent, size
from netweight.labels.identify_subject import LabelSubject
from netweight.labels.label import Row, RowGroup
from netweight.labels.weights import TensorFacts, WeightFacts

# Names that are listed in a row.
_SHOWN = 3
# A type or a finding gets its own row from this share of the gross weight on.
_LEAST_SHARE = 0.01


def weight_group(subject: LabelSubject, facts: WeightFacts) -> RowGroup:
    """Return the rows about size.

    Args:
        subject: What the label is about.
        facts: What the pass over its tensors found.
    """
    gross, net = facts.gross, facts.net
    tare = 1 - net / gross if gross else 0.0
    stored = sum(tensor.stat().st_size for tensor in (*subject.weights, *subject.pickles))
    rows = [
        Row(key="gross_weight", title="Gross weight", value=size(gross), number=gross, unit="bytes", strong=True),
        Row(
            key="net_weight", title="Net weight, lossless", value=size(net), number=net, unit="bytes", strong=True,
            basis="every tensor compressed by the codec's default level, in memory",
        ),
        Row(
            key="tare", title="Tare (could be saved)", number=100 * tare, unit="percent", strong=True,
            value=percent(tare) if net <= gross else f"none; compression adds {size(net - gross)}",
        ),
    ]  # fmt: skip
    if gross and abs(stored - gross) > gross / 20 and stored < gross:
        rows.append(Row(
            key="stored_weight", title="Stored (compressed already)", value=size(stored), number=stored, unit="bytes",
            indent=1,
        ))  # fmt: skip
    if subject.copies:
        nbytes = sum(file.stat().st_size for file in subject.copies)
        rows.append(Row(
            key="copies", title="Copies of the weights", value=f"{size(nbytes)} in {many(len(subject.copies), 'file')}",
            number=nbytes, unit="bytes", indent=1, state="warning",
            basis="counted, not read: variants and pickles of the same weights",
            detail={"files": [file.name for file in subject.copies]},
        ))  # fmt: skip
    return RowGroup(title="Weight", anchor="weight", rows=tuple(rows), basis=coverage(facts))


def coverage(facts: WeightFacts) -> str:
    """Return how much was read, such as "all 290 tensors, 494 million numbers".

    Args:
        facts: What the pass over the tensors found.
    """
    numbers = sum(tensor.count for tensor in facts.tensors)
    return f"all {many(len(facts.tensors), 'tensor')}, {count(numbers)} {'number' if numbers == 1 else 'numbers'}"


def bits_group(facts: WeightFacts) -> RowGroup:
    """Return the rows about where the bits go and what could be left out.

    Args:
        facts: What the pass over the tensors found.
    """
    rows: list[Row] = []
    for number, (dtype, tensors) in enumerate(facts.by_dtype().items()):
        nbytes = sum(tensor.nbytes for tensor in tensors)
        if number and nbytes < _LEAST_SHARE * facts.gross:
            # Positions, counters and similar tensors do not get rows; `ingredients` lists their types.
            continue
        if sum(tensor.count for tensor in tensors if tensor.bits is not None):
            rows += _dtype_rows(dtype, tensors, nbytes, facts.gross)
        else:
            rows.append(Row(
                key=f"bits_{dtype.lower()}", title=f"{dtype} numbers", value=size(nbytes), number=nbytes, unit="bytes",
                basis="the codec has no histogram for this type",
            ))  # fmt: skip
    rows += _narrower_rows(facts)
    rows += _duplicate_rows(facts)
    rows += _row_rows(facts)
    rows += _not_finite_rows(facts)
    return RowGroup(title="Bits per number", anchor="bits", rows=tuple(rows), basis=coverage(facts))


def _dtype_rows(dtype: str, tensors: Sequence[TensorFacts], nbytes: int, gross: int) -> list[Row]:
    """Return rows on the bits of one number: all of them, and those of its parts and of the codec, which add up to it.

    The entropy of a part is the mean over tensors, weighted by their numbers, because the codec codes tensors apart.
    """
    numbers = sum(tensor.count for tensor in tensors)
    bits = 8 * sum(tensor.net for tensor in tensors) / numbers
    sampled = [(tensor.count, tensor.bits) for tensor in tensors if tensor.bits is not None and tensor.bits.count]
    layout = sampled[0][1].layout
    rows = [Row(
        key=f"bits_{dtype.lower()}", title=f"{dtype} number, compressed", value=f"{bits:.2f} of {layout.bits} bits",
        number=bits, unit="bits per number",
        basis=f"{size(nbytes)}, {percent(nbytes / gross)} of the weight" if gross else "",
    )]  # fmt: skip
    if not layout.exponent:
        return rows
    seen = percent(sum(each.count for _, each in sampled) / numbers)
    basis = f"mean over tensors; histograms of {seen} of the {count(numbers)} numbers"
    left = round(bits, 2)
    for part in ("sign", "exponent", "mantissa"):
        width = getattr(layout, part)
        if not width:
            continue
        entropy = sum(each.entropies[part] * n for n, each in sampled) / sum(n for n, _ in sampled)
        left -= round(entropy, 2)
        rows.append(Row(
            key=f"{part}_{dtype.lower()}", title=f"Entropy of its {part}",
            value=f"{entropy:.2f} of {many(width, 'bit')}", number=entropy, unit="bits per number", indent=1,
            basis=basis,
        ))  # fmt: skip
    rows.append(Row(
        key=f"overhead_{dtype.lower()}", title="Overhead of the codec", value=f"{left + 0.0:.2f} bits",
        number=round(left, 2), unit="bits per number", indent=1,
        basis="headers, tables of codes, and codes longer than the entropies",
    ))  # fmt: skip
    return rows


def _narrower_rows(facts: WeightFacts) -> list[Row]:
    rows = []
    for dtype in ("F64", "F32"):
        wide = [tensor for tensor in facts.tensors if tensor.dtype == dtype and tensor.count]
        for narrow in ("BF16", "F16", "F32"):
            fitting = [tensor for tensor in wide if tensor.narrower == narrow]
            nbytes = sum(tensor.nbytes for tensor in fitting)
            if fitting and nbytes >= _LEAST_SHARE * facts.gross:
                rows.append(Row(
                    key=f"{dtype}_holds_{narrow}".lower(), title=f"{dtype} numbers that are exact in {narrow}",
                    value=size(nbytes), number=nbytes, unit="bytes", state="warning",
                    basis=f"{len(fitting)} of {len(wide)} {dtype} tensors",
                    detail={"tensors": [tensor.name for tensor in fitting[:100]]},
                ))  # fmt: skip
    return rows


def _duplicate_rows(facts: WeightFacts) -> list[Row]:
    groups = facts.duplicates
    if not groups:
        return [Row(key="duplicates", title="Equal tensors stored twice", value="none", number=0, unit="bytes")]
    nbytes = sum(tensor.nbytes for group in groups for tensor in group[1:])
    names = [" = ".join(tensor.name for tensor in group[:2]) for group in groups]
    return [Row(
        key="duplicates", title="Equal tensors stored twice", value=size(nbytes), number=nbytes, unit="bytes",
        state="warning", basis=_some(names), detail={"groups": [[each.name for each in group] for group in groups]},
    )]  # fmt: skip


def _row_rows(facts: WeightFacts) -> list[Row]:
    tensors = [tensor for tensor in facts.tensors if tensor.rows]
    zero = sum(tensor.zero_rows for tensor in tensors)
    alike = sum(tensor.constant_rows - tensor.zero_rows for tensor in tensors)
    total = sum(tensor.rows for tensor in tensors)
    rows = []
    of_zeros = [tensor.name for tensor in tensors if tensor.zero_rows]
    of_one_value = [tensor.name for tensor in tensors if tensor.constant_rows > tensor.zero_rows]
    for key, title, number, names in (
        ("zero_rows", "Rows that are all zero", zero, of_zeros),
        ("alike_rows", "Rows of one value", alike, of_one_value),
    ):
        rows.append(Row(
            key=key, title=title, value=f"{number:,} of {total:,}" if number else "none", number=number, unit="rows",
            basis=_some(names) if names else "", state="warning" if number else "measured",
        ))  # fmt: skip
    return rows


def _not_finite_rows(facts: WeightFacts) -> list[Row]:
    bad = [tensor for tensor in facts.tensors if tensor.nans or tensor.infinities]
    searched = [tensor for tensor in facts.tensors if tensor.searched]
    if len(searched) < len(facts.tensors):
        return [Row(
            key="not_finite", title="NaN and infinities", state="not measured" if not bad else "warning",
            value=f"{len(bad):,} of {len(searched):,} tensors contain some",
            basis=f"searched in {len(searched):,} of {many(len(facts.tensors), 'tensor')}; the others are packed",
        )]  # fmt: skip
    if not bad:
        return [Row(key="not_finite", title="NaN and infinities", value="none", number=0)]
    nans, infinities = sum(tensor.nans for tensor in bad), sum(tensor.infinities for tensor in bad)
    return [Row(
        key="not_finite", title="NaN and infinities", value=f"{nans:,} NaN, {infinities:,} infinite",
        number=nans + infinities, state="warning", strong=True, basis=_some([tensor.name for tensor in bad]),
        detail={"tensors": [tensor.name for tensor in bad[:100]]},
    )]  # fmt: skip


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _SHOWN:,} more" if len(names) > _SHOWN else ""
    return f"in {', '.join(names[:_SHOWN])}{more}"
