"""NeuZip's table 1 and figure 2: what layer by layer training and compressed weights cost and save in pre-training.

A run trains a decoder language model from random weights, in bf16.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from netweight.core.seeds import derive, torch_generator
from netweight.data.public import count_words, train_bpe, wikitext2
from netweight.errors import UsageError
from netweight.report.finding import Figure, Finding
from netweight.report.plots import canvas, series_color, to_figure
from netweight_experiments.memory import PARTS, private_bytes
from netweight_experiments.tables.grid import Cell, grid, interval_finding
from netweight_experiments.tables.neuzip.paper_scale_models import PAPER
from netweight_experiments.tables.neuzip.training import (
    COMPRESSED,
    GIB,
    LOMO,
    MIB,
    SEED,
    VANILLA,
    WAYS,
    against_paper,
    arrange,
    cpu_seconds,
    default_dtype,
    digests,
    digests_of_texts,
    first_steps,
    published_number,
    run_in_processes,
    same_training,
    sampled_note,
    seconds_in_turns,
    speed_ratio,
)
from netweight_experiments.tables.registry import Column, MeasuredTable, Scale, table
from netweight_experiments.toys.decoder import MINIATURE, SHAPES, made, parameters_of

# Rounds in which the ways take turns, to compare their speed.
ROUNDS = 9
_TEXTS = ("wikitext2-valid.txt", "wikitext2-test.txt")
_SAME_SETUP = (
    "Weights are bf16 and plain SGD without momentum, decay or clipping steps them on a linear schedule, with "
    "non-reentrant activation checkpointing, as the reference code does; its data, steps and hardware are unknown."
)
_LEARNING_RATE = (
    "The learning rate is 0.1: the reference code's default, 5e-5, changes next to no bf16 weight of a fresh model."
)
_TEXT = "Text is the valid split of WikiText-2, the loss is measured on the beginning of its test split."


@dataclass(frozen=True)
class Pretraining:
    """Everything that decides on a run."""

    way: str
    """One of `WAYS`."""
    shape: str = MINIATURE
    """A key of `SHAPES`."""
    steps: int = 24
    """Updates."""
    learning_rate: float = 0.1
    """At the start; it falls linearly towards 0."""
    optimizer: str = "SGD"
    """Or "AdamW"."""
    batch: int = 4
    """Windows per update."""
    window: int = 256
    """Tokens per window."""
    checkpointing: bool = True
    """Activations are calculated again, by non-reentrant checkpointing of every layer."""
    held_out: int = 16
    """Windows of the test text on which the loss is measured at the end."""
    vocabulary: int = 2048
    """Tokens of the tokenizer, at most what the model has."""
    seed: int = SEED
    """Seed of weights and batches."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"Training by {self.way}"


class Trainee:
    """A model, its optimizer and its text: what takes steps."""

    def __init__(self, config: Pretraining, valid: str) -> None:
        self.config, self.done = config, 0
        self.tokenizer: Any = train_bpe([valid], config.vocabulary)
        self._ids = torch.tensor(self.tokenizer(valid, verbose=False)["input_ids"])
        model: Any = _model(config)
        self.model = model
        if config.checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        self.optimizer = arrange(config.way, model, getattr(torch.optim, config.optimizer), lr=1.0)

    def step(self) -> float:
        """Make one update; return the loss before it, in nats per token."""
        config = self.config
        generator = torch_generator(config.seed, "batch", self.done)
        starts = torch.randint(len(self._ids) - config.window + 1, (config.batch,), generator=generator).tolist()
        ids = torch.stack([self._ids[start : start + config.window] for start in starts])
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * max(0.0, 1 - self.done / max(config.steps, 1))
        loss = self.model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return float(loss.detach())

    def held_out_loss(self, text: str) -> tuple[float, float]:
        """Return the loss on the first windows of a text, in nats per token and per word."""
        ids = self.tokenizer(text, verbose=False)["input_ids"]
        windows = torch.tensor(ids[: self.config.held_out * self.config.window]).view(-1, self.config.window)
        self.model.eval()
        with torch.inference_mode():
            losses = [float(self.model(input_ids=row[None], labels=row[None]).loss) for row in windows]
        mean = math.fsum(losses) / len(losses)
        return mean, mean * len(ids) / count_words(text)


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Train, in a fresh process; losses are hexadecimal, in nats per token."""
    given = Pretraining(**config)
    warm: Any = _model(Pretraining(given.way), tiny=True)  # libraries take once what they need
    ids = torch.ones(1, 8, dtype=torch.long)
    warm(input_ids=ids, labels=ids).loss.backward()
    del warm
    before = private_bytes()
    trainee = Trainee(given, wikitext2("valid"))
    losses, memory = first_steps(trainee, before)
    seconds = []
    while trainee.done < given.steps:
        start = time.perf_counter()
        losses.append(trainee.step())
        seconds.append(time.perf_counter() - start)
    per_token, per_word = trainee.held_out_loss(wikitext2("test")) if given.held_out else (math.nan, math.nan)
    return {
        "losses": [loss.hex() for loss in losses],
        "held_out": {"token": per_token, "word": per_word},
        "digests": digests(trainee.model),
        "weights": sum(parameter.numel() for parameter in trainee.model.parameters()),
        **memory,
        "seconds": seconds,
    }


def _model(config: Pretraining, *, tiny: bool = False) -> nn.Module:
    """The model in bf16, freshly initialized; or a tiny one of the kind, to have its code in memory."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]), default_dtype(torch.bfloat16):
        torch.manual_seed(derive(config.seed, "initialization"))
        return made(config.shape, **(small if tiny else {}))


def take_turns(rounds: int) -> dict[str, list[float]]:
    """CPU seconds per update of each way, in this process."""
    return cpu_seconds({way: Trainee(Pretraining(way), wikitext2("valid")) for way in WAYS}, rounds)


# ---- table 1 ---------------------------------------------------------------------------------------------------------


@table(
    "neuzip-table1",
    needs=("llm", "evidence", "data:text"),
    paper_needs=("memory for a model of 2.7 to 13 billion weights and its gradients, and days on a CPU",),
    stand_in=True,
)
def table1(scale: Scale, out: Path) -> MeasuredTable:
    """Pre-train by each way from the same random weights: loss, peak memory and speed; the losses must be equal."""
    if scale == "small":
        return _table1_small(out)
    configs, left_out = _affordable()
    results = run_in_processes(run, configs, out)
    shapes: dict[str, dict[str, Any]] = {}
    for config, result in zip(configs, results, strict=True):
        shapes.setdefault(config.shape, {})[config.way] = result
    return grid(
        {way: way for way in WAYS},
        [cell for shape in PAPER.shapes for cell in _cells(shape, "GiB", GIB, shapes.get(shape, {}))],
        differs=(_LEARNING_RATE, _TEXT, "Weights are random, updates are 10, and everything runs on a CPU.", *left_out),
        findings=tuple(finding for shape, found in shapes.items() for finding in _findings(found, shape)),
        notes=(_SAME_SETUP,),
        inputs=digests_of_texts(*_TEXTS),
    )


def _table1_small(out: Path) -> MeasuredTable:
    found = dict(zip(WAYS, run_in_processes(run, [Pretraining(way) for way in WAYS], out), strict=True))
    seconds = seconds_in_turns(take_turns, ROUNDS, out)
    ratio = speed_ratio(seconds[LOMO], seconds[COMPRESSED])
    name = f"{MINIATURE}, {COMPRESSED} against {LOMO}: iterations per second"
    told = against_paper(_paper_ratio("speed", COMPRESSED, LOMO), "higher", "Llama-3 8B")
    timed = {way: {**result, "seconds": seconds[way]} for way, result in found.items()}
    return grid(
        {way: way for way in WAYS},
        _cells(MINIATURE, "MiB", MIB, timed),
        differs=(
            f"A miniature: a Llama of {found[VANILLA]['weights'] / 1e6:.1f} M weights, batches of 4 windows of 256 "
            "tokens, 24 updates.",
            _LEARNING_RATE,
            _TEXT,
            "Memory is that of tensors, counted one by one, on a CPU; speed is by CPU seconds of one thread, the ways "
            "taking turns in one process.",
        ),
        findings=(*_findings(found, MINIATURE), interval_finding(name, ratio, **told)),
        notes=(_SAME_SETUP, sampled_note(found, ", with tokenizer and text")),
        inputs=digests_of_texts(*_TEXTS),
    )


def _cells(shape: str, unit: str, size: int, found: Mapping[str, Mapping[str, Any]]) -> list[Cell[str]]:
    """Columns of one model; rows are ways, and empty where one was not run."""

    def of(value: Any) -> Any:
        return lambda way: value(found[way]) if way in found else None

    return [
        (Column(f"{shape} loss", "nats/word", "lower"), of(lambda result: result["held_out"]["word"])),
        (Column(f"{shape} memory", unit, "lower"), of(lambda result: result["counted"] / size)),
        (Column(f"{shape} speed", "iterations/s", "higher"), of(lambda result: 1 / median(result["seconds"]))),
    ]


def _findings(found: Mapping[str, Any], shape: str) -> list[Finding]:
    """That nothing but memory and speed differs, and by how much memory does, beside the paper's own ratios."""
    findings = []
    for base in (LOMO, VANILLA):
        if base in found and COMPRESSED in found:
            one, other, what = found[COMPRESSED], found[base], f"{shape}, {COMPRESSED} against {base}"
            paper = _paper_ratio("memory", COMPRESSED, base)
            told = against_paper(paper, "lower", "Llama-3 8B")
            tensors, process = (one[key] / other[key] for key in ("counted", "sampled"))
            findings += [
                *same_training(what, one, other),
                Finding(f"{what}: peak of tensors", tensors, **told, seeds=(SEED,)),
                Finding(f"{what}: peak of the process", process, better="lower", baseline=paper, seeds=(SEED,)),
            ]
    return findings


def _paper_ratio(what: str, way: str, base: str) -> float:
    """A ratio of the published table, for Llama-3 8B."""
    values = [published_number("neuzip-table1", f"Llama-3 8B {what}", each) for each in (way, base)]
    return round(values[0] / (values[1] or 1), 3)


def memory_needed(config: Pretraining) -> tuple[int, str]:
    """Estimate the bytes that a run needs, from below."""
    count, largest = parameters_of(config.shape)
    fields = SHAPES[config.shape]["fields"]
    layers = fields.get("num_hidden_layers") or fields["num_layers"]
    tokens = config.batch * config.window
    gradients = count if config.way == VANILLA else largest
    # bf16 weights, made dense also where they are compressed then; the inputs of checkpointed layers; the logits in
    # bf16, in fp32, and their gradient.
    parts = {
        "weights": 2 * count,
        "gradients": 2 * gradients,
        "checkpointed activations": 2 * tokens * layers * fields["hidden_size"],
        "logits": 10 * tokens * fields["vocab_size"],
    }
    words = " + ".join(f"{size / GIB:.1f} GiB {part}" for part, size in parts.items())
    return sum(parts.values()), f"{config.shape}, {config.way}: {words} = {sum(parts.values()) / GIB:.1f} GiB"


def _affordable() -> tuple[list[Pretraining], tuple[str, ...]]:
    """The runs at paper scale for which there is memory, and a sentence for each of the others."""
    have = _available()
    fitting, left_out = [], []
    for shape in PAPER.shapes:
        for way in WAYS:
            config = Pretraining(way, shape, steps=10, batch=8, window=1024, held_out=8, vocabulary=8192)
            need, words = memory_needed(config)
            if need <= have:
                fitting.append(config)
            else:
                left_out.append(f"Not measured for want of memory: {words}, and {have / GIB:.1f} GiB are free.")
    if not fitting:
        free = f"This machine has {have / GIB:.1f} GiB of free memory. {' '.join(left_out)}"
        raise UsageError(free, cure="Use a larger machine, or --scale small.")
    return fitting, tuple(left_out)


def _available() -> int:
    """Bytes of memory that are free for use."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


# ---- figure 2 --------------------------------------------------------------------------------------------------------

_STACKS: dict[str, dict[str, Any]] = {
    "vanilla": {"way": VANILLA, "checkpointing": False},
    "checkpointing": {"way": VANILLA, "checkpointing": True},
    "checkpointing + LOMO": {"way": LOMO, "checkpointing": True},
    "checkpointing + LOMO\n+ NeuZip": {"way": COMPRESSED, "checkpointing": True},
}
_LAST = list(_STACKS)[-1]
_OPTIMIZERS = ("SGD", "AdamW")


@table("neuzip-fig2", needs=("llm", "evidence", "data:text"), stand_in=True)
def figure2(scale: Scale, out: Path) -> MeasuredTable:
    """The peak of one training step by what it is for: plain, with checkpointing, layer by layer, compressed."""
    asked = [(optimizer, label) for optimizer in _OPTIMIZERS for label in _STACKS]
    configs = [
        Pretraining(**_STACKS[label], optimizer=optimizer, learning_rate=1e-4, steps=5, held_out=0)
        for optimizer, label in asked
    ]
    found = dict(zip(asked, run_in_processes(run, configs, out), strict=True))
    findings = tuple(
        Finding(
            f"{optimizer}: peak of tensors, compressed against {label}",
            found[optimizer, _LAST]["counted"] / found[optimizer, label]["counted"],
            better="lower", target=1.0, seeds=(SEED,), detail={"bound": "compressed takes no more"},
        )
        for optimizer in _OPTIMIZERS
        for label in list(_STACKS)[:-1]
    )  # fmt: skip

    def part(name: str) -> Any:
        return lambda result: result["parts"][name] / MIB

    return grid(
        {f"{optimizer}, {' '.join(label.split())}": result for (optimizer, label), result in found.items()},
        [
            *((Column(name, "MiB", "lower"), part(name)) for name in PARTS),
            (Column("all tensors", "MiB", "lower"), lambda result: result["counted"] / MIB),
            (Column("process", "MiB", "lower"), lambda result: result["sampled"] / MIB),
        ],
        differs=(
            "The paper's figure is a drawing of one layer; this is a ledger of a whole model's training step.",
            f"A miniature: a Llama of {found[asked[0]]['weights'] / 1e6:.1f} M weights in bf16, batches of 4 windows "
            "of 256 tokens.",
        ),
        findings=findings,
        figures=(_stacked_bars({key: result["parts"] for key, result in found.items()}),),
        notes=(
            "Tensors are counted one by one; the parts are those of the moment at which they are most together. "
            "The last column is what the process held for itself at its peak, sampled; in every row it includes what "
            "the tokenizer and the text took, which is not a tensor.",
            "“other” are gradients on their way, work space, and what an optimizer's step needs for a moment.",
        ),
        inputs=digests_of_texts(*_TEXTS),
    )


def _stacked_bars(parts: Mapping[tuple[str, str], Mapping[str, int]]) -> Figure:
    totals = {key: sum(values.values()) / MIB for key, values in parts.items()}
    narrow = [" ".join(label.split()).replace(" + ", "\n+ ") for label in _STACKS]
    labels = [label.replace("checkpointing", "check-\npointing") for label in narrow]
    with canvas(len(_OPTIMIZERS), height=3.6) as (drawing, panels):
        for axes, optimizer in zip(panels, _OPTIMIZERS, strict=True):
            for place, label in enumerate(_STACKS):
                bottom = 0.0
                for index, part in enumerate(PARTS):
                    height = parts[optimizer, label][part] / MIB
                    axes.bar(place, height, 0.7, bottom=bottom, color=series_color(index), label=part)
                    bottom += height
                axes.text(place, bottom, f"{bottom:.0f}", ha="center", va="bottom", fontsize=8)
            axes.set_title(optimizer)
            axes.set_xticks(range(len(_STACKS)), labels, fontsize=7.5)
            axes.set_ylim(0, max(totals.values()) * 1.08)
            axes.grid(axis="y")
            axes.tick_params(length=3)
        panels[0].set_ylabel("MiB at the peak")
        handles, names = panels[0].get_legend_handles_labels()
        known = dict(zip(names, handles, strict=True))
        drawing.legend(known.values(), known.keys(), loc="outside upper left", ncols=3, fontsize=8.5)
        least = min(_OPTIMIZERS, key=lambda optimizer: totals[optimizer, "vanilla"])
        saved = totals[least, _LAST] / totals[least, "vanilla"]
        alt = (
            "Peak memory of a training step by what it is for, four ways, two optimizers. With "
            f"{least}, compressed layer by layer training takes {saved:.2f} of what plain training takes."
        )
        return to_figure(drawing, alt=alt, caption="Peak of tensors during one training step, by what they are for.")
