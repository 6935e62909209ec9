"""NeuZip's table 1 and figure 2: what layer by layer training and compressed weights cost and save in pre-training.

Each run happens in a process of its own, so that what is sampled of its memory is the training's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

import netweight
from netweight.core.digest import of_file, of_tensor
from netweight.core.engines import in_process
from netweight.core.runs import map_runs
from netweight.core.seeds import derive, torch_generator
from netweight.data.corpora import count_words, text_file, wikitext2
from netweight.data.tokenizer import train_bpe
from netweight.errors import NetweightError, UsageError
from netweight.evidence.figures import Figure, canvas, series_color, to_figure
from netweight.evidence.finding import Finding
from netweight.evidence.memory_ledger import PARTS, PrivateMemory, TensorLedger, in_fresh_process, private_bytes
from netweight.evidence.statistics import Interval, paired_ratio
from netweight.evidence.timing import Case, interleave
from netweight_experiments.tables.published import published
from netweight_experiments.tables.registry import Column, Measured, Row, Scale, table
from netweight_experiments.toys.decoder import MINIATURE, SHAPES, made, parameters_of

VANILLA, LOMO, COMPRESSED = "Vanilla", "LOMO", "LOMO + NeuZip lossless"
# Names of rows, as the paper has them.
WAYS = (VANILLA, LOMO, COMPRESSED)


def arrange(
    way: str, model: nn.Module, optimizer_class: type[torch.optim.Optimizer], **options: Any
) -> torch.optim.Optimizer:
    """Make a dense model ready to be trained one way."""
    if way == VANILLA:
        make: Any = optimizer_class
        plain: torch.optim.Optimizer = make(model.parameters(), **options)
        return plain
    if way == COMPRESSED:
        netweight.compress_(model)
    layerwise: torch.optim.Optimizer = netweight.LayerwiseOptimizer(model, optimizer_class, **options)
    return layerwise


def digests(model: nn.Module) -> dict[str, str]:
    """Return the digest of every parameter's bits, decoded if it is compressed."""
    return {
        name: of_tensor(tensor.dense() if hasattr(tensor, "dense") else tensor.detach())
        for name, tensor in model.named_parameters()
    }


def differing_steps(one: Sequence[str], other: Sequence[str]) -> int:
    """Count the steps whose loss differs in any bit; a missing step differs."""
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


def differing_weights(one: Mapping[str, str], other: Mapping[str, str]) -> int:
    """Count the parameters that differ in any bit; a missing one differs."""
    return sum(one.get(name) != other.get(name) for name in one.keys() | other.keys())


def seconds_in_turns(time_ways: Callable[[Any], Any], given: Any, out: Path) -> dict[str, list[float]]:
    """Seconds per update by way, measured by a function unless an earlier run in this folder has done so."""
    (result,) = map_runs(time_ways, [given], ledger=out / "speed.jsonl", engine=in_process)
    if not result.ok:
        raise NetweightError(f"Timing failed: {result.error}", cure="Run it again.")
    seconds: dict[str, list[float]] = result.value
    return seconds


_WATCHED = 3  # updates during which the process' memory is sampled


@dataclass(frozen=True)
class Pretraining:
    """Everything that decides on a run."""

    way: str  # one of `training_ways.WAYS`
    shape: str = MINIATURE  # a key of `zoo.shapes.SHAPES`
    steps: int = 24  # updates
    learning_rate: float = 0.1  # at the start; it falls linearly towards 0
    optimizer: str = "SGD"  # "SGD" or "AdamW"
    batch: int = 4  # windows per update
    window: int = 256  # tokens per window
    # Whether activations are calculated again, by non-reentrant checkpointing of every layer.
    checkpointing: bool = True
    held_out: int = 16  # windows of the test text on which the loss is measured at the end
    vocabulary: int = 2048  # tokens of the tokenizer, at most what the model has
    seed: int = 20241031  # seed of weights and batches


class Trainee:
    """A model, its optimizer and its text: what takes steps."""

    def __init__(self, config: Pretraining, valid: str) -> None:
        self.config = config
        self.tokenizer: Any = train_bpe([valid], config.vocabulary)
        self._ids = torch.tensor(self.tokenizer(valid, verbose=False)["input_ids"])
        model: Any = _model(config)
        self.model = model
        if config.checkpointing:
            model.activation_checkpointing_enable({"use_reentrant": False})
        model.train()
        self.optimizer = arrange(config.way, model, getattr(torch.optim, config.optimizer), lr=1.0)
        self.done = 0

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
        first = torch.tensor(ids[: self.config.held_out * self.config.window])
        windows = first.view(-1, self.config.window)
        self.model.eval()
        with torch.inference_mode():
            losses = [float(self.model(input_ids=row[None], labels=row[None]).loss) for row in windows]
        mean = math.fsum(losses) / len(losses)
        return mean, mean * len(ids) / count_words(text)


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Train, in a fresh process: see `netweight.evidence.memory_ledger.in_fresh_process`."""
    # The second update is counted tensor by tensor, the next three are sampled; the others are timed.
    given = Pretraining(**config)
    warm: Any = _model(Pretraining(given.way), tiny=True)  # libraries take once what they need
    ids = torch.ones(1, 8, dtype=torch.long)
    warm(input_ids=ids, labels=ids).loss.backward()
    del warm
    before = private_bytes()
    trainee = Trainee(given, wikitext2("valid"))
    losses = [trainee.step()]
    with TensorLedger(trainee.model, trainee.optimizer) as ledger:
        losses.append(trainee.step())
    with PrivateMemory() as memory:
        losses += [trainee.step() for _ in range(_WATCHED)]
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
        "counted": ledger.peak.nbytes,
        "parts": dict(ledger.peak.parts),
        "sampled": memory.highest - before,
        "seconds": seconds,
    }


def _model(config: Pretraining, *, tiny: bool = False) -> torch.nn.Module:
    """The model in bf16, freshly initialized; or a tiny one of the kind, to have its code in memory."""
    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    changes = small if tiny else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "initialization"))
        torch.set_default_dtype(torch.bfloat16)
        try:
            return made(config.shape, **changes)
        finally:
            torch.set_default_dtype(torch.float32)


_NEEDS = ("llm", "evidence", "data:text")
_GIB, _MIB = 1 << 30, 1 << 20
# Rounds in which the ways take turns, to compare their speed.
ROUNDS = 9
_SAME_SETUP = (
    "Weights are bf16 and plain SGD without momentum, decay or clipping steps them on a linear schedule, with "
    "non-reentrant activation checkpointing, as the reference code does; its data, steps and hardware are unknown."
)
_LEARNING_RATE = (
    "The learning rate is 0.1: the reference code's default, 5e-5, changes next to no bf16 weight of a fresh model."
)
_TEXT = "Text is the valid split of WikiText-2, the loss is measured on the beginning of its test split."


@table(
    "neuzip-table1",
    needs=_NEEDS,
    paper_needs=("memory for a model of 2.7 to 13 billion weights and its gradients, and days on a CPU",),
    stand_in=True,
)
def table1(scale: Scale, out: Path) -> Measured:
    """Pre-train by each way from the same random weights: loss, peak memory and speed; the losses must be equal."""
    if scale == "small":
        return _table1_small(out)
    configs, left_out = _affordable()
    results = pretrained(configs, out)
    by = {(config.shape, config.way): result for config, result in zip(configs, results, strict=True)}
    columns, rows = [], {way: [] for way in WAYS}  # type: tuple[list[Column], dict[str, list[Any]]]
    for shape in (name for name in SHAPES if name != MINIATURE):
        columns += _columns(shape, "GiB")
        for way in WAYS:
            found = by.get((shape, way))
            rows[way] += _values(found, _GIB, median(found["seconds"])) if found else [None] * 3
    findings: list[Finding] = []
    for shape in {config.shape for config in configs}:
        findings += _findings({way: by[shape, way] for way in WAYS if (shape, way) in by}, shape)
    return Measured(
        columns=tuple(columns),
        rows=tuple(Row(way, tuple(values)) for way, values in rows.items()),
        differs=(_LEARNING_RATE, _TEXT, "Weights are random, updates are 10, and everything runs on a CPU.", *left_out),
        findings=tuple(findings),
        notes=(_SAME_SETUP,),
        inputs=digests_of_texts(),
    )


def _table1_small(out: Path) -> Measured:
    configs = [Pretraining(way) for way in WAYS]
    found = dict(zip(WAYS, pretrained(configs, out), strict=True))
    seconds = seconds_in_turns(time_ways, ROUNDS, out)
    findings = [*_findings(found, MINIATURE), _speed_finding(_ratio(seconds[LOMO], seconds[COMPRESSED]))]
    unwatched = "CPU seconds of one thread, the ways taking turns in one process"
    return Measured(
        columns=_columns(MINIATURE, "MiB"),
        rows=tuple(Row(way, tuple(_values(found[way], _MIB, median(seconds[way])))) for way in WAYS),
        differs=(
            f"A miniature: a Llama of {found[VANILLA]['weights'] / 1e6:.1f} M weights, batches of 4 windows of 256 "
            "tokens, 24 updates.",
            _LEARNING_RATE,
            _TEXT,
            f"Memory is that of tensors, counted one by one, on a CPU; speed is by {unwatched}.",
        ),
        findings=tuple(findings),
        notes=(_SAME_SETUP, _sampled(found)),
        inputs=digests_of_texts(),
    )


def _columns(shape: str, unit: str) -> tuple[Column, ...]:
    return (
        Column(f"{shape} loss", "nats/word", "lower"),
        Column(f"{shape} memory", unit, "lower"),
        Column(f"{shape} speed", "iterations/s", "higher"),
    )


def _values(found: Mapping[str, Any], unit: int, seconds: float) -> list[Any]:
    return [found["held_out"]["word"], found["counted"] / unit, 1 / seconds]


def _findings(found: Mapping[str, Any], shape: str) -> list[Finding]:
    """That nothing but memory and speed differs, and by how much memory does, beside the paper's own ratios."""
    seeds = (Pretraining(VANILLA).seed,)
    findings = []
    for base in (LOMO, VANILLA):
        if base in found and COMPRESSED in found:
            one, other = found[COMPRESSED], found[base]
            what = f"{shape}, {COMPRESSED} against {base}"
            steps = differing_steps(one["losses"], other["losses"])
            weights = differing_weights(one["digests"], other["digests"])
            paper = _paper_ratio("memory", COMPRESSED, base)
            findings += [
                Finding(f"{what}: updates whose loss differs", steps, target=0, n=len(other["losses"]), seeds=seeds),
                Finding(f"{what}: parameters that differ", weights, target=0, n=len(other["digests"]), seeds=seeds),
                Finding(
                    f"{what}: peak of tensors",
                    one["counted"] / other["counted"],
                    **_better_than(paper, "lower"),
                    seeds=seeds,
                ),
                Finding(
                    f"{what}: peak of the process",
                    one["sampled"] / other["sampled"],
                    better="lower",
                    baseline=paper,
                    seeds=seeds,
                ),
            ]
    return findings


def _better_than(paper: float, better: str) -> dict[str, Any]:
    """What a finding says that is held against the same ratio in the paper."""
    detail = {"baseline": "the same ratio in the paper, for Llama-3 8B on a GPU", "bound": "the paper's own ratio"}
    return {"better": better, "target": paper, "baseline": paper, "detail": detail}


def _speed_finding(ratio: Interval) -> Finding:
    told = _better_than(_paper_ratio("speed", COMPRESSED, LOMO), "higher")
    name = f"{MINIATURE}, {COMPRESSED} against {LOMO}: iterations per second"
    return Finding(name, ratio.estimate, ci95=ratio.ci95, n=ratio.n, **told)


def _paper_ratio(what: str, way: str, base: str) -> float:
    """A ratio of the published table, for Llama-3 8B."""
    numbers = published("neuzip-table1")
    assert numbers is not None
    index = [column.name for column in numbers.columns].index(f"Llama-3 8B {what}")
    values = {row.name: row.values[index] for row in numbers.rows}
    return round(float(values[way] or 0) / float(values[base] or 1), 3)


def _sampled(found: Mapping[str, Any]) -> str:
    sizes = ", ".join(f"{way} {result['sampled'] / _MIB:.0f} MiB" for way, result in found.items())
    return f"Peak of what the process held for itself, with tokenizer and text, sampled during three updates: {sizes}."


# ---- runs ------------------------------------------------------------------------------------------------------------


def pretrain(config: Pretraining) -> Any:
    """One run in a fresh process."""
    return in_fresh_process(run, asdict(config))


def pretrained(configs: Sequence[Pretraining], out: Path) -> list[Any]:
    """Train as configured, each in a fresh process; runs that an earlier call finished are taken from its ledger."""
    results = list(map_runs(pretrain, list(configs), ledger=out / "runs.jsonl", engine=in_process, ordered=True))
    for result in results:
        if not result.ok:
            last = (result.error or "").strip().splitlines()[-1]
            raise NetweightError(f"Training by {result.config.way} failed: {last}", cure="Run it again to continue.")
    return [result.value for result in results]


def take_turns(rounds: int) -> dict[str, list[float]]:
    """CPU seconds per update of each way, all in this process, round by round."""
    trainees = {way: Trainee(Pretraining(way), wikitext2("valid")) for way in WAYS}
    cases = [Case(way, Trainee.step, partial(trainees.__getitem__, way)) for way in WAYS]
    samples = interleave(cases, repeats=rounds, seed=Pretraining(VANILLA).seed, again_below=0, steady=0)
    return {way: list(samples[way].cpu) for way in WAYS}


def time_ways(rounds: int) -> Any:
    """`take_turns` in a fresh process with one thread."""
    return in_fresh_process(take_turns, rounds)


def _ratio(base: Sequence[float], contender: Sequence[float]) -> Interval:
    return paired_ratio(base, contender, seed=Pretraining(VANILLA).seed)


def digests_of_texts() -> dict[str, str]:
    """Digests of the texts that runs read, by file name."""
    return {name: of_file(text_file(name)) for name in ("wikitext2-valid.txt", "wikitext2-test.txt")}


# ---- paper scale -----------------------------------------------------------------------------------------------------


def memory_needed(config: Pretraining) -> tuple[int, str]:
    """Estimate the bytes that a run needs, from below."""
    count, largest = parameters_of(config.shape)
    fields = SHAPES[config.shape][1]
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
    words = " + ".join(f"{size / _GIB:.1f} GiB {part}" for part, size in parts.items())
    return sum(parts.values()), f"{config.shape}, {config.way}: {words} = {sum(parts.values()) / _GIB:.1f} GiB"


def _affordable() -> tuple[list[Pretraining], tuple[str, ...]]:
    """The runs at paper scale for which there is memory, and a sentence for each of the others."""
    have = _available()
    fitting, left_out = [], []
    for shape in (name for name in SHAPES if name != MINIATURE):
        for way in WAYS:
            config = Pretraining(way, shape, steps=10, batch=8, window=1024, held_out=8, vocabulary=8192)
            need, words = memory_needed(config)
            if need <= have:
                fitting.append(config)
            else:
                left_out.append(f"Not measured for want of memory: {words}, and {have / _GIB:.1f} GiB are free.")
    if not fitting:
        raise UsageError(
            f"This machine has {have / _GIB:.1f} GiB of free memory. {' '.join(left_out)}",
            cure="Use a larger machine, or --scale small.",
        )
    return fitting, tuple(left_out)


def _available() -> int:
    """Bytes of memory that are free for use."""
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable"))


_STACKS = {
    "vanilla": {"way": VANILLA, "checkpointing": False},
    "checkpointing": {"way": VANILLA, "checkpointing": True},
    "checkpointing + LOMO": {"way": LOMO, "checkpointing": True},
    "checkpointing + LOMO\n+ NeuZip": {"way": COMPRESSED, "checkpointing": True},
}
_OPTIMIZERS = ("SGD", "AdamW")


@table("neuzip-fig2", needs=("llm", "evidence", "data:text"), stand_in=True)
def figure2(scale: Scale, out: Path) -> Measured:
    """The peak of one training step by what it is for: plain, with checkpointing, layer by layer, compressed."""
    asked = [(optimizer, label) for optimizer in _OPTIMIZERS for label in _STACKS]
    configs = [
        Pretraining(**_STACKS[label], optimizer=optimizer, learning_rate=1e-4, steps=5, held_out=0)  # type: ignore[arg-type]
        for optimizer, label in asked
    ]
    found = dict(zip(asked, pretrained(configs, out), strict=True))
    rows = tuple(
        Row(_row(optimizer, label), (*(result["parts"][part] / _MIB for part in PARTS), *_totals(result)))
        for (optimizer, label), result in found.items()
    )
    findings = tuple(
        Finding(
            f"{optimizer}: peak of tensors, compressed against {label}",
            found[optimizer, list(_STACKS)[-1]]["counted"] / found[optimizer, label]["counted"],
            better="lower", target=1.0, seeds=(configs[0].seed,), detail={"bound": "compressed takes no more"},
        )
        for optimizer in _OPTIMIZERS
        for label in list(_STACKS)[:-1]
    )  # fmt: skip
    return Measured(
        columns=(
            *(Column(part, "MiB", "lower") for part in PARTS),
            Column("all tensors", "MiB", "lower"),
            Column("process", "MiB", "lower"),
        ),
        rows=rows,
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
            "the tokenizer and the text took, which is no tensor.",
            "“other” are gradients on their way, work space, and what an optimizer's step needs for a moment.",
        ),
        inputs=digests_of_texts(),
    )


def _row(optimizer: str, label: str) -> str:
    return f"{optimizer}, {' '.join(label.split())}"


def _narrow(label: str) -> str:
    """A label in lines that fit below a bar."""
    return label.replace("\n", " ").replace(" + ", "\n+ ").replace("checkpointing", "check-\npointing")


def _totals(result: Mapping[str, Any]) -> tuple[float, float]:
    return result["counted"] / _MIB, result["sampled"] / _MIB


def _stacked_bars(parts: Mapping[tuple[str, str], Mapping[str, int]]) -> Figure:
    totals = {key: sum(values.values()) / _MIB for key, values in parts.items()}
    with canvas(len(_OPTIMIZERS), height=3.6) as (drawing, panels):
        for axes, optimizer in zip(panels, _OPTIMIZERS, strict=True):
            for place, label in enumerate(_STACKS):
                bottom = 0.0
                for index, part in enumerate(PARTS):
                    height = parts[optimizer, label][part] / _MIB
                    axes.bar(place, height, 0.7, bottom=bottom, color=series_color(index), label=part)
                    bottom += height
                axes.text(place, bottom, f"{bottom:.0f}", ha="center", va="bottom", fontsize=8)
            axes.set_title(optimizer)
            axes.set_xticks(range(len(_STACKS)), [_narrow(label) for label in _STACKS], fontsize=7.5)
            axes.set_ylim(0, max(totals.values()) * 1.08)
            axes.grid(axis="y")
            axes.tick_params(length=3)
        panels[0].set_ylabel("MiB at the peak")
        handles, names = panels[0].get_legend_handles_labels()
        known = dict(zip(names, handles, strict=True))
        drawing.legend(known.values(), known.keys(), loc="outside upper left", ncols=3, fontsize=8.5)
        least = min(_OPTIMIZERS, key=lambda optimizer: totals[optimizer, "vanilla"])
        saved = totals[least, list(_STACKS)[-1]] / totals[least, "vanilla"]
        alt = (
            "Peak memory of a training step by what it is for, four ways, two optimizers. With "
            f"{least}, compressed layer by layer training takes {saved:.2f} of what plain training takes."
        )
        return to_figure(drawing, alt=alt, caption="Peak of tensors during one training step, by what they are for.")
