"""A report: sections of findings, written as report.json and as one self-contained HTML page.

The page holds its pictures and styles itself, so that it can be mailed, archived and opened without a network;
report.json holds the same facts for machines, and the page can be made again from it (`netweight report`).
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self, cast, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from netweight.core import quantities
from netweight.core.atomic_writes import whole_file
from netweight.errors import UsageError
from netweight.report.audit import of_treatment
from netweight.report.finding import Chapter, Finding, Provenance, Section, encode_json
from netweight.report.page import render

FORMAT = 1
"""Version of report.json; raised when a reader of the previous version would misread a file."""
MAX_BYTES = 5_000_000
"""A page above this size is refused: it would not open well on a phone."""


@final
class Report(BaseModel):
    """A report: chapters, sections, and what was run on what.

    Args:
        title: Heading of the page.
        summary: One or two plain sentences below it.
        command: The command line that made the numbers.
        seeds: Seeds that hold for the whole run; those of findings are added.
        inputs: Name of each input → its digest (with the algorithm, "sha256:…").
        weights: Name of each model that was tested → the digest of its weights.
        environment: Versions, machine and code path; by default what `netweight.core.environment.describe`
            says, and the path on which the codec runs.
        parts: Chapters, sections and provenance, as in report.json.

    Raises:
        ValidationError: The parts do not fit together, such as a section of an unknown chapter.
    """

    model_config = ConfigDict(extra="forbid")

    netweight_report: Literal[1] = FORMAT  # type: ignore[assignment]  # this version alone
    title: str = Field(min_length=1)
    summary: str = ""
    chapters: tuple[Chapter, ...] = ()
    sections: tuple[Section, ...] = ()
    provenance: Provenance

    def __init__(
        self,
        title: str = "",
        *,
        summary: str = "",
        command: str | None = None,
        seeds: Iterable[int] = (),
        inputs: Mapping[str, str] | None = None,
        weights: Mapping[str, str] | None = None,
        environment: Mapping[str, Any] | None = None,
        **parts: Any,
    ) -> None:
        if "provenance" not in parts:
            parts["provenance"] = Provenance(
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                command=command,
                seeds=tuple(sorted(set(seeds))),
                inputs=dict(inputs or {}),
                weights=dict(weights or {}),
                environment=_json_object(_default_environment() if environment is None else environment),
            )
        super().__init__(title=title, summary=summary, **parts)

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, data: Any) -> Any:
        # Runs on the content of a file before `__init__`, which would fill in what the file lacks.
        if isinstance(data, Mapping):
            odd = [f"{name} is missing" for name in ("title", "provenance") if name not in data]
            odd += [f"{name} is unknown" for name in data if name not in cls.model_fields]
            if odd:
                raise ValueError("; ".join(odd))
        return data

    @model_validator(mode="after")
    def _sections_name_their_chapters(self) -> Self:
        titles = {chapter.title for chapter in self.chapters}
        for section in self.sections:
            if section.chapter not in titles and (section.chapter or titles):
                raise ValueError(f"section {section.title!r} does not belong to a chapter of the report")
        return self

    def chapter(self, chapter: Chapter) -> Self:
        """Begin a chapter: sections added from now on belong to it, and the summary is of chapters.

        Args:
            chapter: Its title is different from those of other chapters.

        Raises:
            UsageError: The title is taken, or there are sections before the first chapter.
        """
        if any(earlier.title == chapter.title for earlier in self.chapters):
            raise UsageError(f"A second chapter is titled {chapter.title!r}.", cure="Give each its own title.")
        if self.sections and not self.chapters:
            raise UsageError(
                "The report has sections before its first chapter.", cure="Begin the report with a chapter."
            )
        self.chapters = (*self.chapters, chapter)
        return self

    def add(self, section: Section) -> Self:
        """Add a section, such as an audit returns; it belongs to the last chapter.

        Args:
            section: Its title is different from those of other sections.

        Raises:
            UsageError: The title is taken.
        """
        if not section.title.strip() or any(earlier.title == section.title for earlier in self.sections):
            raise UsageError(
                f"A section titled {section.title!r} cannot be added.", cure="Give each section its own title."
            )
        chapter = self.chapters[-1].title if self.chapters else ""
        self.sections = (*self.sections, replace(section, chapter=chapter))
        seeds = {seed for finding in section.findings for seed in finding.seeds}
        self.provenance = replace(self.provenance, seeds=tuple(sorted(seeds | set(self.provenance.seeds))))
        return self

    def section(
        self,
        title: str,
        findings: Iterable[Finding],
        *,
        treatment: str | None = None,
        audits: Iterable[str] = (),
        **parts: Any,
    ) -> Self:
        """Add a section of these parts.

        Args:
            title: As of `Section`.
            findings: As of `Section`.
            treatment: The treatment that it is about; those of its audits that are not in `audits` are shown in red.
            audits: Names of the audits that ran.
            parts: As of `Section`.

        Raises:
            UsageError: The title is taken, or a part is invalid.
            NameNotFound: The treatment is not declared.
        """
        return self.add(of_treatment(Section(title, tuple(findings), **parts), treatment, audits))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The findings of all sections."""
        return tuple(finding for section in self.sections for finding in section.findings)

    def dump(self) -> str:
        """Return the report as JSON text, indented, with a newline at the end."""
        return json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write report.json and report.html into a folder, each aside first, synced and renamed.

        Args:
            folder: Destination; made when missing. Reports already there are replaced.

        Returns:
            The path of report.html.

        Raises:
            UsageError: The page would be larger than 5 MB, or the folder cannot be made.
            OutputFailed: The folder cannot be written.
        """
        page = _page(self)
        write_text(Path(folder) / "report.json", self.dump())
        return _write_page(page, Path(folder))


def parse_report(text: str, *, where: str) -> Report:
    """Read the content of a report.json; every misfit is listed in the error, which calls the file `where`."""
    try:
        return Report.model_validate_json(text)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, fault['loc'])) or 'the file'}: {fault['msg']}" for fault in error.errors()]
        shown = "; ".join(faults[:8]) + (f"; and {len(faults) - 8} more" if len(faults) > 8 else "")
        raise _misfit(where, f"{shown}.") from error
    # The error of a part names the part.
    except UsageError as error:
        raise _misfit(where, str(error)) from error


def _misfit(where: str, what: str) -> UsageError:
    return UsageError(
        f"{where} is not a report of this version: {what}", cure="Write it again with the command that made it."
    )


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of report.json."""
    schema = Report.model_json_schema(mode="serialization")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def rewrite(folder: str | os.PathLike[str]) -> Path:
    """Make report.html again from the report.json in a folder; return its path."""
    return _write_page(_page(read_report(folder)), Path(folder))


def read_report(folder: str | os.PathLike[str]) -> Report:
    """Read the report.json of a folder."""
    path = Path(folder) / "report.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(
            f"{path} cannot be read: {reason}.", cure="Give the folder of a run that wrote a report."
        ) from error
    return parse_report(text, where=str(path))


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"The folder {folder} could not be created ({error.strerror}).", cure="Choose another."
        ) from error


def write_text(path: Path, text: str) -> None:
    """Write a text file that appears whole or not at all, in place of one that may be there; its folder is made."""
    make_folder(path.parent)
    with whole_file(path, overwrite=True) as file:
        file.write(text.encode())


def _page(report: Report) -> str:
    page = render(report)
    size = len(page.encode())
    if size > MAX_BYTES:
        raise UsageError(
            f"The report page would have {quantities.size(size)}, more than {quantities.size(MAX_BYTES)}.",
            cure="Give it fewer or smaller images.",
        )
    return page


def _write_page(page: str, folder: Path) -> Path:
    path = folder / "report.html"
    write_text(path, page)
    return path


def _json_object(value: Mapping[str, Any]) -> dict[str, Any]:
    """The environment as JSON; what JSON cannot hold is written as text, since a report must not fail on it."""
    try:
        return cast("dict[str, Any]", encode_json(dict(value)))
    except TypeError:
        return {
            str(key): item if isinstance(item, (bool, int, float, str)) else str(item) for key, item in value.items()
        }


def _default_environment() -> dict[str, Any]:
    from netweight.codec import active_path
    from netweight.core.environment import describe

    return describe({"codec_path": active_path()})
