"""One pre-training run of a decoder language model from random weights, with its losses and its memory.

`run` happens in a process of its own, so that what is sampled of its memory is the training's. Used by
`neuzip_training.py` for table 1 and for figure 2.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from netweight_experiments.toys.decoder import MINIATURE, made

from netweight.core.seeds import derive, torch_generator
from netweight.reproduce.training_ways import arrange, digests

if TYPE_CHECKING:
    import torch

__all__ = ["Pretraining", "Trainee", "run"]

_WATCHED = 3  # updates during which the process' memory is sampled


@dataclass(frozen=True)
class Pretraining:
    """Everything that decides on a run.

    Attributes:
        way: One of `training_ways.WAYS`.
        shape: A key of `zoo.shapes.SHAPES`.
        steps: Updates.
        learning_rate: At the start; it falls linearly towards 0.
        optimizer: "SGD" or "AdamW".
        batch: Windows per update.
        window: Tokens per window.
        checkpointing: Whether activations are calculated again, by non-reentrant checkpointing of every layer.
        held_out: Windows of the test text on which the loss is measured at the end.
        vocabulary: Tokens of the tokenizer, at most what the model has.
        seed: Seed of weights and batches.
    """

    way: str
    shape: str = MINIATURE
    steps: int = 24
    learning_rate: float = 0.1
    optimizer: str = "SGD"
    batch: int = 4
    window: int = 256
    checkpointing: bool = True
    held_out: int = 16
    vocabulary: int = 2048
    seed: int = 20241031


class Trainee:
    """A model, its optimizer and its text: what takes steps.

    Args:
        config: How to train.
        valid: The text to learn.
    """

    def __init__(self, config: Pretraining, valid: str) -> None:
        import torch

        from netweight.data.tokenizer import train_bpe

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
        import torch

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
        import torch

        from netweight.data.corpora import count_words

        ids = self.tokenizer(text, verbose=False)["input_ids"]
        first = torch.tensor(ids[: self.config.held_out * self.config.window])
        windows = first.view(-1, self.config.window)
        self.model.eval()
        with torch.inference_mode():
            losses = [float(self.model(input_ids=row[None], labels=row[None]).loss) for row in windows]
        mean = math.fsum(losses) / len(losses)
        return mean, mean * len(ids) / count_words(text)


def run(config: dict[str, Any]) -> dict[str, Any]:
    """Train, in a fresh process: see `netweight.metrics.memory.in_fresh_process`.

    The second update is counted tensor by tensor, the next three are sampled; the others are timed.

    Args:
        config: The fields of a `Pretraining`.

    Returns:
        losses (hexadecimal, nats per token), held_out per token and per word, digests of the weights, weights (their
        number), counted bytes and their parts, sampled bytes, seconds of the other updates.
    """
    import torch

    from netweight.data.corpora import wikitext2
    from netweight.metrics.memory import PrivateMemory, TensorLedger, private_bytes

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
    import torch

    small = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    changes = small if tiny else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(config.seed, "initialization"))
        torch.set_default_dtype(torch.bfloat16)
        try:
            return made(config.shape, **changes)
        finally:
            torch.set_default_dtype(torch.float32)
