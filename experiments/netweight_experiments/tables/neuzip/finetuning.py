"""NeuZip's table 2: a model learns to write SQL by full fine-tuning, compressed or not, or by adapters.

Adapters are LoRA by peft, on a base that bitsandbytes or torchao has quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import netweight
from netweight.core.lazy import extra
from netweight.core.seeds import derive, torch_generator
from netweight.data.public import SourceAndTarget, wikisql
from netweight.errors import MissingExtra, Unsupported, UsageError
from netweight.hf.load_language_model import language_model
from netweight.metrics.intervals import Interval
from netweight.report.finding import Finding
from netweight_experiments.memory import private_bytes
from netweight_experiments.tables.grid import grid, interval_finding
from netweight_experiments.tables.neuzip import quantizers
from netweight_experiments.tables.neuzip.training import (
    COMPRESSED,
    LOMO,
    MIB,
    SEED,
    VANILLA,
    WAYS,
    against_paper,
    arrange,
    cpu_seconds,
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
from netweight_experiments.toys.encoder_decoder import LONGEST, EncoderDecoderRecipe, batches, trained
from netweight_experiments.toys.fitting import Schedule

# Training pairs of the base; fine-tuning has the other 2,594.
SEEN = 6000
BASE_STEPS = 600
# Rounds in which the ways take turns, to compare their speed.
ROUNDS = 7
_ADAPTED = ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]
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

    way: str
    """One of `WAYS`, a key of `BY_ADAMW` or of `ADAPTERS`, or `BASE`."""
    base: str
    """Folder of the base model."""
    first: int
    """The first training pair that the base has not seen."""
    steps: int = 60
    """Updates."""
    learning_rate: float = 0.1
    """It falls linearly towards 0."""
    adapter_learning_rate: float = 2e-3
    rank: int = 8
    batch: int = 16
    """Pairs per update."""
    tests: int = 100
    """Test questions that are answered."""
    seed: int = SEED
    """Seed of batches, dropout and adapters."""

    @property
    def name(self) -> str:
        """For messages."""
        return f"Fine-tuning, {self.way},"


class Student:
    """A base made ready to be fine-tuned one way: what takes steps."""

    def __init__(self, config: FineTuning, pairs: Sequence[SourceAndTarget]) -> None:
        self.config, self._pairs, self.done = config, pairs, 0
        model, self.tokenizer = language_model(Path(config.base), "encoder-decoder")
        self.model: Any = model
        self.optimizer: Any = None  # of a base that is not fine-tuned
        self._rate = config.learning_rate if config.way in WAYS else config.adapter_learning_rate
        if config.way in WAYS:
            self.optimizer = arrange(config.way, model, torch.optim.SGD, lr=1.0)
        elif config.way in BY_ADAMW:
            self.optimizer = arrange(BY_ADAMW[config.way], model, torch.optim.AdamW, lr=1.0, weight_decay=0.0)
        elif config.way in ADAPTERS:
            self.model = _with_adapters(model, config)
            self.optimizer = torch.optim.AdamW(self.trained(), lr=1.0, weight_decay=0.0)
        self.model.train()

    def trained(self) -> list[torch.nn.Parameter]:
        """Return what is trained."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

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

    def answers(self, pairs: Sequence[SourceAndTarget], size: int = 50) -> list[str]:
        """Answer questions greedily; no update can follow."""
        if isinstance(self.optimizer, netweight.LayerwiseOptimizer):
            self.optimizer.close()
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
    """Fine-tune and answer the test, in a fresh process."""
    given = FineTuning(**config)
    training, asked = wikisql("train")[given.first :], wikisql("test")[: given.tests]
    references = [pair.target for pair in asked]
    if given.way == BASE:
        return {"bleu": score(Student(given, training).answers(asked), references)}
    _warm_up(given, training)
    before = private_bytes()
    try:
        student = Student(given, training)
        losses, memory = first_steps(student, before)
    except (MissingExtra, Unsupported, ImportError, NotImplementedError) as error:
        return {"missing": f"{type(error).__name__}: {error}"}
    losses += [student.step() for _ in range(given.steps - len(losses))]
    return {
        "losses": [loss.hex() for loss in losses],
        "digests": {} if given.way in ADAPTERS else digests(student.model),
        "trained": sum(parameter.numel() for parameter in student.trained()),
        **memory,
        "bleu": score(student.answers(asked), references),
    }


def score(answers: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Return SacreBLEU of answers, with the ends of its 95 % bootstrap interval over questions."""
    with extra("evidence", "BLEU is computed by sacrebleu"):
        from sacrebleu.metrics.bleu import BLEU
    # Its resampling has a seed of its own, which the environment variable SACREBLEU_SEED changes.
    found = BLEU().corpus_score(list(answers), [list(references)], n_bootstrap=1000)
    return {
        "value": found.score,
        "low": found._mean - found._ci,
        "high": found._mean + found._ci,
        "n": len(answers),
        "exact": sum(answer == reference for answer, reference in zip(answers, references, strict=True)),
    }


def _quantizer_of(way: str) -> Any:
    """The quantizer of a way's base, or None."""
    return next((each for each in quantizers.quantizers() if each.name == ADAPTERS.get(way)), None)


def _with_adapters(model: Any, config: FineTuning) -> Any:
    """Put LoRA adapters on a base, which is quantized first if the way says so."""
    quantizer = _quantizer_of(config.way)
    if quantizer is not None:
        # transformers casts what enters `wo` to the dtype of its weight, so it is left in bf16, as it is when T5 is
        # loaded quantized.
        quantizers.quantize_(model, quantizer, quantizers.linear_layers(model, keep=("lm_head", "wo")))
    return _with_lora(model, rank=config.rank, targets=_ADAPTED, seed=derive(config.seed, "adapters"))


def _with_lora(model: torch.nn.Module, *, rank: int, targets: Sequence[str], seed: int) -> Any:
    """Put LoRA adapters on layers of a model; only they train afterwards."""
    # Source: Hu et al., LoRA, 2021; on a quantized base Dettmers et al., QLoRA, 2023.
    with extra("llm", "Adapters are trained with peft"):
        import peft
    marked: Any = model
    kinds = {type(module).__name__ for module in model.modules()}
    for layer, mark in (("Linear8bitLt", "is_loaded_in_8bit"), ("Linear4bit", "is_loaded_in_4bit")):
        if layer in kinds:  # peft looks for the marks that transformers sets when it loads such a model
            setattr(marked, mark, True)
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(marked, settings)


def _warm_up(config: FineTuning, pairs: Sequence[SourceAndTarget]) -> None:
    """Let libraries take once what they need, by an update of a model that is then forgotten."""
    quantizer = _quantizer_of(config.way)
    if quantizer is not None:
        quantizers.missing(quantizer)  # imports its library
    for way in (VANILLA, "LoRA on the bf16 base") if config.way in ADAPTERS else (VANILLA,):
        Student(replace(config, way=way, batch=2), pairs).step()


def take_turns(given: Mapping[str, Any]) -> dict[str, list[float]]:
    """CPU seconds per update of each way, in this process."""
    configs = [FineTuning(**fields) for fields in given["configs"]]
    students = {config.way: Student(config, wikisql("train")[config.first :]) for config in configs}
    return cpu_seconds(students, given["rounds"])


# ---- table 2 ---------------------------------------------------------------------------------------------------------


@table(
    "neuzip-table2",
    needs=("llm", "evidence", "data:text"),
    paper_needs=("T5 1B, 3B or 11B: --model FOLDER", "memory for it and its gradients, and days on a CPU"),
    stand_in=True,
)
def table2(scale: Scale, out: Path, *, model: str | None = None) -> MeasuredTable:
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
    found = dict(zip((config.way for config in configs), run_in_processes(run, configs, out), strict=True))
    missing = {way: result["missing"] for way, result in found.items() if "missing" in result}
    timed = [config for config in configs if config.way != BASE and config.way not in missing]
    given = {"configs": [asdict(config) for config in timed], "rounds": ROUNDS}
    seconds = seconds_in_turns(take_turns, given, out)
    name = base.name if model else "stand-in"
    return grid(
        {way: way for way in found},
        [
            (Column(f"{name} BLEU", "BLEU", "higher"), lambda way: found[way].get("bleu", {}).get("value")),
            (
                Column(f"{name} memory", "MiB", "lower"),
                lambda way: found[way]["counted"] / MIB if "counted" in found[way] else None,
            ),
            (
                Column(f"{name} speed", "iterations/s", "higher"),
                lambda way: 1 / median(seconds[way]) if way in seconds else None,
            ),
            (
                Column("speed", "× vanilla", "higher"),
                lambda way: speed_ratio(seconds[VANILLA], seconds[way]).estimate if way in seconds else None,
            ),
        ],
        differs=_differences(configs[0], about),
        findings=(*_same(found), *_quality(found), *_costs(found, speed_ratio(seconds[LOMO], seconds[COMPRESSED]))),
        notes=(
            *(f"{way} was not measured: {reason}" for way, reason in missing.items()),
            sampled_note(found),
            "Speed is by CPU seconds of one thread, the ways taking turns in one process.",
            "Full fine-tuning has the best of three learning rates (0.1, 0.5, 2; 24 updates, dev questions); that "
            "of AdamW was not tuned.",
        ),
        inputs=digests_of_texts("wikisql_12k.parquet"),
    )


def _base(out: Path) -> tuple[Path, dict[str, Any]]:
    """The base model, trained or found trained, and what came of it."""
    recipe = EncoderDecoderRecipe(schedule=Schedule(steps=BASE_STEPS, learning_rate=2e-3, check_every=150))
    folder = out / "base"
    return folder, trained(wikisql("train")[:SEEN], wikisql("dev")[:200], folder, recipe)


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


def _bleu(found: Mapping[str, Any], way: str) -> float:
    return float(found[way]["bleu"]["value"])


def _same(found: Mapping[str, Any]) -> list[Finding]:
    """That layer by layer training, dense and compressed, is the same training."""
    findings = []
    plain, compressed = BY_ADAMW
    for way, base in ((COMPRESSED, LOMO), (COMPRESSED, VANILLA), (compressed, plain)):
        what, difference = f"{way} against {base}", _bleu(found, way) - _bleu(found, base)
        findings += same_training(what, found[way], found[base])
        findings.append(Finding(f"{what}: difference in BLEU", difference, unit="BLEU", target=0, seeds=(SEED,)))
    return findings


def _quality(found: Mapping[str, Any]) -> list[Finding]:
    """BLEU of every way with its interval, and how far full fine-tuning is ahead of adapters, beside the paper."""
    findings = [
        Finding(
            f"BLEU, {way}", bleu["value"], ci95=(bleu["low"], bleu["high"]), n=bleu["n"], unit="BLEU", better="higher",
            seeds=(SEED,), detail={"interval": "bootstrap over test questions", "right to the letter": bleu["exact"]},
        )
        for way, result in found.items()
        if (bleu := result.get("bleu"))
    ]  # fmt: skip
    ahead: dict[str, Any] = {"unit": "BLEU", "better": "higher", "target": 0.0}
    bound = {"baseline": "the paper's T5 1B", "bound": "the paper: full fine-tuning is better"}
    for whole in (VANILLA, next(iter(BY_ADAMW))):
        findings.append(Finding(f"BLEU gained by {whole}", _bleu(found, whole) - _bleu(found, BASE), **ahead))
        for way in ADAPTERS:
            if "bleu" in found[way] and way.startswith("QLoRA"):
                name, gap = f"BLEU by which {whole} is ahead of {way}", _bleu(found, whole) - _bleu(found, way)
                baseline = _paper("BLEU", VANILLA) - _paper("BLEU", way)
                findings.append(Finding(name, gap, baseline=baseline, detail=bound, **ahead))
    return findings


def _costs(found: Mapping[str, Any], speed: Interval) -> list[Finding]:
    """Memory and speed of compression, beside the paper's ratios."""
    findings = []
    for base in (VANILLA, LOMO):
        ratio = found[COMPRESSED]["counted"] / found[base]["counted"]
        told = against_paper(_paper_ratio("memory", base), "lower", "T5 1B")
        findings.append(Finding(f"{COMPRESSED} against {base}: peak of tensors", ratio, **told))
    told = against_paper(_paper_ratio("speed", LOMO), "higher", "T5 1B")
    return [*findings, interval_finding(f"{COMPRESSED} against {LOMO}: iterations per second", speed, **told)]


def _paper(what: str, way: str) -> float:
    """A number of the published table, for T5 1B."""
    return published_number("neuzip-table2", f"T5 1B {what}", way)


def _paper_ratio(what: str, base: str) -> float:
    return round(_paper(what, COMPRESSED) / _paper(what, base), 3)
