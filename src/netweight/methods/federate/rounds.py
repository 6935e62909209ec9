"""A round over any transport: select clients, send, collect updates, validate, aggregate."""

from __future__ import annotations

import logging
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, final

import torch

from netweight.core import seeds
from netweight.errors import FederationStopped, UsageError
from netweight.job import Job
from netweight.methods.federate.checkpoint import Checkpoint
from netweight.methods.federate.history import Round, at_plateau, total_answers
from netweight.methods.federate.method import Method
from netweight.methods.federate.screening import screen
from netweight.methods.federate.settings import Federation
from netweight.methods.federate.updates import Tensors, Update, validate_updates

_LOG = logging.getLogger(__name__)


def sampled_clients(clients: Sequence[int], settings: Federation, round: int, attempt: int) -> tuple[int, ...]:
    """Return who is asked in a round: drawn uniformly without replacement, in order."""
    count = settings.sampled(len(clients))
    if count == len(clients):
        return tuple(clients)
    generator = seeds.torch_generator(settings.seed, "sample", round, attempt)
    drawn = torch.randperm(len(clients), generator=generator)[:count].sort().values
    return tuple(clients[index] for index in drawn.tolist())


def still_there(clients: Sequence[int], settings: Federation, round: int, attempt: int) -> list[int]:
    """Return who does not vanish from the round."""
    generator = seeds.torch_generator(settings.seed, "drop-out", round, attempt)
    draws = torch.rand(len(clients), generator=generator).tolist()
    return [client for client, draw in zip(clients, draws, strict=True) if draw >= settings.drop_out]


@final
@dataclass
class RoundAttempt:
    """An attempt at a round: who was selected, and what was sent."""

    round: int
    """The round's number, from 1."""
    attempt: int
    """Number of attempts before this one."""
    clients: tuple[int, ...]
    """The clients that were drawn, in order."""
    messages: Mapping[int, Tensors]
    """Tensors that each reachable client is sent, by client and name."""
    absent: Mapping[int, str]
    """Client → why it could not be reached."""
    start_time: float
    """Begin of the attempt on the monotonic clock, moved later by time that does not count."""


class Transport(Protocol):
    """Transport of a round's messages to clients: threads of this process, or Flower."""

    def reach(self) -> tuple[Container[int], Mapping[int, str]]:
        """Return the clients that can be asked, and client → why for others."""
        ...

    def collect(self, trial: RoundAttempt) -> Sequence[Update]:
        """Send each client of `trial.messages` its tensors and return the updates that came back.

        A reply that cannot be used is an update with a `fault`; a secure sum is one update with the clients' own,
        without tensors, in `members`.
        """
        ...

    def finish_round(self, done: Round) -> None:
        """Keep what a finished round leaves."""
        ...

    def before_retry(self) -> None:
        """Wait for what may help another attempt."""
        ...


@final
class Rounds:
    """A federation's rounds over any transport: sampling, retries, refusals, bounds, history, checkpoint."""

    def __init__(self, method: Method, settings: Federation, clients: Sequence[int], state: Tensors) -> None:
        self.method, self.settings, self.clients = method, settings, tuple(clients)
        self.state, self.rounds = state, list[Round]()
        # Client → updates in the attempts of the current round.
        self.attempt_answers: dict[int, int] = {}
        self.job: Job | None = None
        # Client → its number of examples, if the operator has registered it.
        self.registered: Mapping[int, int] | None = None
        sampled = settings.sampled(len(self.clients))
        if settings.min_clients > sampled:
            raise UsageError(
                f"A round needs {settings.min_clients} valid updates (min_clients) and asks {sampled} of "
                f"{len(self.clients)} clients.",
                cure=f"Give min_clients {sampled} or less (in a Flower app the setting min-clients).",
            )

    @property
    def answers(self) -> dict[int, int]:
        """Client → how many answers it was asked for so far, failed attempts included."""
        return total_answers(self.rounds, self.attempt_answers)

    def resume(self, job: Job) -> Checkpoint | None:
        """Go on from a checkpoint, if there is one, and save there from now on."""
        self.job, saved = job, Checkpoint.load(job)
        if saved is not None:
            self.state, self.rounds, self.attempt_answers = saved.state, list(saved.rounds), dict(saved.attempt_answers)
        return saved

    def save(self, private: Mapping[int, Tensors] | None = None) -> None:
        """Write a checkpoint, if there is a folder for it."""
        if self.job is not None:
            Checkpoint(self.state, private or {}, self.rounds, self.attempt_answers).save(self.job)

    @property
    def done(self) -> bool:
        """True if no more rounds follow."""
        plateau = self.settings.until_plateau and at_plateau(self.rounds)
        return len(self.rounds) >= self.settings.rounds or plateau

    def refuse_failing_clients(self, *, rehearsed: Container[int] = ()) -> None:
        """Fail the run if some client failed in every round that asked it.

        A client fails if its program stops with an error, or if its update cannot be used. A client that protects
        itself and declines has not failed, and neither has one that sends nothing.

        Args:
            rehearsed: Clients whose lies are simulated. That their updates are rejected is what the run is to show.

        Raises:
            FederationStopped: Such a client is part of no round, so that the result is not what was asked for.
        """
        for client in self.clients:
            if client in rehearsed:
                continue
            rounds = [done for done in self.rounds if client in done.clients]
            if rounds and all(client in done.errors for done in rounds):
                asked = "the only round" if len(rounds) == 1 else f"each of the {len(rounds)} rounds"
                raise FederationStopped(
                    f"Client {client} {rounds[-1].refusals[client]}, in {asked} that asked "
                    f"it; the others' result is saved{f' in {self.job.folder}' if self.job is not None else ''}.",
                    cure="Repair that client and run the same command with more rounds, or leave the client out "
                    "of the task.",
                )

    def run_round(self, transport: Transport) -> None:
        """Run the next round, again if too few clients answer.

        Raises:
            FederationStopped: All attempts had too few valid updates.
        """
        number = len(self.rounds) + 1
        for attempt in range(self.settings.retries + 1):
            if attempt:
                transport.before_retry()
            trial = self.select(number, attempt, *transport.reach())
            if self.conclude(trial, transport.collect(trial)):
                transport.finish_round(self.rounds[-1])
                return
        where = f"; its state is in {self.job.folder}" if self.job is not None else ""
        raise FederationStopped(
            f"Round {number} had fewer than {self.settings.min_clients} valid updates in "
            f"{self.settings.retries + 1} attempts{where}.",
            cure="The log names the clients that were rejected, with reasons. The same command resumes the run.",
        )

    def select(self, number: int, attempt: int, here: Container[int], absent: Mapping[int, str]) -> RoundAttempt:
        """Draw the clients of an attempt, and decide what each of them that can be reached is sent.

        Args:
            number: The round, from 1.
            attempt: Number of attempts before.
            here: Clients that can be reached.
            absent: Client → why it cannot be reached.
        """
        selected = sampled_clients(self.clients, self.settings, number, attempt)
        there = still_there(selected, self.settings, number, attempt)
        most, answers = self.settings.most_answers(), self.answers
        spent = {client for client in there if most is not None and answers.get(client, 0) >= most}
        sent = {
            client: self.method.message(self.state, client)
            for client in there
            if client in here and client not in spent
        }
        missing = {c: absent.get(c, "was dropped, to simulate a failure (drop_out)") for c in selected if c not in sent}
        missing |= {c: f"has answered {most} times, which uses up its privacy budget" for c in spent}
        for client in sent:
            self.attempt_answers[client] = self.attempt_answers.get(client, 0) + 1
        return RoundAttempt(number, attempt, selected, sent, missing, time.monotonic())

    def last_taken(self, client: int) -> int:
        """Return the last round in which a client's update was taken, 0 for none."""
        taken = [done.round for done in self.rounds if client in done.clients and client not in done.refusals]
        return max(taken, default=0)

    def conclude(self, trial: RoundAttempt, updates: Sequence[Update]) -> bool:
        """Validate and aggregate the updates of an attempt and record the round.

        Returns:
            False, with the state as it was, if there are fewer valid updates than the settings ask for.
        """
        sound, left_out = self.validate(trial, updates)
        for client, why in sorted(left_out.items()):
            _LOG.warning("Round %d, attempt %d: client %d left out: %s.", trial.round, trial.attempt + 1, client, why)
        own = [member for update in sound for member in update.members or (update,)]
        if len(own) < self.settings.min_clients:
            return False
        suspects = self.aggregate(trial, sound)
        for client, why in sorted(suspects.items()):
            _LOG.warning("Round %d: client %d is suspicious: %s.", trial.round, client, why)
        errors = {update.client for update in updates if _failed(update, left_out)}
        self.record(trial, own, left_out, suspects, sorted(errors))
        return True

    def validate(self, trial: RoundAttempt, updates: Sequence[Update]) -> tuple[list[Update], dict[int, str]]:
        """Sort updates into those that may be aggregated and those that are rejected.

        Returns:
            Sound updates, or sound secure sums, and client → why it was left out.
        """
        faults = {update.client: update.fault.reason for update in updates if update.fault}
        sums = [update for update in updates if update.members]
        if sums:
            said = {member.client for update in sums for member in update.members}
            missing = {client: "is not in the sum" for client in trial.messages if client not in said}
            return sums, {**missing, **trial.absent, **faults}
        sound, rejected = validate_updates(trial.messages, [one for one in updates if not one.fault], round=trial.round)
        left_out = {**rejected, **trial.absent, **faults}
        return [one for one in sound if one.client not in left_out], left_out

    def aggregate(self, trial: RoundAttempt, sound: Sequence[Update]) -> dict[int, str]:
        """Bound, choose and average valid updates into the next state; return client → what is odd about its update."""
        summed = any(update.members for update in sound)
        averaged, suspects = list(sound), dict[int, str]()
        if not summed or len(sound) > 1:
            registered = None if summed else self.registered
            averaged, suspects = screen(
                trial.messages, self.state, sound, self.settings, round=trial.round, registered=registered
            )
        # The groups change, so a client that is in many suspicious sums is the suspicious one.
        if summed:
            odd = [update for update in sound if update.client in suspects]
            suspects = {
                member.client: f"is in a suspicious sum ({suspects[update.client]})"
                for update in odd
                for member in update.members
            }
        self.state = self.method.aggregate(self.state, averaged)
        return suspects

    def record(
        self, trial: RoundAttempt, own: Sequence[Update], left_out: Mapping[int, str], suspects: Mapping[int, str],
        errors: Sequence[int],
    ) -> None:  # fmt: skip
        """Add a finished round to the history.

        Args:
            trial: The attempt that succeeded.
            own: One update for each client that took part, for its metrics.
            left_out: Client → why it was left out.
            suspects: Client → what is odd about its update.
            errors: Clients whose program or node failed, or whose update could not be used.
        """
        metrics = {
            kind: {one.client: one.metrics[kind] for one in own if kind in one.metrics}
            for kind in ("before", "after", "loss", "epsilon")
        }
        done = Round(
            trial.round, trial.clients, **metrics, seconds=time.monotonic() - trial.start_time, refusals=left_out,
            attempts=trial.attempt + 1, suspects=suspects, errors=tuple(errors), answers=dict(self.attempt_answers),
        )  # fmt: skip
        self.attempt_answers.clear()
        self.rounds.append(done)
        means = {"before": done.mean_before, "after": done.mean_after, "loss": done.mean_loss}
        _LOG.info("Round %d: %d of %d clients; %s", done.round, len(own), len(done.clients), means)


def _failed(update: Update, left_out: Container[int]) -> bool:
    """Return whether a reply counts as a failure of its client, and not as a decision of the client or the server."""
    if update.fault is None:
        return update.client in left_out
    return update.fault.kind == "error"
