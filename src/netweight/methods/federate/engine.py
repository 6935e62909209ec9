"""The engine of one process: rounds with one thread per core, checkpoints between them, and how a run is known."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any, Protocol, TypeVar, final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.core.files import digest_config, digest_tensor, usable_cores
from netweight.core.progress import QUIET, Progress
from netweight.errors import FederationStopped, UsageError
from netweight.job import Job
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, Method, Trained, Weights
from netweight.methods.federate.screening import screen
from netweight.methods.federate.settings import Federation
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors, Update, check_allow_list, validate_updates
from netweight.settings import Settings

# The file within a run's folder that it resumes from.
CHECKPOINT = "federation.safetensors"

# How a reason begins for a client whose own program failed.
ANSWERED_WITH_ERROR = "answered with error"
# What the reason says of a client that protects itself, which is not a failure.
TAKES_NO_PART = "takes no part"

S = TypeVar("S")
T = TypeVar("T")
_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Round:
    """Record of a finished round."""

    round: int  # its number, from 1
    clients: tuple[int, ...]  # who was asked, in order
    # Accuracy of each client's model as received, by client, with freshly generated weights; empty in rounds without
    # evaluation.
    before: Mapping[int, float] = field(default_factory=dict)
    after: Mapping[int, float] = field(default_factory=dict)
    loss: Mapping[int, float] = field(default_factory=dict)  # mean training loss by client
    epsilon: Mapping[int, float] = field(default_factory=dict)  # what a client's answers have spent, as it says
    seconds: float = 0.0  # wall-clock time of local training and aggregation, without evaluation
    refused: Mapping[int, str] = field(default_factory=dict)  # client → why its update was left out
    attempts: int = 1  # how often the round was tried
    suspects: Mapping[int, str] = field(default_factory=dict)  # client → why its update, though sound, looks odd
    # Client → how many answers it was asked for in all attempts of the round: what a privacy account counts.
    answers: Mapping[int, int] = field(default_factory=dict)

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
        maps = ("before", "after", "loss", "epsilon", "refused", "suspects", "answers")
        numbered = {name: {int(client): value for client, value in values.get(name, {}).items()} for name in maps}
        return cls(**{**values, **numbered, "clients": tuple(values["clients"])})


def _mean(values: Mapping[int, float]) -> float | None:
    return sum(values.values()) / len(values) if values else None


def total_answers(rounds: Sequence[Round], attempted: Mapping[int, int]) -> dict[int, int]:
    """Return client → number of answers in rounds and in attempts after them.

    Args:
        rounds: Finished rounds.
        attempted: Client → answers in attempts of a round that is not finished.
    """
    total = dict(attempted)
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


def sampled_clients(clients: Sequence[int], settings: Federation, round: int, attempt: int) -> tuple[int, ...]:
    """Return who is asked in a round: drawn uniformly without replacement, in order."""
    count = max(int(settings.fraction * len(clients)), 1)
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
@dataclass(frozen=True)
class Checkpoint:
    """All of a federation between two rounds."""

    state: Tensors  # the server's tensors; by name
    private: Mapping[int, Tensors]  # each client's private tensors by name, for those that took part so far
    rounds: Sequence[Round]  # what is known of the rounds so far
    attempted: Mapping[int, int] = field(default_factory=dict)  # client → answers in failed attempts of the next round

    def save(self, job: Job) -> None:
        """Make it the state of a job."""
        about = {"rounds": [round.to_json() for round in self.rounds], "attempted": dict(self.attempted)}
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
        found = job.load()
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
        attempted = {int(client): count for client, count in about["attempted"].items()}
        return cls(state, private, [Round.from_json(values) for values in about["rounds"]], attempted)


@final
@dataclass(frozen=True)
class Run:
    """A trained federation."""

    task: Task  # what was learned
    method: Method  # how
    state: Tensors  # the server's tensors by name, after the last round
    private: dict[int, Tensors]  # each client's private tensors by name
    rounds: tuple[Round, ...]  # what is known of each round
    seed: int  # the federation's
    attempted: Mapping[int, int] = field(
        default_factory=dict
    )  # client → answers in failed attempts after the last round

    @property
    def answers(self) -> dict[int, int]:
        """Client → how many answers it was asked for in the whole run, failed attempts included."""
        return total_answers(self.rounds, self.attempted)

    def weights(self, client: int) -> Weights:
        """Return a client's personal model from the server's state and what the client keeps."""
        return self.method.weights(self.task, self.method.message(self.state, client), self.private[client])


def train(
    task: Task, method: Method, settings: Federation = Federation(), *, folder: str | Path | Job | None = None,
    workers: int | None = None, device: torch.device | str = "cpu", save_every: int = 1, progress: Progress = QUIET,
) -> Run:  # fmt: skip
    """Train a federation.

    The same settings give the same result whatever the number of workers, up to rounding where a method multiplies
    clients' vectors together.

    Args:
        task: The model in two halves and every client's data.
        method: How clients train and what they share.
        settings: Rounds, sampling, seed.
        folder: Where to save a checkpoint and to resume from, or a job that is open; None to keep all in memory.
        workers: Threads, each with a share of the clients; None takes one per usable core, and 1 on a GPU.
        device: Where to train.
        save_every: Rounds between checkpoints.
        progress: Where to tell how far the work is.

    Raises:
        UsageError: The folder holds a federation with other settings.
        FederationStopped: A round had too few sound updates and its retries were used up; the state is saved.
        PrivateTensor: The method was about to send a private tensor.
    """
    with ExitStack() as stack:
        federation = _InThisProcess(task, method, settings, torch.device(device), workers)
        if folder is not None:
            federation.resume(stack.enter_context(_opened(task, method, settings, folder)))
        with progress.task(f"{method.name}: rounds", total=settings.rounds, unit="rounds") as work:
            rounds = federation.rounds
            work.update(len(rounds.rounds))
            with federation.working():
                while not rounds.done:
                    federation.run_round()
                    if len(rounds.rounds) % save_every == 0:
                        federation.save()
                    work.update(1)
        federation.save()
    return federation.result()


def finished(task: Task, method: Method, settings: Federation, *, folder: str | Path) -> Run:
    """Open a federation that has been trained; nothing is trained and nothing written."""
    with _opened(task, method, settings, folder, reading=True) as job:
        federation = _InThisProcess(task, method, settings, torch.device("cpu"), 1)
        federation.resume(job)
    if not federation.rounds.done:
        raise UsageError(
            f"The federation in {folder} has {len(federation.rounds.rounds)} of {settings.rounds} rounds.",
            cure="Run it again to go on.",
        )
    return federation.result()


@contextmanager
def round_by_round(task: Task, method: Method, *, seed: int, workers: int) -> Iterator[Callable[[], None]]:
    """Yield a function that runs one more round on the CPU, all clients asked and nothing evaluated: to time rounds."""
    endless = Federation(rounds=2**31, seed=seed, evaluate_every=2**31)
    federation = _InThisProcess(task, method, endless, torch.device("cpu"), workers)
    with federation.working():
        yield federation.run_round


@final
@dataclass(frozen=True)
class Replies:
    """Replies collected in a round."""

    updates: Sequence[Update]
    """Updates as they came; under secure sums without tensors."""
    faults: Mapping[int, str] = field(default_factory=dict)
    """Client → why its reply is not an update."""
    sums: Mapping[tuple[int, ...], Update] | None = None
    """Under secure sums: clients in a sum → the server's next tensors by that sum."""


@final
@dataclass
class Trial:
    """A round under way."""

    round: int  # its number, from 1
    attempt: int  # how often it was tried before
    asked: tuple[int, ...]  # clients that were drawn, in order
    sent: Mapping[int, Tensors]  # what each client that was reached gets, by client and tensor name
    absent: Mapping[int, str]  # client → why it was not reached
    started: float  # when, on the monotonic clock, later by what is not to be counted


class Transport(Protocol):
    """Transport of a round's messages to clients: threads of this process, or Flower."""

    def reach(self) -> tuple[Container[int], Mapping[int, str]]:
        """Return the clients that can be asked, and client → why for others."""
        ...

    def exchange(self, trial: Trial) -> Replies:
        """Ask the clients of `trial.sent`; return what came back."""
        ...

    def settle(self, done: Round) -> None:
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
        self.attempted: dict[int, int] = {}  # client → answers in attempts of the round under way
        self.job: Job | None = None
        self.registered: Mapping[int, int] | None = None  # client → examples that somebody else vouches for
        sampled = max(int(settings.fraction * len(self.clients)), 1)
        if settings.min_clients > sampled:
            raise UsageError(
                f"A round needs {settings.min_clients} sound updates (min_clients) and asks {sampled} of "
                f"{len(self.clients)} clients.",
                cure=f"Give min_clients {sampled} or less.",
            )

    @property
    def answers(self) -> dict[int, int]:
        """Client → how many answers it was asked for so far, failed attempts included."""
        return total_answers(self.rounds, self.attempted)

    def resume(self, job: Job) -> Checkpoint | None:
        """Go on from a checkpoint, if there is one, and save there from now on."""
        self.job, saved = job, Checkpoint.load(job)
        if saved is not None:
            self.state, self.rounds, self.attempted = saved.state, list(saved.rounds), dict(saved.attempted)
        return saved

    def save(self, private: Mapping[int, Tensors] | None = None) -> None:
        """Write a checkpoint, if there is a folder for it."""
        if self.job is not None:
            Checkpoint(self.state, private or {}, self.rounds, self.attempted).save(self.job)

    @property
    def done(self) -> bool:
        """Whether no more rounds are to follow."""
        plateau = self.settings.until_plateau and at_plateau(self.rounds)
        return len(self.rounds) >= self.settings.rounds or plateau

    def refuse_failing_clients(self) -> None:
        """Fail the run if some client answered with an error in every round that asked it.

        Raises:
            FederationStopped: Such a client is part of no round, so that the result is not what was asked for.
        """
        for client in self.clients:
            asked = [done for done in self.rounds if client in done.clients]
            whys = [done.refused.get(client, "") for done in asked]
            failed = [why.startswith(ANSWERED_WITH_ERROR) and TAKES_NO_PART not in why for why in whys]
            if asked and all(failed):
                raise FederationStopped(
                    f"Client {client} {whys[-1]}, in each of the {len(asked)} rounds that asked it; the others' "
                    f"result is saved{f' in {self.job.folder}' if self.job is not None else ''}.",
                    cure="Mend that site and run the same again with more rounds, or leave the client out of the task.",
                )

    def run_round(self, transport: Transport) -> None:
        """Run the next round, again if too few clients answer."""
        number = len(self.rounds) + 1
        for attempt in range(self.settings.retries + 1):
            if attempt:
                transport.before_retry()
            trial = self.begin(number, attempt, *transport.reach())
            if self.conclude(trial, transport.exchange(trial)):
                transport.settle(self.rounds[-1])
                return
        where = f"; its state is in {self.job.folder}" if self.job is not None else ""
        raise FederationStopped(
            f"Round {number} had fewer than {self.settings.min_clients} sound updates in "
            f"{self.settings.retries + 1} attempts{where}.",
            cure="See the log for who was refused and why; run the same again to resume.",
        )

    def begin(self, number: int, attempt: int, here: Container[int], absent: Mapping[int, str]) -> Trial:
        """Draw the clients of an attempt, and what each of them that is here is sent."""
        asked = sampled_clients(self.clients, self.settings, number, attempt)
        there = still_there(asked, self.settings, number, attempt)
        most, answers = self.settings.most_answers(), self.answers
        spent = {client for client in there if most is not None and answers.get(client, 0) >= most}
        sent = {
            client: self.method.message(self.state, client)
            for client in there
            if client in here and client not in spent
        }
        missing = {c: absent.get(c, "vanished, as drop_out asks") for c in asked if c not in sent}
        missing |= {c: f"has answered {most} times, for which its privacy budget was made" for c in spent}
        for client in sent:
            self.attempted[client] = self.attempted.get(client, 0) + 1
        return Trial(number, attempt, asked, sent, missing, time.monotonic())

    def last_taken(self, client: int) -> int:
        """Return the last round in which a client's update was taken, 0 for none."""
        taken = [done.round for done in self.rounds if client in done.clients and client not in done.refused]
        return max(taken, default=0)

    def conclude(self, trial: Trial, replies: Replies) -> bool:
        """Validate a round's answers, bound and join the sound ones, and note the round; False if there are too few."""
        if replies.sums is None:
            found = validate_updates(trial.sent, replies.updates, round=trial.round)
            refused = {**found.refused, **trial.absent, **replies.faults}
            accepted = [one for one in found.accepted if one.client not in refused]
            said = {one.client for one in accepted}
        else:
            said = {update.client for update in replies.updates}
            missing = {client: "is not in the sum" for client in trial.sent if client not in said}
            refused, accepted = {**missing, **trial.absent, **replies.faults}, list(replies.sums.values())
        for client, why in sorted(refused.items()):
            _LOG.warning("Round %d, attempt %d: client %d left out: %s.", trial.round, trial.attempt + 1, client, why)
        if len(said) < self.settings.min_clients:
            return False
        joined, suspects = accepted, dict[int, str]()
        if replies.sums is None or len(accepted) > 1:
            registered = self.registered if replies.sums is None else None
            joined, suspects = screen(
                trial.sent, self.state, accepted, self.settings, round=trial.round, registered=registered
            )
        if replies.sums is not None:  # who is in many odd sums, though the groups change, is the one
            odd = {group: suspects[one.client] for group, one in replies.sums.items() if one.client in suspects}
            suspects = {c: f"is in a sum that looks odd ({why})" for group, why in odd.items() for c in group}
        for client, why in sorted(suspects.items()):
            _LOG.warning("Round %d: client %d is suspicious: %s.", trial.round, client, why)
        self.state = self.method.aggregate(self.state, joined)
        metrics = {
            kind: {
                one.client: one.metrics[kind] for one in replies.updates if one.client in said and kind in one.metrics
            }
            for kind in ("before", "after", "loss", "epsilon")
        }
        done = Round(
            trial.round, trial.asked, **metrics, seconds=time.monotonic() - trial.started, refused=refused,
            attempts=trial.attempt + 1, suspects=suspects, answers=dict(self.attempted),
        )  # fmt: skip
        self.attempted.clear()
        self.rounds.append(done)
        means = {"before": done.mean_before, "after": done.mean_after, "loss": done.mean_loss}
        _LOG.info("Round %d: %d of %d clients; %s", done.round, len(said), len(done.clients), means)
        return True


class _InThisProcess:
    """Clients that train in threads of this process."""

    def __init__(
        self, task: Task, method: Method, settings: Federation, device: torch.device, workers: int | None
    ) -> None:
        self.task, self.method, self.settings, self.device = task, method, settings, device
        self.workers = min(workers or (usable_cores() if device.type == "cpu" else 1), len(task.clients))
        self._models = [LocalModel(task, device) for _ in range(self.workers)]
        self.rounds = Rounds(method, settings, task.clients, self._placed(method.start(task, seed=settings.seed)))
        self.rounds.registered = {client: task.client(client).n for client in task.clients}
        self._private: dict[int, Tensors] = {}
        self._trained: list[Trained] = []

    def resume(self, job: Job) -> None:
        """Go on from a checkpoint, if there is one, and save there from now on."""
        saved = self.rounds.resume(job)
        self.rounds.state = self._placed(self.rounds.state)
        self._private = {c: self._placed(tensors) for c, tensors in saved.private.items()} if saved else {}

    def result(self) -> Run:
        """Return what was trained, with the private tensors of clients that never took part, too."""
        private = {client: self.private(client) for client in self.task.clients}
        rounds = self.rounds
        about = tuple(rounds.rounds), self.settings.seed, dict(rounds.attempted)
        return Run(self.task, self.method, rounds.state, private, *about)

    def _placed(self, tensors: Tensors) -> dict[str, Tensor]:
        return {name: value.to(self.device) for name, value in tensors.items()}

    @contextmanager
    def working(self) -> Iterator[None]:
        """Hold the worker threads; each computes with one thread of torch's, so that their number changes no sum."""
        threads = torch.get_num_threads()
        with ThreadPoolExecutor(self.workers, initializer=torch.set_num_threads, initargs=(1,)) as self._pool:
            torch.set_num_threads(1)
            try:
                yield
            finally:
                torch.set_num_threads(threads)

    def private(self, client: int) -> Tensors:
        """Return what a client keeps."""
        if client not in self._private:
            start = self.method.private_start(self.task, client, seed=self.settings.seed)
            self._private[client] = self._placed(start)
        return self._private[client]

    def save(self) -> None:
        """Write a checkpoint, if there is a folder for it."""
        self.rounds.save(self._private)

    def run_round(self) -> None:
        """Run the next round; what was done before is saved if it cannot be run."""
        try:
            self.rounds.run_round(self)
        except FederationStopped:
            self.save()
            raise

    def reach(self) -> tuple[Container[int], Mapping[int, str]]:
        """Return all clients."""
        return self.task.clients, {}

    def exchange(self, trial: Trial) -> Replies:
        """Let the clients train, and measure them where the round asks for it; that time is not counted."""
        clients = [Client(client, self.private(client), sent) for client, sent in trial.sent.items()]
        began, measured = time.monotonic(), self.settings.evaluates(trial.round)
        begun = [(c.number, self.method.weights(self.task, c.received, c.private)) for c in clients if measured]
        before = self._accuracies(begun)
        middle = time.monotonic()
        self._trained = trained = self._train(clients, trial.round)
        for one in trained:
            check_allow_list(one.update.tensors, self.method.shared, client=one.update.client)
        end = time.monotonic()
        after = self._accuracies([(one.update.client, one.weights) for one in trained if measured])
        trial.started += middle - began + time.monotonic() - end
        known = {"before": before, "after": after, "loss": {one.update.client: one.loss for one in trained}}

        def metrics(client: int) -> dict[str, float]:
            return {kind: values[client] for kind, values in known.items() if client in values}

        return Replies([replace(one.update, metrics=metrics(one.update.client)) for one in trained])

    def settle(self, done: Round) -> None:
        """Let the clients whose updates were taken keep what they have learned."""
        sound = set(done.clients) - set(done.refused)
        self._private.update({one.update.client: one.private for one in self._trained if one.update.client in sound})
        self._trained = []  # their factors lie in memory that the next round takes again

    def before_retry(self) -> None:
        """Wait for nothing: all clients are here."""

    def _train(self, clients: Sequence[Client], number: int) -> list[Trained]:
        def share(model: LocalModel, part: Sequence[Client]) -> list[Trained]:
            return self.method.train(self.task, model, part, round=number, seed=self.settings.seed)

        return self._spread(share, clients)

    def _accuracies(self, models: Sequence[tuple[int, Weights]]) -> dict[int, float]:
        def share(model: LocalModel, part: Sequence[tuple[int, Weights]]) -> list[float]:
            return [model.accuracy(w.body, w.head, self.task.client(number).test, w.statistics) for number, w in part]

        accuracies = self._spread(share, models)
        return {number: accuracy for (number, _), accuracy in zip(models, accuracies, strict=True)}

    def _spread(self, share: Callable[[LocalModel, Sequence[S]], list[T]], items: Sequence[S]) -> list[T]:
        """Give every worker an equal share of the items; return the results in the order of the items."""
        if not items:
            return []
        size = -(-len(items) // self.workers)
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        found = self._pool.map(share, self._models[: len(parts)], parts)
        return [result for part in found for result in part]


@contextmanager
def _opened(
    task: Task, method: Method, settings: Federation, folder: str | Path | Job, *, reading: bool = False
) -> Iterator[Job]:
    """Open a federation's job, which is known by all that decides its result, but for when it ends."""
    data = {
        client: [digest_tensor(part.contiguous()) for part in (*task.client(client).train, *task.client(client).test)]
        for client in task.clients
    }
    key = run_key(task, method, settings, data, may_change=("rounds", "evaluate_every", "until_plateau"))
    with Job.open(folder, key=key, of="a federation", state=CHECKPOINT, reading=reading) as job:
        yield job


def run_key(
    task: Task, method: Method, settings: Federation, data: Any, *, may_change: Sequence[str]
) -> dict[str, Any]:
    """Return all that a federation was asked for, part by part; its digest is the federation's identity.

    Args:
        task: The network in its first state.
        method: How clients train.
        settings: The rounds.
        data: What stands for the clients' data: digests, or their numbers.
        may_change: Settings that may change to go on.
    """
    start = [digest_tensor(tensor) for tensor in (task.initial_body(), task.initial_head())]
    layouts = [str(task.body_layout), str(task.head_layout)]
    return {
        "settings": {name: getattr(settings, name) for name in Federation.model_fields if name not in may_change},
        "method": parts_of(method), "clients": len(data), "data": digest_config(data),
        "initial_weights": dict(zip(("body", "head"), start, strict=True)), "layouts": digest_config(layouts),
    }  # fmt: skip


def parts_of(value: Any) -> Any:
    """Return a method's class and fields as JSON values, those of methods and settings inside it too."""
    if isinstance(value, Settings):
        return {"kind": type(value).__name__, **value.to_json()}
    if is_dataclass(value) and not isinstance(value, type):
        return {"kind": type(value).__name__, **{one.name: parts_of(getattr(value, one.name)) for one in fields(value)}}
    if isinstance(value, tuple | list):
        return [parts_of(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    own = {name: parts_of(each) for name, each in sorted(vars(value).items())} if hasattr(value, "__dict__") else {}
    return {"kind": getattr(value, "__qualname__", type(value).__qualname__), **own}
