"""One model measured in many weight formats: perplexity, bytes, speed. Resumable, format by format.

Each `Outcome` is kept in a file as soon as it is known, so that a run that was killed goes on with the next format.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch import nn

import netweight
from netweight.core.progress import QUIET, Progress
from netweight.errors import Unsupported
from netweight.job import Job
from netweight.metrics.intervals import Interval, paired_ratio
from netweight.metrics.perplexity import Losses, compare, perplexity
from netweight_experiments.tables.neuzip.quantizers import held_bytes, linear_layers, missing, quantize_, quantizers
from netweight_experiments.timing import in_turns

# Mantissa bits of the paper's lossy rows.
BITS = (0, 1, 3)
# Block sizes of the paper's table 4.
BLOCKS = (32, 64, 128, 256, 512)
_BLOCK = 512  # of the paper's table 3
Fidelity = Literal["corrected", "reference"]


@dataclass(frozen=True)
class WeightFormat:
    """One way of holding the weights."""

    name: str  # its name in tables; the papers' where they have it
    bits: int | None = None  # mantissa bits that netweight keeps; None for vanilla and quantizers
    block: int | None = None  # weights that share a normalizer; None for none
    fidelity: Fidelity = "corrected"  # "corrected" is netweight's own rounding, "reference" that of the paper's code
    whole: bool = False  # whether embeddings and output layer are converted too
    quantizer: bool = False  # whether another library's quantizer does it


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


def reason_missing(way: WeightFormat) -> str:
    """Return why a way cannot be measured here, or an empty text."""
    return next((missing(quantizer) for quantizer in quantizers() if quantizer.name == way.name), "")


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

    name: str  # its name in tables
    losses: Callable[[nn.Module, Progress], Losses]  # model → losses of its pieces
    tokens_per_word: float  # to get perplexity per word; 1 for per token
    about: Mapping[str, Any]  # what decides on the losses beside the model: JSON values


@dataclass(frozen=True)
class Subject:
    """A model and what it is measured on."""

    name: str  # its name in tables
    model: nn.Module  # dense, bf16, in evaluation mode
    texts: Sequence[Text]  # the first one is the table's, the others stand beside it
    iteration: Callable[[nn.Module], object]  # one forward pass of the size that speed is measured by
    about: Mapping[str, Any]  # digest of weights and tokenizer, and the size of an iteration


@dataclass(frozen=True)
class Outcome:
    """What was measured of one way."""

    way: WeightFormat
    missing: str = ""  # why nothing was measured; the other fields are empty then
    held: int = 0  # bytes that the whole model holds
    layers: int = 0  # bytes that the converted layers hold, biases included
    weights: int = 0  # number of weights in these layers
    change: float | None = None  # largest relative change of a weight, for netweight's ways
    losses: Mapping[str, Losses] = field(default_factory=dict, repr=False)  # by text
    seconds: tuple[float, ...] = ()
    vanilla_seconds: tuple[float, ...] = ()
    tokens_per_word: Mapping[str, float] = field(default_factory=dict)  # by text
    earlier: bool = False  # whether an earlier run measured it

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
            outcomes.append(_outcome(way, row, earlier=earlier is not None))
    return outcomes


def _measure(subject: Subject, way: WeightFormat, rounds: int, progress: Progress, description: str) -> Outcome:
    reason = reason_missing(way)
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


def _outcome(way: WeightFormat, record: Mapping[str, Any], *, earlier: bool) -> Outcome:
    return Outcome(
        way,
        held=record["held"],
        layers=record["layers"],
        weights=record["weights"],
        change=record["change"],
        losses={
            name: Losses(tuple(map(float, found["nats"])), tuple(found["tokens"]))
            for name, found in record["losses"].items()
        },
        seconds=tuple(record["seconds"]),
        vanilla_seconds=tuple(record["vanilla_seconds"]),
        tokens_per_word=record["tokens_per_word"],
        earlier=earlier,
    )
