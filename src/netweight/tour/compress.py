"""The stop of `compress`: a real model, as published and as bf16, made smaller, proved identical, restored and run.

What the stops before have made goes the same way: see `everything.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import netweight.methods.compress.verify  # noqa: F401  # declares the treatment and its audit
from netweight.core import digest
from netweight.core.progress import Progress
from netweight.methods.compress.folder import Summary, compress_folder, decompress_folder
from netweight.methods.compress.inspect import BitStatistics, TensorReport, bits_figure, inspect_tensors, merge
from netweight.methods.compress.runtime.model import memory_footprint
from netweight.methods.compress.verify import verify
from netweight.report.conclusions import by_targets
from netweight.report.finding import Chapter, Column, Figure, Finding, Table
from netweight.report.plots import bars
from netweight.report.report import Report
from netweight.tour.everything import add_everything, all_others, computed
from netweight.tour.stop import Place, Stop, handed_over
from netweight.toys import minilm

__all__ = ["SENTENCES", "make_stop", "settings"]

SENTENCES = (
    "The cat sleeps on the warm windowsill.",
    "A kitten is napping in the sun by the window.",
    "Compression takes out what can be predicted.",
    "What is redundant need not be stored.",
    "The train to the coast leaves at nine.",
    "Our ferry departs in the morning.",
    "She baked bread with rye and caraway.",
    "The loaf came out of the oven dark and fragrant.",
)
"""What the model embeds: pairs that mean nearly the same."""

LEAST_RATIO = {"fp32, as published": 1.22, "bf16": 1.51}
"""What the ratio of whole files must reach at least."""

_CHAPTER = by_targets(
    "tour: compress",
    met="Of a model of 22.7 million weights {saved} are saved; it and {others} models of this tour come back bit for "
    "bit, and compute the same numbers with compressed weights.",
    missed="Not as it should be: {missed}.",
)
_VERDICT = by_targets(
    "tour: compress, verdict",
    met="Nothing is lost: every bit is there.",
    missed="Something differs or is too large.",
)
_SMALLER = by_targets(
    "tour: compress, smaller",
    met="Of all bytes of the weights {saved} are saved.",
    missed="Saved are {saved} of the weights, less than it should be.",
)
_IDENTICAL = by_targets("tour: compress, identical", met="Nothing is lost.", missed="Something differs.")
_USEFUL = by_targets("tour: compress, used", met="The outputs are equal to the last bit.", missed="The outputs differ.")
_KINDS = ("all tensors", "embeddings", "attention", "feed-forward", "the rest")
_MB = 1e6


@final
@dataclass(frozen=True)
class _Variant:
    """One model taken through the whole way.

    Attributes:
        name: Its dtype, in words.
        compressed: What compressing said.
        restored: What restoring said.
        verify_seconds: Time that the comparison of all bits took.
        identity: The audit's findings.
        files: Number of files compared after restoring, and the names of those that differ.
        tensors: What is in its tensors.
        before: Embeddings by the original, shape `(sentences, 384)`.
        after: Embeddings by the restored model.
        run: Embeddings by the model whose weights stay compressed in memory.
        held: Bytes of the weights in memory, dense and compressed.
    """

    name: str
    compressed: Summary
    restored: Summary
    verify_seconds: float
    identity: tuple[Finding, ...]
    files: tuple[int, list[str]]
    tensors: tuple[TensorReport, ...]
    before: Any
    after: Any
    run: Any
    held: tuple[int, int]

    @property
    def short(self) -> str:
        """Its dtype alone."""
        return self.name.split(",")[0]


def settings() -> Mapping[str, Any]:
    """Return what decides the stop's result."""
    return {"sentences": SENTENCES, "least ratio": LEAST_RATIO}


def make_stop(place: Place) -> Stop:
    """Take a real model, and all that the stops before have made, through compression, verification and use."""
    published = minilm.folder()
    place.say(
        f"The model: all-MiniLM-L6-v2, 22.7 million weights, {_mb(minilm.weights_file().stat().st_size)} as published."
    )
    _write_as_bf16(published, place.folder / "bf16")
    variants = [
        _take("fp32, as published", published, place.folder / "fp32", place.progress, place.say),
        _take("bf16", place.folder / "bf16", place.folder / "bf16", place.progress, place.say),
    ]
    others, ran = all_others(place), computed(place)
    wrong = sum(other.wrong for other in others)
    place.say(
        f"And {len(others)} models of the other stops: {_mb(sum(each.nbytes for each in others))} → "
        f"{_mb(sum(each.stored_nbytes for each in others))}, "
        f"{'every bit is there' if not wrong else f'{wrong} tensors or files are NOT as they were'}."
    )
    report = Report("compress")
    _smaller(report, variants)
    _identical(report, variants)
    _useful(report, variants)
    add_everything(report, others, ran)
    inputs = {"all-MiniLM-L6-v2, model.safetensors": digest.of_file(minilm.weights_file())}
    return handed_over(report, _chapter(report, variants, len(others)), inputs=inputs, models={})


def _chapter(report: Report, variants: Sequence[_Variant], others: int) -> Chapter:
    missed = "; ".join(finding.name for finding in report.findings if finding.passed is False)
    outcome, verdict = _VERDICT(report.findings)
    return Chapter(
        title="compress: everything smaller, bit for bit",
        question="How much smaller do real models get without losing a bit, and do they run that way?",
        conclusion=_CHAPTER(report.findings, saved=_saved(variants), others=str(others), missed=missed)[1],
        verdict=verdict,
        outcome=outcome,
        command="netweight tour --only compress",
        intro="Here nothing is drawn at random, so there is no seed, and a count of differences needs no interval.",
    )


def _saved(variants: Sequence[_Variant]) -> str:
    return " and ".join(f"{100 * (1 - 1 / v.compressed.ratio):.1f} % as {v.short}" for v in variants)


def _take(name: str, source: Path, beside: Path, progress: Progress, say: Callable[[str], None]) -> _Variant:
    """Take one folder the whole way; what is made lies beside the path given."""
    small, back = beside.with_name(f"{beside.name}-net"), beside.with_name(f"{beside.name}-restored")
    compressed = compress_folder(source, small, progress=progress)
    say(
        f"{name}: {_mb(compressed.nbytes)} → {_mb(compressed.stored_nbytes)}, "
        f"{1 - 1 / compressed.ratio:.1%} less, in {compressed.seconds:.2f} s"
    )
    started = time.monotonic()
    identity = verify(small, source, progress=progress)
    seconds = time.monotonic() - started
    wrong = sum(finding.passed is False for finding in identity)
    say(f"  verified: {'every bit is there' if not wrong else 'NOT identical'}")
    restored = decompress_folder(small, back, progress=progress)
    files = _compare(source, back)
    differ = f"{len(files[1])} of {files[0]} files DIFFER" if files[1] else f"all {files[0]} files byte for byte"
    say(f"  restored: {differ}, in {restored.seconds:.2f} s")
    before, after = minilm.embed(source, SENTENCES), minilm.embed(back, SENTENCES)
    same = "the same to the last bit" if _different(before, after) == 0 else "NOT the same"
    say(f"  used: {len(SENTENCES)} sentences embedded by the original and by the restored model, {same}")
    run, held = _run_compressed(source, small)
    same = "the same to the last bit" if _different(before, run) == 0 else "NOT the same"
    say(f"  run with compressed weights, {_mb(held[1])} of memory in place of {_mb(held[0])}: {same}")
    tensors = tuple(inspect_tensors(small, progress=progress))
    return _Variant(name, compressed, restored, seconds, tuple(identity), files, tensors, before, after, run, held)


def _run_compressed(source: Path, small: Path) -> tuple[Any, tuple[int, int]]:
    """Embed with weights that stay compressed in memory; and the bytes of all weights there, dense and compressed."""
    held = [memory_footprint(minilm.encoder(folder)) for folder in (source, small)]
    return minilm.embed(small, SENTENCES), (held[0], held[1])


def _write_as_bf16(source: Path, target: Path) -> None:
    """Write the model as a folder of its own with all weights rounded to bf16, as most models are published today."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    rounded = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in weights.items()}
    save_file(rounded, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))


def _compare(original: Path, restored: Path) -> tuple[int, list[str]]:
    """Compare two folders file by file."""
    mine, theirs = ({name: digest.of_file(folder / name) for name in _names(folder)} for folder in (original, restored))
    names = sorted(mine | theirs)
    return len(names), [name for name in names if mine.get(name) != theirs.get(name)]


def _names(folder: Path) -> list[str]:
    return [str((Path(here) / leaf).relative_to(folder)) for here, _, leaves in os.walk(folder) for leaf in leaves]


def _smaller(report: Report, variants: Sequence[_Variant]) -> None:
    findings = [
        Finding(
            f"size of the weights, {v.name}: plain by compressed",
            v.compressed.ratio,
            better="higher",
            target=LEAST_RATIO[v.name],
            n=sum(_count(tensor) for tensor in v.tensors),
            detail={"plain bytes": v.compressed.nbytes, "compressed bytes": v.compressed.stored_nbytes},
        )
        for v in variants
    ]
    report.section(
        "Smaller",
        findings,
        tables=[_sizes(variants), _times(variants)],
        figures=[
            *(_bits_per_weight(variant) for variant in variants),
            bits_figure(
                {v.short: _merged(v.tensors) for v in variants},
                caption="Why: signs and mantissas look random, exponents crowd in a few values. "
                "netweight codes the exponent together with the first bits of the mantissa.",
            ),
        ],
        question="How much smaller does a real model get without losing a bit?",
        intro="The model is compressed as it was published, in fp32, and rounded to bf16 first, as most models are "
        "published today; the rounding is done before and is no part of the compression. A compressed model is still "
        "an ordinary safetensors file.",
        conclusion=_SMALLER(findings, saved=_saved(variants))[1],
    )


def _identical(report: Report, variants: Sequence[_Variant]) -> None:
    findings = []
    for v in variants:
        kept = [finding for finding in v.identity if finding.name != "ratio"]
        findings += [
            dataclasses.replace(finding, name=f"{v.name}: {finding.name}", n=finding.n or len(v.tensors))
            for finding in kept
        ]
        count, different = v.files
        findings.append(
            Finding(
                f"{v.name}: restored files that differ",
                len(different),
                n=count,
                better="lower",
                target=0,
                detail={"which": different, "among": count},
            )
        )
    report.section(
        "Bit for bit",
        findings,
        question="Is everything there, and can all of it be brought back?",
        intro="Every tensor of the compressed model is decoded and compared with the original, and with its own "
        "recorded digest. Then the folder is restored and compared file by file: weights, configuration, tokenizer, "
        "readme.",
        conclusion=_IDENTICAL(findings)[1],
        treatment="compress",
        audits=("identity",),
    )


def _useful(report: Report, variants: Sequence[_Variant]) -> None:
    findings = []
    for v in variants:
        different = _different(v.before, v.after)
        n = v.before.numel()
        findings.append(Finding(f"{v.name}: numbers that differ in any bit", different, n=n, better="lower", target=0))
        ran = _different(v.before, v.run)
        findings.append(
            Finding(f"{v.name}, run compressed: numbers that differ in any bit", ran, n=n, better="lower", target=0)
        )
        findings.append(
            Finding(f"{v.name}, run compressed: memory of the weights", v.held[1] / _MB, n=len(v.tensors), unit="MB",
                    better="lower", baseline=v.held[0] / _MB)
        )  # fmt: skip
    report.section(
        "The same answers",
        findings,
        tables=[_pairs(variants)],
        question="Do the restored and the compressed model compute what the original computes?",
        intro=f"The original, the restored model, and one whose weights stay compressed in memory each embed "
        f"{len(SENTENCES)} sentences with transformers, in one process; what they return is compared bit by bit, not "
        "by closeness. The table shows that a working model does it: for every sentence, the one nearest in meaning is "
        "found.",
        conclusion=_USEFUL(findings)[1],
    )


def _sizes(variants: Sequence[_Variant]) -> Table:
    columns = (
        "weights",
        Column("plain", "MB"),
        Column("compressed", "MB", "lower"),
        Column("saved", "%", "higher"),
        Column("plain", "bits"),
        Column("compressed", "bits", "lower"),
    )
    rows = []
    for v in variants:
        plain, stored = v.compressed.nbytes, v.compressed.stored_nbytes
        count = sum(_count(tensor) for tensor in v.tensors)
        sizes = (plain / _MB, stored / _MB, 100 * (1 - stored / plain))
        rows.append((v.name, *sizes, 8 * plain / count, 8 * stored / count))
    return Table(
        "Sizes", columns, rows, ("MB are 10⁶ bytes of the weight files, headers included; bits are bits per weight.",)
    )


def _times(variants: Sequence[_Variant]) -> Table:
    columns: list[Column | str] = ["weights"]
    columns += [Column(name, "s", "lower") for name in ("compress", "verify", "restore")]
    rows = [(v.name, v.compressed.seconds, v.verify_seconds, v.restored.seconds) for v in variants]
    notes = (
        "Whole folders, reading, syncing and writing files included, with all cores that may be used. "
        "The codec alone is measured by: netweight benchmark codec",
    )
    return Table("Times", columns, rows, notes)


def _bits_per_weight(variant: _Variant) -> Figure:
    """Bars of bits per weight by kind of tensor: plain, with the exponent coded ideally, and as stored."""
    groups: dict[str, list[float]] = {"plain": [], "exponent coded ideally": [], "netweight": []}
    for kind in _KINDS:
        tensors = [tensor for tensor in variant.tensors if kind in ("all tensors", _kind(tensor.info.name))]
        tensors = [tensor for tensor in tensors if tensor.bits is not None and tensor.bits.layout.exponent]
        count = sum(_count(tensor) for tensor in tensors)
        merged = _merged(tensors)
        groups["plain"].append(float(merged.layout.bits))
        groups["exponent coded ideally"].append(merged.exponent_only_bits)
        groups["netweight"].append(8 * sum(tensor.info.stored_nbytes for tensor in tensors) / count)
    ours, ideal, plain = (groups[name][0] for name in ("netweight", "exponent coded ideally", "plain"))
    name = variant.short
    return bars(
        groups,
        _KINDS,
        alt=f"Bits per weight of {name} weights: {plain:.0f} plain, {ideal:.2f} with exponents coded ideally, "
        f"{ours:.2f} by netweight.",
        caption=f"Bits per weight, {name}, by kind of tensor; the rest are norms, biases and the pooler. Of all "
        f"tensors: {plain:.0f} plain, {ours:.2f} by netweight. An ideal coder of the exponents alone, with one table "
        f"for all, would need {ideal:.2f}.",
        ylabel="bits per weight",
    )


def _kind(name: str) -> str:
    if "embedding" in name and "LayerNorm" not in name:
        return "embeddings"
    if name.endswith("dense.weight"):
        return "attention" if ".attention." in name else "feed-forward" if ".layer." in name else "the rest"
    return "attention" if ".attention." in name and name.endswith(".weight") and "LayerNorm" not in name else "the rest"


def _merged(tensors: Sequence[TensorReport]) -> BitStatistics:
    """The statistics of all floating-point tensors together."""
    return merge(tensor.bits for tensor in tensors if tensor.bits is not None and tensor.bits.layout.exponent)


def _count(tensor: TensorReport) -> int:
    return tensor.bits.count if tensor.bits is not None else 0


def _different(before: Any, after: Any) -> int:
    """Number of values whose bits differ; also NaN is equal to itself."""
    import torch

    return int((before.view(torch.int32) != after.view(torch.int32)).sum())


def _pairs(variants: Sequence[_Variant]) -> Table:
    """Each sentence with the one nearest to it by the first original, and what all models say of the two."""
    embeddings = [part for v in variants for part in (v.before, v.after)]
    names = [f"{v.short}, {which}" for v in variants for which in ("original", "restored")]
    cosines = [part @ part.T for part in embeddings]
    rows, seen = [], set()
    for number, sentence in enumerate(SENTENCES):
        others = cosines[0][number].clone()
        others[number] = -2.0
        nearest = int(others.argmax())
        if (nearest, number) not in seen:
            seen.add((number, nearest))
            rows.append(
                (sentence, SENTENCES[nearest], *(round(float(cosine[number, nearest]), 4) for cosine in cosines))
            )
    title = "Cosine of each sentence and the one nearest to it"
    return Table(title, ["sentence", "nearest", *names], rows)


def _mb(nbytes: int) -> str:
    return f"{nbytes / _MB:.1f} MB"
