"""The HTML page of a report: formatting of numbers, the verdict of each section, and the template.

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
from netweight.report.finding import Chapter, Figure, Finding, Section, Table, decode_json
from netweight.report.numbers import format_beside, format_number, format_target
from netweight.report.text import conclusion_of
from netweight.report.verdict import decide, mark_of


def render(document: Any) -> str:
    """Return the HTML page of a `Report`, which stands above this module."""
    commands = {chapter.title: chapter.command for chapter in document.chapters}
    sections = [
        _section(section, number, commands.get(section.chapter))
        for number, section in enumerate(document.sections, start=1)
    ]
    chapters = [
        _chapter(chapter, number, [section for section in sections if section["part"].chapter == chapter.title])
        for number, chapter in enumerate(document.chapters, start=1)
    ]
    pictures: set[str] = set()
    # The histograms of three models look alike, so only the last one is shown.
    for chapter in chapters[::-1]:
        alike = chapter["picture"] and chapter["picture"]["part"].alt.split()[0]
        chapter["picture"] = None if alike in pictures else chapter["picture"]
        pictures |= {alike} if alike == "Histograms" else set()
    template = page_template("netweight.report", "template.html")
    return template.render(
        report=document, verdict=decide(document.sections),
        verdict_kind=_KINDS[decide(document.sections).outcome], chapters=chapters, sections=sections,
        environment=_flat(document.provenance.environment),
        left=_left(document),
    )  # fmt: skip


def _left(document: Any) -> list[str]:
    """Return what is left to do, by the findings."""

    def listed(words: str, names: list[str]) -> list[str]:
        more = f"; and {len(names) - 3} more" if len(names) > 3 else ""
        return [f"{words} {'; '.join(names[:3])}{more}."] if names else []

    findings = [(section.title, each) for section in document.sections for each in section.findings]
    aimed = [(f"{title}: {each.name}", each) for title, each in findings if each.target is not None]
    audits = [f"{each.title}: {audit}" for each in document.sections for audit in each.missing_audits]
    single = len({seed for _, each in findings for seed in each.seeds}) == 1
    return [
        *listed(
            "Missed targets, to be met or to be stated in the model card:",
            [n for n, e in aimed if mark_of(e) == "missed"],
        ),
        *listed("Targets that were not measured:", [n for n, e in aimed if mark_of(e) == "not measured"]),
        *listed(
            "Attacks to be repeated with more effort, because the control did not break:",
            [n for n, e in aimed if mark_of(e) == "control failed"],
        ),
        *listed("Audits to be run:", audits),
        *(["Runs to be repeated with other seeds: all findings are from one seed."] if single else []),
    ]


_KINDS = {"passed": "pass", "failed": "fail", "none": "none"}
_SIGNS = {"met": "✓", "missed": "✗", "not measured": "?", "control failed": "?", "no target": "–"}


@cache
def page_template(package: str, file: str) -> jinja2.Template:
    """Open the template of a page: values are escaped, and `style` is the style sheet that all pages share."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        loader=jinja2.PackageLoader("netweight.report", "."),  # base.html
    )  # fmt: skip
    style = resources.files("netweight.report").joinpath("page_style.css").read_text(encoding="utf-8")
    # Keys keep their order, and NaN is refused.
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False}
    environment.globals["style"] = Markup(style)  # our own file
    return environment.from_string(resources.files(package).joinpath(file).read_text(encoding="utf-8"))


_OUTCOMES = {"holds": ("pass", "✓"), "partly": ("part", "◐"), "broken": ("fail", "✗"), "told": ("none", "–")}
"""Color and sign of each outcome of a chapter."""


def _chapter(chapter: Chapter, number: int, sections: list[dict[str, Any]]) -> dict[str, Any]:
    kind, sign = _OUTCOMES[chapter.outcome]
    return {
        "anchor": f"chapter-{number}",
        "part": chapter,
        "kind": kind,
        "sign": sign,
        "paragraphs": _paragraphs(chapter.intro),
        "sections": sections,
        # The last one is of the attack on what came out.
        "picture": next((_again(figure) for section in sections[::-1] for figure in section["figures"][::-1]), None),
    }


def _again(figure: dict[str, Any]) -> dict[str, Any]:
    """A figure that stands on the page twice: the ids of the second are its own."""
    if figure["markup"] is None:
        return figure
    return figure | {
        "markup": Markup(re.sub(r'(\bid="|url\(#|href="#|labelledby=")', r"\1again-", figure["part"].data))
    }


def _paragraphs(text: str) -> list[str]:
    return [part.strip() for part in text.split("\n\n") if part.strip()]


def _section(section: Section, number: int, command: str | None) -> dict[str, Any]:
    """A section as the template takes it; `command` is that of its chapter and need not be repeated."""
    verdict = decide(section)
    kind, sentence = _KINDS[verdict.outcome], verdict.sentence
    return {
        "anchor": f"section-{number}-{re.sub(r'[^a-z0-9]+', '-', section.title.lower()).strip('-')}",
        "part": section,
        "kind": kind,
        "verdict": sentence,
        "conclusion": conclusion_of(section),
        "paragraphs": _paragraphs(section.intro),
        "findings": [_finding(finding, command) for finding in section.findings],
        "figures": [_figure(figure) for figure in section.figures],
        "tables": [_table(table) for table in section.tables],
    }


def _finding(finding: Finding, command: str | None) -> dict[str, Any]:
    ends = finding.interval
    mark = mark_of(finding)
    kind = "none" if finding.target is None else "pass" if mark == "met" else "fail"
    return {
        "name": finding.name,
        "value": format_beside(finding.value, finding.target),
        "unit": finding.unit,
        "interval": f"{format_number(ends[0])} to {format_number(ends[1])}" if ends and finding.n != 1 else "–",
        "n": format_number(finding.n),
        "baseline": format_number(finding.baseline),
        "target": _target(finding.target, finding.better),
        "kind": kind,
        "mark": f"{_SIGNS[mark]} {mark}",
        "seeds": ", ".join(str(seed) for seed in finding.seeds),
        "detail": {key: _say(value) for key, value in finding.detail.items()},
        "command": finding.command if finding.command != command else None,
    }


def _target(target: Any, better: str | None) -> str:
    if target is None:
        return "–"
    if isinstance(target, tuple):
        return f"{format_target(target[0])} to {format_target(target[1])}"
    sign = {"higher": "≥ ", "lower": "≤ ", None: ""}[better]
    return sign + format_target(target)


def _table(table: Table) -> dict[str, Any]:
    return {
        "title": table.title,
        "columns": table.columns,
        "rows": [[format_number(cell) for cell in row] for row in table.rows],
        "notes": table.notes,
        "numeric": [not any(isinstance(row[i], str) for row in table.rows) for i in range(len(table.columns))],
    }


def _figure(figure: Figure) -> dict[str, Any]:
    """A figure with its markup. A report.json may come from anywhere, so nothing in it may run or load code."""
    if figure.kind == "png":
        if not re.fullmatch(r"[A-Za-z0-9+/=\s]+", figure.data):
            raise UsageError("A PNG figure of the report is not base64.", cure="Write the report again.")
        return {"part": figure, "markup": None}
    drawn = re.sub(r'<image xlink:href="data:image/png;base64,[A-Za-z0-9+/=\s]+"', "<rect", figure.data)
    unsafe = re.search(r"<\s*(script|foreignObject|iframe|image|style|a)\b|\son\w+\s*=|javascript:", drawn, re.I)
    outside = re.search(r"(href|src)\s*=\s*[\"'](?!#)|url\((?!#)|@import", drawn, re.I)
    if unsafe or outside or not figure.data.lstrip().startswith("<svg"):
        what = (unsafe or outside or re.match(r".{0,20}", figure.data, re.S) or [""])[0]
        raise UsageError(
            f"An SVG figure of the report contains {what!r}, which could run or load code.",
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
