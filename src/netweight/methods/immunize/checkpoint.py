"""Training at rest: weights, optimizer states and history, as the state of a job. `training.py` saves and loads it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

from netweight.job import Job
from netweight.methods.immunize.master_weights import MasterWeights
from netweight.methods.immunize.ranks import ALONE, Ranks
from netweight.methods.immunize.record import StepLog
from netweight.methods.immunize.sharded import put, sharded_like, whole

_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@final
@dataclass(frozen=True)
class Checkpoint:
    """All of training between two steps.

    Attributes:
        weights: Trained weights by name, float32 where the model is narrower.
        moments: Adam's, by weight and kind. Shapes are those of the weights.
        balance: Weights of balanced terms.
        steps: What is known of the steps so far.
    """

    weights: Mapping[str, Tensor]
    moments: Mapping[tuple[str, str], Tensor]
    balance: Mapping[str, float]
    steps: Sequence[StepLog]

    @classmethod
    def take(
        cls,
        weights: MasterWeights,
        optimizer: torch.optim.Adam,
        balance: Mapping[str, float],
        steps: Sequence[StepLog],
    ) -> Checkpoint:
        """Look at training; nothing is copied.

        Args:
            weights: What is trained.
            optimizer: Adam over these weights.
            balance: Weights of balanced terms.
            steps: What is known of the steps so far.
        """
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
