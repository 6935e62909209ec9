"""The engine of one process: rounds with one thread per core, checkpoints between them, and how a run is known."""

from __future__ import annotations

import ast
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from netweight.core import digest, seeds
from netweight.core.environment import usable_cores
from netweight.core.progress import QUIET, Progress
from netweight.errors import FederationStopped, UsageError
from netweight.job import Job
from netweight.methods.federate.method import Client, Method, Trained, Weights
from netweight.methods.federate.settings import Federation
from netweight.methods.federate.task import LocalModel, Task
from netweight.methods.federate.updates import Tensors, check_allow_list, validate_updates

# The file within a run's folder that it resumes from.
CHECKPOINT = "federation.safetensors"

S = TypeVar("S")
T = TypeVar("T")
_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Round:
    """What is known of a finished round."""

    round: int  # its number, from 1
    clients: tuple[int, ...]  # who was asked, in order
    # Accuracy of each client's model as received, by client, with freshly generated weights; empty in rounds without
    # evaluation.
    before: Mapping[int, float] = field(default_factory=dict)
    after: Mapping[int, float] = field(default_factory=dict)
    loss: Mapping[int, float] = field(default_factory=dict)  # mean training loss by client
    seconds: float = 0.0  # wall-clock time of local training and aggregation, without evaluation
    refused: Mapping[int, str] = field(default_factory=dict)  # client → why its update was left out
    attempts: int = 1  # how often the round was tried

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
        maps = ("before", "after", "loss", "refused")
        numbered = {name: {int(client): value for client, value in values[name].items()} for name in maps}
        return cls(**{**values, **numbered, "clients": tuple(values["clients"])})


def _mean(values: Mapping[int, float]) -> float | None:
    return sum(values.values()) / len(values) if values else None


def is_done(settings: Federation, rounds: Sequence[Round]) -> bool:
    """Whether no more rounds are to follow those that have been."""
    return len(rounds) >= settings.rounds or (settings.until_plateau and at_plateau(rounds))


def at_plateau(rounds: Sequence[Round], *, evaluations: int = 6, least: float = 0.001) -> bool:
    """Whether mean accuracy, before and after local training alike, rose by less than `least` lately."""
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

    def weights(self, client: int) -> Weights:
        """Return a client's personal model from the server's state and what the client keeps."""
        return self.method.weights(self.task, self.method.message(self.state, client), self.private[client])


def train(
    task: Task,
    method: Method,
    settings: Federation = Federation(),
    *,
    folder: str | Path | Job | None = None,
    workers: int | None = None,
    device: torch.device | str = "cpu",
    save_every: int = 1,
    progress: Progress = QUIET,
) -> Run:
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
        federation = _Federation(task, method, settings, torch.device(device), workers)
        if folder is not None:
            federation.resume(stack.enter_context(_opened(task, method, settings, folder)))
        with progress.task(f"{method.name}: rounds", total=settings.rounds, unit="rounds") as work:
            work.update(len(federation.rounds))
            with federation.working():
                while not is_done(settings, federation.rounds):
                    federation.run_round()
                    if len(federation.rounds) % save_every == 0:
                        federation.save()
                    work.update(1)
        federation.save()
    return federation.result()


def finished(task: Task, method: Method, settings: Federation, *, folder: str | Path) -> Run:
    """Open a federation that has been trained; nothing is trained and nothing written."""
    federation = _Federation(task, method, settings, torch.device("cpu"), 1)
    with _opened(task, method, settings, folder, reading=True) as kept:
        federation.resume(kept)
    if not is_done(settings, federation.rounds):
        raise UsageError(
            f"The federation in {folder} has {len(federation.rounds)} of {settings.rounds} rounds.",
            cure="Run it again to go on.",
        )
    return federation.result()


@contextmanager
def round_by_round(task: Task, method: Method, *, seed: int, workers: int) -> Iterator[Callable[[], None]]:
    """Yield a function that runs one more round on the CPU, all clients asked and nothing evaluated: to time rounds."""
    endless = Federation(rounds=2**31, seed=seed, evaluate_every=2**31)
    federation = _Federation(task, method, endless, torch.device("cpu"), workers)
    with federation.working():
        yield federation.run_round


@final
class _Federation:
    """A federation under way."""

    def __init__(
        self, task: Task, method: Method, settings: Federation, device: torch.device, workers: int | None
    ) -> None:
        self.task, self.method, self.settings, self.device = task, method, settings, device
        self.workers = min(workers or (usable_cores() if device.type == "cpu" else 1), len(task.clients))
        self._models = [LocalModel(task, device) for _ in range(self.workers)]
        self.state: Tensors = self._placed(method.start(task, seed=settings.seed))
        self._private: dict[int, Tensors] = {}
        self.rounds: list[Round] = []
        self.kept: _Kept | None = None

    def resume(self, kept: _Kept) -> None:
        """Go on from a checkpoint, if there is one, and save there from now on."""
        self.kept, saved = kept, Checkpoint.load(*kept)
        if saved is not None:
            self.state, self.rounds = self._placed(saved.state), list(saved.rounds)
            self._private = {client: self._placed(tensors) for client, tensors in saved.private.items()}

    def result(self) -> Run:
        """Return what was trained, with the private tensors of clients that never took part, too."""
        private = {client: self.private(client) for client in self.task.clients}
        return Run(self.task, self.method, self.state, private, tuple(self.rounds), self.settings.seed)

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
        if self.kept is not None:
            Checkpoint(self.state, self._private, self.rounds).save(*self.kept)

    def run_round(self) -> None:
        """Run the next round, again if too few clients answer."""
        number = len(self.rounds) + 1
        for attempt in range(self.settings.retries + 1):
            done = self._attempt(number, attempt)
            if done is not None:
                self.rounds.append(done)
                return
        self.save()
        where = f"; its state is in {self.kept[0].folder}" if self.kept is not None else ""
        raise FederationStopped(
            f"Round {number} had fewer than {self.settings.min_clients} sound updates in "
            f"{self.settings.retries + 1} attempts{where}.",
            cure="See the log for who was refused and why; run the same again to resume.",
        )

    def _attempt(self, number: int, attempt: int) -> Round | None:
        asked = sampled_clients(self.task.clients, self.settings, number, attempt)
        sent = {client: self.method.message(self.state, client) for client in asked}
        present = still_there(asked, self.settings, number, attempt)
        clients = [Client(client, self.private(client), sent[client]) for client in present]
        measured = self.settings.evaluates(number)
        before = self._accuracies([(c.number, self._received(c)) for c in clients]) if measured else {}
        started = time.perf_counter()
        trained = self._train(clients, number)
        for one in trained:
            check_allow_list(one.update.tensors, self.method.shared, client=one.update.client)
        found = validate_updates(sent, [one.update for one in trained], round=number)
        for client, why in found.refused.items():
            _LOG.warning("Round %d, attempt %d: client %d left out: %s.", number, attempt + 1, client, why)
        if len(found.accepted) < self.settings.min_clients:
            return None
        self.state = self.method.aggregate(self.state, found.accepted)
        seconds = time.perf_counter() - started
        sound = {update.client for update in found.accepted}
        kept = [one for one in trained if one.update.client in sound]
        self._private.update({one.update.client: one.private for one in kept})
        after = self._accuracies([(one.update.client, one.weights) for one in kept]) if measured else {}
        losses = {one.update.client: one.loss for one in kept}
        return Round(number, asked, before, after, losses, seconds, found.refused, attempt + 1)

    def _received(self, client: Client) -> Weights:
        return self.method.weights(self.task, client.received, client.private)

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


# A job, and the digest by which earlier releases know its federation.
_Kept = tuple[Job, str]


@contextmanager
def _opened(
    task: Task, method: Method, settings: Federation, folder: str | Path | Job, *, reading: bool = False
) -> Iterator[_Kept]:
    """Open a federation's job, which is known by all that decides its result, but for when it ends."""
    data = {
        client: [
            digest.of_tensor(part.contiguous()) for part in (*task.client(client).train, *task.client(client).test)
        ]
        for client in task.clients
    }
    key, known = identity(task, method, settings, data, may_change=("rounds", "evaluate_every", "until_plateau"))
    with Job.open(folder, key=key, of="a federation", state=CHECKPOINT, reading=reading) as job:
        yield job, known


def identity(
    task: Task, method: Method, settings: Federation, data: Any, *, may_change: Sequence[str]
) -> tuple[dict[str, Any], str]:
    """What a federation was asked for, part by part, and one digest of it; some settings may change to go on."""
    asked = {name: getattr(settings, name) for name in Federation.model_fields if name not in may_change}
    start = [digest.of_tensor(tensor) for tensor in (task.initial_body(), task.initial_head())]
    layouts = [str(task.body_layout), str(task.head_layout)]
    key = {
        "settings": asked, "method": described(method), "clients": len(data), "data": digest.of_config(data),
        "initial_weights": dict(zip(("body", "head"), start, strict=True)), "layouts": digest.of_config(layouts),
    }  # fmt: skip
    return key, digest.of_config([asked, repr(method), data, start, layouts])


def described(method: Method) -> Any:
    """A method's repr, which is its identity, taken apart as JSON values, so that a difference is found by name."""
    text = repr(method)
    try:
        return _parts(ast.parse(text, mode="eval").body)
    except SyntaxError:
        return text


def _parts(node: ast.expr) -> Any:
    if isinstance(node, ast.Call):
        named = {word.arg or "": _parts(word.value) for word in node.keywords}
        return {"kind": ast.unparse(node.func), **{str(i): _parts(each) for i, each in enumerate(node.args)}, **named}
    if isinstance(node, ast.Tuple | ast.List):
        return [_parts(each) for each in node.elts]
    return ast.unparse(node)
