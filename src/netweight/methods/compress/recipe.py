"""`compress` in recipes: what is done, and what the method's audit looks at."""

from __future__ import annotations

from pathlib import Path

from netweight.core.progress import Progress
from netweight.methods.compress.folder import compress_folder
from netweight.methods.compress.folder_format import MANIFEST, Manifest
from netweight.methods.compress.plan import make_plan
from netweight.methods.compress.settings import CompressSettings
from netweight.methods.compress.verify import TREATMENT, Compressed, _identity
from netweight.registry import CardEntry, Method


def _compress(source: Path, destination: Path, settings: CompressSettings, progress: Progress) -> None:
    compress_folder(source, destination, settings, progress=progress)


def _examine(
    audit: str, destination: Path, source: Path, settings: CompressSettings, progress: Progress
) -> tuple[Compressed, CompressSettings]:
    return Compressed(destination, source), settings


def _check(source: Path | None, settings: CompressSettings) -> None:
    if source is not None and source.is_dir():
        make_plan(source, settings)


def _card(folder: Path) -> CardEntry | None:
    if not (folder / MANIFEST).exists():
        return None
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
    return CardEntry("Compressed" + (", with rounding" if rounded else ", bit for bit"), text, facts, ("compressed",))


def _bytes(count: int) -> str:
    return f"{count:,} bytes"


COMPRESS = Method(
    TREATMENT,
    CompressSettings,
    audits={"identity": _identity},
    apply=_compress,
    examine=_examine,
    check=_check,
    takes=("model", "adapters"),
    card=_card,
)
