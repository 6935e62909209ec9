"""The engine of one process: clients train in one thread per core, and a run is known by a digest of its settings."""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from netweight.core.devices import check_device
from netweight.core.digests import digest_config, digest_tensor
from netweight.core.progress import QUIET, Progress
from netweight.core.threads import usable_cores
from netweight.errors import FederationStopped, UsageError
from netweight.job import Job
from netweight.methods.federate.checkpoint import CHECKPOINT
from netweight.methods.federate.data_checks import refuse_unfit_examples
from netweight.methods.federate.history import Round, total_answers
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.malicious_clients import WithMaliciousClients
from netweight.methods.federate.method import Client, ClientWeights, LocalResult, Method
from netweight.methods.federate.rounds import RoundAttempt, Rounds
from netweight.methods.federate.settings import Federation
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors, Update, check_allow_list
from netweight.settings import Settings

S = TypeVar("S")
T = TypeVar("T")


@final
@dataclass(frozen=True)
class TrainedFederation:
    """A trained federation."""

    task: Task
    """Task that was learned."""
    method: Method
    """Method of the federation."""
    state: Tensors
    """The server's tensors by name, after the last round."""
    private: dict[int, Tensors]
    """Each client's private tensors by name."""
    rounds: tuple[Round, ...]
    """History of each round."""
    seed: int
    """The federation's."""
    attempt_answers: Mapping[int, int] = field(default_factory=dict)
    """Client → answers in failed attempts after the last round."""

    @property
    def answers(self) -> dict[int, int]:
        """Client → how many answers it was asked for in the whole run, failed attempts included."""
        return total_answers(self.rounds, self.attempt_answers)

    def weights(self, client: int) -> ClientWeights:
        """Return a client's personal model from the server's state and what the client keeps."""
        return self.method.weights(self.task, self.method.message(self.state, client), self.private[client])


def train(
    task: Task, method: Method, settings: Federation = Federation(), *, folder: str | Path | Job | None = None,
    workers: int | None = None, device: torch.device | str = "cpu", save_every: int = 1, progress: Progress = QUIET,
) -> TrainedFederation:  # fmt: skip
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
        UsageError: The folder holds a federation with other settings, or a client's examples cannot be learned.
        FederationStopped: A round had too few sound updates and its retries were used up, or no update of some client
            could be used in any round; the state is saved.
        PrivateTensor: The method was about to send a private tensor.
    """
    check_device(str(device))
    for client in task.clients:
        refuse_unfit_examples(task, client)
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
        federation.rounds.refuse_failing_clients(
            rehearsed=method.liars if isinstance(method, WithMaliciousClients) else ()
        )
    return federation.result()


def finished(task: Task, method: Method, settings: Federation, *, folder: str | Path) -> TrainedFederation:
    """Open a federation that has been trained; nothing is trained and nothing written."""
    with _opened(task, method, settings, folder, reading=True) as job:
        federation = _InThisProcess(task, method, settings, torch.device("cpu"), 1)
        federation.resume(job)
    if not federation.rounds.done:
        raise UsageError(
            f"The federation in {folder} has {len(federation.rounds.rounds)} of {settings.rounds} rounds.",
            cure="Give the command that trained it again (netweight federate run --out FOLDER, with the same options); "
            "it continues from the last round.",
        )
    return federation.result()


@contextmanager
def round_by_round(task: Task, method: Method, *, seed: int, workers: int) -> Iterator[Callable[[], None]]:
    """Yield a function that runs one more round on the CPU, all clients asked and nothing evaluated: to time rounds."""
    endless = Federation(rounds=2**31, seed=seed, evaluate_every=2**31)
    federation = _InThisProcess(task, method, endless, torch.device("cpu"), workers)
    with federation.working():
        yield federation.run_round


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
        self._results: list[LocalResult] = []

    def resume(self, job: Job) -> None:
        """Go on from a checkpoint, if there is one, and save there from now on."""
        saved = self.rounds.resume(job)
        self.rounds.state = self._placed(self.rounds.state)
        self._private = {c: self._placed(tensors) for c, tensors in saved.private.items()} if saved else {}

    def result(self) -> TrainedFederation:
        """Return what was trained, with the private tensors of clients that never took part, too."""
        private = {client: self.private(client) for client in self.task.clients}
        rounds = self.rounds
        about = tuple(rounds.rounds), self.settings.seed, dict(rounds.attempt_answers)
        return TrainedFederation(self.task, self.method, rounds.state, private, *about)

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

    def collect(self, trial: RoundAttempt) -> list[Update]:
        """Let the clients train, and measure them where the round asks for it; that time is not counted."""
        clients = [Client(client, self.private(client), sent) for client, sent in trial.messages.items()]
        measured = self.settings.evaluates(trial.round)
        begun = time.monotonic()
        before = self._accuracies(self._received(clients)) if measured else {}
        trial.start_time += time.monotonic() - begun
        self._results = self._train(clients, trial.round)
        for one in self._results:
            check_allow_list(one.update.tensors, self.method.shared, client=one.update.client)
        ended = time.monotonic()
        after = self._accuracies([(one.update.client, one.weights) for one in self._results]) if measured else {}
        trial.start_time += time.monotonic() - ended
        return [
            replace(one.update, metrics={**one.update.metrics, **_of(one.update.client, before=before, after=after)})
            for one in self._results
        ]

    def _received(self, clients: Sequence[Client]) -> list[tuple[int, ClientWeights]]:
        return [(c.number, self.method.weights(self.task, c.message, c.private)) for c in clients]

    def finish_round(self, done: Round) -> None:
        """Let the clients whose updates were taken keep what they have learned."""
        sound = set(done.clients) - set(done.refusals)
        self._private.update({one.update.client: one.private for one in self._results if one.update.client in sound})
        # The factors are in memory that the next round uses again.
        self._results = []

    def before_retry(self) -> None:
        """Wait for nothing: all clients are here."""

    def _train(self, clients: Sequence[Client], number: int) -> list[LocalResult]:
        def share(model: LocalModel, part: Sequence[Client]) -> list[LocalResult]:
            return self.method.train(self.task, model, part, round=number, seed=self.settings.seed)

        return self._spread(share, clients)

    def _accuracies(self, models: Sequence[tuple[int, ClientWeights]]) -> dict[int, float]:
        def share(model: LocalModel, part: Sequence[tuple[int, ClientWeights]]) -> list[float]:
            return [model.accuracy(w.body, w.head, self.task.client(number).test, w.statistics) for number, w in part]

        accuracies = self._spread(share, models)
        return {number: accuracy for (number, _), accuracy in zip(models, accuracies, strict=True)}

    def _spread(self, share: Callable[[LocalModel, Sequence[S]], list[T]], items: Sequence[S]) -> list[T]:
        """Give every worker an equal share of the items; return the results in the order of the items."""
        if not items:
            return []
        size = -(-len(items) // self.workers)
        parts = [items[start : start + size] for start in range(0, len(items), size)]
        results = self._pool.map(share, self._models[: len(parts)], parts)
        return [result for part in results for result in part]


def _of(client: int, **values: Mapping[int, float]) -> dict[str, float]:
    """Return one client's values of several measurements, as far as it has them."""
    return {kind: by_client[client] for kind, by_client in values.items() if client in by_client}


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
        "frozen_weights": digest_config({name: digest_tensor(value) for name, value in task.constants().items()}),
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
