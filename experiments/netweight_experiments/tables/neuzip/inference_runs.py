"""One model measured in many weight formats (perplexity, bytes, speed), and the models and texts of NeuZip's tables.

Each `Outcome` is kept in a file as soon as it is known, so that a run that was killed goes on with the next format. At
small scale windows are short and a few hundred of them are scored; at paper scale everything is as in the paper's
code: windows of 1,024 tokens, the whole test text, bf16 autocast, no key-value cache. All formats convert the same
layers: the linear ones but the output layer, as the paper does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

import netweight
from netweight.core.digests import digest_file
from netweight.core.progress import QUIET, Progress
from netweight.data.public import count_words, tiny_shakespeare, wikisql, wikitext2, wmt14_german_english
from netweight.errors import Unsupported, UsageError
from netweight.hf.load_language_model import language_model
from netweight.job import Job
from netweight.metrics.intervals import Interval, paired_ratio
from netweight.metrics.perplexity import Losses, causal_losses, compare, cut_windows, encoder_decoder_losses, perplexity
from netweight_experiments.tables.grid import typed
from netweight_experiments.tables.neuzip.quantizers import held_bytes, linear_layers, missing, quantize_, quantizers
from netweight_experiments.tables.registry import Scale
from netweight_experiments.timing import in_turns
from netweight_experiments.toys import decoder, encoder_decoder
from netweight_experiments.toys.encoder_decoder import LONGEST, batches

# Mantissa bits of the paper's lossy rows.
BITS = (0, 1, 3)
# Block sizes of the paper's table 4.
BLOCKS = (32, 64, 128, 256, 512)
_BLOCK = 512  # of the paper's table 3
Fidelity = Literal["corrected", "reference"]


@dataclass(frozen=True)
class WeightFormat:
    """One way of holding the weights."""

    name: str
    """Its name in tables; the papers' where they have it."""
    bits: int | None = None
    """Mantissa bits that netweight keeps; None for vanilla and quantizers."""
    block: int | None = None
    """Weights that share a normalizer; None for none."""
    fidelity: Fidelity = "corrected"
    """"corrected" is netweight's own rounding, "reference" that of the paper's code."""
    whole: bool = False
    """Whether embeddings and output layer are converted too."""
    quantizer: bool = False
    """Whether another library's quantizer does it."""


VANILLA = WeightFormat("Vanilla")


def weight_formats(*, extras: bool) -> tuple[WeightFormat, ...]:
    """Return the ways to measure, in the order of the paper's table 3 and then of its table 4."""
    found = [VANILLA, *(WeightFormat(quantizer.name, quantizer=True) for quantizer in quantizers())]
    for fidelity in ("corrected", "reference"):
        found += [_lossy(bits, _BLOCK, fidelity) for bits in BITS]
    found.append(WeightFormat("NeuZip 7-bit (lossless)", bits=7))
    if extras:
        found += [_lossy(bits, _BLOCK, "corrected") for bits in (2, 4, 5, 6)]
        found.append(WeightFormat("NeuZip 7-bit (lossless), embeddings too", bits=7, whole=True))
        found.append(WeightFormat("NeuZip 3-bit, embeddings too", bits=3, block=_BLOCK, whole=True))
    blocks = [block for block in (None, *BLOCKS) if block != _BLOCK]
    found += [
        _lossy(bits, block, fidelity) for fidelity in ("corrected", "reference") for bits in BITS for block in blocks
    ]
    return tuple(found)


def _lossy(bits: int, block: int | None, fidelity: Fidelity) -> WeightFormat:
    how = ", as the reference code" if fidelity == "reference" else ""
    blocks = "" if block == _BLOCK else ", no blocks" if block is None else f", blocks of {block}"
    return WeightFormat(f"NeuZip {bits}-bit{how}{blocks}", bits=bits, block=block, fidelity=fidelity)


def apply(way: WeightFormat, model: nn.Module) -> float | None:
    """Convert a dense bf16 model in place."""
    layers = linear_layers(model)
    if way.quantizer:
        quantize_(model, next(quantizer for quantizer in quantizers() if quantizer.name == way.name), layers)
    if way.bits is None:
        return None
    report = netweight.compress_(
        model,
        include=None if way.whole else layers,
        mantissa_bits=way.bits,
        block_size=way.block,
        fidelity=way.fidelity,
    )
    return float(report.worst_change)


SEED = 20241031
ROUNDS = 7


@dataclass(frozen=True)
class Text:
    """A text, or pairs, to measure perplexity on."""

    name: str
    """Its name in tables."""
    losses: Callable[[nn.Module, Progress], Losses]
    """Model → losses of its pieces."""
    tokens_per_word: float
    """To get perplexity per word; 1 for per token."""
    about: Mapping[str, Any]
    """What decides on the losses beside the model: JSON values."""


@dataclass(frozen=True)
class Subject:
    """A model and what it is measured on."""

    name: str
    """Its name in tables."""
    model: nn.Module
    """Dense, bf16, in evaluation mode."""
    texts: Sequence[Text]
    """The first one is the table's, the others stand beside it."""
    iteration: Callable[[nn.Module], object]
    """One forward pass of the size that speed is measured by."""
    about: Mapping[str, Any]
    """Digest of weights and tokenizer, and the size of an iteration."""


@dataclass(frozen=True)
class Outcome:
    """What was measured of one way."""

    way: WeightFormat
    missing: str = ""
    """Why nothing was measured; the other fields are empty then."""
    held: int = 0
    """Bytes that the whole model holds."""
    layers: int = 0
    """Bytes that the converted layers hold, biases included."""
    weights: int = 0
    """Number of weights in these layers."""
    change: float | None = None
    """Largest relative change of a weight, for netweight's ways."""
    losses: Mapping[str, Losses] = field(default_factory=dict, repr=False)
    """By text."""
    seconds: tuple[float, ...] = ()
    vanilla_seconds: tuple[float, ...] = ()
    tokens_per_word: Mapping[str, float] = field(default_factory=dict)
    """By text."""
    earlier: bool = False
    """Whether an earlier run measured it."""

    @property
    def bits(self) -> float:
        """Bits per weight of the converted layers."""
        return 8 * self.layers / self.weights

    def perplexity(self, text: str) -> Interval:
        """Return the perplexity on a text."""
        return perplexity(self.losses[text], tokens_per_word=self.tokens_per_word[text], seed=SEED)

    def against(self, other: Outcome, text: str) -> Interval:
        """Return the ratio of perplexities to another way's, on the same pieces."""
        per_word = self.tokens_per_word[text]
        return compare(self.losses[text], other.losses[text], tokens_per_word=per_word, seed=SEED)

    def speed(self) -> Interval:
        """Return iterations per second over those of the dense model."""
        return paired_ratio(self.vanilla_seconds, self.seconds, seed=SEED)

    def iterations(self) -> float:
        """Return iterations per second, the median of the rounds."""
        return 1 / sorted(self.seconds)[len(self.seconds) // 2]


def measure(
    subject: Subject,
    ways: Sequence[WeightFormat],
    folder: Path,
    name: str,
    *,
    rounds: int = ROUNDS,
    progress: Progress = QUIET,
) -> list[Outcome]:
    """Measure every way, or take what an earlier run of the same subject has kept in the folder's `NAME.jsonl`."""
    about = {**subject.about, "rounds": rounds, "texts": [dict(text.about) for text in subject.texts]}
    outcomes = []
    with Job.open(folder, shared=True) as job:
        for number, way in enumerate(ways, start=1):
            key = {"subject": about, "way": way}
            row = earlier = job.recorded(name, key)
            if row is None:
                found = _measure(subject, way, rounds, progress, f"{number}/{len(ways)} {way.name}")
                if found.missing:
                    outcomes.append(found)  # not kept: the next run may have the library
                    continue
                row = asdict(found)
                job.record(name, row, key=key)
            outcomes.append(replace(typed(Outcome, row), earlier=earlier is not None))
    return outcomes


def _measure(subject: Subject, way: WeightFormat, rounds: int, progress: Progress, description: str) -> Outcome:
    reason = next((missing(quantizer) for quantizer in quantizers() if quantizer.name == way.name), "")
    if reason:
        return Outcome(way, reason)
    layers = linear_layers(subject.model)
    weights = sum(subject.model.get_parameter(f"{name}.weight").numel() for name in layers)
    model = copy.deepcopy(subject.model)
    try:
        change = apply(way, model)
    except Unsupported as error:
        return Outcome(way, error.reason)
    losses = {text.name: text.losses(model, progress) for text in subject.texts}
    work = {"way": partial(subject.iteration, model), "vanilla": partial(subject.iteration, subject.model)}
    progress.note(description)
    times = in_turns(work, rounds, clock="wall", seed=SEED)
    return Outcome(
        way,
        held=held_bytes(model),
        layers=sum(held_bytes(model.get_submodule(name)) for name in layers),
        weights=weights,
        change=change,
        losses=losses,
        seconds=times["way"],
        vanilla_seconds=times["vanilla"],
        tokens_per_word={text.name: text.tokens_per_word for text in subject.texts},
    )


# Name of the models that are trained here, in tables.
STAND_IN = "stand-in"
# How to tell the papers' models by their configuration: vocabulary, width, blocks; or width, blocks, heads.
_DECODERS = {"Llama-3 8B": (128256, 4096, 32), "Llama-2 13B": (32000, 5120, 40), "Yi-1.5 34B": (64000, 7168, 60)}
_ENCODER_DECODERS = {"T5 1B": (1024, 24, 16), "T5 3B": (1024, 24, 32), "T5 11B": (1024, 24, 128)}
_FETCH = {
    "decoder": "Llama-3 8B, Llama-2 13B or Yi-1.5 34B (meta-llama/Meta-Llama-3-8B, meta-llama/Llama-2-13b-hf, "
    "01-ai/Yi-1.5-34B)",
    "encoder-decoder": "T5 of 1B, 3B or 11B (google-t5/t5-large, t5-3b, t5-11b; which ones the paper took is inferred)",
}


@dataclass(frozen=True)
class Extent:
    """How much is measured at a scale."""

    window: int
    """Tokens per window of a decoder."""
    windows: int | None
    """Most windows (or pairs) of the table's text, evenly spaced; None for all."""
    beside: int
    batch: int
    """Windows (or pairs) per forward pass, and per iteration of the speed."""
    rounds: int
    """Rounds of timing."""
    extras: bool
    """Whether ways that the paper does not have are measured."""


EXTENTS: dict[Scale, Extent] = {
    "small": Extent(window=256, windows=512, beside=128, batch=8, rounds=7, extras=True),
    "paper": Extent(window=1024, windows=None, beside=0, batch=1, rounds=5, extras=False),
}


@dataclass(frozen=True)
class Opened:
    """A subject and what is known of it."""

    subject: Subject
    """What is measured."""
    differs: tuple[str, ...]
    """What differs from the paper's set-up."""
    training: dict[str, Any]
    """What came of the stand-in's training; empty for a named model."""
    inputs: dict[str, str]
    """Name of each input → its digest."""
    published: str
    """Name of the paper's model that this is by its configuration, or ""."""

    @property
    def text(self) -> str:
        """Name of the table's text."""
        return self.subject.texts[0].name

    @property
    def unit(self) -> str:
        """Unit of memory."""
        return "GiB" if self.published else "MB"

    def memory(self, count: int) -> float:
        """Return bytes in the unit of memory."""
        return count / ((1 << 30) if self.published else 10**6)


def open_decoder(scale: Scale, model: str | None, folder: Path, progress: Progress) -> Opened:
    """Open a decoder for table 3(a): the named one, or the stand-in, which is trained first."""
    extent, path, training = EXTENTS[scale], _named(model, scale, "decoder"), dict[str, Any]()
    if path is None:
        path = folder / "decoder"
        training = decoder.trained(wikitext2("valid"), path, decoder.SMALL, progress=progress)
    network, tokenizer = language_model(path, "decoder")
    size = min(extent.window, int(getattr(network.config, "max_position_embeddings", extent.window)))
    texts = [_windows("WikiText-2", wikitext2("test"), tokenizer, size, extent.windows, extent.batch)]
    if extent.beside:
        texts.append(_windows("Shakespeare", tiny_shakespeare(), tokenizer, size, extent.beside, extent.batch))
    first = texts[0][1][: extent.batch]

    def iterate(current: nn.Module) -> None:
        causal_losses(current, first, batch=extent.batch)

    about = {"weights": _weights_digest(path), "iteration": [extent.batch, size]}
    subject = Subject(path.name if model else STAND_IN, network, [text for text, _ in texts], iterate, about)
    beside = ""
    if len(texts) > 1:
        beside = f", and {len(texts[1][1])} of Tiny Shakespeare, which the paper does not have"
    small = (
        f"Windows of {size} tokens, {len(texts[0][1])} of them evenly spaced over WikiText-2's test split{beside}; "
        "the paper takes all windows of 1,024.",
        *["The stand-in has seen no Shakespeare: it does no better there than guessing, and ranks nothing."]
        * bool(training),
    )
    words = "WikiText-2 is the version that writes rare words as <unk>; the paper's code takes the raw one."
    differs = _differs(
        training, "per word", "Llama, trained here on WikiText-2's validation split",
        "Llama-3 8B, Llama-2 13B and Yi-1.5 34B", *(small if scale == "small" else ()), words,
    )  # fmt: skip
    same = _same(_DECODERS, network.config, "vocab_size", "hidden_size", "num_hidden_layers")
    return Opened(subject, differs, training, _digests(path) if model else {}, same)


def open_encoder_decoder(scale: Scale, model: str | None, folder: Path, progress: Progress) -> Opened:
    """Open an encoder-decoder for table 3(b): the named one, or the stand-in, which is trained first."""
    extent, path, training = EXTENTS[scale], _named(model, scale, "encoder-decoder"), dict[str, Any]()
    pairs = wmt14_german_english() if scale == "paper" else wikisql("test")
    if path is None:
        path, recipe = folder / "encoder-decoder", encoder_decoder.SMALL
        training = encoder_decoder.trained(wikisql("train"), wikisql("dev"), path, recipe, progress=progress)
    network, tokenizer = language_model(path, "encoder-decoder")
    chosen = [pairs[place] for place in _places(len(pairs), extent.windows)]
    longest = (1024, 1024) if scale == "paper" else LONGEST
    given = list(batches(chosen, tokenizer, extent.batch, longest=longest))

    def losses(current: nn.Module, shown: Progress) -> Losses:
        return encoder_decoder_losses(current, given, progress=shown)

    def iterate(current: nn.Module) -> None:
        encoder_decoder_losses(current, given[:1])

    task = "WMT14 de-en" if scale == "paper" else "WikiSQL"
    text = Text(task, losses, 1.0, {"text": task, "pairs": len(chosen)})
    about = {"weights": _weights_digest(path), "iteration": [extent.batch]}
    subject = Subject(path.name if model else STAND_IN, network, [text], iterate, about)
    what = "Sources begin with “translate German to English: ”; the paper does not say how it prompts."
    if scale == "small":
        what = (
            f"The task is SQL from a question and its table ({len(chosen)} of {len(pairs)} test pairs of WikiSQL, "
            "which name only the columns that the query uses); the paper's is translation, WMT14 de-en."
        )
    differs = _differs(training, "per token", "T5, trained here", "T5 of 1B, 3B and 11B", what)
    same = _same(_ENCODER_DECODERS, network.config, "d_model", "num_layers", "num_heads")
    return Opened(subject, differs, training, _digests(path) if model else {}, same)


def _named(model: str | None, scale: Scale, kind: str) -> Path | None:
    if scale == "paper" and not model:
        raise UsageError(
            f"Paper scale measures the paper's {kind} models, and none was named.",
            cure=f"Fetch {_FETCH[kind]} as a folder and name it: --model FOLDER",
        )
    return Path(model) if model else None


def _windows(
    name: str, text: str, tokenizer: Any, size: int, most: int | None, batch: int
) -> tuple[Text, torch.Tensor]:
    """A text cut into windows, some of them chosen; words are counted in the whole text, as the paper's code does."""
    ids = tokenizer(text, verbose=False)["input_ids"]
    windows = cut_windows(ids, size)
    chosen = windows[_places(len(windows), most)]

    def losses(model: nn.Module, progress: Progress) -> Losses:
        return causal_losses(model, chosen, batch=batch, progress=progress, description=f"perplexity on {name}")

    about = {"text": name, "window": size, "windows": len(chosen)}
    return Text(name, losses, len(ids) / count_words(text), about), chosen


def _places(count: int, most: int | None) -> list[int]:
    """Which of `count` pieces to take: all, or `most` of them evenly spaced."""
    if most is None or count <= most:
        return list(range(count))
    return [place * count // most for place in range(most)]


def _weights_digest(path: Path) -> list[str]:
    return sorted(_digests(path).values())


def _digests(path: Path) -> dict[str, str]:
    return {file.name: digest_file(file) for file in sorted(path.glob("*.safetensors"))}


def _same(known: Mapping[str, tuple[int, ...]], config: Any, *keys: str) -> str:
    """Name of the paper's model with this shape, or ""."""
    shape = tuple(getattr(config, key, None) for key in keys)
    return next((name for name, own in known.items() if own == shape), "")


def _differs(training: dict[str, Any], unit: str, shape: str, theirs: str, *more: str) -> tuple[str, ...]:
    """What differs from the paper's set-up; of a model of the user's nothing about its training."""
    clock = "Measured on a CPU by wall time; the paper's speeds are a GPU's."
    if not training:
        return *more, clock
    fit, size = training["fit"], training["weights"] / 1e6
    model = training[f"held-out perplexity {unit}"]
    frequencies = training[f"held-out perplexity {unit} of token frequencies"]
    rose = (
        "it overfits: held-out loss rose after that, and the weights of its best look were kept"
        if fit["overfits"]
        else "held-out loss was still at its best then"
    )
    return (
        f"The model is a stand-in of {size:.1f} million weights in the shape of {shape}; the paper measures {theirs}.",
        f"Trained for {fit['steps']} steps, best at {fit['best_step']} ({rose}); "
        f"held-out perplexity {model:.4g} {unit}, against {frequencies:.4g} by token frequencies alone.",
        *more,
        clock,
    )
