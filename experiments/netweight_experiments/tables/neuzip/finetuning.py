"""NeuZip's table 2: a model learns to write SQL by full fine-tuning, compressed or not, or by adapters.

Each run happens in a process of its own. Adapters are LoRA by peft, on a base quantized by bitsandbytes or torchao.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import netweight
from netweight.core.digest import of_file
from netweight.core.engines import in_process
from netweight.core.runs import map_runs
from netweight.core.seeds import derive, torch_generator
from netweight.data.corpora import Pair, text_file, wikisql
from netweight.errors import MissingExtra, NetweightError, Unsupported, UsageError
from netweight.evidence.finding import Finding
from netweight.evidence.memory_ledger import PrivateMemory, TensorLedger, in_fresh_process, private_bytes
from netweight.evidence.statistics import Interval, paired_ratio
from netweight.evidence.timing import Case, interleave
from netweight.hf.load_language_model import language_model
from netweight.hf.peft import with_lora
from netweight.hf.quantizers import linear_layers, missing, quantize_, quantizers
from netweight_experiments.tables.neuzip.pretraining import (
    COMPRESSED,
    LOMO,
    VANILLA,
    WAYS,
    arrange,
    differing_steps,
    differing_weights,
    digests,
    seconds_in_turns,
)
from netweight_experiments.tables.published import published
from netweight_experiments.tables.registry import Column, Measured, Row, Scale, table
from netweight_experiments.toys.encoder_decoder import LONGEST, EncoderDecoderRecipe, batches, trained
from netweight_experiments.toys.fitting import Schedule

_ADAPTED = ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]
_WATCHED = 3  # updates during which the process' memory is sampled
# Name of the row that trains nothing.
BASE = "the base, before fine-tuning"
# Rows of full fine-tuning with the optimizer that adapters have; the paper has none.
BY_ADAMW = {"Vanilla by AdamW": VANILLA, "LOMO + NeuZip lossless by AdamW": COMPRESSED}
# Rows that train adapters, by the paper's names → the quantizer of the base, by its name in `quantizers`.
ADAPTERS = {
    "LoRA on the bf16 base": None,
    "QLoRA INT8": "Quant INT8",
    "QLoRA FP4": "Quant FP4",
    "QLoRA FP4^2": "Quant FP4^2",
    "QLoRA NF4": "Quant NF4",
    "QLoRA NF4^2": "Quant NF4^2",
}


@dataclass(frozen=True)
class FineTuning:
    """Everything that decides on a run, but the base."""

    way: str  # one of `WAYS`, a key of `BY_ADAMW` or of `ADAPTERS`, or `BASE`
    base: str  # folder of the base model
    first: int  # the first training pair that the base has not seen
    steps: int = 60  # updates
    learning_rate: float = 0.1  # it falls linearly towards 0
    adapter_learning_rate: float = 2e-3
    rank: int = 8
    batch: int = 16  # pairs per update
    tests: int = 100  # test questions that are answered
    seed: int = 20241031  # seed of batches, dropout and adapters


class Student:
    """A base made ready to be fine-tuned one way: what takes steps."""

    def __init__(self, config: FineTuning, pairs: Sequence[Pair]) -> None:
        self.config, self._pairs, self.done = config, pairs, 0
        model, self.tokenizer = language_model(Path(config.base), "encoder-decoder")
        self.model: Any = model
        self._rate = config.learning_rate
        if config.way in WAYS:
            self.optimizer = arrange(config.way, model, torch.optim.SGD, lr=1.0)
        elif config.way in BY_ADAMW:
            self._rate = config.adapter_learning_rate
            self.optimizer = arrange(BY_ADAMW[config.way], model, torch.optim.AdamW, lr=1.0, weight_decay=0.0)
        elif config.way in ADAPTERS:
            self._rate = config.adapter_learning_rate
            self.model = _with_adapters(model, config)
            trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
            self.optimizer = torch.optim.AdamW(trained, lr=1.0, weight_decay=0.0)
        self.model.train()

    def step(self) -> float:
        """Make one update; return the loss before it, in nats per token."""
        config = self.config
        generator = torch_generator(config.seed, "batch", self.done)
        chosen = torch.randint(len(self._pairs), (config.batch,), generator=generator).tolist()
        (batch,) = batches([self._pairs[number] for number in chosen], self.tokenizer, config.batch)
        torch.manual_seed(derive(config.seed, "dropout", self.done))
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate * (1 - self.done / config.steps)
        loss = self.model(**batch).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return float(loss.detach())

    def answers(self, pairs: Sequence[Pair], size: int = 50) -> list[str]:
        """Answer questions greedily."""
        netweight.decompress_(self.model)
        self.model.eval()
        said: list[str] = []
        for batch in batches(pairs, self.tokenizer, size):
            asked = {name: batch[name] for name in ("input_ids", "attention_mask")}
            with torch.inference_mode():
                ids = self.model.generate(**asked, max_new_tokens=LONGEST[1], do_sample=False, num_beams=1)
            said += self.tokenizer.batch_decode(ids, skip_special_tokens=True)
        return said


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Fine-tune and answer the test, in a fresh process: see `memory_ledger.in_fresh_process`."""
    # The second update is counted tensor by tensor, the next three are sampled.
    given = FineTuning(**config)
    training, asked = wikisql("train")[given.first :], wikisql("test")[: given.tests]
    if given.way == BASE:
        return {"bleu": score(Student(given, training).answers(asked), [pair.target for pair in asked])}
    _warm_up(given, training)
    before = private_bytes()
    try:
        student = Student(given, training)
        losses = [student.step()]
        with TensorLedger(student.model, student.optimizer) as ledger:
            losses.append(student.step())
    except (MissingExtra, Unsupported, ImportError, NotImplementedError) as error:
        return {"missing": f"{type(error).__name__}: {error}"}
    with PrivateMemory() as memory:
        losses += [student.step() for _ in range(_WATCHED)]
    losses += [student.step() for _ in range(given.steps - len(losses))]
    trained = [parameter for parameter in student.model.parameters() if parameter.requires_grad]
    return {
        "losses": [loss.hex() for loss in losses],
        "digests": {} if given.way in ADAPTERS else digests(student.model),
        "trained": sum(parameter.numel() for parameter in trained),
        "counted": ledger.peak.nbytes,
        "parts": dict(ledger.peak.parts),
        "sampled": memory.highest - before,
        "bleu": score(student.answers(asked), [pair.target for pair in asked]),
    }


def score(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return SacreBLEU of answers, with the ends of its 95 % bootstrap interval over questions."""
    try:
        from sacrebleu.metrics.bleu import BLEU
    except ImportError as error:
        raise MissingExtra(
            "BLEU is computed by sacrebleu, which is not installed.", cure='Run: pip install "netweight[evidence]"'
        ) from error
    # Its resampling has a seed of its own, which the environment variable SACREBLEU_SEED changes.
    found = BLEU().corpus_score(list(answers), [list(references)], n_bootstrap=1000)
    return {
        "value": found.score,
        "low": found._mean - found._ci,
        "high": found._mean + found._ci,
        "n": len(answers),
        "exact": sum(answer == reference for answer, reference in zip(answers, references, strict=True)),
    }


def quantizer_of(way: str) -> Any:
    """The quantizer of a way's base, or None."""
    return next((quantizer for quantizer in quantizers() if quantizer.name == ADAPTERS.get(way)), None)


def _with_adapters(model: Any, config: FineTuning) -> Any:
    """Put LoRA adapters on a base, which is quantized first if the way says so."""
    quantizer = quantizer_of(config.way)
    if quantizer is not None:
        # transformers casts what enters `wo` to the dtype of its weight, so it is left in bf16, as it is when T5 is
        # loaded quantized.
        quantize_(model, quantizer, linear_layers(model, keep=("lm_head", "wo")))
    return with_lora(model, rank=config.rank, targets=_ADAPTED, seed=derive(config.seed, "adapters"))


def _warm_up(config: FineTuning, pairs: Sequence[Pair]) -> None:
    """Let libraries take once what they need, by an update of a model that is then forgotten."""
    quantizer = quantizer_of(config.way)
    if quantizer is not None:
        missing(quantizer)  # imports its library
    for way in (VANILLA, "LoRA on the bf16 base") if config.way in ADAPTERS else (VANILLA,):
        Student(replace(config, way=way, batch=2), pairs).step()


_MIB = 1 << 20
# Training pairs of the base; fine-tuning has the other 2,594.
SEEN = 6000
BASE_STEPS = 600
# Rounds in which the ways take turns, to compare their speed.
ROUNDS = 7


@table(
    "neuzip-table2",
    needs=("llm", "evidence", "data:text"),
    paper_needs=("T5 1B, 3B or 11B: --model FOLDER", "memory for it and its gradients, and days on a CPU"),
    stand_in=True,
)
def table2(scale: Scale, out: Path, *, model: str | None = None) -> Measured:
    """Fine-tune by each way from the same base: BLEU, peak memory and speed; the first three must agree to the bit."""
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
    return in_fresh_process(run, asdict(config))


def _runs(configs: Sequence[FineTuning], out: Path) -> list[Any]:
    results = list(map_runs(fine_tune, list(configs), ledger=out / "runs.jsonl", engine=in_process, ordered=True))
    for result in results:
        if not result.ok:
            last = (result.error or "").strip().splitlines()[-1]
            raise NetweightError(f"Fine-tuning, {result.config.way}, failed: {last}", cure="Run it again to continue.")
    return [result.value for result in results]


def take_turns(given: Mapping[str, Any]) -> dict[str, list[float]]:
    """CPU seconds per update of each way, all in this process, round by round."""
    configs = [FineTuning(**fields) for fields in given["configs"]]
    students = {config.way: Student(config, wikisql("train")[config.first :]) for config in configs}
    cases = [Case(way, Student.step, partial(students.__getitem__, way)) for way in students]
    samples = interleave(cases, repeats=given["rounds"], seed=configs[0].seed, again_below=0, steady=0)
    return {way: list(samples[way].cpu) for way in students}


def time_ways(given: Mapping[str, Any]) -> Any:
    """`take_turns` in a fresh process with one thread."""
    return in_fresh_process(take_turns, given)


def _ratio(base: Sequence[float], contender: Sequence[float]) -> Interval:
    return paired_ratio(base, contender, seed=FineTuning.seed)


def _lomo_ratio(seconds: Mapping[str, Sequence[float]]) -> Interval:
    return _ratio(seconds[LOMO], seconds[COMPRESSED])


def _inputs() -> dict[str, str]:
    return {"wikisql_12k.parquet": of_file(text_file("wikisql_12k.parquet"))}
