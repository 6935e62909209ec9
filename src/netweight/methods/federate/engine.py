"""The engine in this process: rounds of a federation, its clients spread over the processor's cores.

The command line, the benchmarks and the studies call it. The Flower app runs the same methods elsewhere.
"""

from __future__ import annotations

import ast
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from netweight.core import digest
from netweight.core.environment import usable_cores
from netweight.core.progress import QUIET, Progress
from netweight.errors import FederationStopped, UsageError
from netweight.job import Job
from netweight.methods.federate.checkpoint import Checkpoint
from netweight.methods.federate.intake import examine
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, Method, Trained, Weights
from netweight.methods.federate.outgoing import check_outgoing
from netweight.methods.federate.rounds import Federation, Round, sampled_clients, still_there
from netweight.methods.federate.task import FedTask
from netweight.methods.federate.updates import Tensors

__all__ = ["CHECKPOINT", "Run", "described", "finished", "round_by_round", "train"]

CHECKPOINT = "federation.safetensors"
"""The file within a run's folder that it resumes from."""

S = TypeVar("S")
T = TypeVar("T")
_LOG = logging.getLogger(__name__)


@final
@dataclass(frozen=True)
class Run:
    """A trained federation.

    Attributes:
        task: What was learned.
        method: How.
        state: The server's tensors by name, after the last round.
        private: Each client's private tensors by name.
        rounds: What is known of each round.
        seed: Of the federation.
    """

    task: FedTask
    method: Method
    state: Tensors
    private: dict[int, Tensors]
    rounds: tuple[Round, ...]
    seed: int

    def weights(self, client: int) -> Weights:
        """Return a client's personal model from the server's state and what the client keeps.

        Args:
            client: Its number.
        """
        return self.method.weights(self.task, self.method.message(self.state, client), self.private[client])


def train(
    task: FedTask,
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
        kept = None if folder is None else stack.enter_context(_opened(task, method, settings, folder))
        federation = _Federation(task, method, settings, kept, torch.device(device), workers)
        with progress.task(f"{method.name}: rounds", total=settings.rounds, unit="rounds") as work:
            work.update(len(federation.rounds))
            with federation.working():
                while not settings.is_done(federation.rounds):
                    federation.run_round()
                    if len(federation.rounds) % save_every == 0:
                        federation.save()
                    work.update(1)
        federation.save()
    return Run(task, method, federation.state, federation.all_private(), tuple(federation.rounds), settings.seed)


def finished(task: FedTask, method: Method, settings: Federation, *, folder: str | Path) -> Run:
    """Open a federation that has been trained; nothing is trained and nothing written.

    Args:
        task: As for `train`; so are the others.
        method: How clients trained.
        settings: Rounds, sampling, seed.
        folder: Where its checkpoint lies.

    Raises:
        UsageError: The folder holds a federation with other settings, or one with rounds to go.
    """
    with _opened(task, method, settings, folder, reading=True) as kept:
        federation = _Federation(task, method, settings, kept, torch.device("cpu"), 1)
    if not settings.is_done(federation.rounds):
        raise UsageError(
            f"The federation in {folder} has {len(federation.rounds)} of {settings.rounds} rounds.",
            cure="Run it again to go on.",
        )
    return Run(task, method, federation.state, federation.all_private(), tuple(federation.rounds), settings.seed)


@contextmanager
def round_by_round(task: FedTask, method: Method, *, seed: int, workers: int) -> Iterator[Callable[[], None]]:
    """Yield a function that runs one more round on the CPU, all clients asked and nothing evaluated: to time rounds.

    Args:
        task: As for `train`; so are the others.
        method: How clients train.
        seed: Of everything drawn.
        workers: Threads.
    """
    endless = Federation(rounds=2**31, seed=seed, evaluate_every=2**31)
    federation = _Federation(task, method, endless, None, torch.device("cpu"), workers)
    with federation.working():
        yield federation.run_round


@final
class _Federation:
    """A federation under way."""

    def __init__(
        self,
        task: FedTask,
        method: Method,
        settings: Federation,
        kept: _Kept | None,
        device: torch.device,
        workers: int | None,
    ) -> None:
        self.task, self.method, self.settings, self.kept, self.device = task, method, settings, kept, device
        self.workers = workers or (usable_cores() if device.type == "cpu" else 1)
        self.workers = min(self.workers, len(task.clients))
        self._models = [LocalModel(task, device) for _ in range(self.workers)]
        self.state: Tensors = self._placed(method.start(task, seed=settings.seed))
        self._private: dict[int, Tensors] = {}
        self.rounds: list[Round] = []
        saved = None if kept is None else Checkpoint.load(kept.job, kept.digest)
        if saved is not None:
            self.state, self.rounds = self._placed(saved.state), list(saved.rounds)
            self._private = {client: self._placed(tensors) for client, tensors in saved.private.items()}

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

    def all_private(self) -> dict[int, Tensors]:
        """Return what every client keeps, those included that never took part."""
        return {client: self.private(client) for client in self.task.clients}

    def save(self) -> None:
        """Write a checkpoint, if there is a folder for it."""
        if self.kept is not None:
            Checkpoint(self.state, self._private, self.rounds).save(self.kept.job, self.kept.digest)

    def run_round(self) -> None:
        """Run the next round, again if too few clients answer."""
        number = len(self.rounds) + 1
        for attempt in range(self.settings.retries + 1):
            done = self._attempt(number, attempt)
            if done is not None:
                self.rounds.append(done)
                return
        self.save()
        where = f"; its state is in {self.kept.job.folder}" if self.kept is not None else ""
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
            check_outgoing(one.update.tensors, self.method.shared, client=one.update.client)
        intake = examine(sent, [one.update for one in trained], round=number)
        for client, why in intake.refused.items():
            _LOG.warning("Round %d, attempt %d: client %d left out: %s.", number, attempt + 1, client, why)
        if len(intake.accepted) < self.settings.min_clients:
            return None
        self.state = self.method.aggregate(self.state, intake.accepted)
        seconds = time.perf_counter() - started
        sound = {update.client for update in intake.accepted}
        kept = [one for one in trained if one.update.client in sound]
        self._private.update({one.update.client: one.private for one in kept})
        after = self._accuracies([(one.update.client, one.weights) for one in kept]) if measured else {}
        losses = {one.update.client: one.loss for one in kept}
        return Round(number, asked, before, after, losses, seconds, intake.refused, attempt + 1)

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


_MAY_CHANGE = ("rounds", "evaluate_every", "until_plateau")


@final
@dataclass(frozen=True)
class _Kept:
    """Where a federation is kept."""

    job: Job
    digest: str


@contextmanager
def _opened(
    task: FedTask, method: Method, settings: Federation, folder: str | Path | Job, *, reading: bool = False
) -> Iterator[_Kept]:
    """Open a federation's job. Its key is all that decides the result but for when it ends, which may be put off."""
    asked = {field: value for field, value in vars(settings).items() if field not in _MAY_CHANGE}
    data = {
        client: [
            digest.of_tensor(tensor.contiguous()) for tensor in (*task.client(client).train, *task.client(client).test)
        ]
        for client in task.clients
    }
    start = [digest.of_tensor(tensor) for tensor in (task.initial_body(), task.initial_head())]
    layouts = [str(task.body_layout), str(task.head_layout)]
    key = {
        "settings": asked, "method": described(method), "clients": len(data), "data": digest.of_config(data),
        "initial_weights": dict(zip(("body", "head"), start, strict=True)), "layouts": digest.of_config(layouts),
    }  # fmt: skip
    with Job.open(folder, key=key, of="a federation", state=CHECKPOINT, reading=reading) as job:
        yield _Kept(job, digest.of_config([asked, repr(method), data, start, layouts]))


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
