"""Flower's apps without Flower's processes: a grid that passes every message as bytes to client apps in this process."""

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

SERVER = 1


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
        self.sent, self.waiting, self.traffic = 0, {}, []
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
        return reply if reply is None or reply.has_error() else _travelled(reply)


def _travelled(message):
    """The message as it arrives: written to bytes and read again."""
    arrived = inflate_object_from_contents(message.object_id, as_bytes(message))
    arrived.metadata.__dict__["_message_id"] = message.metadata.message_id
    return arrived
