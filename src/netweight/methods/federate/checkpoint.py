"""The checkpoint of a federation between two rounds, from which a stopped run goes on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from torch import Tensor

from netweight.job import Job
from netweight.methods.federate.history import Round
from netweight.methods.federate.updates import Tensors

# The file within a run's folder that it resumes from.
CHECKPOINT = "federation.safetensors"


@final
@dataclass(frozen=True)
class Checkpoint:
    """All of a federation between two rounds."""

    state: Tensors
    """The server's tensors; by name."""
    private: Mapping[int, Tensors]
    """Each client's private tensors by name, for those that took part so far."""
    rounds: Sequence[Round]
    """History of the rounds so far."""
    attempt_answers: Mapping[int, int] = field(default_factory=dict)
    """Client → answers in failed attempts of the next round."""

    def save(self, job: Job) -> None:
        """Make it the state of a job."""
        about = {"rounds": [round.to_json() for round in self.rounds], "attempt_answers": dict(self.attempt_answers)}
        job.save(about, self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.state.items():
            yield f"state|{name}", value
        for client, tensors in self.private.items():
            for name, value in tensors.items():
                yield f"private|{client}|{name}", value

    @classmethod
    def load(cls, job: Job) -> Checkpoint | None:
        """Read a job's state, if there is one."""
        record = job.load()
        if record is None:
            return None
        about, tensors = record
        state: dict[str, Tensor] = {}
        private: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition("|")
            if kind == "state":
                state[rest] = value
            elif kind == "private":
                client, _, own = rest.partition("|")
                private.setdefault(int(client), {})[own] = value
        attempt_answers = {int(client): count for client, count in about["attempt_answers"].items()}
        return cls(state, private, [Round.from_json(values) for values in about["rounds"]], attempt_answers)
