"""What the records in a model's folder tell of what was done to it, in words, for its card."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from netweight.core.environment import netweight_version
from netweight.errors import UsageError
from netweight.methods.compress.folder import write_side_file
from netweight.methods.compress.manifest import MANIFEST, Manifest
from netweight.methods.forget.edit import FOLDER as EDITS
from netweight.methods.forget.edit import read_records
from netweight.methods.immunize.checkpoint import RECORD as IMMUNIZED
from netweight.methods.immunize.checkpoint import Record
from netweight.methods.space.folder import EXPORTED, ExportRecord
from netweight.report.report import Report, read_report
from netweight.report.text import markdown_table, render_markdown


@final
@dataclass(frozen=True)
class Entry:
    """One thing that was done."""

    title: str  # in a few words
    text: str  # what it means, and what it does not
    facts: tuple[tuple[str, str], ...]  # names and values
    tags: tuple[str, ...]  # for the hub


def entries_of(folder: Path) -> list[Entry]:
    """Return what was done to a model, in no order of time: records do not know of each other."""
    known: dict[str, Callable[[Path], Entry]] = {
        EXPORTED: _exported,
        IMMUNIZED: _immunized,
        EDITS: _forgot,
        MANIFEST: _compressed,
    }
    return [told(folder) for name, told in known.items() if (folder / name).exists()]


def _compressed(folder: Path) -> Entry:
    manifest = Manifest.read(folder)
    weights = [entry for entry in manifest.files if entry.kind == "compressed"]
    before, after = (sum(getattr(entry, name) for entry in weights) for name in ("nbytes", "stored_nbytes"))
    rounded = sum(entry.rounded for entry in weights)
    kept = (
        f"{rounded} tensors are rounded: each weight differs from the original by at most "
        f"{max(entry.bound for entry in weights):.3g} of itself, and did by at most "
        f"{max(entry.worst_change for entry in weights):.3g}. The others are kept bit for bit."
        if rounded
        else "Nothing is lost: every file comes back byte for byte."
    )
    text = (
        f"{kept} The weights are ordinary safetensors files with compressed tensors. They load with transformers and "
        "diffusers after `import netweight.plugins.transformers` (or `.diffusers`) and stay compressed in memory; "
        "`netweight decompress FOLDER NEW` restores the original files, `netweight verify FOLDER` checks all digests."
    )
    facts = (
        ("weights before", _bytes(before)),
        ("weights as stored", f"{_bytes(after)} ({after / before:.1%})" if before else _bytes(after)),
        ("tensors", str(sum(entry.tensors for entry in weights))),
        ("level", manifest.level),
    )
    return Entry("Compressed" + (", with rounding" if rounded else ", bit for bit"), text, facts, ("compressed",))


def _bytes(count: int) -> str:
    return f"{count:,} bytes"


def _immunized(folder: Path) -> Entry:
    record = Record.read(folder / IMMUNIZED)
    text = (
        "A defense against harmful fine-tuning was trained into the weights. That is delay, not prevention: how many "
        "steps of an attack it holds is for attacks to say, and only those that were tried."
    )
    facts = (
        ("defense", record.defense),
        ("steps", str(len(record.steps))),
        ("weights trained", f"{record.trained:,}"),
        *((f"settings: {name}", str(record.settings[name])) for name in ("lr", "epochs", "batch_size", "seed")
          if name in record.settings),
    )  # fmt: skip
    return Entry("Immunized", text, facts, ("immunized",))


def _forgot(folder: Path) -> Entry:
    records = read_records(folder)
    text = (
        "Neurons on which memorized training images hang were switched off in the weights. That suppresses these "
        "images under their prompts; other text embeddings may still bring them back. "
        "`netweight forget undo FOLDER NEW` takes the last edit back to the last bit."
    )
    facts = (
        ("edits", str(len(records))),
        ("neurons", str(sum(len(record.units) for record in records))),
        ("layers", str(len({module for record in records for module in record.units.modules}))),
        ("prompts", str(sum(len(record.prompts) for record in records))),
    )
    return Entry("Memorization switched off", text, facts, ("unlearning",))


def _exported(folder: Path) -> Entry:
    record = ExportRecord.read(folder)
    text = (
        "A low-rank adapter that is a point of a space of adapters, not trained on images of its own. Where the space "
        "is of people, it may resemble one of them."
    )
    low, high = record.ranks
    facts = (
        ("point", record.point),
        ("of a space of", f"{record.adapters} adapters, {record.components} components"),
        ("rank", str(low) if low == high else f"{low} to {high}"),
        ("left out by the rank, relative", f"{record.relative_error:.2e}"),
        ("layout", record.layout),
    )
    return Entry("Drawn from a space of adapters", text, facts, ("lora",))


CARD = "README.md"
_LICENSES = ("LICENSE", "LICENSE.md", "LICENSE.txt", "COPYING")
_NO_LICENSE = (
    "License: not stated here. A model made from another one is under that one's license: name it, as `license:` in "
    "the first lines of this file."
)


def update_card(folder: str | Path, *, command: str | None = None, base_model: str | None = None) -> Path:
    """Write or update the section that says what was done to a model."""
    folder = Path(folder)
    entries = entries_of(folder)
    if not entries:
        raise UsageError(
            f"{folder} holds no record of what netweight did to it.", cure="Name the folder that a command wrote."
        )
    text = _text(folder) or _begun(folder, entries, base_model)
    begin, end = _marks("done")
    earlier = re.search(r"^Made by: `(.*)`$", text.partition(begin)[2].partition(end)[0], re.MULTILINE)
    command = command or (earlier[1] if earlier else None)
    lines = ["## What was done to this model", ""]
    for entry in entries:
        lines += [f"### {entry.title}", "", entry.text, ""]
        lines += markdown_table(("", ""), entry.facts)
    lines += [f"Made by: `{command}`", ""] if command else []
    lines += [_license(folder, text), "", f"Written by netweight {netweight_version()}."]
    return _write(folder, _with(text, "done", lines))


def add_evidence(folder: str | Path, run: str | Path) -> Path:
    """Write or update the section with what the audits and attacks of a run found."""
    folder = Path(folder)
    text = _text(folder) or f"# {folder.resolve().name}\n"
    return _write(folder, _with(text, "evidence", _evidence(read_report(run))))


def _evidence(report: Report) -> list[str]:
    lines = ["## Evidence", "", f"From the report {report.title!r} of {report.provenance.created[:10]}."]
    if report.summary:
        lines += ["", report.summary]
    for section in report.sections:
        found = render_markdown(section)
        if found:
            lines += ["", f"### {section.title}", "", *found]
    if report.provenance.command:
        lines += ["", f"Made by: `{report.provenance.command}`"]
    return [*lines, ""]


def _begun(folder: Path, entries: Sequence[Entry], base_model: str | None) -> str:
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


def _license(folder: Path, text: str) -> str:
    """What is known of the license: stated in the card's first lines, lying beside, or nothing."""
    head = re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)
    stated = re.search(r"^license: *(\S+)", head[1], re.MULTILINE) if head else None
    if stated:
        return f"License: {stated[1]}, as stated above."
    beside = next((name for name in _LICENSES if (folder / name).is_file()), None)
    return f"License: see {beside}." if beside else _NO_LICENSE


def _with(text: str, key: str, lines: Sequence[str]) -> str:
    """Put a section between its marks: in the place of an earlier one, or at the end."""
    begin, end = _marks(key)
    section = "\n".join([begin, *lines, end])
    if (text.count(begin), text.count(end)) == (0, 0):
        return f"{text.rstrip()}\n\n{section}\n"
    if (text.count(begin), text.count(end)) != (1, 1) or text.index(begin) > text.index(end):
        raise UsageError(
            f"{CARD} does not have the marks {begin!r} and {end!r} once each, in this order.",
            cure="Take what is left of the section out.",
        )
    return text[: text.index(begin)] + section + text[text.index(end) + len(end) :]


def _marks(key: str) -> tuple[str, str]:
    return f"<!-- netweight {key}: begin -->", f"<!-- netweight {key}: end -->"


def _text(folder: Path) -> str:
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder of a model.", cure="Name a folder; a single file has no card.")
    file = folder / CARD
    try:
        return file.read_text(encoding="utf-8") if file.is_file() else ""
    except UnicodeDecodeError as error:
        raise UsageError(f"{file} is no text in UTF-8.", cure="Save it as UTF-8.") from error


def _write(folder: Path, text: str) -> Path:
    write_side_file(folder, CARD, text.encode())
    return folder / CARD
