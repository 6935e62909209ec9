"""The shape of report.json: pydantic models from which the shipped JSON schema is made.

`report.py` fills a document from findings and renders one into HTML; everything the page shows is in the document, so
that a page can be made again from its JSON alone. Unknown keys are refused.
"""

from __future__ import annotations

import json
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from netweight.errors import UsageError
from netweight.report.finding import Finding

__all__ = [
    "FORMAT",
    "Chapter",
    "Column",
    "Figure",
    "Finding",
    "Provenance",
    "Report",
    "Section",
    "Table",
    "json_schema",
    "parse_report",
    "shipped_schema",
]

FORMAT = 1
"""Version of report.json; raised when a reader of the previous version would misread a file."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class NonFinite(_Part):
    """A number that JSON cannot write."""

    nonfinite: Literal["NaN", "Infinity", "-Infinity"]


Real = bool | int | float | NonFinite


class Finding(_Part):
    """A finding as `Finding.to_json` writes it."""

    name: str = Field(min_length=1)
    value: Real | None
    ci95: tuple[Real, Real] | None = None
    n: int | None = Field(None, ge=1)
    unit: str = ""
    better: Literal["higher", "lower"] | None = None
    target: Real | tuple[Real, Real] | None = None
    baseline: Real | None = None
    seeds: tuple[int, ...] = ()
    detail: dict[str, Any] = {}
    command: str | None = None
    passed: bool | None = None

    @model_validator(mode="after")
    def _verdict_follows_from_the_numbers(self) -> Finding:
        if self.finding().passed != self.passed:
            raise ValueError(f"finding {self.name!r} says passed = {self.passed}, and its own numbers say otherwise")
        return self

    def finding(self) -> Finding:
        """Return the finding itself."""
        return Finding.from_json(self.model_dump(mode="json"))


class Column(_Part):
    """A column of a table."""

    name: str
    unit: str = ""
    better: Literal["higher", "lower"] | None = None


class Table(_Part):
    """A table; a cell that is None is shown as a dash."""

    title: str
    columns: tuple[Column, ...] = Field(min_length=1)
    rows: tuple[tuple[Real | str | None, ...], ...]
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _rows_fit_columns(self) -> Table:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"row {number} of table {self.title!r} has {len(row)} cells for {len(self.columns)} columns"
                )
        return self


class Figure(_Part):
    """A picture, inline: an SVG element as text, or a PNG file in base64."""

    kind: Literal["svg", "png"]
    data: str
    alt: str = Field(min_length=1)
    caption: str = ""


class Section(_Part):
    """One question and what was found; `chapter` is the title of the chapter that it belongs to, if any."""

    title: str = Field(min_length=1)
    chapter: str = ""
    intro: str = ""
    question: str = ""
    conclusion: str = ""
    treatment: str | None = None
    audits: tuple[str, ...] = ()
    missing_audits: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    tables: tuple[Table, ...] = ()
    figures: tuple[Figure, ...] = ()


class Chapter(_Part):
    """Sections that tell of one thing: what was asked, what was found, and a verdict in plain words.

    `outcome` colors the verdict: "holds", "partly", "broken" where an attack still succeeds or a target is missed, or
    "told" where nothing is judged. `command` makes all numbers of its sections.
    """

    title: str = Field(min_length=1)
    question: str = Field(min_length=1)
    conclusion: str = Field(min_length=1)
    verdict: str = Field(min_length=1)
    outcome: Literal["holds", "partly", "broken", "told"]
    intro: str = ""
    command: str | None = None


class Provenance(_Part):
    """What was run, on what."""

    created: str
    command: str | None = None
    seeds: tuple[int, ...] = ()
    inputs: dict[str, str] = {}
    environment: dict[str, Any] = {}


class Report(_Part):
    """A whole report."""

    netweight_report: Literal[1] = 1
    title: str = Field(min_length=1)
    summary: str = ""
    chapters: tuple[Chapter, ...] = ()
    sections: tuple[Section, ...] = ()
    provenance: Provenance

    @model_validator(mode="after")
    def _sections_name_their_chapters(self) -> Report:
        known = {chapter.title for chapter in self.chapters}
        for section in self.sections:
            if section.chapter not in known and (section.chapter or known):
                raise ValueError(f"section {section.title!r} belongs to no chapter of the report")
        return self

    def dump(self) -> str:
        """Return the document as JSON text, indented, with a newline at the end."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def parse_report(text: str, *, where: str) -> Report:
    """Read report.json.

    Args:
        text: Its content.
        where: What to call it in an error, usually its path.

    Raises:
        UsageError: It is not JSON, or does not fit the schema; every misfit is listed.
    """
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}" for fault in error.errors()]
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise UsageError(
            f"{where} is not a report of this version: {shown}.",
            cure="Write it again with the command that made it.",
        ) from error


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of report.json, made from the models above."""
    schema = Report.model_json_schema(mode="validation")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def shipped_schema() -> dict[str, Any]:
    """Return the JSON schema that ships with the package, `report.schema.json`."""
    text = resources.files("netweight.report").joinpath("report.schema.json").read_text(encoding="utf-8")
    schema: dict[str, Any] = json.loads(text)
    return schema
