"""Measuring one model under many ways of holding its weights: perplexity, bytes, speed. Resumable, way by way.

A `Subject` is the model with its texts; `measure` gives one `Outcome` per way and keeps each in a file as soon as it is
known, so that a run that was killed goes on with the next way. Used by `neuzip_inference.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.core.digest import of_config
from netweight.core.progress import QUIET, Progress
from netweight.core.runs import Ledger
from netweight.errors import Unsupported
from netweight.hf.quantizers import held_bytes, linear_layers
from netweight.metrics.intervals import Interval, paired_ratio
from netweight.metrics.perplexity import Losses, compare, perplexity
from netweight.metrics.timing import Case, interleave
from netweight.reproduce.inference_ways import Way, apply, reason_missing

if TYPE_CHECKING:
    from torch import nn

__all__ = ["SEED", "Outcome", "Subject", "Text", "measure"]

SEED = 20241031
ROUNDS = 7


@dataclass(frozen=True)
class Text:
    """A text, or pairs, to measure perplexity on.

    Attributes:
        name: Its name in tables.
        losses: Model → losses of its pieces.
        tokens_per_word: To get perplexity per word; 1 for per token.
        about: What decides on the losses beside the model: JSON values.
    """

    name: str
    losses: Callable[[nn.Module, Progress], Losses]
    tokens_per_word: float
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Subject:
    """A model and what it is measured on.

    Attributes:
        name: Its name in tables.
        model: Dense, bf16, in evaluation mode.
        texts: The first one is the table's, the others stand beside it.
        iteration: One forward pass of the size that speed is measured by.
        about: Digest of weights and tokenizer, and the size of an iteration.
    """

    name: str
    model: nn.Module
    texts: Sequence[Text]
    iteration: Callable[[nn.Module], object]
    about: Mapping[str, Any]


@dataclass(frozen=True)
class Outcome:
    """What was measured of one way.

    Attributes:
        way: The way.
        missing: Why nothing was measured; the other fields are empty then.
        held: Bytes that the whole model holds.
        layers: Bytes that the converted layers hold, biases included.
        weights: Number of weights in these layers.
        change: Largest relative change of a weight, for netweight's ways.
        losses: By text.
        seconds: Of an iteration, in rounds.
        vanilla_seconds: Of an iteration of the dense model, in the same rounds.
        tokens_per_word: By text.
        earlier: Whether an earlier run measured it.
    """

    way: Way
    missing: str = ""
    held: int = 0
    layers: int = 0
    weights: int = 0
    change: float | None = None
    losses: Mapping[str, Losses] = field(default_factory=dict, repr=False)
    seconds: tuple[float, ...] = ()
    vanilla_seconds: tuple[float, ...] = ()
    tokens_per_word: Mapping[str, float] = field(default_factory=dict)
    earlier: bool = False

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
    subject: Subject, ways: Sequence[Way], ledger: Path, *, rounds: int = ROUNDS, progress: Progress = QUIET
) -> list[Outcome]:
    """Measure every way, or take what an earlier run of the same subject has kept.

    The dense model stays in memory throughout; each way is applied to a copy.

    Args:
        subject: What to measure.
        ways: Vanilla first.
        ledger: File that keeps finished ways.
        rounds: Rounds of timing, at least 5.
        progress: Where progress is shown.

    Returns:
        One outcome per way, in their order.
    """
    about = {**subject.about, "rounds": rounds, "texts": [dict(text.about) for text in subject.texts]}
    outcomes = []
    with Ledger(ledger) as kept:
        for number, way in enumerate(ways, start=1):
            digest = of_config({"subject": about, "way": way})
            earlier = digest in kept.records
            if not earlier:
                found = _measure(subject, way, rounds, progress, f"{number}/{len(ways)} {way.name}")
                if found.missing:
                    outcomes.append(found)  # not kept: the next run may have the library
                    continue
                kept.append({"digest": digest, **asdict(found)})
            outcomes.append(_outcome(way, kept.records[digest], earlier=earlier))
    return outcomes


def _measure(subject: Subject, way: Way, rounds: int, progress: Progress, description: str) -> Outcome:
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
    seconds, vanilla = _time(subject, model, rounds, progress, description)
    return Outcome(
        way,
        held=held_bytes(model),
        layers=sum(held_bytes(model.get_submodule(name)) for name in layers),
        weights=weights,
        change=change,
        losses=losses,
        seconds=seconds,
        vanilla_seconds=vanilla,
        tokens_per_word={text.name: text.tokens_per_word for text in subject.texts},
    )


def _time(
    subject: Subject, model: nn.Module, rounds: int, progress: Progress, description: str
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Wall time of an iteration and of one of the dense model, side by side."""
    cases = [
        Case("way", lambda _: subject.iteration(model)),
        Case("vanilla", lambda _: subject.iteration(subject.model)),
    ]
    samples = interleave(
        cases, repeats=rounds, seed=SEED, again_below=0, steady=0, progress=progress, description=description
    )
    return samples["way"].wall, samples["vanilla"].wall


def _outcome(way: Way, record: Mapping[str, Any], *, earlier: bool) -> Outcome:
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
