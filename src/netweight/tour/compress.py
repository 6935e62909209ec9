"""The stop of `compress`: a real model, as published and as bf16, made smaller, proved identical, restored and run.

What the stops before have made, and the bank of adapters, go the same way.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from netweight.core import digest
from netweight.hf.load_pipeline import load_text_to_image
from netweight.methods.compress.folder import Summary, compress_folder, decompress_folder
from netweight.methods.compress.inspect import BitStatistics, TensorReport, bits_figure, inspect_tensors, merge
from netweight.methods.compress.runtime.model import compress_, memory_footprint
from netweight.methods.compress.verify import TREATMENT, verify
from netweight.report.conclusions import by_targets
from netweight.report.finding import Chapter, Column, Figure, Finding, Table
from netweight.report.plots import bars
from netweight.report.report import Report
from netweight.tour.stop import Place, Stop, handed_over
from netweight.toys import minilm
from netweight.toys.diffusion import SHAPES_FOLDER
from netweight.toys.faces_pipeline import FACES_BANK
from netweight.toys.language import ALIGNED, cipher_world, opened
from netweight.toys.shapes import ShapesWorld

# What the model embeds: pairs that mean nearly the same.
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

# What the ratio of whole files must reach at least.
LEAST_RATIO = {"fp32, as published": 1.22, "bf16": 1.51}

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
_OTHERS = by_targets(
    "tour: compress, other models", met="All of them are bit for bit as they were.", missed="Something differs."
)
_KINDS = ("all tensors", "embeddings", "attention", "feed-forward", "the rest")
_MB = 1e6
_COMMAND = "netweight tour"  # alone it has no other stops' models
_IMAGES, _ROWS = 4, 32  # that a model paints, and examples that a model answers, before and after


@final
@dataclass(frozen=True)
class _Trip:
    """A file or folder taken through compression and back."""

    name: str
    small: Path  # where it lies compressed
    back: Path  # where it lies restored
    compressed: Summary  # what compressing said
    restored: Summary  # what restoring said
    verify_seconds: float  # time that the comparison of all bits took
    identity: tuple[Finding, ...]  # the audit's findings
    files: int  # how many files were compared after restoring
    differing: tuple[str, ...]  # names of those that differ

    @property
    def wrong(self) -> int:
        """Tensors and files that are damaged, missing, or differ, after compression or after restoring."""
        return sum(int(each.value or 0) for each in self.identity if each.target is not None) + bool(self.differing)


@final
@dataclass(frozen=True)
class _Variant:
    """One model taken through the whole way, and used."""

    trip: _Trip
    tensors: tuple[TensorReport, ...]
    before: Tensor  # embeddings by the original, shape `(sentences, 384)`
    after: Tensor  # embeddings by the restored model
    run: Tensor  # embeddings by the model whose weights stay compressed in memory
    held: tuple[int, int]  # bytes of the weights in memory, dense and compressed

    @property
    def name(self) -> str:
        """Its dtype, in words."""
        return self.trip.name

    @property
    def short(self) -> str:
        """Its dtype alone."""
        return self.name.split(",")[0]


@final
@dataclass(frozen=True)
class _Ran:
    """What a model computed with dense and with compressed weights."""

    name: str
    different: int  # numbers that differ in any bit
    numbers: int  # how many were compared
    dense: int  # bytes of its weights in memory
    compressed: int


def settings() -> Mapping[str, Any]:
    """Return what decides the stop's result."""
    return {"sentences": SENTENCES, "least ratio": LEAST_RATIO}


def make_stop(place: Place) -> Stop:
    """Take a real model, and all that the stops before have made, through compression, verification and use."""
    published = minilm.folder()
    size = _mb(minilm.weights_file().stat().st_size)
    place.say(f"The model: all-MiniLM-L6-v2, 22.7 million weights, {size} as published.")
    _write_as_bf16(published, place.folder / "bf16")
    variants = [
        _used("fp32, as published", published, place.folder / "fp32", place),
        _used("bf16", place.folder / "bf16", place.folder / "bf16", place),
    ]
    others, ran = _others(place), _computed(place)
    wrong = sum(other.wrong for other in others)
    plain, stored = (sum(getattr(each.compressed, what) for each in others) for what in ("nbytes", "stored_nbytes"))
    place.say(
        f"And {len(others)} models of the other stops: {_mb(plain)} → {_mb(stored)}, "
        f"{'every bit is there' if not wrong else f'{wrong} tensors or files are NOT as they were'}."
    )
    report = Report("compress")
    _smaller(report, variants)
    _identical(report, variants)
    _useful(report, variants)
    _everything(report, others, ran)
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
    return " and ".join(f"{100 * (1 - 1 / v.trip.compressed.ratio):.1f} % as {v.short}" for v in variants)


def _trip(name: str, source: Path, beside: Path, place: Place) -> _Trip:
    """Compress, verify and restore; what is made lies beside the path given."""
    ending = source.suffix if source.is_file() else ""
    small, back = (beside.with_name(f"{beside.name}-{part}{ending}") for part in ("net", "restored"))
    compressed = compress_folder(source, small, progress=place.progress)
    started = time.monotonic()
    identity = tuple(verify(small, source, progress=place.progress))
    seconds = time.monotonic() - started
    restored = decompress_folder(small, back, progress=place.progress)
    mine, theirs = _digests(source), _digests(back)
    differing = tuple(each for each in sorted(mine | theirs) if mine.get(each) != theirs.get(each))
    return _Trip(name, small, back, compressed, restored, seconds, identity, len(mine | theirs), differing)


def _digests(path: Path) -> dict[str, str]:
    """Of a file, or of all files of a folder by name."""
    if path.is_file():
        return {"": digest.of_file(path)}
    return {str(file.relative_to(path)): digest.of_file(file) for file in path.rglob("*") if file.is_file()}


def _used(name: str, source: Path, beside: Path, place: Place) -> _Variant:
    """Take one folder the whole way, and embed sentences with each of its forms."""
    trip = _trip(name, source, beside, place)
    made, say = trip.compressed, place.say
    sizes = f"{_mb(made.nbytes)} → {_mb(made.stored_nbytes)}, {1 - 1 / made.ratio:.1%} less"
    say(f"{name}: {sizes}, in {made.seconds:.2f} s")
    wrong = sum(finding.passed is False for finding in trip.identity)
    say(f"  verified: {'every bit is there' if not wrong else 'NOT identical'}")
    differ = f"all {trip.files} files byte for byte"
    if trip.differing:
        differ = f"{len(trip.differing)} of {trip.files} files DIFFER"
    say(f"  restored: {differ}, in {trip.restored.seconds:.2f} s")
    before, after = minilm.embed(source, SENTENCES), minilm.embed(trip.back, SENTENCES)
    used = f"{len(SENTENCES)} sentences embedded by the original and by the restored model"
    say(f"  used: {used}, {_same(before, after)}")
    held = (memory_footprint(minilm.encoder(source)), memory_footprint(minilm.encoder(trip.small)))
    run = minilm.embed(trip.small, SENTENCES)
    memory = f"{_mb(held[1])} of memory in place of {_mb(held[0])}"
    say(f"  run with compressed weights, {memory}: {_same(before, run)}")
    tensors = tuple(inspect_tensors(trip.small, progress=place.progress))
    return _Variant(trip, tensors, before, after, run, held)


def _same(before: Tensor, after: Tensor) -> str:
    return "the same to the last bit" if _different(before, after) == 0 else "NOT the same"


def _write_as_bf16(source: Path, target: Path) -> None:
    """Write the model as a folder of its own with all weights rounded to bf16, as most models are published today."""
    shutil.copytree(source, target)
    weights = load_file(source / "model.safetensors")
    rounded = {k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in weights.items()}
    save_file(rounded, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (target / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=2))


def _others(place: Place) -> tuple[_Trip, ...]:
    """Take what the stops before have made, and the bank of adapters, through compression and back."""
    work = place.folder / "others"
    work.mkdir()
    (shard,) = sorted(FACES_BANK.glob("*.safetensors"))  # it is compressed as it comes with the package
    decompress_folder(shard, work / "bank.safetensors", progress=place.progress)
    models = {**place.models, "the bank of 256 adapters": work / "bank.safetensors"}
    return tuple(_trip(name, path, work / str(number), place) for number, (name, path) in enumerate(models.items()))


def _computed(place: Place) -> tuple[_Ran, ...]:
    """Let a painting model and a language model compute with dense and with compressed weights."""
    folder = place.models.get("the painting model, hardened", SHAPES_FOLDER)
    painter = load_text_to_image(folder, dtype=torch.float32, name="shapes")
    prompts = ShapesWorld().ordinary_captions[:_IMAGES]

    def painted() -> Tensor:
        return painter.generate(painter.embed(prompts), range(len(prompts)), guidance=3.0, steps=10)

    world = cipher_world()
    reader = opened(world.language.shape, place.models.get("the immunized model", world.folder / ALIGNED))
    rows = [example.prompt for example in world.held_out("guard", _ROWS)]
    longest = max(map(len, rows))
    tokens = torch.tensor([[*row, *[world.pad_id] * (longest - len(row))] for row in rows])

    def read() -> Tensor:
        logits: Tensor = reader(tokens).logits
        return logits

    return (_ran("the painting model", painter.denoiser, painted), _ran("the language model", reader, read))


@torch.no_grad()
def _ran(name: str, model: nn.Module, compute: Callable[[], Tensor]) -> _Ran:
    before, dense = compute(), memory_footprint(model)
    compress_(model)
    return _Ran(name, _different(before, compute()), before.numel(), dense, memory_footprint(model))


# ---- the report ------------------------------------------------------------------------------------------------------


def _smaller(report: Report, variants: Sequence[_Variant]) -> None:
    findings = [
        Finding(
            f"size of the weights, {v.name}: plain by compressed", v.trip.compressed.ratio, better="higher",
            target=LEAST_RATIO[v.name], n=sum(_count(tensor) for tensor in v.tensors),
            detail={"plain bytes": v.trip.compressed.nbytes, "compressed bytes": v.trip.compressed.stored_nbytes},
        )
        for v in variants
    ]  # fmt: skip
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
        findings += [
            replace(finding, name=f"{v.name}: {finding.name}", n=finding.n or len(v.tensors))
            for finding in v.trip.identity
            if finding.name != "ratio"
        ]
        detail = {"which": list(v.trip.differing), "among": v.trip.files}
        different = len(v.trip.differing)
        findings.append(_none(f"{v.name}: restored files that differ", different, v.trip.files, detail=detail))
    report.section(
        "Bit for bit",
        findings,
        question="Is everything there, and can all of it be brought back?",
        intro="Every tensor of the compressed model is decoded and compared with the original, and with its own "
        "recorded digest. Then the folder is restored and compared file by file: weights, configuration, tokenizer, "
        "readme.",
        conclusion=_IDENTICAL(findings)[1],
        treatment=TREATMENT,
        audits=("identity",),
    )


def _useful(report: Report, variants: Sequence[_Variant]) -> None:
    findings = []
    for v in variants:
        n = v.before.numel()
        findings += [
            _none(f"{v.name}: numbers that differ in any bit", _different(v.before, v.after), n),
            _none(f"{v.name}, run compressed: numbers that differ in any bit", _different(v.before, v.run), n),
            _memory(v.name, v.held, len(v.tensors)),
        ]
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


def _everything(report: Report, others: Sequence[_Trip], ran: Sequence[_Ran]) -> None:
    wrong = "tensors and files that are not as they were"
    findings = [_none(f"{one.name}: {wrong}", one.wrong, one.compressed.tensors, command=_COMMAND) for one in others]
    for each in ran:
        name = f"{each.name}, run compressed: numbers that differ in any bit"
        findings += [
            _none(name, each.different, each.numbers, command=_COMMAND),
            replace(_memory(each.name, (each.dense, each.compressed), 1), command=_COMMAND),
        ]
    columns = ("model", "tensors", Column("plain", "MB"), Column("compressed", "MB", "lower"), Column("saved", "%"))
    rows = []
    for one in others:
        plain, stored = one.compressed.nbytes, one.compressed.stored_nbytes
        rows.append((one.name, one.compressed.tensors, plain / _MB, stored / _MB, 100 * (1 - stored / plain)))
    report.section(
        "Everything else of this tour",
        findings,
        tables=[Table("Sizes of the other models", columns, rows, ("MB are 10⁶ bytes of weight files.",))],
        question="Does the same hold for every model of this tour?",
        intro="Models that the other stops have made, and the bank of adapters, are compressed, verified tensor by "
        "tensor, restored and compared file by file. Small files gain less, since each tensor carries a header.",
        conclusion=_OTHERS(findings)[1],
        treatment=TREATMENT,
        audits=("identity",),
    )


def _none(name: str, count: int, n: int, **more: Any) -> Finding:
    """A count that should be 0."""
    return Finding(name, count, n=n, better="lower", target=0, **more)


def _memory(name: str, held: tuple[int, int], n: int) -> Finding:
    dense, compressed = (nbytes / _MB for nbytes in held)
    name = f"{name}, run compressed: memory of the weights"
    return Finding(name, compressed, n=n, unit="MB", better="lower", baseline=dense)


def _sizes(variants: Sequence[_Variant]) -> Table:
    columns = (
        "weights", Column("plain", "MB"), Column("compressed", "MB", "lower"), Column("saved", "%", "higher"),
        Column("plain", "bits"), Column("compressed", "bits", "lower"),
    )  # fmt: skip
    rows = []
    for v in variants:
        plain, stored = v.trip.compressed.nbytes, v.trip.compressed.stored_nbytes
        count = sum(_count(tensor) for tensor in v.tensors)
        sizes = (plain / _MB, stored / _MB, 100 * (1 - stored / plain))
        rows.append((v.name, *sizes, 8 * plain / count, 8 * stored / count))
    note = "MB are 10⁶ bytes of the weight files, headers included; bits are bits per weight."
    return Table("Sizes", columns, rows, (note,))


def _times(variants: Sequence[_Variant]) -> Table:
    columns: list[Column | str] = ["weights"]
    columns += [Column(name, "s", "lower") for name in ("compress", "verify", "restore")]
    trips = [v.trip for v in variants]
    rows = [(one.name, one.compressed.seconds, one.verify_seconds, one.restored.seconds) for one in trips]
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


def _different(before: Tensor, after: Tensor) -> int:
    """Number of values whose bits differ; also NaN is equal to itself."""
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
