"""Training of a defense, in one process or in several that share every batch; resumed to the same bits.

`immunize` is the entry point, `_Training` makes the steps.
`ImmunizeTrainer` takes its gradients from `add_gradients`, too, and leaves the rest to transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from netweight.core.digests import digest_config, digest_tensor
from netweight.core.environment import describe
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive
from netweight.data.tokens import AnswerPair, Batch, Example, collate
from netweight.errors import TrainingStopped, UsageError
from netweight.hf.load_language_model import frozen
from netweight.job import Job
from netweight.methods.immunize.batches import collate_part, drawn_rows
from netweight.methods.immunize.compact_adam import CompactAdam, compact_states
from netweight.methods.immunize.defense import Defense, DefenseSettings
from netweight.methods.immunize.defenses import DEFENSES
from netweight.methods.immunize.distributed import (
    ProcessGroup,
    Spread,
    average_gradients,
    put,
    sharded_like,
    spread_of,
    whole,
)
from netweight.methods.immunize.divergence import DivergenceMonitor
from netweight.methods.immunize.gradients import TermLog, add_gradients
from netweight.methods.immunize.inputs import check_inputs
from netweight.methods.immunize.master_weights import MasterWeights
from netweight.methods.immunize.pairs import PairBatch, blank, collate_pairs
from netweight.methods.immunize.record import RECORD, Record, StepLog
from netweight.methods.immunize.settings import TrainingSettings, recommended_training
from netweight.nn.hooks import in_mode

# The checkpoint's name in a training's folder.
CHECKPOINT = "immunize.net.safetensors"
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # Adam's


def immunize(
    model: nn.Module,
    pairs: Sequence[AnswerPair],
    retain: Sequence[Example] = (),
    *,
    defense: DefenseSettings | Defense[Any] | str = "repnoise",
    settings: TrainingSettings | None = None,
    folder: str | Path | Job | None = None,
    pad_id: int = 0,
    progress: Progress = QUIET,
) -> Record:
    """Train a defense into a model, in place.

    Parameters that require a gradient are trained, so a model with LoRA adapters has its adapters immunized. Weights in
    bfloat16 or float16 are stepped in float32. The sides of a batch go forward and backward one after the other.

    Several processes train one model together where it is wrapped by `DistributedDataParallel` or sharded by FSDP2's
    `fully_shard`: each calls this with the same arguments, computes its part of every batch, and the result is that of
    one process with whole batches, save for rounding and dropout. The first one writes the folder.

    Args:
        model: A causal language model that is called as those of transformers.
        pairs: At least one, each within the context.
        retain: Examples of ability that is to be kept; at each step a batch of them joins the loss as "retained".
        defense: A defense's settings, its name (see docs/immunize.md), or a `Defense` of one's own.
        settings: How it is trained; None takes what the defense recommends.
        folder: Where checkpoints (see `checkpoint_every`) and finally the record are written, or a job that is open. A
            second call with the same model, data and settings continues from the last checkpoint, to the same bits.
        pad_id: What stands after the end of shorter rows. Only the published loss, which takes it for text, depends
            on it.
        progress: Where progress is shown.

    Returns:
        The record of what was done; write it beside the weights.

    Raises:
        UsageError: Rows cannot be trained on, there are no such layers to freeze, nothing is left to train, the
            folder holds another training, or the processes were not given the same.
        Unsupported: The model lacks a part that the defense needs, or is spread over processes in another way.
        NameNotFound: There is no such defense.
        TrainingStopped: NaN, infinity, or a loss on what is to be kept that stays far above guessing and its start.
            With a folder the model then holds the last good checkpoint, else the weights before the step that failed.
    """
    defense = defense_of(defense)
    settings = settings or recommended_training(defense.settings)
    spread = spread_of(model)
    model, group = spread.model, spread.group
    group.check(lambda: check_inputs(model, pairs, retain, context=settings.context))
    digests = {
        "pairs": digest_config([asdict(pair) for pair in pairs]),
        "retain": digest_config([asdict(example) for example in retain]),
        "before": _digest_of(model),
    }
    key = {
        "defense": {"name": defense.name, **defense.options}, "settings": settings.to_json(),
        "model": digests["before"], "pairs": digests["pairs"], "retain": digests["retain"], "pad_id": pad_id,
    }  # fmt: skip
    identity = digest_config(key)
    _check_same(identity, group)
    jobs: list[Job] = []  # the first process's
    with ExitStack() as stack:
        if settings.frozen is not None:
            stack.enter_context(frozen(model, settings.frozen))
        stack.enter_context(defense.preparation(model, seed=derive(settings.seed, "prepare")))
        if folder is not None:
            job = Job.open(folder, key=key, of="a training", state=CHECKPOINT)
            group.first(lambda: jobs.append(stack.enter_context(job)))
        steps: list[StepLog] = []
        trained = 0
        if defense.trains:
            checkpoint = None if folder is None else (identity, jobs)
            training = _Training(spread, defense, settings, pairs, retain, pad_id, checkpoint)
            training.run(QUIET if group.rank else progress)
            steps, trained = training.steps, sum(value.numel() for value in training.weights.parameters)
        digests["after"] = _digest_of(model)
        environment = {**describe(), "processes": group.size}
        record = Record(defense.name, defense.options, settings.to_json(), digests, trained, steps, environment)
        if folder is not None:
            group.first(lambda: record.write(jobs[0].folder / RECORD))
    return record


def defense_of(defense: DefenseSettings | Defense[Any] | str) -> Defense[Any]:
    """Return what computes the loss of a defense: of its settings, or of a name."""
    if isinstance(defense, Defense):
        return defense
    settings = DEFENSES[defense]() if isinstance(defense, str) else defense
    assert isinstance(settings, DefenseSettings)
    return settings.build()


def _digest_of(model: nn.Module) -> str:
    return digest_config({name: digest_tensor(whole(value)) for name, value in model.named_parameters()})


def _check_same(identity: str, group: ProcessGroup) -> None:
    """Refuse processes that would train different things together."""
    others = group.first(lambda: identity) != identity
    differing = [rank for rank, differs in enumerate(group.counts(int(others))) if differs]
    if differing:
        raise UsageError(
            f"Process {differing[0]} was given another model, defense, data or settings than process 0.",
            cure="Call immunize with the same arguments in all processes, weights and order of rows included.",
        )


class _Training:
    """A training under way."""

    def __init__(
        self,
        spread: Spread,
        defense: Defense[Any],
        settings: TrainingSettings,
        pairs: Sequence[AnswerPair],
        retain: Sequence[Example],
        pad_id: int,
        checkpoint: tuple[str, list[Job]] | None,
    ) -> None:
        # The identity that a checkpoint must have, and in the first process the job that contains it; None without one.
        self.checkpoint = checkpoint
        self.model, self.group, self.device = spread.model, spread.group, spread.device
        self.defense, self.settings = defense, settings
        self.pairs, self.retain, self.pad_id = pairs, retain, pad_id
        compact = compact_states(self.model, settings, self.group)
        self.weights = MasterWeights(self.model, compact=compact)
        masters = self.weights.masters
        self.optimizer = None if compact else torch.optim.Adam(masters.values(), lr=settings.lr)
        self.compact = CompactAdam(masters) if compact else None
        self.balance: dict[str, float] = {}
        self.steps: list[StepLog] = []
        self.per_epoch = math.ceil(len(pairs) / settings.batch_size)
        self.count = settings.epochs * self.per_epoch
        self.divergence = DivergenceMonitor(self.model)

    def run(self, progress: Progress) -> None:
        """Train to the end, from the checkpoint if there is one."""
        self._restore()
        with in_mode(self.model, training=True), progress.task(self.defense.name, self.count, unit="steps") as task:
            task.update(len(self.steps))
            while len(self.steps) < self.count:
                problem = self._step()
                if problem is not None:
                    self._stop(problem)
                # Weights of steps that may turn out to be the beginning of the end are not kept.
                done = len(self.steps)
                every = self.settings.checkpoint_every
                if not self.divergence.bad and every is not None and (done % every == 0 or done == self.count):
                    self._save()
                task.update()
                task.describe(f"{self.defense.name} " + ", ".join(map(_term_text, self.steps[-1].terms.items())))

    def _save(self) -> None:
        """Keep all of training between two steps; the first process does, with all others' parts."""
        if self.checkpoint is None:
            return
        identity, jobs = self.checkpoint
        about = {"identity": identity, "balance": self.balance, "steps": [asdict(step) for step in self.steps]}
        self.group.first_consuming(self._tensors(), lambda tensors: jobs[0].save(about, tensors))

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self.weights.masters.items():
            yield f"weight|{name}", whole(master)
        if self.compact is not None:
            yield from self.compact.tensors()
            return
        assert self.optimizer is not None
        for name, master in self.weights.masters.items():
            for kind in _MOMENTS if master in self.optimizer.state else ():
                yield f"{kind}|{name}", whole(self.optimizer.state[master][kind])

    @torch.no_grad()
    def _restore(self) -> bool:
        """Go back to what was kept, which the first process reads for all; False if there is nothing."""
        if self.checkpoint is None:
            return False
        (_, jobs), tensors = self.checkpoint, dict[str, Tensor]()

        def read() -> tuple[dict[str, Any], set[str]] | None:
            stored = jobs[0].load()
            tensors.update(stored[1] if stored else {})
            return stored and (stored[0], set(tensors))

        record = self.group.first(read)
        if record is None:
            return False
        about, names = record
        for name, master in self.weights.masters.items():
            put(master, self.group.spread(tensors.get(f"weight|{name}"), master))
            if self.optimizer is None:
                continue
            state: dict[str, Tensor] = {}
            for kind in (kind for kind in _MOMENTS if f"{kind}|{name}" in names):
                # Adam stores its count of steps on the CPU.
                like = torch.zeros(()) if kind == "step" else master
                state[kind] = sharded_like(self.group.spread(tensors.get(f"{kind}|{name}"), like), like)
            self.optimizer.state.pop(master, None)
            if state:
                self.optimizer.state[master] = state
        if self.compact is not None:
            self.compact.restore(tensors, len(about["steps"]))
        self.weights.write_back()
        self.balance, self.steps = about["balance"], [StepLog.from_json(values) for values in about["steps"]]
        self.divergence = DivergenceMonitor(self.model, self.steps[0].terms)
        return True

    def _stop(self, problem: str) -> None:
        step = len(self.steps)
        self.weights.clear()
        held = "The model contains the weights before this step."
        if self._restore():
            held = f"The model contains the weights after step {len(self.steps)}, from {CHECKPOINT}."
        raise TrainingStopped(
            f"Step {step + 1} of {self.defense.name} stopped: {problem}. {held}",
            cure="Give a lower lr (--lr), or less weight to the terms that raise a loss.",
        )

    def _step(self) -> str | None:
        """Make a step; the problem if there is one, and then the step is not made."""
        step, settings = len(self.steps), self.settings
        terms = add_gradients(
            self.defense, self.model, self._batch(step), self._retained(step), self.weights.parameters, self.balance,
            draws=(settings.seed, step), measure=step % settings.measure_every == 0, then=self.weights.take_gradients,
        )  # fmt: skip
        average_gradients((self.weights.trained if self.weights.compact else self.weights.masters).values(), self.group)
        norm = self.weights.norm(self.group)
        if (problem := self.divergence.problem(terms)) is not None:
            return problem
        if not math.isfinite(norm):
            return f"the gradient of {self.weights.not_finite(self.group) or 'several weights together'} is not finite"
        self.weights.clip(norm, settings.clip)
        rate = settings.rate(step, self.count)
        if self.compact is not None:
            self.compact.step(self.weights.gradients, rate)
        elif self.optimizer is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = rate
            self.optimizer.step()
        self.weights.write_back()
        self.weights.clear()
        self.steps.append(StepLog(step, rate, norm, terms))
        return None

    def _drawn(self, count: int, step: int, stream: str) -> list[int]:
        return drawn_rows(count, self.settings.batch_size, step, seed=self.settings.seed, stream=stream)

    def _batch(self, step: int) -> PairBatch:
        rows = self._drawn(len(self.pairs), step, "order")
        chosen = [self.pairs[row] for row in self.group.part(rows)]
        if chosen:
            batch = collate_pairs(chosen, pad_id=self.pad_id, aligned=self.defense.aligned)
        else:
            one = blank(collate([self.pairs[rows[0]].harmless], pad_id=self.pad_id))
            # Both sides are equal, so the published loss does not look at either.
            batch = PairBatch(one, one)
        return replace(batch, group=self.group).to(self.device)

    def _retained(self, step: int) -> Batch | None:
        if not self.retain:
            return None
        rows = self._drawn(len(self.retain), step, "retain")
        return collate_part(self.retain, rows, self.group, pad_id=self.pad_id).to(self.device)


def _term_text(entry: tuple[str, TermLog]) -> str:
    name, term = entry
    return f"{name} {term.value:.3g}"
