"""The client: a ClientApp that trains by a method, keeps what is private and sends what the allow-list names."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from netweight.errors import UsageError
from netweight.integrations.flower.private import Kept, private_file
from netweight.integrations.flower.records import ARRAYS, REPORT, Answer, Order, chosen, from_record
from netweight.integrations.flower.secure_sum import masked_reply, under_masks
from netweight.methods.federate.config import Privacy
from netweight.methods.federate.hardening import UpdateNoise
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import Client, Method, Trained
from netweight.methods.federate.outgoing import check_outgoing
from netweight.methods.federate.task import FedTask
from netweight.methods.federate.updates import Tensors, to_wire

__all__ = ["client_app", "client_number"]


def client_app(
    task_of: Callable[[Context], FedTask],
    method: Method | Callable[[Context], Method],
    *,
    folder: str | Path | Callable[[Context], str | Path | None] | None = None,
    device: torch.device | str = "cpu",
    secure_sum: bool | Callable[[Context], bool] = False,
    seed: int | None = None,
) -> ClientApp:
    """Return the app that every client runs.

    A client's number is `partition-id` of its node's configuration.

    Args:
        task_of: Makes the task; it needs this client's data only, `FedTask(body, head, {number: data})`.
        method: How to train, the same as the server's, or a function of the context that returns it.
        folder: Where this client keeps its private tensors between runs; None to keep them in the node's memory, where
            they end with the run. Clients may share a folder: files carry their numbers.
        device: Where to train.
        secure_sum: Send updates under masks that cancel in the sum, and only so. See `secure_sum.py` for what it costs
            and against whom it helps.
        seed: Of this client's batches and noise. None takes the federation's, which the server knows, so that a run can
            be repeated; but a new secret one each time for methods whose noise is to hide something from the server.

    Returns:
        The app. It refuses an order by an exception, which the server gets as an error with the exception's text.
    """
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
        check_outgoing(wire, own_method.shared, client=number)
        _keep(Kept(number, order.federation, {order.go_on_from: private, order.round: trained.private}), context, file)
        answer = Answer(trained.update, metrics)
        if chosen(secure_sum, context):
            return masked_reply(message, received, answer)
        return Message(answer.to_records(wire), reply_to=message)

    return app


def client_number(context: Context) -> int:
    """Return a node's client number.

    Args:
        context: Flower's, of this node.

    Raises:
        UsageError: Its configuration says none.
    """
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
    if dataclasses.is_dataclass(value):
        return any(_hides_by_noise(getattr(value, field.name)) for field in dataclasses.fields(value))
    return isinstance(value, tuple) and any(_hides_by_noise(item) for item in value)


def _kept(context: Context, number: int, file: Path | None) -> Kept:
    return Kept.load(file) if file is not None and file.exists() else Kept.of_state(context.state, number)


def _keep(kept: Kept, context: Context, file: Path | None) -> None:
    """Keep private tensors before the update leaves: a server must not go on from what a client may have lost."""
    if file is not None:
        kept.save(file)
    kept.to_state(context.state)


def _trained(
    task: FedTask, method: Method, client: Client, order: Order, seed: int, device: torch.device
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
