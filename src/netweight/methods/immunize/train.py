"""What is checked before any work: every pair and example fits the model. Used by `training.py` and the trainer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from netweight.core import digest
from netweight.core.environment import describe
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.data.examples import Batch, Example, Pair, collate
from netweight.errors import TrainingStopped, UsageError
from netweight.hf.load_language_model import positions_of
from netweight.job import Job
from netweight.methods.immunize.baselines import response_loss
from netweight.methods.immunize.catalog import named_defense
from netweight.methods.immunize.decoder import structure_of
from netweight.methods.immunize.defense import Defense, PairBatch, Side, Term, blank, collate_pairs, own_rows
from netweight.methods.immunize.distributed import (
    ALONE,
    Ranks,
    Spread,
    common_norm,
    is_sharded,
    local,
    put,
    sharded_like,
    spread_of,
    whole,
)
from netweight.methods.immunize.repnoise import TermLog, backward
from netweight.methods.immunize.settings import Settings
from netweight.store.checkpoint import read_record, write_record

_NAMED = 5  # of several bad rows so many are named


def vocabulary_of(model: nn.Module) -> int | None:
    """How many tokens the model knows, by its input embedding; None if it has none that can be found."""
    for module in model.modules():
        accessor = getattr(module, "get_input_embeddings", None)
        found: Any = accessor() if callable(accessor) else module if isinstance(module, nn.Embedding) else None
        if getattr(found, "weight", None) is not None:
            return int(found.weight.shape[0])
    return None


def check_data(
    model: nn.Module, pairs: Sequence[Pair], retain: Sequence[Example], *, context: int | None = None
) -> None:
    """Check that all rows can be trained on."""
    if not pairs:
        raise UsageError("There is no pair to train on.", cure="Give rows of prompt, chosen and rejected.")
    limits = [limit for limit in (context, positions_of(model)) if limit is not None]
    context = min(limits, default=None)
    vocabulary = vocabulary_of(model)
    rows = [(f"pair {row}, chosen", pair.harmless) for row, pair in enumerate(pairs)]
    rows += [(f"pair {row}, rejected", pair.harmful) for row, pair in enumerate(pairs)]
    rows += [(f"retain {row}", example) for row, example in enumerate(retain)]
    if context is not None:
        long = [f"{name} ({len(example)} tokens)" for name, example in rows if len(example) > context]
        _refuse(long, f"longer than the context of {context} tokens", "Cut or leave out these rows.")
    if vocabulary is not None:
        strange = [
            name
            for name, example in rows
            if not all(0 <= token < vocabulary for token in example.prompt + example.response)
        ]
        _refuse(strange, f"with tokens outside the vocabulary of {vocabulary}", "Use the model's own tokenizer.")


def _refuse(rows: list[str], reason: str, cure: str) -> None:
    if rows:
        more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
        raise UsageError(f"{len(rows)} rows are {reason}: {'; '.join(rows[:_NAMED])}{more}.", cure=cure)


_CURE = 'Write numbers from 0, ranges such as "10-20" with both ends, "last" or "head", with commas between.'


def block_numbers(layers: str, blocks: int) -> tuple[list[int], bool]:
    """Read which layers are meant."""
    # Numbers are read as numbers. The code of RepNoise looks for the digits "0" to "9" in a parameter's name where
    # layers 0 to 10 are meant, and so finds every block of a model with 32: the paper's row "0-10" of table 6 is that
    # of a model all of whose blocks were frozen, if it came from this code.
    numbers: set[int] = set()
    head = False
    for part in (text.strip() for text in layers.split(",")):
        span = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if part == "head":
            head = True
        elif part == "last":
            numbers.add(blocks - 1)
        elif span is None:
            raise UsageError(f"{part!r} names no layers.", cure=_CURE)
        else:
            first = int(span[1])
            last = int(span[2] or first)
            if not first <= last < blocks:
                raise UsageError(f"There are no layers {part!r}: the model has blocks 0 to {blocks - 1}.", cure=_CURE)
            numbers.update(range(first, last + 1))
    return sorted(numbers), head


@contextmanager
def frozen(model: nn.Module, layers: str) -> Iterator[list[str]]:
    """Keep layers from being trained within a block of code."""
    parts = structure_of(model)
    numbers, head = block_numbers(layers, len(parts.blocks))
    modules = [list(parts.blocks.values())[number] for number in numbers] + [parts.unembedding] * head
    chosen = {id(value) for module in modules for value in module.parameters()}
    held = {name: value for name, value in model.named_parameters() if id(value) in chosen and value.requires_grad}
    try:
        for value in held.values():
            value.requires_grad_(False)
        yield list(held)
    finally:
        for value in held.values():
            value.requires_grad_(True)


_NARROW = (torch.bfloat16, torch.float16)


@final
class MasterWeights:
    """What an optimizer steps: a float32 copy of each trained weight that is narrower, else the weight itself."""

    def __init__(self, model: nn.Module) -> None:
        # The model's own parameters, by name.
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        if not self.trained:
            raise UsageError(
                "No weight of the model requires a gradient.", cure="Call requires_grad_(True) on what is to train."
            )
        # What is stepped in their stead, by the same names.
        self.masters = {
            name: nn.Parameter(value.detach().float()) if value.dtype in _NARROW else value
            for name, value in self.trained.items()
        }

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's own trained parameters."""
        return list(self.trained.values())

    def take_gradients(self) -> None:
        """Add the narrow gradients to those of the float32 copies and free them."""
        for name, value in self.trained.items():
            master = self.masters[name]
            if master is not value and value.grad is not None:
                grad = value.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                value.grad = None

    def average(self, ranks: Ranks) -> None:
        """Average the gradients over all processes; FSDP has averaged those of its shards."""
        if ranks.size > 1:
            for master in self.masters.values():
                if master.grad is None and not is_sharded(master):  # other processes may have one
                    master.grad = torch.zeros_like(master)
            ranks.average(grad for grad in self._gradients() if not is_sharded(grad))

    def norm(self, ranks: Ranks) -> float:
        """The common norm of all gradients."""
        return common_norm(self._gradients(), ranks)

    @torch.no_grad()
    def clip(self, norm: float, most: float) -> None:
        """Scale all gradients, whose common norm this is, down so that it becomes `most` if it is above."""
        factor = (most / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)
        for grad in map(local, self._gradients()):
            grad.mul_(factor.to(grad.device))

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def clear(self) -> None:
        """Free all gradients."""
        for value in (*self.trained.values(), *self.masters.values()):
            value.grad = None

    def not_finite(self, ranks: Ranks) -> str | None:
        """The name of a weight whose gradient holds NaN or infinity, in any process."""
        bad = [
            master.grad is not None and not torch.isfinite(local(master.grad)).all() for master in self.masters.values()
        ]
        found = ranks.sum(torch.tensor(bad, dtype=torch.int64)).tolist()
        return next((name for name, count in zip(self.masters, found, strict=True) if count), None)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the float32 copies into the model."""
        for name, value in self.trained.items():
            if self.masters[name] is not value:
                value.copy_(self.masters[name])


_VERSION = 1


@final
@dataclass(frozen=True)
class StepLog:
    """One step of training."""

    step: int  # counted from 0
    rate: float  # the learning rate
    norm: float  # norm of the whole gradient before it was clipped
    terms: Mapping[str, TermLog]  # what each term of the loss was

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` made of one."""
        terms = {name: TermLog(**term) for name, term in values["terms"].items()}
        return cls(values["step"], values["rate"], values["norm"], terms)


@final
@dataclass(frozen=True)
class Record:
    """What was done to a model."""

    defense: str  # the defense's name
    options: Mapping[str, Any]  # the defense's settings
    settings: Mapping[str, Any]  # the settings of training
    digests: Mapping[str, str]
    trained: int  # how many weights were trained
    steps: Sequence[StepLog]
    environment: Mapping[str, Any]  # versions and machine

    def write(self, path: str | Path) -> None:
        """Write the record as JSON, over one that is there."""
        write_record(path, asdict(self), version=_VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record."""

        def made(values: dict[str, Any]) -> Self:
            return cls(steps=[StepLog.from_json(step) for step in values.pop("steps")], **values)

        return read_record(path, made, version=_VERSION, of="an immunized model")


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@final
@dataclass(frozen=True)
class Checkpoint:
    """All of training between two steps."""

    weights: Mapping[str, Tensor]  # trained weights by name, float32 where the model is narrower
    moments: Mapping[tuple[str, str], Tensor]  # adam's, by weight and kind; shapes are those of the weights
    balance: Mapping[str, float]  # weights of balanced terms
    steps: Sequence[StepLog]  # what is known of the steps so far

    @classmethod
    def take(
        cls,
        weights: MasterWeights,
        optimizer: torch.optim.Adam,
        balance: Mapping[str, float],
        steps: Sequence[StepLog],
    ) -> Checkpoint:
        """Look at training; nothing is copied."""
        moments = {
            (name, kind): optimizer.state[master][kind]
            for name, master in weights.masters.items()
            if master in optimizer.state
            for kind in _MOMENTS
        }
        return cls(weights.masters, moments, balance, steps)

    @torch.no_grad()
    def restore(self, weights: MasterWeights, optimizer: torch.optim.Adam, ranks: Ranks = ALONE) -> None:
        """Set weights and optimizer to what they were; the first process has the tensors for all, see `load`."""
        known = ranks.first(lambda: sorted(self.moments))
        for name, master in weights.masters.items():
            put(master, ranks.spread(self.weights.get(name), master))
            optimizer.state.pop(master, None)
            state: dict[str, Tensor] = {}
            for kind in (kind for kind in _MOMENTS if (name, kind) in known):
                like = torch.zeros(()) if kind == "step" else master  # Adam counts its steps on the CPU
                state[kind] = sharded_like(ranks.spread(self.moments.get((name, kind)), like), like)
            if state:
                optimizer.state[master] = state
        weights.write_back()

    def save(self, job: Job | None, identity: str, ranks: Ranks = ALONE) -> None:
        """Make it the state of a job; the first process does, which alone has the job, with all others' parts."""
        about = {"identity": identity, "balance": dict(self.balance), "steps": [asdict(step) for step in self.steps]}

        def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
            assert job is not None
            job.save(about, tensors)

        ranks.first_takes(self._tensors(), write)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.weights.items():
            yield f"weight|{name}", whole(value)
        for (name, kind), value in self.moments.items():
            yield f"{kind}|{name}", whole(value)

    @classmethod
    def shared(cls, job: Job | None, identity: str, ranks: Ranks) -> Checkpoint | None:
        """Read a job's state in the first process, if there is one; the others get all but its tensors."""
        mine: list[Checkpoint] = []

        def read() -> tuple[Mapping[str, float], list[dict[str, Any]]] | None:
            assert job is not None
            found = cls.load(job, identity)
            if found is None:
                return None
            mine.append(found)
            return found.balance, [asdict(step) for step in found.steps]

        known = ranks.first(read)
        if known is None or mine:
            return mine[0] if mine else None
        return cls({}, {}, known[0], [StepLog.from_json(step) for step in known[1]])

    @classmethod
    def load(cls, job: Job, identity: str) -> Checkpoint | None:
        """Read a job's state, if there is one."""
        found = job.load({"identity": identity})
        if found is None:
            return None
        about, tensors = found
        weights: dict[str, Tensor] = {}
        moments: dict[tuple[str, str], Tensor] = {}
        for stored, value in tensors.items():
            kind, _, name = stored.partition("|")
            if kind == "weight":
                weights[name] = value
            elif kind in _MOMENTS:
                moments[name, kind] = value
        return cls(weights, moments, about["balance"], [StepLog.from_json(values) for values in about["steps"]])


# The checkpoint's name in the folder.
CHECKPOINT = "immunize.net.safetensors"
# The record's name in the folder.
RECORD = "immunize.json"
# Terms that must not diverge.
_KEPT = ("retain", "general")
# So many steps in a row may be far worse than guessing.
_PATIENCE = 5


def immunize(
    model: nn.Module,
    pairs: Sequence[Pair],
    retain: Sequence[Example] = (),
    *,
    defense: Defense | str = "repnoise",
    settings: Settings | None = None,
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
        retain: Examples of ability that is to be kept; at each step a batch of them joins the loss as "general".
        defense: A defense or its name in the catalog.
        settings: How it is trained; None takes the catalog's, or the defaults for a defense that is not in it.
        folder: Where a checkpoint and finally the record are written, or a job that is open. A second call with the
            same model, data and settings continues where the first one was killed, to the same bits.
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
    if isinstance(defense, str):
        entry = named_defense(defense)
        defense, settings = entry.defense, settings or entry.settings
    settings = settings or Settings()
    spread = spread_of(model)
    model, ranks = spread.model, spread.ranks
    check_data(model, pairs, retain, context=settings.context)
    options: dict[str, Any] = asdict(defense)  # type: ignore[call-overload]
    digests = {
        "pairs": digest.of_config([asdict(pair) for pair in pairs]),
        "retain": digest.of_config([asdict(example) for example in retain]),
        "before": _digest_of(model),
    }
    identity = digest.of_config([defense.name, options, asdict(settings), digests, pad_id])
    _check_same(identity, ranks)
    key = {
        "defense": {"name": defense.name, **options}, "settings": asdict(settings), "model": digests["before"],
        "pairs": digests["pairs"], "retain": digests["retain"], "pad_id": pad_id,
    }  # fmt: skip
    held: AbstractContextManager[object] = nullcontext() if settings.frozen is None else frozen(model, settings.frozen)
    with (
        held,
        defense.prepared(model, seed=derive(settings.seed, "prepare")),
        _opened(folder, key, ranks) as job,
    ):
        steps: list[StepLog] = []
        trained = 0
        if defense.trains:
            training = _Training(spread, defense, settings, pairs, retain, pad_id)
            training.run(None if folder is None else _Kept(job, identity, ranks), QUIET if ranks.rank else progress)
            steps, trained = training.steps, sum(value.numel() for value in training.weights.parameters)
        digests["after"] = _digest_of(model)
        environment = {**describe(), "processes": ranks.size}
        record = Record(defense.name, options, asdict(settings), digests, trained, steps, environment)
        if folder is not None:
            ranks.first(lambda: None if job is None else record.write(job.folder / RECORD))
    return record


@contextmanager
def _opened(folder: str | Path | Job | None, key: Mapping[str, Any], ranks: Ranks) -> Iterator[Job | None]:
    """Open the training's job in the first process."""
    jobs: list[Job] = []
    with ExitStack() as stack:

        def enter() -> None:
            assert folder is not None
            jobs.append(stack.enter_context(Job.open(folder, key=key, of="a training", state=CHECKPOINT)))

        if folder is not None:
            ranks.first(enter)
        yield jobs[0] if jobs else None


@final
@dataclass(frozen=True)
class _Kept:
    """Where a training is kept; only the first process has the job."""

    job: Job | None
    identity: str
    ranks: Ranks

    def save(self, checkpoint: Checkpoint) -> None:
        checkpoint.save(self.job, self.identity, self.ranks)

    def load(self) -> Checkpoint | None:
        return Checkpoint.shared(self.job, self.identity, self.ranks)


def _digest_of(model: nn.Module) -> str:
    return digest.of_config({name: digest.of_tensor(whole(value)) for name, value in model.named_parameters()})


def _check_same(identity: str, ranks: Ranks) -> None:
    """Refuse processes that would train different things together."""
    others = ranks.first(lambda: identity) != identity
    differing = [rank for rank, differs in enumerate(ranks.counts(int(others))) if differs]
    if differing:
        raise UsageError(
            f"Process {differing[0]} was given another model, defense, data or settings than process 0.",
            cure="Call immunize with the same arguments in all processes, weights and order of rows included.",
        )


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
        spread: Spread,
        defense: Defense,
        settings: Settings,
        pairs: Sequence[Pair],
        retain: Sequence[Example],
        pad_id: int,
    ) -> None:
        self.model, self.ranks, self.device = spread.model, spread.ranks, spread.device
        self.defense, self.settings = defense, settings
        self.pairs, self.retain, self.pad_id = pairs, retain, pad_id
        self.weights = MasterWeights(self.model)
        self.optimizer = torch.optim.Adam(self.weights.masters.values(), lr=settings.lr)
        self.balance: dict[str, float] = {}
        self.steps: list[StepLog] = []
        self.per_epoch = math.ceil(len(pairs) / settings.batch_size)
        self.count = settings.epochs * self.per_epoch
        self._limit = 2 * math.log(vocabulary_of(self.model) or math.inf)
        self._bad = 0

    def run(self, kept: _Kept | None, progress: Progress) -> None:
        """Train to the end, from the checkpoint if there is one."""
        self._restore(kept)
        with _training_mode(self.model), progress.task(self.defense.name, self.count, unit="steps") as task:
            task.update(len(self.steps))
            while len(self.steps) < self.count:
                problem = self._step()
                if problem is not None:
                    self._stop(problem, kept)
                # Weights of steps that may turn out to be the beginning of the end are not kept.
                if kept is not None and not self._bad and self._due():
                    kept.save(Checkpoint.take(self.weights, self.optimizer, self.balance, self.steps))
                task.update()
                task.describe(f"{self.defense.name} " + ", ".join(map(_shown, self.steps[-1].terms.items())))

    def _due(self) -> bool:
        done = len(self.steps)
        return done % self.settings.save_every == 0 or done == self.count

    def _restore(self, kept: _Kept | None) -> bool:
        """Go back to a checkpoint; False if there is none."""
        checkpoint = None if kept is None else kept.load()
        if checkpoint is None:
            return False
        checkpoint.restore(self.weights, self.optimizer, self.ranks)
        self.balance, self.steps = dict(checkpoint.balance), list(checkpoint.steps)
        return True

    def _stop(self, problem: str, kept: _Kept | None) -> None:
        step = len(self.steps)
        self.weights.clear()
        held = "The model holds the weights before this step."
        if self._restore(kept):
            held = f"The model holds the weights after step {len(self.steps)}, from {CHECKPOINT}."
        raise TrainingStopped(
            f"Step {step + 1} of {self.defense.name} stopped: {problem}. {held}",
            cure="Lower the learning rate or the weight of the ascent.",
        )

    def _step(self) -> str | None:
        """Make a step; the problem if there is one, and then the step is not made."""
        step, settings = len(self.steps), self.settings
        measure = step % settings.measure_every == 0
        generator = torch_generator(settings.seed, "noise", step)
        cuda = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            others = (self.ranks.rank,) if self.ranks.rank else ()  # other rows are dropped out otherwise
            torch.manual_seed(derive(settings.seed, "dropout", step, *others))
            terms = self._backward(step, generator, measure=measure)
        self.weights.average(self.ranks)
        norm = self.weights.norm(self.ranks)
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
                terms |= backward(side, parameters, self.balance, measure=measure, ranks=self.ranks)
                del side  # before the next one is computed, the graph of this one is gone
                self.weights.take_gradients()
        if self.retain:
            general: Side = {"general": Term(response_loss(self.model, self._retained(step), self.ranks))}
            terms |= backward(general, parameters, self.balance, measure=measure, ranks=self.ranks)
            self.weights.take_gradients()
        return terms

    def _problem(self, terms: Mapping[str, TermLog], norm: float) -> str | None:
        for name, term in terms.items():
            if not math.isfinite(term.value):
                return f"the term {name!r} is {term.value}"
        if not math.isfinite(norm):
            return f"the gradient of {self.weights.not_finite(self.ranks) or 'several weights together'} is not finite"
        # A model that was never taught to refuse begins far above guessing: that is no divergence.
        first = self.steps[0].terms if self.steps else terms
        limits = {name: max(self._limit, 2 * first[name].value) for name in _KEPT if name in terms}
        over = [name for name, limit in limits.items() if terms[name].value > limit]
        self._bad = self._bad + 1 if over else 0
        if self._bad >= _PATIENCE:
            limit = limits[over[0]]
            what = "twice that of guessing" if limit == self._limit else "twice that of the first step"
            return f"the loss on what is to be kept was above {limit:.1f}, {what}, {_PATIENCE} times"
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
        chosen = [self.pairs[row] for row in own_rows(rows, self.ranks)]
        if chosen:
            batch = collate_pairs(chosen, pad_id=self.pad_id, aligned=self.defense.aligned)
        else:
            one = blank(collate([self.pairs[rows[0]].harmless], pad_id=self.pad_id))
            batch = PairBatch(one, one)  # equal sides: the published loss looks at nothing either
        return replace(batch, ranks=self.ranks).to(self.device)

    def _retained(self, step: int) -> Batch:
        rows = self._drawn(len(self.retain), self.settings.batch_size, step, "retain")
        chosen = [self.retain[row] for row in own_rows(rows, self.ranks)]
        batch = collate(chosen or [self.retain[rows[0]]], pad_id=self.pad_id)
        return (batch if chosen else blank(batch)).to(self.device)


def _shown(entry: tuple[str, TermLog]) -> str:
    name, term = entry
    return f"{name} {term.value:.3g}"
