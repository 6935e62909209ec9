"""NeuZip's table 1: what layer by layer training and compressed weights cost and save in pre-training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from netweight_experiments.toys.decoder import MINIATURE, SHAPES

from netweight.errors import NetweightError, UsageError
from netweight.report.finding import Column, Finding
from netweight.reproduce.pretraining import Pretraining
from netweight.reproduce.published import published
from netweight.reproduce.registry import Measured, Row, Scale, table
from netweight.reproduce.training_ways import (
    COMPRESSED,
    LOMO,
    VANILLA,
    WAYS,
    differing_steps,
    differing_weights,
    seconds_in_turns,
)

if TYPE_CHECKING:
    from netweight.metrics.intervals import Interval

__all__ = ["digests_of_texts", "memory_needed", "pretrained", "table1"]

_NEEDS = ("llm", "evidence", "data:text")
_GIB, _MIB = 1 << 30, 1 << 20
ROUNDS = 9
"""Rounds in which the ways take turns, to compare their speed."""
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
    """Pre-train by each way from the same random weights: loss, peak memory and speed; the losses must be equal.

    Args:
        scale: "small" trains a miniature of 45.6 M weights for 24 updates; "paper" the paper's three shapes, from
            random weights, for 10 updates of 8 windows of 1,024 tokens, where the machine has the memory.
        out: Finished runs are kept here.

    Raises:
        UsageError: Paper scale, and the machine's memory is too small for any of it.
        NetweightError: A run failed.
    """
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
    from netweight.metrics.memory import in_fresh_process
    from netweight.reproduce.pretraining import run

    return in_fresh_process(run, asdict(config))


def pretrained(configs: Sequence[Pretraining], out: Path) -> list[Any]:
    """Train as configured, each in a fresh process; runs that an earlier call finished are taken from its ledger.

    Args:
        configs: The runs.
        out: Folder of the ledger.

    Returns:
        What `pretraining.run` returns, in the order of `configs`.

    Raises:
        NetweightError: A run failed.
    """
    from netweight.core.engines import in_process
    from netweight.core.runs import map_runs

    results = list(map_runs(pretrain, list(configs), ledger=out / "runs.jsonl", engine=in_process, ordered=True))
    for result in results:
        if not result.ok:
            last = (result.error or "").strip().splitlines()[-1]
            raise NetweightError(f"Training by {result.config.way} failed: {last}", cure="Run it again to continue.")
    return [result.value for result in results]


def take_turns(rounds: int) -> dict[str, list[float]]:
    """CPU seconds per update of each way, all in this process, round by round."""
    from netweight.data.corpora import wikitext2
    from netweight.metrics.timing import Case, interleave
    from netweight.reproduce.pretraining import Trainee

    trainees = {way: Trainee(Pretraining(way), wikitext2("valid")) for way in WAYS}
    cases = [Case(way, Trainee.step, partial(trainees.__getitem__, way)) for way in WAYS]
    samples = interleave(cases, repeats=rounds, seed=Pretraining(VANILLA).seed, again_below=0, steady=0)
    return {way: list(samples[way].cpu) for way in WAYS}


def time_ways(rounds: int) -> Any:
    """`take_turns` in a fresh process with one thread."""
    from netweight.metrics.memory import in_fresh_process

    return in_fresh_process(take_turns, rounds)


def _ratio(base: Sequence[float], contender: Sequence[float]) -> Interval:
    from netweight.metrics.intervals import paired_ratio

    return paired_ratio(base, contender, seed=Pretraining(VANILLA).seed)


def digests_of_texts() -> dict[str, str]:
    """Digests of the texts that runs read, by file name."""
    from netweight.core.digest import of_file
    from netweight.data.corpora import text_file

    return {name: of_file(text_file(name)) for name in ("wikitext2-valid.txt", "wikitext2-test.txt")}


# ---- paper scale -----------------------------------------------------------------------------------------------------


def memory_needed(config: Pretraining) -> tuple[int, str]:
    """Estimate the bytes that a run needs, from below.

    Args:
        config: The run.

    Returns:
        The bytes, and the arithmetic in words.
    """
    from netweight_experiments.toys.decoder import parameters_of

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
    """The runs at paper scale for which there is memory, and a sentence for each of the others.

    Raises:
        UsageError: There is none.
    """
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
