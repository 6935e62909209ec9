"""A federation at rest: the server's state, every client's private tensors and the history, as the state of a job.

The engine in this process calls it. A Flower server and its clients keep theirs apart, see `integrations/flower`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from netweight.job import Job
from netweight.methods.federate.rounds import Round
from netweight.methods.federate.updates import Tensors


@final
@dataclass(frozen=True)
class Checkpoint:
    """All of a federation between two rounds.

    Attributes:
        state: The server's tensors. By name.
        private: Each client's private tensors by name, for those that took part so far.
        rounds: What is known of the rounds so far.
    """

    state: Tensors
    private: Mapping[int, Tensors]
    rounds: Sequence[Round]

    def save(self, job: Job, settings: str) -> None:
        """Make it the state of a job; `settings` is the digest by which earlier releases know a federation."""
        job.save({"settings": settings, "rounds": [round.to_json() for round in self.rounds]}, self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, value in self.state.items():
            yield f"state|{name}", value
        for client, tensors in self.private.items():
            for name, value in tensors.items():
                yield f"private|{client}|{name}", value

    @classmethod
    def load(cls, job: Job, settings: str) -> Checkpoint | None:
        """Read a job's state, if there is one."""
        found = job.load({"settings": settings})
        if found is None:
            return None
        about, tensors = found
        state: dict[str, Tensor] = {}
        private: dict[int, dict[str, Tensor]] = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition("|")
            if kind == "state":
                state[rest] = value
            elif kind == "private":
                client, _, own = rest.partition("|")
                private.setdefault(int(client), {})[own] = value
        return cls(state, private, [Round.from_json(values) for values in about["rounds"]])
