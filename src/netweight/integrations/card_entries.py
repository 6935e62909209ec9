"""What the records in a model's folder tell of what was done to it, in words, for its card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from netweight.methods.compress.manifest import MANIFEST, Manifest
from netweight.methods.forget.edit_record import FOLDER as EDITS
from netweight.methods.forget.edit_record import read_records
from netweight.methods.immunize.record import Record
from netweight.methods.immunize.training import RECORD as IMMUNIZED
from netweight.methods.space.export_record import EXPORTED, ExportRecord

__all__ = ["Entry", "entries_of"]


@final
@dataclass(frozen=True)
class Entry:
    """One thing that was done.

    Attributes:
        title: In a few words.
        text: What it means, and what it does not.
        facts: Names and values.
        tags: For the hub.
    """

    title: str
    text: str
    facts: tuple[tuple[str, str], ...]
    tags: tuple[str, ...]


def entries_of(folder: Path) -> list[Entry]:
    """Return what was done to a model, in no order of time: records do not know of each other.

    Args:
        folder: The model's folder.

    Raises:
        CorruptBlob: A record is damaged.
    """
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
        "diffusers after `import netweight.integrations.transformers` (or `.diffusers`) and stay compressed in memory; "
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
