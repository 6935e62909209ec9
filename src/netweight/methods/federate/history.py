"""The history of a federation: what is recorded of each finished round, and when accuracy has stopped rising."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any, final


@final
@dataclass(frozen=True)
class Round:
    """Record of a finished round."""

    round: int
    """Number of the round, from 1."""
    clients: tuple[int, ...]
    """Clients that were asked, in order."""
    before: Mapping[int, float] = field(default_factory=dict)
    """Accuracy of each client's model as received, by client, with freshly generated weights; empty in rounds
    without evaluation.
    """
    after: Mapping[int, float] = field(default_factory=dict)
    """Accuracy of each client's model after its local training, by client; empty in rounds without evaluation."""
    loss: Mapping[int, float] = field(default_factory=dict)
    """Mean training loss by client."""
    epsilon: Mapping[int, float] = field(default_factory=dict)
    """Privacy budget that each client reports as spent."""
    seconds: float = 0.0
    """Wall-clock time of local training and aggregation, without evaluation."""
    refusals: Mapping[int, str] = field(default_factory=dict)
    """Client → why its update was left out."""
    errors: tuple[int, ...] = ()
    """Clients of `refusals` whose program or node failed, or whose update could not be used, in order."""
    attempts: int = 1
    """Number of attempts."""
    suspects: Mapping[int, str] = field(default_factory=dict)
    """Client → why its update, though sound, looks odd."""
    answers: Mapping[int, int] = field(default_factory=dict)
    """Client → how many answers it was asked for in all attempts of the round: what a privacy account counts."""

    @property
    def mean_before(self) -> float | None:
        """Mean accuracy before local training, each client counted once."""
        return _mean(self.before)

    @property
    def mean_after(self) -> float | None:
        """Mean accuracy after local training, each client counted once."""
        return _mean(self.after)

    @property
    def mean_loss(self) -> float | None:
        """Mean training loss over the clients."""
        return _mean(self.loss)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Round:
        """Read what `to_json` gave: JSON's keys are text and its tuples lists."""
        maps = ("before", "after", "loss", "epsilon", "refusals", "suspects", "answers")
        numbered = {name: {int(client): value for client, value in values.get(name, {}).items()} for name in maps}
        return cls(**{**values, **numbered, "clients": tuple(values["clients"]), "errors": tuple(values["errors"])})


def _mean(values: Mapping[int, float]) -> float | None:
    return sum(values.values()) / len(values) if values else None


def total_answers(rounds: Sequence[Round], attempt_answers: Mapping[int, int]) -> dict[int, int]:
    """Return client → number of answers in rounds and in attempts after them.

    Args:
        rounds: Finished rounds.
        attempt_answers: Client → answers in attempts of a round that is not finished.
    """
    total = dict(attempt_answers)
    for done in rounds:
        for client, count in done.answers.items():
            total[client] = total.get(client, 0) + count
    return total


def at_plateau(rounds: Sequence[Round], *, evaluations: int = 6, least: float = 0.001) -> bool:
    """Return whether mean accuracy, before and after local training alike, rose by less than `least` lately."""
    readings = [(r.mean_before, r.mean_after) for r in rounds if r.after][-2 * evaluations :]
    if len(readings) < 2 * evaluations:
        return False
    return all(
        mean(values[evaluations:]) - mean(values[:evaluations]) < least for values in zip(*readings, strict=True)
    )
