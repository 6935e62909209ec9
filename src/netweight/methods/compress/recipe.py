"""`compress` in recipes: the treatment and its audits."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from netweight.core.progress import Progress
from netweight.errors import NetweightError
from netweight.methods.compress.bits import merge
from netweight.methods.compress.compress_folder import compress_folder
from netweight.methods.compress.folder_format import MANIFEST, Manifest, make_plan
from netweight.methods.compress.inspect import TensorReport, bits_figure, inspect_tensors
from netweight.methods.compress.settings import CompressSettings
from netweight.methods.compress.verify import AuditSubject
from netweight.registry import CardEntry
from netweight.report.finding import Column, Finding, Section, Table
from netweight.report.text import Conclusion, Criterion, Words, by_targets


def apply(source: Path, destination: Path, settings: CompressSettings, progress: Progress) -> None:
    compress_folder(source, destination, settings, progress=progress)


def examine(
    audit: str, destination: Path, source: Path, settings: CompressSettings, progress: Progress
) -> tuple[AuditSubject, CompressSettings]:
    return AuditSubject(destination, source), settings


def check(source: Path | None, settings: CompressSettings) -> None:
    if source is not None and source.is_dir():
        make_plan(source, settings)


def card(folder: Path) -> CardEntry | None:
    if not (folder / MANIFEST).exists():
        return None
    manifest = Manifest.read(folder)
    weights = [entry for entry in manifest.files if entry.kind == "compressed"]
    before, after = (sum(getattr(entry, name) for entry in weights) for name in ("nbytes", "stored_nbytes"))
    rounded = sum(entry.rounded for entry in weights)
    summary = (
        f"{rounded} tensors are rounded: each weight differs from the original by at most "
        f"{max(entry.bound for entry in weights):.3g} of itself, and the largest change was "
        f"{max(entry.worst_change for entry in weights):.3g}. The others are kept bit for bit."
        if rounded
        else "Compression is lossless: every file can be restored byte for byte."
    )
    opened = (
        "The weights are quantized, and no program can open them in this form: "
        "`netweight decompress FOLDER NEW` restores "
        "the original files, `netweight verify FOLDER` checks all digests."
        if manifest.bytes_only
        else "The weights are ordinary safetensors files with compressed tensors. They load with transformers and "
        "diffusers where netweight is installed, and stay compressed in memory; `netweight decompress FOLDER NEW` "
        "restores the original files, `netweight verify FOLDER` checks all digests."
    )
    text = f"{summary} {opened}"
    facts = (
        ("weights before", f"{before:,} bytes"),
        ("weights as stored", f"{after:,} bytes" + (f" ({after / before:.1%})" if before else "")),
        ("tensors", str(sum(entry.tensors for entry in weights))),
        ("level", manifest.level),
    )
    return CardEntry("Compressed" + (", with rounding" if rounded else ", bit for bit"), text, facts, ("compressed",))


def size(subject: AuditSubject, config: CompressSettings, *, seed: int, progress: Progress) -> Section:
    """Report how much smaller a model is, in bytes and in bits per weight, and why."""
    reports = list(inspect_tensors(subject.path, progress=progress))
    plain, stored = (sum(getattr(each.info, name) for each in reports) for name in ("nbytes", "stored_nbytes"))
    weights: dict[str, list[TensorReport]] = {}
    for each in reports:
        if each.bits is not None and each.bits.layout.exponent and each.bits.count:
            weights.setdefault(each.info.dtype, []).append(each)
    bits = {dtype: merge(each.bits for each in of if each.bits is not None) for dtype, of in weights.items()}
    columns = ("dtype", "tensors", "weights", Column("plain", "bits"), Column("compressed", "bits", "lower"),
               Column("with an ideal exponent code", "bits"))  # fmt: skip
    rows = [
        (dtype, len(of), bits[dtype].count, float(bits[dtype].layout.bits),
         8 * sum(each.info.stored_nbytes for each in of) / bits[dtype].count, bits[dtype].exponent_only_bits)
        for dtype, of in weights.items()
    ]  # fmt: skip
    why = "The reason: signs and mantissas are almost random, and most exponents are among a few values."
    ratio = Finding(_RATIO, plain / max(stored, 1), n=len(reports), better="higher",
                    detail={"plain bytes": plain, "compressed bytes": stored})  # fmt: skip
    outcome, words = _SMALLER([ratio], saved=f"{100 * (1 - stored / plain) if plain else 0:.1f} %")
    return Section(
        "Size", [ratio], tables=[Table("Bits per weight", columns, rows)], question="How much smaller is the model?",
        figures=[bits_figure(bits, caption=why)] if bits and find_spec("matplotlib") else [], conclusion=words,
        outcome=outcome,
    )  # fmt: skip


def tested(audit: str, config: CompressSettings) -> list[tuple[str, str]]:
    """Return what an audit compares, and how much of it."""
    if audit == "identity":
        compared = "every bit" if config.mantissa_bits == 7 else "every weight, within the bound of the rounding"
        return [("compared with the original", f"every file, and {compared} of every tensor")]
    if audit == "outputs":
        rows, length = _INPUTS
        return [("outputs of a language model", f"compared on {rows} rows of {length} random tokens, to the last bit")]
    return []


def _saved(smaller: bool, *, saved: str) -> Words:
    if smaller:
        return "holds", f"Compression saves {saved} of the tensors' bytes."
    return "told", "No size reduction: the tensors are incompressible."


_RATIO = "size of the tensors, original / compressed"
_SMALLER = Conclusion("compress: size", [Criterion(_RATIO, "higher", than=1.0, strict=True)], _saved)


# Rows of random tokens whose outputs are compared, and their length.
_INPUTS = (4, 16)


def outputs(subject: AuditSubject, config: CompressSettings, *, seed: int, progress: Progress) -> Section:
    """Compare what a language model computes with dense weights and with weights that stay compressed in memory."""
    # Compression itself needs no torch, and checks its arguments with this module.
    import torch

    from netweight.hf.load_language_model import load_network
    from netweight.methods.compress.runtime.model import memory_footprint

    title, question = "Outputs", "Does the compressed model compute what the original computes?"
    name = "output numbers that differ in any bit"
    manifest = Manifest.read(subject.path) if (subject.path / MANIFEST).exists() else None
    if manifest is not None and manifest.bytes_only:
        return Section(
            title, question=question, outcome="told",
            conclusion="The outputs were not compared: " + "; ".join(
                f"{'the model' if at == '.' else at} {reason}" for at, reason in manifest.bytes_only.items()
            ) + ", and must be decompressed before use.",
        )  # fmt: skip
    if not (subject.source / "config.json").is_file():
        return Section(
            title, question=question, outcome="told",
            conclusion="The outputs were not compared, because this audit runs single models of transformers. The "
            "audit of identity covers every bit of the weights.",
        )  # fmt: skip
    try:
        models = [load_network(folder) for folder in (subject.source, subject.path)]
    except NetweightError as error:
        return Section(title, [Finding(name, None, detail={"reason": str(error)})], question=question)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(models[0].config.vocab_size, _INPUTS, generator=generator)
    with torch.inference_mode():
        before, after = (model(input_ids=tokens)[0].float() for model in models)
    different = int((before.view(torch.int32) != after.view(torch.int32)).sum())
    dense, held = (memory_footprint(model) for model in models)
    # Rounded weights give other outputs, so there is no target for them.
    target = 0 if config.mantissa_bits == 7 else None
    findings = [
        Finding(name, different, n=before.numel(), better="lower", target=target, seeds=(seed,)),
        Finding("memory of the compressed weights", held / 1e6, unit="MB", better="lower", baseline=dense / 1e6),
    ]
    outcome, words = _SAME(findings) if target is not None else ("told", "")
    return Section(
        title, findings, question=question, conclusion=words, outcome=outcome,
        intro="Random tokens go through the original and through the model whose weights stay compressed in memory; "
        "their outputs are compared bit by bit.",
    )  # fmt: skip


_SAME = by_targets("compress: outputs", met="The outputs are equal to the last bit.", missed="The outputs differ.")
