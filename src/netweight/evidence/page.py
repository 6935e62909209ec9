"""From a report document to one HTML page: how numbers are written, what verdict a section gets, the template.

Used by `report.py`; other pages take templates and the style sheet from here (`page_template`). The page is
self-contained (style sheet and pictures inline, no script), follows the reader's light or dark setting, and says pass
and fail in words as well as in color.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Any

import jinja2
from markupsafe import Markup

from netweight.errors import UsageError
from netweight.report.finding import Chapter, Figure, Finding, Section, decode_json
from netweight.report.report import Report

__all__ = ["format_number", "page_template", "render", "verdict"]


def render(document: Report) -> str:
    """Return the HTML page of a report.

    Args:
        document: A checked report document.

    Raises:
        UsageError: A figure holds something that could run or load code.
    """
    commands = {chapter.title: chapter.command for chapter in document.chapters}
    sections = [
        _section(section, number, commands.get(section.chapter))
        for number, section in enumerate(document.sections, start=1)
    ]
    chapters = [
        _chapter(chapter, number, [section for section in sections if section["part"].chapter == chapter.title])
        for number, chapter in enumerate(document.chapters, start=1)
    ]
    template = page_template("netweight.report", "report_template.html")
    return template.render(
        report=document, chapters=chapters, sections=sections, environment=_flat(document.provenance.environment)
    )


@cache
def page_template(package: str, file: str) -> jinja2.Template:
    """Open the template of a page: values are escaped, and `style` is the style sheet that all pages share.

    Args:
        package: Where it lies.
        file: Its name.

    Returns:
        The template of jinja2.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = resources.files("netweight.report").joinpath("page_style.css").read_text(encoding="utf-8")
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}  # and not sorted
    environment.globals["style"] = Markup(style)  # our own file
    return environment.from_string(resources.files(package).joinpath(file).read_text(encoding="utf-8"))


def format_number(value: Any, digits: int = 4) -> str:
    """Write a cell of a table for people.

    Args:
        value: A number (at least `digits` significant digits; integers in full, with thin spaces between thousands),
            a truth value (yes, no), a text (as it is) or None (a dash).
        digits: Significant digits of numbers that are not whole.

    Returns:
        The text.
    """
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u2009").replace("-", "\u2212")
    if not isinstance(value, float):
        return str(value)
    if value != value or value in (float("inf"), float("-inf")):
        return {"nan": "not a number", "inf": "∞", "-inf": "\u2212∞"}[str(value)]
    if value and not 1e-4 <= abs(value) < 1e7:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa} × 10^{int(exponent)}".replace("-", "\u2212")
    decimals = max(0, digits - 1 - (len(f"{abs(value):.0f}") - 1 if abs(value) >= 1 else _leading_zeros(value)))
    return f"{value:,.{decimals}f}".replace(",", "\u2009").replace("-", "\u2212")


def verdict(section: Section) -> tuple[str, str]:
    """Return the verdict on a section: its kind ("pass", "fail" or "none") and one sentence.

    A missing audit fails a section, whatever its findings say; so does a target that could not be measured.

    Args:
        section: Of a report.
    """
    judged = [finding for finding in section.findings if finding.target is not None]
    missed = [finding.name for finding in judged if finding.passed is False]
    unmeasured = [finding.name for finding in judged if finding.passed is None]
    parts = []
    if missed:
        parts.append(f"{len(missed)} of {_count(len(judged), 'target')} missed: {_list(missed)}.")
    if unmeasured:
        parts.append(f"Not measured: {_list(unmeasured)}.")
    if section.missing_audits:
        parts.append(f"Not audited: {_list(section.missing_audits)}.")
    if parts:
        return "fail", " ".join(parts)
    if not judged:
        return "none", "Nothing here has a target; the numbers are reported as they are."
    return "pass", "The target is met." if len(judged) == 1 else f"All {len(judged)} targets are met."


def _leading_zeros(value: float) -> int:
    """-1 for 0.5, -2 for 0.05: the exponent of a number below 1, so that its digits are counted from the first."""
    return int(f"{value:e}".split("e")[1]) if value else 0


_OUTCOMES = {"holds": ("pass", "✓"), "partly": ("part", "◐"), "broken": ("fail", "✗"), "told": ("none", "–")}
"""How the outcome of a chapter is colored, and its sign."""


def _chapter(chapter: Chapter, number: int, sections: list[dict[str, Any]]) -> dict[str, Any]:
    kind, sign = _OUTCOMES[chapter.outcome]
    return {
        "anchor": f"chapter-{number}",
        "part": chapter,
        "kind": kind,
        "sign": sign,
        "paragraphs": _paragraphs(chapter.intro),
        "sections": sections,
    }


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def _section(section: Section, number: int, command: str | None) -> dict[str, Any]:
    """A section as the template takes it; `command` is said by its chapter and need not be said again."""
    kind, sentence = verdict(section)
    return {
        "anchor": f"section-{number}-{re.sub(r'[^a-z0-9]+', '-', section.title.lower()).strip('-')}",
        "part": section,
        "kind": kind,
        "verdict": sentence,
        "paragraphs": _paragraphs(section.intro),
        "findings": [_finding(finding, command) for finding in section.findings],
        "figures": [_figure(figure) for figure in section.figures],
        "tables": [_table(table.model_dump(mode="json")) for table in section.tables],
    }


def _finding(document: Finding, said: str | None) -> dict[str, Any]:
    finding = document.finding()
    low_high = finding.ci95 and f"{format_number(finding.ci95[0])} to {format_number(finding.ci95[1])}"
    kind = {True: "pass", False: "fail", None: "none"}[finding.passed]
    return {
        "name": finding.name,
        "value": _telling(finding.value, finding.target),
        "unit": finding.unit,
        "interval": low_high or "–",
        "n": format_number(finding.n),
        "baseline": format_number(finding.baseline),
        "target": _target(finding.target, finding.better),
        "kind": kind,
        "mark": {"pass": "✓ met", "fail": "✗ missed", "none": "– no target"}[kind]
        if finding.value is not None
        else "? not measured",
        "seeds": ", ".join(str(seed) for seed in finding.seeds),
        "detail": {key: _say(value) for key, value in finding.detail.items()},
        "command": finding.command if finding.command != said else None,
    }


def _target(target: Any, better: str | None) -> str:
    if target is None:
        return "–"
    if isinstance(target, tuple):
        return f"{_as_set(target[0])} to {_as_set(target[1])}"
    sign = {"higher": "≥ ", "lower": "≤ ", None: ""}[better]
    return sign + _as_set(target)


def _as_set(bound: Any) -> str:
    """A target with as many digits as it was set with."""
    plain = f"{bound:.10g}" if isinstance(bound, float) and (bound == 0 or 1e-4 <= abs(bound) < 1e7) else None
    return plain.replace("-", "\u2212") if plain else format_number(bound)


def _telling(value: Any, target: Any) -> str:
    """The value with enough digits to be told from its target: 1.5128 misses 1.513 and must not be shown as 1.513."""
    bounds = target if isinstance(target, tuple) else (target,)
    if not isinstance(value, float):
        return format_number(value)
    for digits in range(4, 10):
        text = format_number(value, digits)
        if all(bound is None or value == bound or text != format_number(float(bound), digits) for bound in bounds):
            return text
    return repr(value)


def _table(table: dict[str, Any]) -> dict[str, Any]:
    rows = [[decode_json(cell) for cell in row] for row in table["rows"]]
    numeric = [not any(isinstance(row[i], str) for row in rows) for i in range(len(table["columns"]))]
    return {**table, "rows": [[format_number(cell) for cell in row] for row in rows], "numeric": numeric}


def _figure(figure: Figure) -> dict[str, Any]:
    """A figure with its markup. A report.json may come from anywhere, so nothing in it may run or load code."""
    if figure.kind == "png":
        if not re.fullmatch(r"[A-Za-z0-9+/=\s]+", figure.data):
            raise UsageError("A PNG figure of the report is not base64.", cure="Write the report again.")
        return {"part": figure, "markup": None}
    unsafe = re.search(r"<\s*(script|foreignObject|iframe|image|style|a)\b|\son\w+\s*=|javascript:", figure.data, re.I)
    outside = re.search(r"(href|src)\s*=\s*[\"'](?!#)|url\((?!#)|@import", figure.data, re.I)
    if unsafe or outside or not figure.data.lstrip().startswith("<svg"):
        what = (unsafe or outside or re.match(r".{0,20}", figure.data, re.S) or [""])[0]
        raise UsageError(
            f"An SVG figure of the report holds {what!r}, which could run or load code.",
            cure="Draw it with netweight.report.plots.",
        )
    return {"part": figure, "markup": Markup(figure.data)}  # checked just above


def _flat(environment: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """The environment as lines: nested objects by dotted names, lists joined."""
    lines: list[tuple[str, str]] = []
    for key, value in environment.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and value.keys() != {"nonfinite"}:
            lines += _flat(value, f"{name}.")
        else:
            lines.append((name.replace("_", " "), _say(decode_json(value))))
    return lines


def _say(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key} = {_say(item)}" for key, item in value.items()) or "–"
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_say(item) for item in value) or "–"
    return format_number(value)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _list(names: Sequence[str], most: int = 4) -> str:
    return "; ".join(names[:most]) + (f"; and {len(names) - most} more" if len(names) > most else "")
