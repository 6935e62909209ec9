"""Printed ε against a count by hand: partitions × repeated rounds × mixed histories, in a process and over Flower.

The count does not use the project's account. Answers are counted where they leave a client, holders of an example by
comparing rows, and ε by convolving the distributions of the privacy loss with numpy. Losses are rounded down, so that
the count is never above the true ε of the noise, and a printed ε below the count is wrong.
"""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation_under_test import examples
from scipy.special import ndtr
from torch import nn

from netweight.errors import FederationStopped
from netweight.job import Job
from netweight.methods.federate import ClientData, Federation, LocalTraining, Task, fedavg, train
from netweight.methods.federate.algorithms.direct import DirectMethod
from netweight.methods.federate.algorithms.private_sgd import centaur, dp_fedavg
from netweight.methods.federate.method import Client, LocalResult, Method
from netweight.methods.federate.partition import dirichlet, dominant_groups
from netweight.methods.federate.protections import HardenedMethod, UpdateNoise
from netweight.methods.federate.report import guarantees
from netweight.methods.federate.settings import Budget

pytest.importorskip("opacus")

DELTA = 1e-5
TRAINING = LocalTraining(epochs=1, lr=0.1, batch_size=8)
# Noise multiplier, sampling rate, steps.
Part = tuple[float, float, int]

# ---- the count -------------------------------------------------------------------------------------------------------

_WIDTH, _CELLS = 2.0**-11, 2**17  # of the grid of privacy losses, from -32 to 32


def counted_epsilon(parts: Sequence[Part], delta: float) -> float:
    """ε of Gaussian noise with Poisson sampling, one unit added or removed, from below."""
    return max(_one_direction(parts, delta, removed) for removed in (True, False))


def _one_direction(parts: Sequence[Part], delta: float, removed: bool) -> float:
    edges = (np.arange(_CELLS + 1) - _CELLS // 2) * _WIDTH
    spectrum: Any = 1.0
    for noise, rate, steps in parts:
        if removed:  # the loss of the mixture against the normal distribution rises with x
            below = _mixture(_place(edges, noise, rate), noise, rate)
        else:  # and that of the normal distribution against the mixture falls
            below = ndtr(-_place(-edges, noise, rate) / noise)
        masses = np.diff(below)
        masses[0] += below[0]
        spectrum = spectrum * np.fft.rfft(np.roll(masses, -(_CELLS // 2))) ** steps
    masses = np.roll(np.fft.irfft(spectrum, _CELLS), _CELLS // 2).clip(0)
    low, high = 0.0, 30.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        above = int(np.searchsorted(edges[:-1], middle, side="right"))
        lost = float((masses[above:] * -np.expm1(middle - edges[above:-1])).sum())
        low, high = (middle, high) if lost > delta else (low, middle)
    return low


def _place(loss: np.ndarray, noise: float, rate: float) -> np.ndarray:
    """Where the loss of the mixture against the normal distribution has this value; -∞ where it never does."""
    odds = (np.exp(loss) - (1 - rate)) / rate
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(odds > 0, noise**2 * np.log(np.maximum(odds, 1e-300)) + 0.5, -np.inf)


def _mixture(x: np.ndarray, noise: float, rate: float) -> np.ndarray:
    return (1 - rate) * ndtr(x / noise) + rate * ndtr((x - 1) / noise)


@pytest.mark.parametrize("parts", [[(2.0, 1.0, 3)], [(4.0, 1.0, 1)], [(3.0, 1.0, 2), (1.5, 1.0, 1)]])
def test_the_count_is_the_closed_form_of_noise_without_sampling(parts: list[Part]) -> None:
    """Dong, Roth, Su (arXiv 1905.02383): Gaussian noise composes to Gaussian noise."""
    mu = math.sqrt(sum(steps / noise**2 for noise, _, steps in parts))
    counted = counted_epsilon(parts, DELTA)
    for epsilon, above in ((counted - 0.01, True), (counted + 0.01, False)):
        lost = ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon) * ndtr(-mu / 2 - epsilon / mu)
        assert (lost > DELTA) == above


def test_the_count_is_that_of_opacus_numerical_accountant() -> None:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = [(1.2, 0.2, 30), (2.0, 0.4, 10)]
    wanted = accountant.get_epsilon(DELTA)
    assert wanted - 0.06 < counted_epsilon([(1.2, 0.2, 30), (2.0, 0.4, 10)], DELTA) < wanted + 0.01


# ---- clients whose answers are counted where they leave --------------------------------------------------------------


class Watched:
    """A method that counts the answers of each client when they are computed."""

    def __init__(self, method: Method) -> None:
        self._method, self.sent = method, Counter[int]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._method, name)

    def train(self, task: Task, model: Any, clients: Sequence[Client], **asked: Any) -> list[LocalResult]:
        trained = self._method.train(task, model, clients, **asked)
        self.sent.update(one.update.client for one in trained)
        return trained


def parts_of_answers(method: Method, n: int, answers: int) -> list[Part]:
    """What `answers` updates of a client with n examples do to one of them, or to the client."""
    if isinstance(method, HardenedMethod):
        assert method.noise is not None
        return [(method.noise.multiplier, 1.0, answers)]
    assert isinstance(method, DirectMethod)
    (phase,) = method.phases
    assert phase.privacy is not None
    size = method.training.batch_size
    return [(phase.privacy.noise_multiplier, min(1.0, size / n), answers * phase.epochs * math.ceil(n / size))]


def rows_of(task: Task, client: int) -> set[bytes]:
    inputs, targets = task.client(client).train
    return {x.numpy().tobytes() + bytes([int(y)]) for x, y in zip(inputs, targets, strict=True)}


def count_in_process(task: Task, method: Method, sent: Mapping[int, int], delta: float) -> float:
    """The largest ε of any example, over all clients that have it; or of any client."""
    if isinstance(method, HardenedMethod):
        most = max(sent.values())
        return counted_epsilon([(noise / 2, rate, n) for noise, rate, n in parts_of_answers(method, 0, most)], delta)
    holders: dict[bytes, set[int]] = {}
    for client in task.clients:
        for row in rows_of(task, client):
            holders.setdefault(row, set()).add(client)
    groups = {frozenset(group & set(sent)) for group in holders.values()} - {frozenset()}
    return max(
        counted_epsilon([part for c in group for part in parts_of_answers(method, task.client(c).n, sent[c])], delta)
        for group in groups
    )


# ---- in one process --------------------------------------------------------------------------------------------------

LABELS = torch.arange(300) % 10
EVENLY = torch.randperm(300, generator=torch.Generator().manual_seed(1))


def copied() -> list[torch.Tensor]:
    """Rows of three clients, of which the third has rows of both others, in another order."""
    return [EVENLY[:40], EVENLY[40:70], torch.cat([EVENLY[60:80].flip(0), EVENLY[:10].flip(0)])]


PARTITIONS: dict[str, Callable[[], list[torch.Tensor]]] = {
    "iid": lambda: list(EVENLY.split(60)),
    "dirichlet": lambda: dirichlet(LABELS, clients=5, alpha=0.4, seed=3),
    "by class": lambda: [(LABELS == label).nonzero().flatten() for label in range(5)],
    "reference split": lambda: dominant_groups(
        LABELS, clients=6, per_client=60, groups=((0, 1, 2), (2, 3, 4), (4, 5, 6)), seed=2022
    ),
    "sizes": lambda: [EVENLY[:7], EVENLY[7:50], EVENLY[50:230]],
    "the same rows": lambda: [EVENLY[:30]] * 3,
    "copied rows": copied,
}


def task_of(partition: str) -> Task:
    torch.manual_seed(0)
    inputs, _ = examples(300, 5)
    data = [ClientData((inputs[own], LABELS[own] % 3), examples(10, 900)) for own in PARTITIONS[partition]()]
    return Task(nn.Sequential(nn.Linear(6, 5), nn.Tanh()), nn.Linear(5, 3), data)


ROUNDS = Federation(rounds=3)


@dataclass(frozen=True)
class Case:
    """A federation in one process."""

    partition: str
    method: Method
    settings: Federation = ROUNDS
    stops_at: int = 0
    """The round after which it is stopped and goes on from its folder; 0 for none."""


def private(noise: float, **training: Any) -> Method:
    return dp_fedavg(noise, training=TRAINING.replace(**training))


NOISY = HardenedMethod(fedavg(TRAINING), UpdateNoise(0.05, 6.0))
REPEATED = Federation(rounds=3, drop_out=0.4, min_clients=3, retries=60, seed=3)
SAMPLED = Federation(rounds=6, fraction=0.5, seed=4)
CASES = {
    "iid, every client in every round": Case("iid", private(1.5)),
    "iid, sampled rounds": Case("iid", private(1.2), SAMPLED),
    "dirichlet, repeated rounds": Case("dirichlet", private(1.8), REPEATED),
    "dirichlet, stopped and resumed": Case("dirichlet", private(1.4, epochs=2), Federation(rounds=4), stops_at=1),
    "by class, two local epochs": Case("by class", private(1.6, epochs=2)),
    "by class, a batch of all examples": Case("by class", private(3.0, batch_size=64)),
    "reference split, which overlaps": Case("reference split", private(2.0)),
    "reference split, sampled and repeated": Case("reference split", private(2.2), REPEATED.replace(fraction=0.7)),
    "clients of 7, 43 and 180 examples": Case("sizes", private(1.7)),
    "the same rows at three clients": Case("the same rows", private(3.0)),
    "some rows at two clients, repeated": Case("copied rows", private(2.5), REPEATED.replace(min_clients=2)),
    "noise on updates, repeated rounds": Case("dirichlet", NOISY, REPEATED),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_in_one_process_no_printed_epsilon_is_below_the_count(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    from netweight.methods.federate import engine

    case, task = CASES[name], task_of(CASES[name].partition)
    watched, whole = Watched(case.method), engine.parts_of
    monkeypatch.setattr(engine, "parts_of", lambda value: whole(getattr(value, "_method", value)))
    if case.stops_at:
        train(task, watched, case.settings.replace(rounds=case.stops_at), workers=1, folder=tmp_path)  # type: ignore[arg-type]
    run = train(task, watched, case.settings, workers=1, folder=tmp_path)  # type: ignore[arg-type]
    (promise,) = guarantees(run, DELTA)
    counted = count_in_process(task, case.method, watched.sent, DELTA)
    assert math.isfinite(promise.epsilon)
    assert counted <= promise.epsilon <= 1.3 * counted + 0.3  # the account's own method is an upper bound
    printed = float(re.search(r"ε (\S+) at", str(promise))[1])  # type: ignore[index]
    assert printed == pytest.approx(promise.epsilon, rel=1e-3)
    if case.settings.drop_out:
        assert max(done.attempts for done in run.rounds) > 1


# ---- over Flower: a node's account over several federations ----------------------------------------------------------

INFINITE = "infinite"


@dataclass(frozen=True)
class Stage:
    """A federation that a node takes part in."""

    method: Method
    rounds: int = 2
    lost: bool = False
    """Whether the first answer of each node gets lost, so that its round is repeated."""
    secure_sum: bool = False
    fraction: float = 1.0
    number: int = 0
    """The client number of the first node is raised by this."""
    budget: float | None = None


HISTORIES: dict[str, tuple[tuple[Stage, ...], str]] = {
    "two federations, other noise": ((Stage(private(3.0)), Stage(private(2.0), rounds=1)), ""),
    "answers that get lost": ((Stage(private(3.0), lost=True),), ""),
    "secure sums": ((Stage(private(3.0), secure_sum=True), Stage(private(3.0))), ""),
    "sampled rounds": ((Stage(private(2.5), rounds=4, fraction=0.6),), ""),
    "noise on updates, then in secure sums": ((Stage(NOISY), Stage(NOISY, rounds=1, secure_sum=True)), ""),
    "a budget that ends": ((Stage(NOISY, rounds=1), Stage(NOISY, rounds=1, budget=2.5), Stage(NOISY, budget=2.5)), ""),
    "another client number": ((Stage(private(3.0)), Stage(private(3.0), number=10)), ""),
    "first without noise": ((Stage(fedavg(TRAINING), rounds=1), Stage(private(3.0))), INFINITE),
    "later without noise": ((Stage(private(3.0)), Stage(fedavg(TRAINING)), Stage(private(3.0), rounds=1)), INFINITE),
    "examples and clients": ((Stage(private(3.0)), Stage(NOISY)), INFINITE),
    "a head without noise": ((Stage(centaur(3.0, training=TRAINING)), Stage(private(3.0))), INFINITE),
}


@pytest.mark.parametrize("name", HISTORIES)
def test_over_flower_no_printed_epsilon_is_below_the_count(name: str, tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "'click.utils", DeprecationWarning)
        from flower_under_test import GridHere, serve
    from flower_federation import client_data, halves

    from netweight.plugins.flower import client_app

    stages, outcome = HISTORIES[name]
    sent: dict[int, list[tuple[Method, int]]] = {}  # client → method of every answer that left, and its examples

    def task_here(context: Any) -> Task:
        number = context.node_config["partition-id"]
        return Task(*halves(), {number: client_data(number % 10)})

    for index, stage in enumerate(stages):
        nodes = {20 + node: (node + stage.number if node == 0 else node) for node in range(3)}
        lost = set(nodes) if stage.lost else set[int]()

        answered: list[int] = []

        def lose(node: int, reply: Any, grid: Any, lost: set[int] = lost, answered: list[int] = answered) -> Any:
            if reply.metadata.message_type == "train" and node in lost:
                lost.remove(node)
                answered.append(node)
                return None
            return reply

        budget = None if stage.budget is None else Budget(epsilon=stage.budget, delta=DELTA)
        app = client_app(
            task_here, stage.method, folder=tmp_path / "nodes", secure_sum=stage.secure_sum, budget=budget, repeats=100
        )
        grid = GridHere(dict.fromkeys(nodes, app), nodes, spoil=lose)
        try:
            serve(
                grid, stage.method, tmp_path / str(index), rounds=stage.rounds, fraction=stage.fraction, seed=index,
                secure_sum=stage.secure_sum, retries=3, min_clients=min(2, math.floor(3 * stage.fraction) or 1),
            )  # fmt: skip
        except (FederationStopped, ValueError):
            assert stage.budget is not None or stage.number
        replies = [node for node, _ in grid.masked] if stage.secure_sum else [
            node for node, content in grid.traffic if len(content) > 1
        ]  # fmt: skip
        for node in itertools.chain(replies, answered):
            number = nodes[node]
            sent.setdefault(number, []).append((stage.method, client_data(number % 10).n))
    for number, answers in sent.items():
        with Job.open(tmp_path / "nodes" / f"client-{number}", of="private tensors", reading=True) as job:
            rows = [row for row in job.records("answers") if "state" in row]
        assert len(rows) >= len(answers)
        printed = [row["spent"] for row in rows if "spent" in row][-1]
        if outcome == INFINITE:
            assert printed.startswith("No ε holds (it is infinite)")
            continue
        parts = [part for method, n in answers for part in parts_of_answers(method, n, 1)]
        if "one client" in printed:
            parts = [(noise / 2, rate, steps) for noise, rate, steps in parts]
        counted = counted_epsilon(parts, DELTA)
        epsilon = float(re.search(r"ε (\S+) at", printed)[1])  # type: ignore[index]
        assert counted <= epsilon * 1.0005 <= 1.3 * counted + 0.3  # four digits are printed
        budgets = [stage.budget for stage in stages if stage.budget is not None]
        assert all(epsilon <= budget for budget in budgets)
