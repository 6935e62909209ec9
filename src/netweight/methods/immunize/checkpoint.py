"""A training at rest and under way: float32 weights that are stepped, the log of steps, the checkpoint, the record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor, nn

from netweight.core.digest import of_config
from netweight.errors import UsageError
from netweight.job import Job
from netweight.methods.immunize.defense import TermLog
from netweight.methods.immunize.distributed import (
    ALONE,
    ProcessGroup,
    common_norm,
    is_sharded,
    local,
    put,
    sharded_like,
    whole,
)
from netweight.store.checkpoint import read_record, write_record

CHECKPOINT = "immunize.net.safetensors"  # the checkpoint's name in a training's folder
RECORD = "immunize.json"  # the record's
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

    def average(self, group: ProcessGroup) -> None:
        """Average the gradients over all processes; FSDP has averaged those of its shards."""
        if group.size > 1:
            for master in self.masters.values():
                if master.grad is None and not is_sharded(master):  # other processes may have one
                    master.grad = torch.zeros_like(master)
            group.average(grad for grad in self._gradients() if not is_sharded(grad))

    def norm(self, group: ProcessGroup) -> float:
        """The common norm of all gradients."""
        return common_norm(self._gradients(), group)

    @torch.no_grad()
    def clip(self, norm: float, most: float | None) -> None:
        """Scale all gradients, whose common norm this is, down so that it becomes `most` if it is above."""
        if most is None:
            return
        factor = (most / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)
        for grad in map(local, self._gradients()):
            grad.mul_(factor.to(grad.device))

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def clear(self) -> None:
        """Free all gradients."""
        for value in (*self.trained.values(), *self.masters.values()):
            value.grad = None

    def not_finite(self, group: ProcessGroup) -> str | None:
        """The name of a weight whose gradient holds NaN or infinity, in any process."""
        bad = [
            master.grad is not None and not torch.isfinite(local(master.grad)).all() for master in self.masters.values()
        ]
        found = group.sum(torch.tensor(bad, dtype=torch.int64)).tolist()
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

    @property
    def ends(self) -> list[tuple[str, float, float]]:
        """Each term of the loss at the first and at the last step."""
        if not self.steps:
            return []
        first, last = self.steps[0].terms, self.steps[-1].terms
        return [(name, first[name].value, term.value) for name, term in last.items() if name in first]

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
        cls, weights: MasterWeights, optimizer: torch.optim.Adam, balance: Mapping[str, float], steps: Sequence[StepLog]
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
    def restore(self, weights: MasterWeights, optimizer: torch.optim.Adam, group: ProcessGroup = ALONE) -> None:
        """Set weights and optimizer to what they were; the first process has the tensors for all, see `load`."""
        known = group.first(lambda: sorted(self.moments))
        for name, master in weights.masters.items():
            put(master, group.spread(self.weights.get(name), master))
            optimizer.state.pop(master, None)
            state: dict[str, Tensor] = {}
            for kind in (kind for kind in _MOMENTS if (name, kind) in known):
                like = torch.zeros(()) if kind == "step" else master  # Adam counts its steps on the CPU
                state[kind] = sharded_like(group.spread(self.moments.get((name, kind)), like), like)
            if state:
                optimizer.state[master] = state
        weights.write_back()

    def save(self, job: Job | None, identity: str, group: ProcessGroup = ALONE) -> None:
        """Make it the state of a job; the first process does, which alone has the job, with all others' parts."""
        about = {"identity": identity, "balance": dict(self.balance), "steps": [asdict(step) for step in self.steps]}

        def write(tensors: Iterator[tuple[str, Tensor]]) -> None:
            assert job is not None
            job.save(about, tensors)

        group.first_takes(self._tensors(), write)

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.weights.items():
            yield f"weight|{name}", whole(value)
        for (name, kind), value in self.moments.items():
            yield f"{kind}|{name}", whole(value)

    @classmethod
    def shared(cls, job: Job | None, identity: str, group: ProcessGroup) -> Checkpoint | None:
        """Read a job's state in the first process, if there is one; the others get all but its tensors."""
        mine: list[Checkpoint] = []

        def read() -> tuple[Mapping[str, float], list[dict[str, Any]]] | None:
            assert job is not None
            found = cls.load(job, identity)
            if found is None:
                return None
            mine.append(found)
            return found.balance, [asdict(step) for step in found.steps]

        known = group.first(read)
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


@final
@dataclass(frozen=True)
class TrainingJob:
    """Where a training is kept, so that a later call continues it; only the first process has the job."""

    job: Job | None
    identity: str
    group: ProcessGroup

    @classmethod
    @contextmanager
    def open(
        cls, folder: str | Path | Job | None, key: Mapping[str, Any], group: ProcessGroup
    ) -> Iterator[TrainingJob | None]:
        """Open a training's job in the first process; None without a folder."""
        jobs: list[Job] = []
        with ExitStack() as stack:

            def enter() -> None:
                assert folder is not None
                jobs.append(stack.enter_context(Job.open(folder, key=key, of="a training", state=CHECKPOINT)))

            if folder is not None:
                group.first(enter)
            yield None if folder is None else cls(jobs[0] if jobs else None, of_config(key), group)

    def save(self, checkpoint: Checkpoint) -> None:
        """Keep all of training."""
        checkpoint.save(self.job, self.identity, self.group)

    def load(self) -> Checkpoint | None:
        """Return what was kept, if anything was."""
        return Checkpoint.shared(self.job, self.identity, self.group)

    def write(self, record: Record) -> None:
        """Write the record beside the checkpoint."""
        self.group.first(lambda: None if self.job is None else record.write(self.job.folder / RECORD))
