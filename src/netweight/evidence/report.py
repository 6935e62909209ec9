"""The report: findings of one or more sections, as report.json and as one self-contained HTML page.

A report is built section by section and written at once. The page holds its pictures and styles itself, so that it
can be mailed, archived and opened without a network; report.json holds the same facts for machines, and the page can
be made again from it (`netweight report`).
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast, final

from pydantic import ValidationError

from netweight.core.files import whole_file
from netweight.errors import UsageError
from netweight.report.audit import missing_audits
from netweight.report.finding import Chapter, Figure, Finding, Provenance, Section, Table, encode_json
from netweight.report.page import render
from netweight.report.report import Report, parse_report

__all__ = ["MAX_BYTES", "Column", "Report", "Table", "make_folder", "read_report", "rewrite", "write_text"]

MAX_BYTES = 5 * 1024 * 1024
"""A page above this size is refused: it would not open well on a phone."""


@dataclass(frozen=True)
class Column:
    """A column of a report table.

    Attributes:
        name: Heading.
        unit: Unit of its numbers, in plain text.
        better: Which direction is better, if any.
    """

    name: str
    unit: str = ""
    better: Literal["higher", "lower"] | None = None


@dataclass(frozen=True)
class Table:
    """A table of a report.

    Attributes:
        title: What the rows are.
        columns: Headings, or plain texts for columns without unit.
        rows: Cells: numbers, texts, truth values, or None for "not available"; as many per row as columns.
        notes: Lines below the table.
    """

    title: str
    columns: Sequence[Column | str]
    rows: Sequence[Sequence[Any]]
    notes: Sequence[str] = field(default=())


@final
class Report:
    """A report under construction.

    Args:
        title: Heading of the page.
        summary: One or two plain sentences below it.
        command: The command line that made the numbers.
        seeds: Seeds that hold for the whole run.
        inputs: Name of each input → its digest (with the algorithm, "sha256:…").
        environment: Versions, machine and code path; by default what `netweight.core.environment.describe`
            says, and the path on which the codec runs.
    """

    def __init__(
        self,
        title: str,
        *,
        summary: str = "",
        command: str | None = None,
        seeds: Iterable[int] = (),
        inputs: Mapping[str, str] | None = None,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        self.title = title
        self.summary = summary
        self.command = command
        self.seeds = tuple(seeds)
        self.inputs = dict(inputs or {})
        self._environment = environment
        self._sections: list[Section] = []
        self._chapters: list[Chapter] = []

    def chapter(self, chapter: Chapter) -> Report:
        """Begin a chapter: sections added from now on belong to it, and the summary tells of chapters.

        Args:
            chapter: Its title is different from those of other chapters.

        Returns:
            The report, so that calls can be chained.

        Raises:
            UsageError: The title is taken, or there are sections before the first chapter.
        """
        if any(known.title == chapter.title for known in self._chapters):
            raise UsageError(f"A second chapter is titled {chapter.title!r}.", cure="Give each its own title.")
        if self._sections and not self._chapters:
            raise UsageError("Sections lie before the first chapter.", cure="Begin the report with a chapter.")
        self._chapters.append(chapter)
        return self

    def section(
        self,
        title: str,
        findings: Iterable[Finding],
        *,
        figures: Iterable[Figure] = (),
        tables: Iterable[Table] = (),
        intro: str = "",
        question: str = "",
        conclusion: str = "",
        treatment: str | None = None,
        audits: Iterable[str] = (),
        warnings: Iterable[str] = (),
    ) -> Report:
        """Add a section.

        Args:
            title: Its heading; different from those of other sections.
            findings: What was measured, in the order to show.
            figures: Pictures, each with a text alternative.
            tables: Further tables.
            intro: A few plain sentences: what this is about and how to read it. A blank line starts a paragraph.
            question: What was asked, one sentence, for the summary table.
            conclusion: What was found, one sentence in plain words; without it the findings with targets are counted.
            treatment: The treatment that the section is about. Audits that it names and that are not in `audits`
                are shown in red.
            audits: Names of the audits that ran.
            warnings: Further sentences to show in red.

        Returns:
            The report, so that calls can be chained.

        Raises:
            UsageError: The title is empty or taken, or a table's rows do not fit its columns.
            NameNotFound: The treatment is not declared.
        """
        self._check_title(title)
        ran = tuple(audits)
        self._sections.append(
            Section(
                title=title,
                chapter=self._chapters[-1].title if self._chapters else "",
                intro=intro,
                question=question,
                conclusion=conclusion,
                treatment=treatment,
                audits=ran,
                missing_audits=missing_audits(treatment, ran) if treatment else (),
                warnings=tuple(warnings),
                findings=tuple(Finding.model_validate(finding.to_json()) for finding in findings),
                tables=tuple(_table(table) for table in tables),
                figures=tuple(Figure.model_validate(asdict(figure)) for figure in figures),
            )
        )
        return self

    def include(self, section: Section) -> Report:
        """Add a section of another report as it was written, such as one read by `read_report`.

        Args:
            section: Its title is different from those of other sections here.

        Returns:
            The report, so that calls can be chained.

        Raises:
            UsageError: The title is taken.
        """
        self._check_title(section.title)
        chapter = self._chapters[-1].title if self._chapters else ""
        self._sections.append(section.model_copy(update={"chapter": chapter}))
        return self

    def _check_title(self, title: str) -> None:
        if not title.strip() or any(section.title == title for section in self._sections):
            raise UsageError(f"A section titled {title!r} cannot be added.", cure="Give each section its own title.")

    def document(self) -> Report:
        """Return the report as the document that report.json holds."""
        environment = _default_environment() if self._environment is None else dict(self._environment)
        seeds = {seed for section in self._sections for finding in section.findings for seed in finding.seeds}
        return Report(
            title=self.title,
            summary=self.summary,
            chapters=tuple(self._chapters),
            sections=tuple(self._sections),
            provenance=Provenance(
                created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                command=self.command,
                seeds=tuple(sorted(seeds | set(self.seeds))),
                inputs=self.inputs,
                environment=_json_object(environment),
            ),
        )

    def write(self, folder: str | os.PathLike[str]) -> Path:
        """Write report.json and report.html into a folder, each aside first, synced and renamed.

        Args:
            folder: Where to; made when missing. Reports already there are replaced.

        Returns:
            The path of report.html.

        Raises:
            UsageError: The page would be larger than 5 MB, or the folder cannot be made.
            OutputFailed: The folder cannot be written.
        """
        document = self.document()
        return _write(document, render(document), Path(folder))


def rewrite(folder: str | os.PathLike[str]) -> Path:
    """Make report.html again from the report.json in a folder.

    Args:
        folder: A folder with a report.json.

    Returns:
        The path of report.html.

    Raises:
        UsageError: There is no report.json, or it does not fit the schema.
    """
    return _write_page(render(read_report(folder)), Path(folder))


def read_report(folder: str | os.PathLike[str]) -> Report:
    """Read the report.json of a folder.

    Args:
        folder: A folder with a report.json.

    Raises:
        UsageError: There is none, or it does not fit the schema.
    """
    path = Path(folder) / "report.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error}.", cure="Give the folder of a run that wrote one.") from error
    return parse_report(text, where=str(path))


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, unless it is there.

    Args:
        folder: The folder.

    Raises:
        UsageError: The system refuses: a file is in the way, permission is missing, the disk is full.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"The folder {folder} cannot be made ({error.strerror}).", cure="Choose another.") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file that appears whole or not at all, in place of one that may be there.

    Args:
        path: The file; its folder is made when missing.
        text: The new content, written as UTF-8.

    Raises:
        OutputFailed: The folder cannot be written, or the disk is full.
        UsageError: The folder cannot be made, or another run is writing the same file.
    """
    make_folder(path.parent)
    with whole_file(path, overwrite=True) as file:
        file.write(text.encode())


def _write(document: Report, page: str, folder: Path) -> Path:
    _check_size(page)
    write_text(folder / "report.json", document.dump())
    return _write_page(page, folder)


def _write_page(page: str, folder: Path) -> Path:
    _check_size(page)
    path = folder / "report.html"
    write_text(path, page)
    return path


def _check_size(page: str) -> None:
    size = len(page.encode())
    if size > MAX_BYTES:
        raise UsageError(
            f"The report page would have {size / 2**20:.1f} MB, more than {MAX_BYTES / 2**20:.0f} MB.",
            cure="Give it fewer or smaller images.",
        )


def _table(table: Table) -> Table:
    columns = [Column(column) if isinstance(column, str) else column for column in table.columns]
    try:
        return Table.model_validate(
            {
                "title": table.title,
                "columns": [asdict(column) for column in columns],
                "rows": [encode_json(list(row)) for row in table.rows],
                "notes": list(table.notes),
            }
        )
    except (ValidationError, TypeError) as error:
        raise UsageError(
            f"Table {table.title!r} cannot be shown: {error}.", cure="Cells are numbers or texts."
        ) from error


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
