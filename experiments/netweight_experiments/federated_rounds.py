"""Rounds in the usual way, one client after another by modules and `torch.optim.SGD`: what the engine is timed against.

FedAvg and HyperFL as one would write them with care and without this library: contiguous images, no copies but those
needed, gradients of the hypernetwork by autograd. Images are random: how long a round takes does not depend on them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.core import seeds
from netweight.core.progress import QUIET, Progress
from netweight.methods.federate.algorithms.hyperfl import HYPERNETWORK, HyperFL
from netweight.methods.federate.catalog import METHODS, named_method
from netweight.methods.federate.engine import round_by_round
from netweight.methods.federate.method import without
from netweight.methods.federate.settings import LocalTraining
from netweight.methods.federate.small_cnn import small_cnn
from netweight.methods.federate.task import ClientData, Task
from netweight.metrics.intervals import interval_finding, paired_ratio
from netweight.nn import Hypernetwork, ParameterLayout
from netweight.report.finding import Better, Finding
from netweight_experiments.timing import Case, Samples, interleave


def random_federation(clients: int, images: int, *, classes: int = 10, seed: int = 0) -> Task:
    """Return clients with images of Fashion-MNIST's size, and the small CNN."""
    data = []
    for client in range(clients):
        generator = seeds.torch_generator(seed, "random images", client)
        inputs = torch.randn(images, 1, 28, 28, generator=generator)
        targets = torch.randint(classes, (images,), generator=generator)
        data.append(ClientData((inputs, targets), (inputs[:1], targets[:1])))
    body, head = small_cnn(1, 28, classes, seed=seed)
    return Task(body, head, data)


def dense_fedavg(task: Task, training: LocalTraining, *, seed: int) -> Callable[[], dict[str, Tensor]]:
    """Return a function that trains one round of FedAvg and returns the average, body and head numbered 0 and 1."""
    server = nn.Sequential(copy.deepcopy(task.body), copy.deepcopy(task.head))
    draws = _Draws(task, training, seed)

    def round() -> dict[str, Tensor]:
        average = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
        for client, share in draws.shares():
            model = copy.deepcopy(server)
            optimizer = _sgd(model.parameters(), training.lr, training)
            for inputs, targets in draws.batches(client, training.epochs):
                optimizer.zero_grad()
                task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            _add(average, model, share)
        server.load_state_dict(average)
        return average

    return round


def dense_hyperfl(task: Task, training: LocalTraining, *, seed: int) -> Callable[[], dict[str, Tensor]]:
    """Return a function that trains one round of HyperFL and returns the average of the hypernetworks."""
    layout, body = ParameterLayout.of(task.body), copy.deepcopy(task.body)
    method = HyperFL(training)
    with torch.random.fork_rng(devices=[]):
        server = method.hypernetwork(task)
    server.load_state_dict(without(HYPERNETWORK, method.start(task, seed=seed)))
    private = {client: method.private_start(task, client, seed=seed) for client in task.clients}
    embeddings = {client: nn.Parameter(own["embedding"]) for client, own in private.items()}
    heads = {client: copy.deepcopy(task.head) for client in task.clients}
    draws = _Draws(task, training, seed)

    def train_head(client: int) -> None:
        with torch.no_grad():
            weights = layout.split(server(embeddings[client]))
        optimizer = _sgd(heads[client].parameters(), training.head_lr, training)
        for inputs, targets in draws.batches(client, training.head_epochs):
            with torch.no_grad():
                features = functional_call(body, weights, (inputs,))
            optimizer.zero_grad()
            task.loss(heads[client](features), targets).backward()  # type: ignore[no-untyped-call]
            optimizer.step()

    def train_generator(client: int) -> Hypernetwork:
        network, embedding, head = copy.deepcopy(server), embeddings[client], heads[client].requires_grad_(False)
        optimizer = _sgd([*network.parameters(), embedding], training.lr, training)
        for inputs, targets in draws.batches(client, training.epochs):
            optimizer.zero_grad()
            features = functional_call(body, layout.split(network(embedding)), (inputs,))
            task.loss(head(features), targets).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(network.parameters(), training.clip)
            nn.utils.clip_grad_norm_([embedding], training.clip)
            optimizer.step()
        head.requires_grad_(True)
        return network

    def round() -> dict[str, Tensor]:
        average = {name: torch.zeros_like(value) for name, value in server.state_dict().items()}
        for client, share in draws.shares():
            train_head(client)
            _add(average, train_generator(client), share)
        server.load_state_dict(average)
        return average

    return round


class _Draws:
    """Clients in turn, and their batches in an order drawn anew each time."""

    def __init__(self, task: Task, training: LocalTraining, seed: int) -> None:
        self._task, self._size = task, training.batch_size
        self._generator = seeds.torch_generator(seed, "batches")

    def shares(self) -> Iterator[tuple[int, float]]:
        """Yield every client with its share of all examples."""
        total = sum(self._task.client(client).n for client in self._task.clients)
        for client in self._task.clients:
            yield client, self._task.client(client).n / total

    def batches(self, client: int, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield a client's batches."""
        inputs, targets = self._task.client(client).train
        for _ in range(epochs):
            for index in torch.split(torch.randperm(len(inputs), generator=self._generator), self._size):
                yield inputs[index], targets[index]


def _sgd(parameters: object, lr: float, training: LocalTraining) -> torch.optim.SGD:
    return torch.optim.SGD(
        parameters,  # type: ignore[arg-type]  # modules' iterators and lists alike
        lr=lr,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )


@torch.no_grad()
def _add(average: dict[str, Tensor], model: nn.Module, share: float) -> None:
    for name, value in model.state_dict().items():
        average[name].add_(value, alpha=share)


# Methods that are timed, by their names in the catalog.
TIMED = ("fedavg", "dp-fedavg", "ppsgd", "centaur", "hyperfl", "hyperfl-body")
_NOISE = 1.0  # how much noise there is does not change the time


@dataclass(frozen=True, order=True)
class Contender:
    """Who trains a round."""

    method: str
    """A method by its name in the catalog."""
    engine: bool = True
    """Whether this library's engine trains it, or dense modules one client after another."""
    threads: int = 1
    """The engine's workers, or torch's threads for dense modules."""

    @property
    def label(self) -> str:
        """In words, for tables."""
        if self.engine:
            return f"{self.method}, {self.threads} worker{'s' * (self.threads > 1)}"
        return f"{self.method}, dense modules, {self.threads} thread{'s' * (self.threads > 1)}"


def time_rounds(
    task: Task,
    training: LocalTraining,
    *,
    workers: tuple[int, ...] = (1, 2),
    repeats: int,
    seed: int = 0,
    progress: Progress = QUIET,
) -> dict[Contender, Samples]:
    """Time rounds of every contender, one of each in turn, in one process."""
    before = torch.get_num_threads()
    with ExitStack() as stack:
        stack.callback(torch.set_num_threads, before)
        cases = []
        for threads in workers:
            for method in TIMED:
                noise = _NOISE if METHODS[method].private else None
                made = named_method(method, training=training, noise_multiplier=noise)
                rounds = stack.enter_context(round_by_round(task, made, seed=seed, workers=threads))
                cases.append(_case(Contender(method, threads=threads), 1, rounds))
            dense = dense_fedavg(task, training, seed=seed)
            cases.append(_case(Contender("fedavg", engine=False, threads=threads), threads, dense))
        cases.append(_case(Contender("hyperfl", engine=False), 1, dense_hyperfl(task, training, seed=seed)))
        return interleave(
            cases, repeats=repeats, seed=seed, again_below=0, steady=0, progress=progress, description="rounds"
        )


def _case(contender: Contender, threads: int, run: Callable[[], object]) -> Case[Contender]:
    """Time a function with a number of torch's threads; the engine's workers each have one."""

    def timed(_: Any) -> None:
        run()

    return Case(contender, timed, lambda: torch.set_num_threads(threads))


def speed_findings(times: Mapping[Contender, Samples], *, seed: int, targets: bool) -> list[Finding]:
    """Return ratios of times taken side by side, with intervals."""
    findings = []
    for threads in sorted({contender.threads for contender in times}):
        base = Contender("fedavg", threads=threads)
        for method in TIMED[1:]:
            limit = {"hyperfl": 2.0, "dp-fedavg": 3.0}.get(method) if targets else None
            name = f"time of a round, {method} over fedavg, {_workers(threads)}"
            findings.append(_ratio(name, times, Contender(method, threads=threads), base, "lower", limit, seed))
        for method, least in (("fedavg", 1.0 if threads == 1 else 1.8), ("hyperfl", 6.0)):
            goal = least if targets and threads <= 2 else None
            for other in sorted({1, threads}):
                name = f"times as fast as dense modules on {other} thread{'s' * (other > 1)}, {method}"
                dense = Contender(method, engine=False, threads=other)
                if dense not in times:
                    continue
                wanted = goal if other == threads else None
                ours = Contender(method, threads=threads)
                findings.append(_ratio(f"{name}, {_workers(threads)}", times, dense, ours, "higher", wanted, seed))
    return findings


def _workers(threads: int) -> str:
    return f"{threads} worker{'s' * (threads > 1)}"


def _ratio(
    name: str,
    times: Mapping[Contender, Samples],
    top: Contender,
    bottom: Contender,
    better: Better,
    target: float | None,
    seed: int,
) -> Finding:
    above, below = times[top].wall, times[bottom].wall
    return interval_finding(
        name,
        paired_ratio(above, below, seed=seed),
        better=better,
        target=target,
        seeds=(seed,),
        detail={"median seconds": {top.label: median(above), bottom.label: median(below)}},
    )
