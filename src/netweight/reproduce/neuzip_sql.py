"""NeuZip's table 2: a model learns to write SQL by full fine-tuning, compressed or not, or by adapters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from netweight.errors import NetweightError, UsageError
from netweight.report.finding import Column, Finding
from netweight.reproduce.published import published
from netweight.reproduce.registry import Measured, Row, Scale, table
from netweight.reproduce.sql_finetuning import ADAPTERS, BASE, BY_ADAMW, FineTuning
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

__all__ = ["table2"]

_MIB = 1 << 20
SEEN = 6000
"""Training pairs of the base; fine-tuning has the other 2,594."""
BASE_STEPS = 600
ROUNDS = 7
"""Rounds in which the ways take turns, to compare their speed."""


@table(
    "neuzip-table2",
    needs=("llm", "evidence", "data:text"),
    paper_needs=("T5 1B, 3B or 11B: --model FOLDER", "memory for it and its gradients, and days on a CPU"),
    stand_in=True,
)
def table2(scale: Scale, out: Path, *, model: str | None = None) -> Measured:
    """Fine-tune by each way from the same base: BLEU, peak memory and speed; the first three must agree to the bit.

    Args:
        scale: "small" fine-tunes `model`, or a base of 5.2 M weights that it trains first on 6,000 of the questions;
            "paper" needs `model`.
        out: The base and finished runs are kept here.
        model: A folder of an encoder-decoder of the T5 kind with its tokenizer.

    Raises:
        UsageError: Paper scale without a model, or the folder holds no such model.
        NetweightError: A run failed.
    """
    if scale == "paper" and model is None:
        raise UsageError(
            "Paper scale fine-tunes T5 of 1, 3 and 11 billion weights, and no model was named.",
            cure="Give its folder: --model FOLDER",
        )
    base, about = (Path(model), {}) if model else _base(out)
    # A base that is not ours has seen none of the questions.
    common: dict[str, Any] = {"base": str(base), "first": 0 if model else SEEN}
    configs = [FineTuning(way, **common) for way in (BASE, *WAYS, *BY_ADAMW, *ADAPTERS)]
    found = dict(zip((config.way for config in configs), _runs(configs, out), strict=True))
    missing = {way: result["missing"] for way, result in found.items() if "missing" in result}
    trained = [config for config in configs if config.way != BASE and config.way not in missing]
    given = {"configs": [asdict(config) for config in trained], "rounds": ROUNDS}
    seconds = seconds_in_turns(time_ways, given, out)
    ratios = {way: _ratio(seconds[VANILLA], spent) for way, spent in seconds.items()}
    name = base.name if model else "stand-in"
    return Measured(
        columns=(
            Column(f"{name} BLEU", "BLEU", "higher"),
            Column(f"{name} memory", "MiB", "lower"),
            Column(f"{name} speed", "iterations/s", "higher"),
            Column("speed", "× vanilla", "higher"),
        ),
        rows=tuple(Row(way, _values(way, found[way], seconds, ratios)) for way in found),
        differs=_differences(configs[0], about),
        findings=(*_same(found, configs[0]), *_quality(found, configs[0]), *_costs(found, _lomo_ratio(seconds))),
        notes=(
            *(f"{way} was not measured: {reason}" for way, reason in missing.items()),
            _sampled(found),
            "Speed is by CPU seconds of one thread, the ways taking turns in one process.",
            "Full fine-tuning has the best of three learning rates (0.1, 0.5, 2; 24 updates, dev questions); that "
            "of AdamW was not tuned.",
        ),
        inputs=_inputs(),
    )


def _base(out: Path) -> tuple[Path, dict[str, Any]]:
    """The base model, trained or found trained, and what came of it."""
    from netweight_experiments.toys.encoder_decoder import EncoderDecoderRecipe, trained
    from netweight_experiments.toys.fitting import Schedule

    from netweight.data.corpora import wikisql

    recipe = EncoderDecoderRecipe(schedule=Schedule(steps=BASE_STEPS, learning_rate=2e-3, check_every=150))
    folder = out / "base"
    return folder, trained(wikisql("train")[:SEEN], wikisql("dev")[:200], folder, recipe)


def _values(
    way: str, found: Mapping[str, Any], seconds: Mapping[str, Sequence[float]], ratios: Mapping[str, Interval]
) -> tuple[float | None, ...]:
    if "missing" in found:
        return (None, None, None, None)
    if way == BASE:
        return (found["bleu"]["value"], None, None, None)
    speed = 1 / median(seconds[way])
    return (found["bleu"]["value"], found["counted"] / _MIB, speed, ratios[way].estimate)


def _differences(config: FineTuning, about: Mapping[str, Any]) -> tuple[str, ...]:
    which = "A model folder of the user's."
    if about:
        which = (
            f"A miniature: a T5 of {about['weights'] / 1e6:.1f} M weights that was trained here from random weights on "
            f"{about['training pairs']:,} questions by {BASE_STEPS} updates; the paper's are pre-trained, of 1 to 11 G."
        )
    return (
        which,
        "Questions are WikiSQL's, with the columns that the query uses; the paper's are b-mc2/sql-create-context.",
        f"{config.steps} updates of {config.batch} pairs on questions that the base has not seen, at most 128 tokens "
        "in and 64 out, in bf16, on a CPU. Full fine-tuning is by plain SGD, as in the reference code; at its 5e-5 a "
        f"bf16 weight hardly ever changes, so the rate is {config.learning_rate}.",
        f"Adapters of rank {config.rank} are on every linear layer, stepped by AdamW at {config.adapter_learning_rate}"
        "; the paper's rank is not known. T5's `wo` layers stay in bf16.",
        "The rows “by AdamW” are not in the paper: full fine-tuning with the optimizer and the rate of the adapters.",
        "Memory is that of tensors, counted one by one.",
    )


def _same(found: Mapping[str, Any], config: FineTuning) -> tuple[Finding, ...]:
    """That layer by layer training, dense and compressed, is the same training."""
    findings = []
    plain, compressed = BY_ADAMW
    for way, base in ((COMPRESSED, LOMO), (COMPRESSED, VANILLA), (compressed, plain)):
        one, other, what = found[way], found[base], f"{way} against {base}"
        counted: dict[str, Any] = {"target": 0, "seeds": (config.seed,)}
        steps, weights = (
            differing_steps(one["losses"], other["losses"]),
            differing_weights(one["digests"], other["digests"]),
        )
        findings += [
            Finding(f"{what}: updates whose loss differs", steps, n=len(other["losses"]), **counted),
            Finding(f"{what}: parameters that differ", weights, n=len(other["digests"]), **counted),
            Finding(
                f"{what}: difference in BLEU", one["bleu"]["value"] - other["bleu"]["value"], unit="BLEU", **counted
            ),
        ]
    return tuple(findings)


def _quality(found: Mapping[str, Any], config: FineTuning) -> tuple[Finding, ...]:
    """BLEU of every way with its interval, and how far full fine-tuning is ahead of adapters, beside the paper."""
    findings = []
    for way, result in found.items():
        if "bleu" in result:
            bleu = result["bleu"]
            findings.append(
                Finding(
                    f"BLEU, {way}", bleu["value"], ci95=(bleu["low"], bleu["high"]), n=bleu["n"], unit="BLEU",
                    better="higher", seeds=(config.seed,),
                    detail={"interval": "bootstrap over test questions", "right to the letter": bleu["exact"]},
                )
            )  # fmt: skip
    before, (plain, _) = found[BASE]["bleu"]["value"], BY_ADAMW
    for whole in (VANILLA, plain):
        value = found[whole]["bleu"]["value"]
        findings.append(Finding(f"BLEU gained by {whole}", value - before, unit="BLEU", better="higher", target=0.0))
        findings += [
            Finding(
                f"BLEU by which {whole} is ahead of {way}", value - found[way]["bleu"]["value"], unit="BLEU",
                better="higher", target=0.0, baseline=_paper("BLEU", VANILLA) - _paper("BLEU", way),
                detail={"baseline": "the paper's T5 1B", "bound": "the paper: full fine-tuning is better"},
            )
            for way in ADAPTERS
            if "bleu" in found[way] and way.startswith("QLoRA")
        ]  # fmt: skip
    return tuple(findings)


def _costs(found: Mapping[str, Any], speed: Interval) -> tuple[Finding, ...]:
    """Memory and speed of compression, beside the paper's ratios."""
    said = {"baseline": "the same ratio in the paper, for T5 1B on a GPU", "bound": "the paper's own ratio"}
    findings = []
    for base in (VANILLA, LOMO):
        ratio = found[COMPRESSED]["counted"] / found[base]["counted"]
        paper = round(_paper("memory", COMPRESSED) / _paper("memory", base), 3)
        name = f"{COMPRESSED} against {base}: peak of tensors"
        findings.append(Finding(name, ratio, better="lower", target=paper, baseline=paper, detail=said))
    paper = round(_paper("speed", COMPRESSED) / _paper("speed", LOMO), 3)
    name = f"{COMPRESSED} against {LOMO}: iterations per second"
    told: dict[str, Any] = {"better": "higher", "target": paper, "baseline": paper, "detail": said}
    return (*findings, Finding(name, speed.estimate, ci95=speed.ci95, n=speed.n, **told))


def _paper(what: str, way: str) -> float:
    """A number of the published table, for T5 1B."""
    numbers = published("neuzip-table2")
    assert numbers is not None
    index = [column.name for column in numbers.columns].index(f"T5 1B {what}")
    return float(next(row.values[index] for row in numbers.rows if row.name == way) or 0)


def _sampled(found: Mapping[str, Any]) -> str:
    sizes = ", ".join(
        f"{way} {result['sampled'] / _MIB:.0f} MiB" for way, result in found.items() if "sampled" in result
    )
    return f"Peak of what the process held for itself, sampled during three updates: {sizes}."


# ---- runs ------------------------------------------------------------------------------------------------------------


def fine_tune(config: FineTuning) -> Any:
    """One run in a fresh process."""
    from netweight.metrics.memory import in_fresh_process
    from netweight.reproduce.sql_finetuning import run

    return in_fresh_process(run, asdict(config))


def _runs(configs: Sequence[FineTuning], out: Path) -> list[Any]:
    from netweight.core.engines import in_process
    from netweight.core.runs import map_runs

    results = list(map_runs(fine_tune, list(configs), ledger=out / "runs.jsonl", engine=in_process, ordered=True))
    for result in results:
        if not result.ok:
            last = (result.error or "").strip().splitlines()[-1]
            raise NetweightError(f"Fine-tuning, {result.config.way}, failed: {last}", cure="Run it again to continue.")
    return [result.value for result in results]


def take_turns(given: Mapping[str, Any]) -> dict[str, list[float]]:
    """CPU seconds per update of each way, all in this process, round by round."""
    from netweight.data.corpora import wikisql
    from netweight.metrics.timing import Case, interleave
    from netweight.reproduce.sql_finetuning import Student

    configs = [FineTuning(**fields) for fields in given["configs"]]
    students = {config.way: Student(config, wikisql("train")[config.first :]) for config in configs}
    cases = [Case(way, Student.step, partial(students.__getitem__, way)) for way in students]
    samples = interleave(cases, repeats=given["rounds"], seed=configs[0].seed, again_below=0, steady=0)
    return {way: list(samples[way].cpu) for way in students}


def time_ways(given: Mapping[str, Any]) -> Any:
    """`take_turns` in a fresh process with one thread."""
    from netweight.metrics.memory import in_fresh_process

    return in_fresh_process(take_turns, given)


def _ratio(base: Sequence[float], contender: Sequence[float]) -> Interval:
    from netweight.metrics.intervals import paired_ratio

    return paired_ratio(base, contender, seed=FineTuning.seed)


def _lomo_ratio(seconds: Mapping[str, Sequence[float]]) -> Interval:
    return _ratio(seconds[LOMO], seconds[COMPRESSED])


def _inputs() -> dict[str, str]:
    from netweight.core.digest import of_file
    from netweight.data.corpora import text_file

    return {"wikisql_12k.parquet": of_file(text_file("wikisql_12k.parquet"))}
