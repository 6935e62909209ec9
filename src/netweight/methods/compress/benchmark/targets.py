"""What the codec should reach, and what a result says of it: a finding per target, and tables for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, final

from netweight.methods.compress.benchmark.data import GAUSSIAN, IN_CACHE
from netweight.methods.compress.benchmark.result import OURS, Result, Row
from netweight.report.finding import Finding

__all__ = ["MINILM", "TARGETS", "SpeedTable", "findings", "label", "speed_tables", "target_table"]

MINILM = "MiniLM"
"""Name of the real model's data sets."""


@final
@dataclass(frozen=True)
class Target:
    """One target.

    Attributes:
        name: What should be reached.
        bound: The least value.
        data: Name of the data set.
        dtype: Its dtype.
        quantity: "ratio", "gbps", or the contender whose speed is the unit.
        direction: What is timed.
        mode: Where outputs go.
        path: Code path; None for the fastest.
        level: Level.
        threads: Number of threads.
        today: What the best of others reaches, in words.
    """

    name: str
    bound: float
    data: str
    dtype: str
    quantity: str
    direction: str = "decode"
    mode: str = "warm"
    path: str | None = None
    level: str = "default"
    threads: int = 1
    today: str = ""


@final
@dataclass(frozen=True)
class SpeedTable:
    """Measurements for people: everything on one data set, with outputs in one place and one number of threads.

    Attributes:
        title: What was measured.
        headers: Columns.
        lines: One per contender.
    """

    title: str
    headers: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]


_CACHE, _MEMORY = ("in cache", IN_CACHE), ("MiniLM from memory", MINILM)

TARGETS = (
    *(Target(f"decode bf16 against zipnn, {where}", 5.5, data, "BF16", "zipnn") for where, data in (_CACHE, _MEMORY)),
    *(
        Target(f"decode bf16 against memcpy, {where}", 1.0, data, "BF16", "memcpy", today="0.17 (zipnn)")
        for where, data in (_CACHE, _MEMORY)
    ),
    *(
        Target(f"encode bf16 against zipnn, {where}", 4.0, data, "BF16", "zipnn", direction="encode")
        for where, data in (_CACHE, _MEMORY)
    ),
    *(
        Target(f"AVX2 decode against zipnn, {where}", 2.0, data, "BF16", "zipnn", path="avx2")
        for where, data in (_CACHE, _MEMORY)
    ),
    *(
        Target(f"portable decode against zipnn, {where}", 1.0, data, "BF16", "zipnn", path="portable")
        for where, data in (_CACHE, _MEMORY)
    ),
    Target("Python API, fresh outputs, against zipnn's", 3.5, MINILM, "BF16", "zipnn", mode="fresh"),
    Target("ratio, MiniLM as bf16, default", 1.513, MINILM, "BF16", "ratio", today="1.504 (zipnn)"),
    Target("ratio, N(0, 0.02) as bf16, default", 1.521, GAUSSIAN, "BF16", "ratio", today="1.510 (zipnn)"),
    Target("ratio, MiniLM as bf16, max", 1.516, MINILM, "BF16", "ratio", level="max"),
    Target("ratio, N(0, 0.02) as bf16, max", 1.526, GAUSSIAN, "BF16", "ratio", level="max"),
    Target("decode bf16, max, in cache", 1.0, IN_CACHE, "BF16", "gbps", level="max"),
    Target(
        "decode bf16, max, MiniLM from memory", 1.0, MINILM, "BF16", "gbps", level="max", today="0.027 GB/s at 65.6 %"
    ),
    Target("ratio, MiniLM as fp32", 1.2205, MINILM, "F32", "ratio", today="1.2205 (zipnn)"),
    Target("decode fp32, in cache", 6.0, IN_CACHE, "F32", "gbps"),
    Target("decode fp32, MiniLM from memory", 6.0, MINILM, "F32", "gbps", today="3.4 GB/s (zipnn)"),
    Target("ratio, MiniLM as fp16", 1.17, MINILM, "F16", "ratio"),
    *(
        Target(
            f"{direction} 67 MB, two threads against one",
            1.9,
            GAUSSIAN,
            "BF16",
            "one thread",
            direction=direction,
            threads=2,
        )
        for direction in ("decode", "encode")
    ),
)
"""The targets, for a core with AVX-512 (VBMI2)."""


def findings(result: Result) -> list[Finding]:
    """Lay a result beside the targets.

    Args:
        result: A result on the standard data sets.

    Returns:
        One finding per target, in their order; its value is None where the result has no such measurement.
    """
    return [_finding(result, target) for target in TARGETS]


def _finding(result: Result, target: Target) -> Finding:
    unit = {"ratio": "", "gbps": "GB/s"}.get(target.quantity, "×")
    detail = {"today": target.today} if target.today else {}
    row = _row(result, target)
    if row is None:
        reason = f"{target.data} as {target.dtype} was not measured this way"
        return Finding(target.name, None, better="higher", target=target.bound, unit=unit, detail={"reason": reason})
    common: dict[str, Any] = {"better": "higher", "target": target.bound, "unit": unit}
    if target.quantity == "ratio":
        return Finding(target.name, row.ratio, detail=detail, **common)
    common |= {"n": len(row.seconds), "seeds": (result.seed,)}
    if target.quantity == "gbps":
        return Finding(target.name, row.gbps(), detail=detail, **common)
    if target.quantity == "one thread":
        base = _row(result, target, threads=1)
        ratio = None if base is None else result.speedup(row, base)
    else:
        ratio = result.against(row, target.quantity)
    if ratio is None:
        return Finding(target.name, None, detail={"reason": f"{target.quantity} was not measured"}, **common)
    ci95 = None if ratio.low is None or ratio.high is None else (ratio.low, ratio.high)
    return Finding(target.name, ratio.estimate, ci95=ci95, detail=detail, **common)


def _row(result: Result, target: Target, *, threads: int | None = None) -> Row | None:
    """The row that a target is about; without a path in the target the fastest, which is measured first."""
    wanted = {name: getattr(target, name) for name in ("data", "dtype", "direction", "mode", "level", "threads")}
    if target.path is not None:
        wanted["path"] = target.path
    return result.find(contender=OURS, **(wanted | ({} if threads is None else {"threads": threads})))


def target_table(result: Result) -> list[tuple[str, str, str, str, str]]:
    """Return rows for people: what, target, measured, 95 % interval, verdict.

    Args:
        result: What was measured.
    """
    lines = []
    for finding in findings(result):
        verdict = {True: "met", False: "missed", None: "not measured"}[finding.passed]
        interval = "" if finding.ci95 is None else f"{finding.ci95[0]:.2f} to {finding.ci95[1]:.2f}"
        unit = finding.unit if finding.unit == "×" else f" {finding.unit}".rstrip()
        measured = "–" if finding.value is None else _number(finding) + unit
        lines.append((finding.name, f"≥ {finding.target}{unit}", measured, interval, verdict))
    return lines


def _number(finding: Finding) -> str:
    """A ratio of sizes to four places, a speed to two; more where rounding would hide a target that was missed."""
    value, bound = finding.value, finding.target
    assert isinstance(value, int | float)
    assert isinstance(bound, int | float)
    for places in range(2 if finding.unit else 4, 9):
        text = f"{value:.{places}f}"
        if (float(text) >= bound) == (value >= bound):
            return text
    return repr(value)


def label(row: Row) -> str:
    """Name a contender: netweight with its path and level, peers by their names.

    Args:
        row: A row of a result.
    """
    if row.contender != OURS:
        return row.contender
    pooled = ", pooled" if row.mode == "pooled" else ""
    return f"{OURS} {row.path}, {row.level}{pooled}"


def speed_tables(result: Result) -> list[SpeedTable]:
    """Sort the rows of a result into tables for people, in the order of the measurements.

    Args:
        result: What was measured.

    Returns:
        The tables.
    """
    groups: dict[str, dict[str, dict[str, Row]]] = {}
    for row in result.rows:
        where = "warm" if row.mode == "warm" else "new outputs"
        threads = "one thread" if row.threads == 1 else f"{row.threads} threads"
        contenders = groups.setdefault(f"{row.data} as {row.dtype}, {where}, {threads}", {})
        contenders.setdefault(label(row), {})[row.direction] = row
    return [_speed_table(result, title, contenders) for title, contenders in groups.items()]


def _speed_table(result: Result, title: str, contenders: dict[str, dict[str, Row]]) -> SpeedTable:
    directions = [d for d in ("decode", "encode") if any(d in rows for rows in contenders.values())]
    headers = ["", "ratio", *(text for d in directions for text in (f"{d} GB/s", "× zipnn", "× memcpy"))]
    lines = []
    for name, rows in contenders.items():
        cells = [f"{next(iter(rows.values())).ratio:.4f}"]
        for row in (rows.get(direction) for direction in directions):
            cells += (
                [_speed(row.gbps()), _times(result, row, "zipnn"), _times(result, row, "memcpy")] if row else [""] * 3
            )
        lines.append((name, *cells))
    return SpeedTable(title, tuple(headers), tuple(lines))


def _times(result: Result, row: Row, base: str) -> str:
    ratio = result.against(row, base)
    return "" if ratio is None else _speed(ratio.estimate)


def _speed(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.2g}"
