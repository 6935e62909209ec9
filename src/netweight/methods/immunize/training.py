"""`immunize`: train a defense into a model, side by side so that memory is that of one, resumable bit for bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, final

import torch
from torch import nn

from netweight.attacks.finetuning.examples import Batch, Example, collate
from netweight.core import digest
from netweight.core.environment import describe
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.errors import TrainingStopped
from netweight.methods.immunize.backward import TermLog, backward
from netweight.methods.immunize.baselines import response_loss
from netweight.methods.immunize.catalog import named_defense
from netweight.methods.immunize.checkpoint import Checkpoint
from netweight.methods.immunize.defense import Defense, Side, Term
from netweight.methods.immunize.freezing import frozen
from netweight.methods.immunize.intake import check_data, vocabulary_of
from netweight.methods.immunize.master_weights import MasterWeights
from netweight.methods.immunize.pairs import Pair, PairBatch, collate_pairs
from netweight.methods.immunize.record import Record, StepLog
from netweight.methods.immunize.settings import Settings

__all__ = ["CHECKPOINT", "RECORD", "immunize"]

CHECKPOINT = "immunize.net.safetensors"
"""The checkpoint's name in the folder."""
RECORD = "immunize.json"
"""The record's name in the folder."""
_KEPT = ("retain", "general")
"""Terms that must not diverge."""
_PATIENCE = 5
"""So many steps in a row may be far worse than guessing."""


def immunize(
    model: nn.Module,
    pairs: Sequence[Pair],
    retain: Sequence[Example] = (),
    *,
    defense: Defense | str = "repnoise",
    settings: Settings | None = None,
    folder: str | Path | None = None,
    pad_id: int = 0,
    progress: Progress = QUIET,
) -> Record:
    """Train a defense into a model, in place.

    Parameters that require a gradient are trained, so a model with LoRA adapters has its adapters immunized. Weights in
    bfloat16 or float16 are stepped in float32. The sides of a batch go forward and backward one after the other.

    Args:
        model: A causal language model that is called as those of transformers.
        pairs: At least one, each within the context.
        retain: Examples of ability that is to be kept; at each step a batch of them joins the loss as "general".
        defense: A defense or its name in the catalog.
        settings: How it is trained; None takes the catalog's, or the defaults for a defense that is not in it.
        folder: Where a checkpoint and finally the record are written. A second call with the same model, data and
            settings continues where the first one was killed, to the same bits.
        pad_id: What stands after the end of shorter rows. Only the published loss, which takes it for text, depends
            on it.
        progress: Where progress is shown.

    Returns:
        The record of what was done; write it beside the weights.

    Raises:
        UsageError: Rows cannot be trained on, there are no such layers to freeze, nothing is left to train, or the
            folder holds another training.
        Unsupported: The model lacks a part that the defense needs.
        NameNotFound: There is no such defense.
        TrainingStopped: NaN, infinity, or a loss on what is to be kept that stays far above that of guessing. With a
            folder the model then holds the last good checkpoint, else the weights before the step that failed.
    """
    if isinstance(defense, str):
        entry = named_defense(defense)
        defense, settings = entry.defense, settings or entry.settings
    settings = settings or Settings()
    check_data(model, pairs, retain, context=settings.context)
    options: dict[str, Any] = asdict(defense)  # type: ignore[call-overload]
    digests = {
        "pairs": digest.of_config([asdict(pair) for pair in pairs]),
        "retain": digest.of_config([asdict(example) for example in retain]),
        "before": _digest_of(model),
    }
    identity = digest.of_config([defense.name, options, asdict(settings), digests, pad_id])
    held: AbstractContextManager[object] = nullcontext() if settings.frozen is None else frozen(model, settings.frozen)
    with held, defense.prepared(model, seed=derive(settings.seed, "prepare")):
        steps: list[StepLog] = []
        trained = 0
        if defense.trains:
            training = _Training(model, defense, settings, pairs, retain, pad_id)
            checkpoint = None if folder is None else Path(folder) / CHECKPOINT
            training.run(checkpoint, identity, progress)
            steps, trained = training.steps, sum(value.numel() for value in training.weights.parameters)
    digests["after"] = _digest_of(model)
    record = Record(defense.name, options, asdict(settings), digests, trained, steps, describe())
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        record.write(Path(folder) / RECORD)
    return record


def _digest_of(model: nn.Module) -> str:
    return digest.of_config({name: digest.of_tensor(value) for name, value in model.named_parameters()})


@contextmanager
def _training_mode(model: nn.Module) -> Iterator[None]:
    """Put all modules into training mode, and back into the mode that each was in."""
    modes = {module: module.training for module in model.modules()}
    model.train()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@final
class _Training:
    """A training under way."""

    def __init__(
        self,
        model: nn.Module,
        defense: Defense,
        settings: Settings,
        pairs: Sequence[Pair],
        retain: Sequence[Example],
        pad_id: int,
    ) -> None:
        self.model, self.defense, self.settings = model, defense, settings
        self.pairs, self.retain, self.pad_id = pairs, retain, pad_id
        self.weights = MasterWeights(model)
        self.optimizer = torch.optim.Adam(self.weights.masters.values(), lr=settings.lr)
        self.balance: dict[str, float] = {}
        self.steps: list[StepLog] = []
        self.per_epoch = math.ceil(len(pairs) / settings.batch_size)
        self.count = settings.epochs * self.per_epoch
        self.device = self.weights.parameters[0].device
        self._limit = 2 * math.log(vocabulary_of(model) or math.inf)
        self._bad = 0

    def run(self, checkpoint: Path | None, identity: str, progress: Progress) -> None:
        """Train to the end, from the checkpoint if there is one."""
        if checkpoint is not None and checkpoint.exists():
            self._restore(Checkpoint.load(checkpoint, identity))
        with _training_mode(self.model), progress.task(self.defense.name, self.count, unit="steps") as task:
            task.update(len(self.steps))
            while len(self.steps) < self.count:
                problem = self._step()
                if problem is not None:
                    self._stop(problem, checkpoint, identity)
                # Weights of steps that may turn out to be the beginning of the end are not kept.
                if checkpoint is not None and not self._bad and self._due():
                    Checkpoint.take(self.weights, self.optimizer, self.balance, self.steps).save(checkpoint, identity)
                task.update()
                task.describe(f"{self.defense.name} " + ", ".join(map(_shown, self.steps[-1].terms.items())))

    def _due(self) -> bool:
        done = len(self.steps)
        return done % self.settings.save_every == 0 or done == self.count

    def _restore(self, checkpoint: Checkpoint) -> None:
        checkpoint.restore(self.weights, self.optimizer)
        self.balance, self.steps = dict(checkpoint.balance), list(checkpoint.steps)

    def _stop(self, problem: str, checkpoint: Path | None, identity: str) -> None:
        step = len(self.steps)
        self.weights.clear()
        kept = "The model holds the weights before this step."
        if checkpoint is not None and checkpoint.exists():
            self._restore(Checkpoint.load(checkpoint, identity))
            kept = f"The model holds the weights after step {len(self.steps)}, from {checkpoint}."
        raise TrainingStopped(
            f"Step {step + 1} of {self.defense.name} stopped: {problem}. {kept}",
            cure="Lower the learning rate or the weight of the ascent.",
        )

    def _step(self) -> str | None:
        """Make a step; the problem if there is one, and then the step is not made."""
        step, settings = len(self.steps), self.settings
        measure = step % settings.measure_every == 0
        generator = torch_generator(settings.seed, "noise", step)
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            torch.manual_seed(derive(settings.seed, "dropout", step))
            terms = self._backward(step, generator, measure=measure)
        norm = self.weights.norm()
        if (problem := self._problem(terms, norm)) is not None:
            return problem
        self.weights.clip(norm, settings.clip)
        rate = settings.rate(step, self.count)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.weights.write_back()
        self.weights.clear()
        self.steps.append(StepLog(step, rate, norm, terms))
        return None

    def _backward(self, step: int, generator: torch.Generator, *, measure: bool) -> dict[str, TermLog]:
        """Gradients of all sides, one after the other."""
        terms: dict[str, TermLog] = {}
        parameters = self.weights.parameters
        with closing(self.defense.sides(self.model, self._batch(step), generator)) as sides:
            for side in sides:
                terms |= backward(side, parameters, self.balance, measure=measure)
                del side  # before the next one is computed, the graph of this one is gone
                self.weights.take_gradients()
        if self.retain:
            general: Side = {"general": Term(response_loss(self.model, self._retained(step)))}
            terms |= backward(general, parameters, self.balance, measure=measure)
            self.weights.take_gradients()
        return terms

    def _problem(self, terms: Mapping[str, TermLog], norm: float) -> str | None:
        for name, term in terms.items():
            if not math.isfinite(term.value):
                return f"the term {name!r} is {term.value}"
        if not math.isfinite(norm):
            return f"the gradient of {self.weights.not_finite() or 'several weights together'} is not finite"
        kept = [terms[name].value for name in _KEPT if name in terms]
        self._bad = self._bad + 1 if any(value > self._limit for value in kept) else 0
        if self._bad >= _PATIENCE:
            return (
                f"the loss on what is to be kept was above {self._limit:.1f}, twice that of guessing, {_PATIENCE} times"
            )
        return None

    def _drawn(self, count: int, size: int, step: int, stream: str) -> list[int]:
        """Indices of a step's rows: all rows in a random order, then all again in another."""
        per_pass = math.ceil(count / size)
        generator = torch_generator(self.settings.seed, stream, step // per_pass)
        order: list[int] = torch.randperm(count, generator=generator).tolist()
        first = step % per_pass * size
        return order[first : first + size]

    def _batch(self, step: int) -> PairBatch:
        rows = self._drawn(len(self.pairs), self.settings.batch_size, step, "order")
        chosen = [self.pairs[row] for row in rows]
        return collate_pairs(chosen, pad_id=self.pad_id, aligned=self.defense.aligned).to(self.device)

    def _retained(self, step: int) -> Batch:
        rows = self._drawn(len(self.retain), self.settings.batch_size, step, "retain")
        return collate([self.retain[row] for row in rows], pad_id=self.pad_id).to(self.device)


def _shown(entry: tuple[str, TermLog]) -> str:
    name, term = entry
    return f"{name} {term.value:.3g}"
