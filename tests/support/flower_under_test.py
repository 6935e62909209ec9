"""Flower's apps without its processes: a grid that passes every message as bytes to client apps in this process."""

import json
import warnings
from dataclasses import replace

import torch
from flower_federation import CLIENTS, client_data, halves

from netweight.methods.federate import Federation, Task
from netweight.methods.federate.checkpoint import CHECKPOINT
from netweight.methods.federate.history import Round
from netweight.methods.federate.method import ClientWeights, LocalResult
from netweight.methods.federate.updates import Update
from netweight.plugins.flower import HISTORY, Elsewhere, client_app, server_app
from netweight.store import open_store

with warnings.catch_warnings():  # typer, which Flower imports, asks click for names that click is going to drop
    warnings.filterwarnings("ignore", "'click.utils", DeprecationWarning)
    from flwr.app import Context, Error, Message, RecordDict
    from flwr.common import bytes_to_ndarray
    from flwr.serverapp import Grid
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
    from flwr.supercore.task_identity import TaskIdentity

SERVER = 1
NODES = {10: 0, 11: 1, 12: 2}


def task_of_client(context):
    number = context.node_config["partition-id"]
    return Task(*halves(), {number: client_data(number)})


def task_of_server(context):
    return Task(*halves(), Elsewhere(CLIENTS))


def new_grid(method, folder=None, spoil=None, nodes=NODES, secure_sum=False, seed=520, **asked):
    app = client_app(task_of_client, method, folder=folder, secure_sum=secure_sum, seed=seed, **asked)
    return GridHere(dict.fromkeys(nodes, app), nodes, spoil=spoil)


def averaged(**settings):
    """A federation that takes the plain mean, in which clients count by their examples over Flower, too."""
    return Federation(**{"aggregator": "mean", **settings})


def serve(grid, method, folder, *, secure_sum=False, nodes=None, **settings):
    """Run the server to its end and return its state and history."""
    federation = averaged(**{"rounds": 2, "min_clients": 2, "retries": 1, **settings})
    app = server_app(
        task_of_server, method, federation, folder=folder, timeout=0.0, patience=0.0, secure_sum=secure_sum, nodes=nodes
    )
    app(grid, Context(1, 1, {}, RecordDict(), {}, 0))
    return state_in(folder), history_in(folder)


def state_in(folder):
    with open_store(folder / CHECKPOINT) as store:
        return {name.removeprefix("state|"): store.get(name) for name in store.names() if name.startswith("state|")}


def history_in(folder):
    return [Round.from_json(values) for values in json.loads((folder / HISTORY).read_text())["rounds"]]


def same(state, other, tolerance=0.0):
    """Whether two states have the same names and, up to an absolute tolerance, the same values."""
    assert state.keys() == other.keys()
    return all(torch.allclose(state[name], other[name], rtol=0, atol=tolerance) for name in state)


def as_bytes(message):
    """All that travels of a message."""
    return {name: thing.deflate() for name, thing in get_all_nested_objects(message).items()}


class GridHere(Grid):
    """Nodes are client apps in this process, called when their replies are pulled.

    Args:
        apps: Node id → client app.
        numbers: Node id → client number (`partition-id`).
        spoil: Called with a node id, its reply and the grid; returns the reply that is to arrive, or None for none.
    """

    def __init__(self, apps, numbers, run_config=None, spoil=None):
        self.apps, self.spoil, self.online = dict(apps), spoil, set(apps)
        self.contexts = {
            node: Context(1, node, {"partition-id": numbers[node]}, RecordDict(), run_config or {}, 0) for node in apps
        }
        self.sent, self.waiting = 0, {}
        self.traffic, self.arrays, self.masked = [], [], []
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, SERVER, 1

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *arguments, **options):
        raise NotImplementedError

    def get_node_ids(self):
        return sorted(self.online)

    def push_messages(self, messages):
        ids = []
        for message in messages:
            self.sent += 1
            message.metadata.__dict__["_message_id"] = f"message-{self.sent}"
            self.waiting[message.metadata.message_id] = message
            ids.append(message.metadata.message_id)
        return ids

    def pull_messages(self, message_ids):
        replies = [self._answer(self.waiting.pop(name)) for name in list(message_ids) if name in self.waiting]
        return [reply for reply in replies if reply is not None]

    def send_and_receive(self, messages, *, timeout=None):
        return self.pull_messages(self.push_messages(list(messages)))

    def _answer(self, message):
        node = message.metadata.dst_node_id
        if node not in self.online:
            return None
        try:
            reply = self.apps[node](_travelled(message), self.contexts[node])
        except Exception as error:
            reply = Message(Error(2, f"{type(error)}:<{error.args!r}>"), reply_to=message)
        if self.spoil is not None:
            reply = self.spoil(node, reply, self)
        if reply is not None and message.metadata.message_type == "train":
            self.traffic.append((node, as_bytes(reply)))
            self._note(node, reply)
        return reply if reply is None or reply.has_error() else _travelled(reply)

    def _note(self, node, reply):
        """Keep what a curious server would look at."""
        if reply.has_content():
            for record in reply.content.array_records.values():
                self.arrays += [(node, array) for array in record.values()]
            for record in reply.content.config_records.values():
                if "masked_params" in record:
                    self.masked.append((node, [bytes_to_ndarray(part) for part in record["masked_params"]]))


def _travelled(message):
    """The message as it arrives: written to bytes and read again."""
    arrived = inflate_object_from_contents(message.object_id, as_bytes(message))
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived


class Leaky:
    """A method that sends its clients' heads."""

    def __init__(self, method):
        self._method = method

    def __getattr__(self, name):
        return getattr(self._method, name)

    def train(self, task, model, clients, **options):
        trained = self._method.train(task, model, clients, **options)
        return [
            replace(one, update=replace(one.update, tensors={**one.update.tensors, **one.private})) for one in trained
        ]


class ToEachItsOwn:
    """Sends each client its own number, which comes back: what methods with a message per client need."""

    name, shared = "own", ("number",)

    def start(self, task, *, seed):
        return {"number": torch.arange(float(len(task.clients)))}

    def private_start(self, task, client, *, seed):
        return {}

    def message(self, state, client):
        return {"number": state["number"][client : client + 1]}

    def weights(self, task, received, private):
        return ClientWeights(task.initial_body(), task.initial_head())

    def train(self, task, model, clients, *, round, seed):
        return [
            LocalResult(
                Update(
                    client.number,
                    task.client(client.number).n,
                    {"number": client.message["number"] + 10 * client.number},
                    round,
                    {"loss": 0.0},
                ),
                {},
                self.weights(task, client.message, client.private),
            )
            for client in clients
        ]

    def aggregate(self, state, updates):
        return {"number": torch.cat([update.tensors["number"] for update in updates])}
