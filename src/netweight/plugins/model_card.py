"""The model card of a folder, README.md: marked sections that state the treatments of the model and their tests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml

from netweight.core.digests import digest_config
from netweight.core.environment import netweight_version
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.methods.compress.compress_folder import write_side_file
from netweight.registry import CardEntry, known_methods
from netweight.report.card_sections import (
    CARD,
    HEAD,
    evidence_of,
    marks,
    verdict_in,
    with_section,
    with_verdict,
    without_other_weights,
    worst_evidence,
)
from netweight.report.page import render
from netweight.report.report import Report, read_report
from netweight.report.text import markdown_table, render_markdown
from netweight.report.verdict import Verdict, decide
from netweight.store.weights_digest import weights_digest


def entries_of(folder: Path) -> list[CardEntry]:
    """Return what was done to a model, in no order of time: records do not know of each other."""
    entries = (method.card(folder) for method in known_methods().values() if method.card is not None)
    return [entry for entry in entries if entry is not None]


_LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "COPYING")
_NO_LICENSE = (
    "License: not stated here. A model that was made from another one is under the license "
    "of that one: name it, as `license:` in "
    "the first lines of this file."
)


def update_card(folder: str | Path, *, command: str | None = None, base_model: str | None = None) -> Path:
    """Write or update the section that says what was done to a model."""
    folder = Path(folder)
    entries = entries_of(folder)
    if not entries:
        raise UsageError(
            f"{folder} does not contain a record of a treatment by netweight.",
            cure="Name the folder that a command wrote.",
        )
    text = _text(folder)
    text = _tagged(text, entries) if text else _begun(folder, entries, base_model)
    begin, end = marks("done")
    earlier = re.search(r"^Made by: `(.*)`$", text.partition(begin)[2].partition(end)[0], re.MULTILINE)
    command = command or (earlier[1] if earlier else None)
    lines = ["## What was done to this model", ""]
    for entry in entries:
        lines += [f"### {entry.title}", "", entry.text, ""]
        lines += markdown_table(("", ""), entry.facts)
    lines += [f"Made by: `{command}`", ""] if command else []
    lines += [_license(folder, text), "", f"Written by netweight {netweight_version()}."]
    if evidence_of(text):
        text = without_other_weights(text, weights_digest(folder))
    return _write(folder, with_section(text, "done", lines))


def add_evidence(folder: str | Path, run: str | Path, progress: Progress = QUIET) -> Path:
    """Write or update the section with what the audits and attacks of a run found.

    Evidence from other runs stays in the card if it is about the present weights. The first section of the card states
    the worst verdict of all its evidence, so that a later run of another kind does not hide an earlier one.

    Args:
        folder: The model's folder.
        run: The folder of the run; a later report from the same folder takes the place of an earlier one.
        progress: Where progress is shown; the weights are read in full.

    Returns:
        The card.

    Raises:
        UsageError: The report is about other weights than those of the folder, or one of both cannot be read.
    """
    folder = Path(folder)
    text = _text(folder) or f"# {folder.resolve().name}\n"
    report = read_report(run)
    weights = weights_digest(folder, progress)
    tested = report.provenance.weights
    if tested and weights not in tested.values():
        again = f": {report.provenance.command}" if report.provenance.command else "."
        raise UsageError(
            f"The report in {run} is about the weights of {', '.join(tested)}, and {folder} contains other weights: it "
            "is another model, or it was changed after the report.",
            cure=f"Name the folder that was tested, or repeat the test on this one{again}",
        )
    complete_reports(folder, report)
    key = digest_config(str(Path(run).resolve())).rpartition(":")[2][:8]
    text = with_section(text, f"evidence {key}", _evidence(report, weights if tested else None))
    text = without_other_weights(text, weights, latest=key) if weights else with_verdict(text, latest=key)
    return _write(folder, text)


def worse_verdict(folder: str | Path, verdict: Verdict) -> str | None:
    """Return a sentence about the verdict of a model's card; None if it is the verdict of the last run.

    Args:
        folder: The model's folder.
        verdict: The verdict of the last run.
    """
    text = _text(Path(folder))
    worst = worst_evidence(text)
    if worst is None or verdict_in(text) == verdict.card:
        return None
    return (
        f"The card states the worst verdict of its {len(evidence_of(text))} reports, which is that of an earlier one. "
        f"{worst.source} {worst.sentence}"
    )


def complete_reports(folder: str | Path, report: Report) -> list[Path]:
    """Put what a run measured into the reports of treatments in a model's folder that lacked it.

    A treatment writes its report before anything has attacked the model, and marks the audits that are missing. A page
    that still does so beside the result of these audits would be wrong when it is published.

    Args:
        folder: The model's folder, compressed or not.
        report: The report of the run.

    Returns:
        The folders of the reports that were written anew.
    """
    command = report.provenance.command or ""
    made = {audit for section in report.sections for audit in section.audits}
    for method in known_methods().values():
        made |= {audit for audit, verb in method.by_attack.items() if f"attack {verb} " in f"{command} "}
    written = []
    for file in sorted(Path(folder).glob("*-report/report.json")):
        earlier = read_report(file.parent)
        if not any(made.intersection(section.missing_audits) for section in earlier.sections):
            continue
        sections = [
            replace(
                section, audits=(*section.audits, *(each for each in section.missing_audits if each in made)),
                missing_audits=tuple(each for each in section.missing_audits if each not in made),
            )
            for section in earlier.sections
        ]  # fmt: skip
        titles = [section.title for section in sections]
        later = [replace(each, chapter="") for each in report.sections if not each.title.endswith(tuple(titles))]
        whole = earlier.model_copy(update={"sections": (*sections, *later)})
        name = file.parent.name
        write_side_file(Path(folder), f"{name}/report.json", whole.dump().encode())
        write_side_file(Path(folder), f"{name}/report.html", render(whole).encode())
        written.append(file.parent)
    return written


def add_section(folder: str | Path, key: str, lines: Sequence[str]) -> Path:
    """Write or replace a marked section of the card and leave the rest of it as it is.

    Args:
        folder: The model's folder.
        key: Name of the section, which stands in its marks.
        lines: Its lines, in Markdown.

    Returns:
        The card.
    """
    folder = Path(folder)
    text = _text(folder) or f"# {folder.resolve().name}\n"
    return _write(folder, with_section(text, key, lines))


def _evidence(report: Report, weights: str | None) -> list[str]:
    lines = [
        "## Evidence",
        "",
        f"**{decide(report.sections).card}**",
        "",
        f"From the report {report.title!r} of {report.provenance.created[:10]}.",
        *([f"<!-- weights {weights} -->"] if weights else []),
    ]
    if report.summary:
        lines += ["", report.summary]
    for section in report.sections:
        lines_of_section = render_markdown(section)
        if lines_of_section:
            lines += ["", f"### {section.title}", "", *lines_of_section]
    if report.provenance.command:
        lines += ["", f"Made by: `{report.provenance.command}`"]
    return [*lines, ""]


def _begun(folder: Path, entries: Sequence[CardEntry], base_model: str | None) -> str:
    """A new card, with the metadata that is known."""
    tags = ["netweight", *dict.fromkeys(tag for entry in entries for tag in entry.tags)]
    lines = ["---"]
    lines += [f"base_model: {base_model}"] if base_model else []
    library = _library(folder)
    lines += [f"library_name: {library}"] if library else []
    lines += ["tags:", *(f"- {tag}" for tag in tags), "---", "", f"# {folder.resolve().name}"]
    return "\n".join(lines) + "\n"


def _library(folder: Path) -> str | None:
    marks = {"model_index.json": "diffusers", "adapter_config.json": "peft", "config.json": "transformers"}
    return next((library for name, library in marks.items() if (folder / name).is_file()), None)


def _tagged(text: str, entries: Sequence[CardEntry]) -> str:
    """Add the tags of what was done to the metadata of a card that is there; all else stays as its author wrote it."""
    head = HEAD.match(text)
    tags = ["netweight", *dict.fromkeys(tag for entry in entries for tag in entry.tags)]
    if head is None:
        return "\n".join(["---", "tags:", *(f"- {tag}" for tag in tags), "---", "", text.lstrip()])
    lines = head[1].split("\n")
    try:
        metadata = yaml.safe_load(head[1]) or {}
    except yaml.YAMLError as error:
        raise UsageError(f"The metadata of {CARD} are not valid YAML: {error}.", cure="Correct them.") from error
    listed = metadata.get("tags") if isinstance(metadata, dict) else None
    new = [f"- {tag}" for tag in tags if tag not in (listed if isinstance(listed, list) else [])]
    if isinstance(listed, list) and "tags:" in lines:
        place = lines.index("tags:") + 1
        indent = re.match(r"\s*", lines[place])[0] if place < len(lines) else ""  # type: ignore[index]  # it matches
        lines[place:place] = [indent + tag for tag in new]
    elif isinstance(listed, list):
        # The list is written in one line.
        place = next(number for number, line in enumerate(lines) if line.startswith("tags:"))
        lines[place : place + 1] = ["tags:", *(f"- {tag}" for tag in listed), *new]
    elif new:
        lines += ["tags:", *new]
    return "\n".join(["---", *lines, "---", ""]) + text[head.end() :]


def license_of(folder: Path) -> str | None:
    """Return the license that a card's metadata state, or the name of a license file beside it; None without either."""
    head = HEAD.match(_text(folder))
    stated = re.search(r"^license: *(\S+)", head[1], re.MULTILINE) if head else None
    if stated:
        return stated[1]
    return next((name for name in _LICENSES if (folder / name).is_file()), None)


def verdict_of(folder: Path) -> str | None:
    """Return the verdict that the card states; None where it states none."""
    return verdict_in(_text(folder))


def _license(folder: Path, text: str) -> str:
    """Return what is known of the license: stated in the card's first lines, in a file beside it, or nothing."""
    head = HEAD.match(text)
    stated = re.search(r"^license: *(\S+)", head[1], re.MULTILINE) if head else None
    if stated:
        return f"License: {stated[1]}, as stated above."
    beside = next((name for name in _LICENSES if (folder / name).is_file()), None)
    return f"License: see {beside}." if beside else _NO_LICENSE


def _text(folder: Path) -> str:
    if not folder.is_dir():
        raise UsageError(
            f"{folder} is not a folder of a model.", cure="Name a folder. A single file cannot have a model card."
        )
    file = folder / CARD
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else ""
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is not a text in UTF-8.", cure="Save it as UTF-8.") from error


def _write(folder: Path, text: str) -> Path:
    write_side_file(folder, CARD, text.encode())
    return folder / CARD
