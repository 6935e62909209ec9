"""The app of a client, and its private tensors between rounds: in Flower's state and on the client's own disk.

A node's state is memory only and a run's own, so that the file is what survives. It holds the tensors after the last
round that the server took and after the newest one: which of them counts, the server says with its next order.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import safetensors
import safetensors.torch
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from netweight.core.atomic_writes import whole_file
from netweight.core.digests import digest_config, digest_tensor
from netweight.errors import UsageError
from netweight.job import Job
from netweight.methods.federate.accounting import AnswerPrivacy, Guarantee, Release, guarantee, privacy_of
from netweight.methods.federate.data_checks import refuse_unfit_examples
from netweight.methods.federate.finished import PRIVATE_KEY
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, LocalResult, Method
from netweight.methods.federate.settings import Budget
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors, check_allow_list, to_wire
from netweight.plugins.flower.secure_sum import masked_reply, under_masks
from netweight.plugins.flower.strategy import (
    ARRAYS,
    DECLINED_CODE,
    REPORT,
    ClientRequest,
    Declined,
    answer_record,
    chosen,
    from_record,
    to_record,
)

_KEY, _ACCOUNT = PRIVATE_KEY, "netweight.answers"
# In a client's folder: its private tensors, and what it answered, one line each.
_STATE, _ANSWERS = "private.safetensors", "answers"
_LOG = logging.getLogger(__name__)


def _job_of(folder: str | Path, client: int, *, reading: bool = False) -> AbstractContextManager[Job]:
    """Open a client's job: its private tensors, and the account of what it answered."""
    return Job.open(Path(folder) / f"client-{client}", of="private tensors", state=_STATE, reading=reading)


@final
@dataclass(frozen=True)
class PrivateTensors:
    """A client's private tensors after some rounds."""

    client: int
    """Whose they are."""
    federation: str
    """Digest of the federation's settings; empty for tensors that may begin any."""
    after: Mapping[int, Tensors]
    """Round → the private tensors after it; 0 for those before the first. By name."""

    def at(self, federation: str, round: int) -> Tensors | None:
        """Return the tensors after a round, or None if there are none yet and the round is 0."""
        if self.after and self.federation not in ("", federation):
            raise UsageError(
                f"The private tensors of client {self.client} belong to another federation.",
                cure="Give this federation a folder of its own, or export them and import them with start=True.",
            )
        if round not in self.after and (round or self.after):
            raise UsageError(
                f"Client {self.client} keeps its private tensors after the rounds {sorted(self.after)}; the server "
                f"continues from round {round}.",
                cure="Put the server's checkpoint or the client's file back, or delete both to "
                "start again from the beginning.",
            )
        return self.after.get(round)

    def to_state(self, state: RecordDict) -> None:
        """Put them into a context's state."""
        for name in [name for name in state if name.startswith(_KEY)]:
            del state[name]
        state[_KEY] = ConfigRecord({"client": self.client, "federation": self.federation, "rounds": list(self.after)})
        for round, tensors in self.after.items():
            state[f"{_KEY}.{round}"] = to_record(tensors)

    @classmethod
    def of_state(cls, state: RecordDict, client: int) -> PrivateTensors:
        """Return what a context's state holds for a client."""
        about = state.config_records.get(_KEY)
        if about is None or about["client"] != client:
            return cls(client, "", {})
        rounds = about["rounds"]
        assert isinstance(rounds, list)
        after = {int(round): from_record(state.array_records[f"{_KEY}.{int(round)}"]) for round in rounds}
        return cls(client, str(about["federation"]), after)

    def save(self, job: Job) -> None:
        """Make them the state of a client's job."""
        job.save({"client": self.client, "federation": self.federation}, self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for round, tensors in self.after.items():
            # A round without private tensors is recorded as well.
            yield f"{round}|", torch.empty(0)
            for name, value in tensors.items():
                yield f"{round}|{name}", value

    @classmethod
    def load(cls, job: Job, client: int) -> PrivateTensors | None:
        """Read a client's job, if it keeps something."""
        state = job.load()
        if state is None:
            return None
        about, stored = state
        after: dict[int, dict[str, Tensor]] = {}
        for place, value in stored.items():
            round, _, name = place.partition("|")
            tensors = after.setdefault(int(round), {})
            if name:
                tensors[name] = value.clone()
        return cls(client, about["federation"], after)


def export_private(folder: str | Path, client: int, target: str | Path) -> Path:
    """Write a client's newest private tensors, such as its head, to an ordinary safetensors file."""
    private_tensors = None
    if (Path(folder) / f"client-{client}" / _STATE).exists():
        with _job_of(folder, client, reading=True) as job:
            private_tensors = PrivateTensors.load(job, client)
    if private_tensors is None:
        raise UsageError(f"There are no private tensors of client {client} in {folder}.", cure="Check the folder.")
    newest = max(private_tensors.after)
    about = {"client": client, "federation": private_tensors.federation, "round": newest}
    data = safetensors.torch.save(dict(private_tensors.after[newest]), metadata={_KEY: json.dumps(about)})
    with whole_file(Path(target)) as file:
        file.write(data)
    return Path(target)


def import_private(source: str | Path, folder: str | Path, *, start: bool = False) -> Path:
    """Put private tensors that were exported where a client looks for them."""
    with safetensors.safe_open(str(source), framework="pt") as file:
        metadata = file.metadata() or {}
        if _KEY not in metadata:
            raise UsageError(f"{source} was not written by export_private.", cure="Export the tensors again.")
        about = json.loads(metadata[_KEY])
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    client = about["client"]
    federation, round = ("", 0) if start else (about["federation"], about["round"])
    with _job_of(folder, client) as job:
        if job.load() is not None:
            raise UsageError(
                f"{job.folder} already contains private tensors of client {client}.", cure="Move the folder away."
            )
        PrivateTensors(client, federation, {round: tensors}).save(job)
        return job.folder


def client_app(
    task_of: Callable[[Context], Task],
    method: Method | Callable[[Context], Method],
    *,
    folder: str | Path | Callable[[Context], str | Path | None] | None = None,
    device: torch.device | str = "cpu",
    secure_sum: bool | Callable[[Context], bool] = False,
    seed: int | Callable[[Context], int | None] | None = None,
    budget: Budget | None = None,
    repeats: int = 3,
) -> ClientApp:
    """Return the app that every client runs.

    Args:
        task_of: Makes the task, with this client's data, of Flower's context.
        method: The method; like `folder` and `secure_sum` it may be a function of Flower's context.
        folder: Where the client keeps its private tensors and the account of its answers; None for the node's memory.
        device: Where to train.
        secure_sum: Whether the client sends its updates under masks only.
        seed: Random seed of the client's start and draws, for rehearsals; by default a secret that no server knows.
        budget: What all answers together may give away; needs a folder and a method with noise.
        repeats: How often the client answers again to the same state.

    Raises:
        UsageError: A budget has no folder to be kept in.
    """
    if budget is not None and folder is None:
        raise UsageError("The account of a budget must be stored on the client's disk.", cure="Give a folder.")
    app = ClientApp()

    @app.query()
    def tell_number(message: Message, context: Context) -> Message:
        number = client_number(context)
        n = task_of(context).client(number).n
        report = ConfigRecord({"client": number, "n": 1 if privacy_of(chosen(method, context), n).releases else n})
        return Message(RecordDict({REPORT: report}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        try:
            return under_masks(message, context, train_once, masked=chosen(secure_sum, context))
        except Declined as reason:
            _LOG.warning("Client %d declines: %s", client_number(context), reason)
            return Message(Error(DECLINED_CODE, str(reason)), reply_to=message)

    def train_once(message: Message, context: Context) -> Message:
        place, number = chosen(folder, context), client_number(context)
        if place is None:
            if budget is not None:
                raise UsageError(
                    "The account of a budget must be stored on the client's disk, and this node has no folder.",
                    cure="Give its private-folder in --node-config.",
                )
            return answered(message, context, None)
        with _job_of(place, number) as job:
            return answered(message, context, job)

    def answered(message: Message, context: Context, job: Job | None) -> Message:
        number, order = client_number(context), ClientRequest.of(message)
        task, own_method = task_of(context), chosen(method, context)
        # This is checked only in the first round, since the examples do not change.
        if not order.go_on_from:
            refuse_unfit_examples(task, number)
        sent = from_record(message.content.array_records[ARRAYS])
        answers = AnswerAccount(context, job, number)
        rehearsed: int | None = chosen(seed, context)
        if budget is not None and rehearsed is not None:
            raise UsageError(
                "Noise that is drawn from a known seed can be computed and subtracted, so that a budget does not hold.",
                cure="Leave the rehearsal's seed out, or the budget.",
            )
        spent = answers.admit(order, sent, privacy_of(own_method, task.client(number).n), budget, repeats)
        own_seed: int = answers.seed if rehearsed is None else rehearsed
        private_tensors = (PrivateTensors.load(job, number) if job is not None else None) or PrivateTensors.of_state(
            context.state, number
        )
        start = own_method.private_start(task, number, seed=own_seed)
        # A method that keeps nothing to itself needs nothing from earlier rounds.
        private = (private_tensors.at(order.federation, order.go_on_from) if start else None) or start
        received = _on(device, sent)
        client = Client(number, _on(device, private), received)
        # Noise is drawn anew for every answer: two answers with the same noise would differ by what it hides.
        draws = secrets.randbits(62) if rehearsed is None and spent is not None else own_seed
        trained, metrics = _trained(task, own_method, client, order, draws, torch.device(device))
        # Losses and accuracies would reveal what the noise hides.
        if spent is not None:
            metrics = {"epsilon": spent.epsilon} if math.isfinite(spent.epsilon) else {}
        wire = to_wire(trained.update.tensors)
        check_allow_list(wire, own_method.shared, client=number)
        # Kept and counted before the update leaves: a server must not go on from what a client may have lost. What
        # another federation keeps here stays where this one keeps nothing.
        if start:
            after = PrivateTensors(number, order.federation, {order.go_on_from: private, order.round: trained.private})
            if job is not None:
                after.save(job)
            after.to_state(context.state)
        answers.count(order, spent)
        update = replace(trained.update, metrics=metrics)
        if chosen(secure_sum, context):
            return masked_reply(message, received, update)
        return Message(answer_record(update, wire), reply_to=message)

    return app


@final
class AnswerAccount:
    """The account of a client's answers: on its disk, or in the node's memory where it has no folder."""

    def __init__(self, context: Context, job: Job | None, client: int) -> None:
        self._state, self._job = context.state, job
        self._rows: list[dict[str, Any]] = []
        if job is not None:
            self._rows = job.records(_ANSWERS)
        elif (record := context.state.config_records.get(_ACCOUNT)) is not None:
            self._rows = json.loads(str(record["rows"]))
        known_seed = next((int(row["seed"]) for row in self._rows if "seed" in row), None)
        self.seed = secrets.randbits(62) if known_seed is None else known_seed
        if known_seed is None:
            self._add({"seed": self.seed})
        self._next: dict[str, Any] = {}

    def admit(
        self, order: ClientRequest, sent: Tensors, about: AnswerPrivacy, budget: Budget | None, repeats: int
    ) -> Guarantee | None:
        """Refuse an order that changes the model's shape, repeats a state too often or passes the budget.

        Args:
            order: What the server asks.
            sent: The tensors that it sent, by name.
            about: What is known of the noise in the answer.
            budget: What all answers together may give away; None for no limit.
            repeats: How often the same state is answered again.

        Returns:
            What all answers in the account give away together with this one; None if this one has no noise.
        """
        shape = digest_config({name: [*value.shape, str(value.dtype)] for name, value in sorted(sent.items())})
        if any(row.get("federation") == order.federation and row["shape"] != shape for row in self._rows):
            raise UsageError("The server sends other tensors than before: the shape of the model was changed.")
        state = digest_config({name: digest_tensor(value.contiguous()) for name, value in sorted(sent.items())})
        again = sum(row.get("state") == state for row in self._rows)
        if sent and again > repeats:
            raise Declined(f"This client has answered the same state {again} times already.")
        self._next = {
            "state": state, "round": order.round, "releases": [vars(one) for one in about.releases],
            "sampling": about.sampling, "caveats": list(about.caveats), "federation": order.federation, "shape": shape,
        }  # fmt: skip
        delta = Budget.model_fields["delta"].default if budget is None else budget.delta
        spent = guarantee([*self._answered(), about], delta)
        if budget is not None and spent.caveats:
            raise Declined(
                f"This client has a privacy budget, but no ε can be stated for its answers: "
                f"{'; '.join(spent.caveats)}.",
                cure="Use dp-fedavg or noise on updates (`UpdateNoise`), and a folder whose account has such answers "
                "alone; an update that was sent cannot be recalled.",
            )
        if budget is not None and spent.epsilon > budget.epsilon:
            raise Declined(
                f"Another answer of this client would spend ε {spent.epsilon:.4g} for one "
                f"{spent.unit} ({spent.adjacency}); the budget is {budget.epsilon:g} at δ {delta:g}."
            )
        return spent if about.releases else None

    def _answered(self) -> list[AnswerPrivacy]:
        """Return what is known of the noise in every answer of the account."""
        return [
            AnswerPrivacy(tuple(Release(**one) for one in row["releases"]), row["sampling"], tuple(row["caveats"]))
            for row in self._rows
            if "state" in row
        ]

    def count(self, order: ClientRequest, spent: Guarantee | None) -> None:
        """Count the answer that is about to leave."""
        if spent is not None:
            _LOG.info("Round %d: %s.", order.round, spent)
            self._next["spent"] = str(spent)
        self._add(self._next)

    def _add(self, row: dict[str, Any]) -> None:
        self._rows.append(row)
        if self._job is not None:
            self._job.record(_ANSWERS, row)
        else:
            self._state[_ACCOUNT] = ConfigRecord({"rows": json.dumps(self._rows)})


def client_number(context: Context) -> int:
    """Return a node's client number."""
    number = context.node_config.get("partition-id")
    if number is None:
        raise UsageError(
            "This node has no client number.",
            cure='Start it with --node-config "partition-id=NUMBER", the client\'s number in the task.',
        )
    return int(number)


def _on(device: torch.device | str, tensors: Tensors) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in tensors.items()}


def _trained(
    task: Task, method: Method, client: Client, order: ClientRequest, seed: int, device: torch.device
) -> tuple[LocalResult, dict[str, float]]:
    model = LocalModel(task, device)
    test = task.client(client.number).test
    metrics: dict[str, float] = {}
    if order.evaluate:
        before = method.weights(task, client.message, client.private)
        metrics["before"] = model.accuracy(before.body, before.head, test, before.statistics)
    trainings = method.train(task, model, [client], round=order.round, seed=seed)
    if not trainings:
        raise Declined(
            f"Client {client.number} does not take part in round {order.round}; its own log states the reason."
        )
    (trained,) = trainings
    metrics.update(trained.update.metrics)
    if order.evaluate:
        after = trained.weights
        metrics["after"] = model.accuracy(after.body, after.head, test, after.statistics)
    return trained, metrics
