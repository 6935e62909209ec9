"""The app of a client, and its private tensors between rounds: in Flower's state and on the client's own disk.

A node's state is memory only and a run's own, so that the file is what survives. It holds the tensors after the last
round that the server took and after the newest one: which of them counts, the server says with its next order.
"""

from __future__ import annotations

import dataclasses
import json
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

import safetensors
import safetensors.torch
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from netweight.core.files import whole_file
from netweight.errors import UsageError
from netweight.methods.federate.defenses import UpdateNoise
from netweight.methods.federate.method import Client, Method, Trained
from netweight.methods.federate.settings import Privacy
from netweight.methods.federate.task import LocalModel, Task
from netweight.methods.federate.updates import Tensors, check_allow_list, to_wire
from netweight.plugins.flower.records import ARRAYS, REPORT, Answer, Order, chosen, from_record, to_record
from netweight.plugins.flower.secure_sum import masked_reply, under_masks
from netweight.settings import Settings
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

_KEY = "netweight.private"


def private_file(folder: str | Path, client: int) -> Path:
    """Return where a client's private tensors are."""
    return Path(folder) / f"client-{client}.safetensors"


@final
@dataclass(frozen=True)
class Kept:
    """A client's private tensors after some rounds."""

    client: int  # whose they are
    federation: str  # digest of the federation's settings; empty for tensors that may begin any
    after: Mapping[int, Tensors]  # round → the private tensors after it; 0 for those before the first. By name.

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
                f"goes on from round {round}.",
                cure="Put the server's checkpoint or the client's file back, or begin anew without both.",
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
    def of_state(cls, state: RecordDict, client: int) -> Kept:
        """Return what a context's state holds for a client."""
        about = state.config_records.get(_KEY)
        if about is None or about["client"] != client:
            return cls(client, "", {})
        rounds = about["rounds"]
        assert isinstance(rounds, list)
        after = {int(round): from_record(state.array_records[f"{_KEY}.{int(round)}"]) for round in rounds}
        return cls(client, str(about["federation"]), after)

    def save(self, path: Path) -> None:
        """Write them over what is there, all or nothing."""
        write_checkpoint(path, {"client": self.client, "federation": self.federation}, self._tensors())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for round, tensors in self.after.items():
            yield f"{round}|", torch.empty(0)  # a round without private tensors is a round, too
            for name, value in tensors.items():
                yield f"{round}|{name}", value

    @classmethod
    def load(cls, path: Path) -> Kept:
        """Read a file that `save` wrote."""
        after: dict[int, dict[str, Tensor]] = {}
        with open_checkpoint(path) as (about, store, names):
            for stored in names:
                round, _, name = stored.partition("|")
                tensors = after.setdefault(int(round), {})
                if name:
                    tensors[name] = store.get(stored, check=True).clone()
        return cls(about["client"], about["federation"], after)


def export_private(folder: str | Path, client: int, target: str | Path) -> Path:
    """Write a client's newest private tensors, such as its head, to an ordinary safetensors file."""
    source = private_file(folder, client)
    if not source.exists():
        raise UsageError(f"There are no private tensors of client {client} in {folder}.", cure="Check the folder.")
    kept = Kept.load(source)
    newest = max(kept.after)
    about = {"client": client, "federation": kept.federation, "round": newest}
    data = safetensors.torch.save(dict(kept.after[newest]), metadata={_KEY: json.dumps(about)})
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
    target = private_file(folder, about["client"])
    if target.exists():
        raise UsageError(
            f"{target} holds private tensors of client {about['client']} already.", cure="Move the file away."
        )
    federation, round = ("", 0) if start else (about["federation"], about["round"])
    Kept(about["client"], federation, {round: tensors}).save(target)
    return target


def client_app(
    task_of: Callable[[Context], Task],
    method: Method | Callable[[Context], Method],
    *,
    folder: str | Path | Callable[[Context], str | Path | None] | None = None,
    device: torch.device | str = "cpu",
    secure_sum: bool | Callable[[Context], bool] = False,
    seed: int | None = None,
) -> ClientApp:
    """Return the app that every client runs."""
    app = ClientApp()

    @app.query()
    def tell_number(message: Message, context: Context) -> Message:
        report = ConfigRecord({"client": client_number(context)})
        if chosen(secure_sum, context):  # the scale of weights must be known before they are masked
            report["n"] = task_of(context).client(client_number(context)).n
        return Message(RecordDict({REPORT: report}), reply_to=message)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return under_masks(message, context, train_once, wanted=chosen(secure_sum, context))

    def train_once(message: Message, context: Context) -> Message:
        number, order = client_number(context), Order.of(message)
        task, own_method = task_of(context), chosen(method, context)
        place = chosen(folder, context)
        file = None if place is None else private_file(place, number)
        kept = _kept(context, number, file)
        start = own_method.private_start(task, number, seed=order.seed)
        # A method that keeps nothing to itself needs nothing from earlier rounds.
        private = (kept.at(order.federation, order.go_on_from) if start else None) or start
        received = _on(device, from_record(message.content.array_records[ARRAYS]))
        client = Client(number, _on(device, private), received)
        draws = seed
        if draws is None:
            draws = secrets.randbits(62) if _hides_by_noise(own_method) else order.seed
        trained, metrics = _trained(task, own_method, client, order, draws, torch.device(device))
        wire = to_wire(trained.update.tensors)
        check_allow_list(wire, own_method.shared, client=number)
        _keep(Kept(number, order.federation, {order.go_on_from: private, order.round: trained.private}), context, file)
        answer = Answer(trained.update, metrics)
        if chosen(secure_sum, context):
            return masked_reply(message, received, answer)
        return Message(answer.to_records(wire), reply_to=message)

    return app


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


def _hides_by_noise(value: object) -> bool:
    """Whether a method, or anything that it is made of, draws noise for the sake of privacy."""
    if isinstance(value, Privacy | UpdateNoise):
        return True
    parts = value if isinstance(value, tuple) else ()
    if dataclasses.is_dataclass(value) or isinstance(value, Settings):
        parts = tuple(vars(value).values())
    return any(_hides_by_noise(part) for part in parts)


def _kept(context: Context, number: int, file: Path | None) -> Kept:
    return Kept.load(file) if file is not None and file.exists() else Kept.of_state(context.state, number)


def _keep(kept: Kept, context: Context, file: Path | None) -> None:
    """Keep private tensors before the update leaves: a server must not go on from what a client may have lost."""
    if file is not None:
        kept.save(file)
    kept.to_state(context.state)


def _trained(
    task: Task, method: Method, client: Client, order: Order, seed: int, device: torch.device
) -> tuple[Trained, dict[str, float]]:
    model = LocalModel(task, device)
    test = task.client(client.number).test
    metrics: dict[str, float] = {}
    if order.evaluate:
        before = method.weights(task, client.received, client.private)
        metrics["before"] = model.accuracy(before.body, before.head, test, before.statistics)
    found = method.train(task, model, [client], round=order.round, seed=seed)
    if not found:
        raise UsageError(f"Client {client.number} takes no part in round {order.round}; its own log says why.")
    (trained,) = found
    metrics["loss"] = trained.loss
    if order.evaluate:
        after = trained.weights
        metrics["after"] = model.accuracy(after.body, after.head, test, after.statistics)
    return trained, metrics
