"""One fine-tuning run of an encoder-decoder that writes SQL from questions: full, compressed, or adapters on a base.

`run` happens in a process of its own, so that what is sampled of its memory is the training's. Adapters are LoRA by
peft, on a base that bitsandbytes or torchao has quantized. Used by `neuzip_sql.py` for table 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.core.seeds import derive, torch_generator
from netweight.errors import MissingExtra, Unsupported
from netweight.reproduce.training_ways import COMPRESSED, VANILLA, WAYS, arrange, digests

if TYPE_CHECKING:
    from netweight.data.corpora import Pair

__all__ = ["ADAPTERS", "BASE", "BY_ADAMW", "FineTuning", "Student", "quantizer_of", "run", "score"]

_ADAPTED = ["q", "k", "v", "o", "wi_0", "wi_1", "wo"]
_WATCHED = 3  # updates during which the process' memory is sampled
BASE = "the base, before fine-tuning"
"""Name of the row that trains nothing."""
BY_ADAMW = {"Vanilla by AdamW": VANILLA, "LOMO + NeuZip lossless by AdamW": COMPRESSED}
"""Rows of full fine-tuning with the optimizer that adapters have; the paper has none."""
ADAPTERS = {
    "LoRA on the bf16 base": None,
    "QLoRA INT8": "Quant INT8",
    "QLoRA FP4": "Quant FP4",
    "QLoRA FP4^2": "Quant FP4^2",
    "QLoRA NF4": "Quant NF4",
    "QLoRA NF4^2": "Quant NF4^2",
}
"""Rows that train adapters, by the paper's names → the quantizer of the base, by its name in `quantizers`."""


@dataclass(frozen=True)
class FineTuning:
    """Everything that decides on a run, but the base.

    Attributes:
        way: One of `WAYS`, a key of `BY_ADAMW` or of `ADAPTERS`, or `BASE`.
        base: Folder of the base model.
        first: The first training pair that the base has not seen.
        steps: Updates.
        learning_rate: Of full fine-tuning by SGD, at the start; it falls linearly towards 0.
        adapter_learning_rate: Of adapters, and of everything else that AdamW steps.
        rank: Of the adapters, on every linear layer of attention and feed-forward.
        batch: Pairs per update.
        tests: Test questions that are answered.
        seed: Seed of batches, dropout and adapters.
    """

    way: str
    base: str
    first: int
    steps: int = 60
    learning_rate: float = 0.1
    adapter_learning_rate: float = 2e-3
    rank: int = 8
    batch: int = 16
    tests: int = 100
    seed: int = 20241031


class Student:
    """A base made ready to be fine-tuned one way: what takes steps.

    Args:
        config: How.
        pairs: What to learn.

    Raises:
        MissingExtra: The quantizer or peft is not installed.
        Unsupported: The quantizer or the adapters do not take this model on this machine.
    """

    def __init__(self, config: FineTuning, pairs: Sequence[Pair]) -> None:
        import torch

        from netweight.hf.load_language_model import language_model

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
        import torch
        from netweight_experiments.toys.encoder_decoder import batches

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
        import torch
        from netweight_experiments.toys.encoder_decoder import LONGEST, batches

        import netweight

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
    """Fine-tune and answer the test, in a fresh process: see `memory_ledger.in_fresh_process`.

    The second update is counted tensor by tensor, the next three are sampled.

    Args:
        config: The fields of a `FineTuning`.

    Returns:
        losses (hexadecimal, nats per token), digests of the weights (none for adapters), trained (number of weights
        that are), counted bytes and their parts, sampled bytes, bleu with its interval. For `BASE` only bleu. Where
        the way cannot run here, only missing: the reason.
    """
    from netweight.data.corpora import wikisql
    from netweight.metrics.memory import PrivateMemory, TensorLedger, private_bytes

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
    """Return SacreBLEU of answers, with the ends of its 95 % bootstrap interval over questions.

    Args:
        answers: What was written.
        references: What should have been, one each.

    Returns:
        value, low, high, n and exact, the number of answers that are right to the letter.

    Raises:
        MissingExtra: sacrebleu is not installed.
    """
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
    from netweight.hf.quantizers import quantizers

    return next((quantizer for quantizer in quantizers() if quantizer.name == ADAPTERS.get(way)), None)


def _with_adapters(model: Any, config: FineTuning) -> Any:
    """Put LoRA adapters on a base, which is quantized first if the way says so."""
    from netweight.hf.peft import with_lora
    from netweight.hf.quantizers import linear_layers, quantize_

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
        from netweight.hf.quantizers import missing

        missing(quantizer)  # imports its library
    for way in (VANILLA, "LoRA on the bf16 base") if config.way in ADAPTERS else (VANILLA,):
        Student(replace(config, way=way, batch=2), pairs).step()
