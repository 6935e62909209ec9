"""What a federation is asked to do and what is known of each round. Both engines call it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean
from typing import Any, final

import torch

from netweight.core import seeds
from netweight.errors import UsageError

__all__ = ["Federation", "Round", "at_plateau", "sampled_clients", "still_there"]


@final
@dataclass(frozen=True)
class Federation:
    """The settings of a federation.

    Attributes:
        rounds: Number of rounds, at least 1.
        fraction: Share of clients asked in each round, above 0 and up to 1: `max(int(fraction · clients), 1)`.
        seed: Every draw derives from it.
        evaluate_every: Measure accuracy before and after local training every so many rounds, and in the last.
        drop_out: Share of the asked clients that vanish from each round at random, to rehearse it; 0 to below 1.
        min_clients: A round with fewer sound updates is tried again.
        retries: How often; then the federation stops with its state saved.
        until_plateau: End before the last round once accuracy has stopped rising, as `at_plateau` judges.

    Raises:
        UsageError: A value is out of its range.
    """

    rounds: int = 200
    fraction: float = 1.0
    seed: int = 520
    evaluate_every: int = 1
    drop_out: float = 0.0
    min_clients: int = 1
    retries: int = 3
    until_plateau: bool = False

    def __post_init__(self) -> None:
        """Check the values."""
        if min(self.rounds, self.evaluate_every, self.min_clients) < 1 or self.retries < 0:
            raise UsageError(
                f"A federation cannot have {self.rounds} rounds, evaluation every {self.evaluate_every}, at least "
                f"{self.min_clients} clients, {self.retries} retries."
            )
        if not 0 < self.fraction <= 1 or not 0 <= self.drop_out < 1:
            raise UsageError(
                f"A federation cannot have fraction {self.fraction} and drop-out {self.drop_out}.",
                cure="The fraction is above 0 and up to 1, drop-out at least 0 and below 1.",
            )

    def evaluates(self, round: int) -> bool:
        """Whether accuracy is measured in a round.

        Args:
            round: From 1.
        """
        return round % self.evaluate_every == 0 or round == self.rounds

    def is_done(self, rounds: Sequence[Round]) -> bool:
        """Whether no more rounds are to follow.

        Args:
            rounds: Those that have been.
        """
        return len(rounds) >= self.rounds or (self.until_plateau and at_plateau(rounds))


@final
@dataclass(frozen=True)
class Round:
    """What is known of a finished round.

    Attributes:
        round: Its number, from 1.
        clients: Who was asked, in order.
        before: Accuracy of each client's model as received, by client, with freshly generated weights; empty in
            rounds without evaluation.
        after: The same after local training.
        loss: Mean training loss by client.
        seconds: Wall-clock time of local training and aggregation, without evaluation.
        refused: Client → why its update was left out.
        attempts: How often the round was tried.
    """

    round: int
    clients: tuple[int, ...]
    before: Mapping[int, float] = field(default_factory=dict)
    after: Mapping[int, float] = field(default_factory=dict)
    loss: Mapping[int, float] = field(default_factory=dict)
    seconds: float = 0.0
    refused: Mapping[int, str] = field(default_factory=dict)
    attempts: int = 1

    @property
    def mean_before(self) -> float | None:
        """Mean accuracy over the round's clients before local training, each counted once."""
        return _mean(self.before)

    @property
    def mean_after(self) -> float | None:
        """Mean accuracy over the round's clients after local training, each counted once."""
        return _mean(self.after)

    @property
    def mean_loss(self) -> float | None:
        """Mean training loss over the round's clients."""
        return _mean(self.loss)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Round:
        """Return the round that `to_json` was asked for.

        Args:
            values: JSON values.
        """
        maps = {
            name: {int(client): value for client, value in values[name].items()}
            for name in ("before", "after", "loss", "refused")
        }
        return cls(
            values["round"], tuple(values["clients"]), seconds=values["seconds"], attempts=values["attempts"], **maps
        )


def _mean(values: Mapping[int, float]) -> float | None:
    return sum(values.values()) / len(values) if values else None


def at_plateau(rounds: Sequence[Round], *, evaluations: int = 6, least: float = 0.001) -> bool:
    """Whether accuracy has stopped rising, both before and after local training.

    Args:
        rounds: What is known so far.
        evaluations: The mean of so many last measurements is compared with that of as many before them.
        least: A rise by less than this share of all examples is none; 0.001 is a tenth of a point.

    Returns:
        False while there are fewer measurements than for two such means.
    """
    readings = [(r.mean_before, r.mean_after) for r in rounds if r.after][-2 * evaluations :]
    if len(readings) < 2 * evaluations:
        return False
    return all(
        mean(values[evaluations:]) - mean(values[:evaluations]) < least for values in zip(*readings, strict=True)
    )


def sampled_clients(clients: Sequence[int], settings: Federation, round: int, attempt: int) -> tuple[int, ...]:
    """Return who is asked in a round: drawn uniformly without replacement, in order.

    Args:
        clients: All numbers.
        settings: The federation's.
        round: From 1.
        attempt: From 0; another one draws others.
    """
    count = max(int(settings.fraction * len(clients)), 1)
    if count == len(clients):
        return tuple(clients)
    generator = seeds.torch_generator(settings.seed, "sample", round, attempt)
    drawn = torch.randperm(len(clients), generator=generator)[:count].sort().values
    return tuple(clients[index] for index in drawn.tolist())


def still_there(clients: Sequence[int], settings: Federation, round: int, attempt: int) -> list[int]:
    """Return who does not vanish from the round.

    Args:
        clients: Numbers of those who were asked.
        settings: The federation's, with the share that drops out.
        round: From 1.
        attempt: From 0.
    """
    generator = seeds.torch_generator(settings.seed, "drop-out", round, attempt)
    draws = torch.rand(len(clients), generator=generator).tolist()
    return [client for client, draw in zip(clients, draws, strict=True) if draw >= settings.drop_out]
