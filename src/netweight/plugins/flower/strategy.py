"""Rounds on a Flower server: records, the assignment of nodes to clients, messages, and the aggregation of updates."""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import TypeVar, final

import numpy as np
import safetensors.torch
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from netweight.errors import Unsupported, UsageError
from netweight.methods.federate.history import Round
from netweight.methods.federate.method import Method
from netweight.methods.federate.rounds import RoundAttempt, Rounds
from netweight.methods.federate.settings import Federation
from netweight.methods.federate.updates import Fault, LowRankUpdate, Tensors, Update, from_wire, to_wire

_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")
# Seconds between two queries for replies.
_POLL = 0.5
# After a failure, the SuperLink is asked again after these seconds.
_AGAIN = (0.5, 1.0, 2.0, 4.0, 8.0)
# The number of replies that are requested, and are in memory, at a time.
_PULLED = 4
# Seconds that a message is valid beyond the time that is waited for its answer: the SuperLink would else answer first,
# with an error that says less than that nothing came.
GRACE = 60.0


# ---- what travels: tensors, orders and answers as Flower's records; answers are not trusted --------------------------

# Names of the records of a message: tensors; what the server wants; what a client says of its update; accuracies.
ARRAYS, ORDER, REPORT, METRICS = "arrays", "order", "report", "metrics"

# Code of the error with which a client declines a round. Flower numbers its own errors from 0.
DECLINED_CODE = 1000


def chosen(value: _T | Callable[[Context], _T], context: Context) -> _T:
    """Return a setting as it is, or what a function makes of the run's context."""
    return value(context) if callable(value) else value


def to_record(tensors: Tensors) -> ArrayRecord:
    """Return tensors as an array record, bit for bit."""
    odd = sorted(name for name, value in tensors.items() if value.dtype == torch.bfloat16)
    if odd:
        raise Unsupported(
            f"Flower's arrays do not support bfloat16, the type of the tensors {odd}.",
            cure="Federate a model in float32.",
        )
    return ArrayRecord({name: Array(value.detach().cpu().contiguous().numpy()) for name, value in tensors.items()})


def from_record(record: ArrayRecord) -> dict[str, Tensor]:
    """Return the tensors of an array record."""
    return {name: _tensor(array) for name, array in record.items()}


def _tensor(array: Array) -> Tensor:
    """Read an array whose header is checked against its bytes first, so that a false one reserves no memory."""
    stream = BytesIO(array.data)
    if np.lib.format.read_magic(stream) != (1, 0):
        raise ValueError("an array in an unknown version of NumPy's format")
    shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    if dtype.hasobject or math.prod(shape) * dtype.itemsize != len(array.data) - stream.tell():
        raise ValueError(f"an array whose bytes are not {dtype} of shape {shape}")
    return torch.from_numpy(array.numpy())


@final
@dataclass(frozen=True)
class ClientRequest:
    """Request of a server to a client."""

    federation: str
    """Digest of the federation's settings."""
    round: int
    """The round under way, from 1."""
    seed: int
    """The federation's seed."""
    evaluate: bool
    """True if clients should report accuracies."""
    go_on_from: int
    """The last round in which the server took this client's update; 0 for none. The client goes on from the
    private tensors that it had after it, so that a round that was lost or refused leaves no trace.
    """

    def to_record(self) -> ConfigRecord:
        """Return it as a record."""
        return ConfigRecord(dict(vars(self)))

    @classmethod
    def of(cls, message: Message) -> ClientRequest:
        """Return the order that a message holds."""
        record = message.content.config_records[ORDER]
        numbers = {name: int(str(record[name])) for name in ("round", "seed", "go_on_from")}
        return cls(str(record["federation"]), evaluate=bool(record["evaluate"]), **numbers)


def answer_record(update: Update, wire: Tensors) -> RecordDict:
    """Return the records that travel, with the update's tensors as `to_wire` gave them."""
    report = ConfigRecord({"client": update.client, "n": update.n, "round": update.round})
    return RecordDict({ARRAYS: to_record(wire), REPORT: report, METRICS: MetricRecord(dict(update.metrics))})


class Declined(UsageError):
    """A client protects itself and does not take part in a round."""


def fault_of_error(reply: Message) -> Fault:
    """Return the fault of a reply that is an error: a client that declined is known by its code, not by its words."""
    lines = (reply.error.reason or "no reason given").strip().splitlines()
    reason = lines[-1][:300] if lines else ""
    if reply.error.code == DECLINED_CODE:
        return Fault(f"declined: {reason}", "declined")
    return Fault(f"answered with error {reply.error.code}: {reason}", "error")


def read_answer(reply: Message, client: int) -> Update:
    """Read a client's reply, which is no error.

    Raises:
        UsageError: It cannot be read, or it is in the name of another client.
    """
    try:
        report = reply.content.config_records[REPORT]
        numbers = {name: int(str(report[name])) for name in ("client", "n", "round")}
        tensors = from_wire(from_record(reply.content.array_records[ARRAYS]))
        metrics = known_metrics(reply.content.metric_records.get(METRICS, MetricRecord()))
    except Exception as error:
        # A reply may have any content, so reading it may raise any error; the client is at fault.
        raise UsageError(f"sent a reply that cannot be read ({type(error).__name__}: {error})") from error
    if numbers["client"] != client:
        raise UsageError(f"answered in the name of client {numbers['client']}")
    return Update(client, numbers["n"], tensors, numbers["round"], metrics)


def known_metrics(said: Mapping[str, object]) -> dict[str, float]:
    """Return those of a client's numbers that are known by name and can be."""
    return {name: float(str(value)) for name, value in said.items() if _can_be(name, value)}


def _can_be(name: str, value: object) -> bool:
    if not isinstance(value, float | int) or not math.isfinite(value):
        return False
    return 0 <= value <= 1 if name in ("before", "after") else name == "loss" or (name == "epsilon" and value >= 0)


# ---- rounds ----------------------------------------------------------------------------------------------------------


def patiently(call: Callable[..., Iterable[_T]], *arguments: object) -> list[_T]:
    """Call the SuperLink, again where it says that it failed, as it does while its database is locked."""
    for seconds in _AGAIN:
        try:
            return list(call(*arguments))
        # Flower's grid is built on httpx, whose errors arrive here.
        except Exception as error:
            if getattr(getattr(error, "response", None), "status_code", 0) < 500:
                raise
            _LOG.warning("The SuperLink failed and is asked again in %.1f seconds: %s.", seconds, error)
            time.sleep(seconds)
    return list(call(*arguments))


def exchange(grid: Grid, messages: Sequence[Message], *, timeout: float) -> Iterator[Message]:
    """Send messages; return an iterator over the replies that come within `timeout` seconds, errors included."""
    waiting = [sent for sent in patiently(grid.push_messages, messages) if sent] if messages else []
    return _replies(grid, waiting, time.monotonic() + timeout)


def _replies(grid: Grid, waiting: list[str], deadline: float) -> Iterator[Message]:
    # Unlike the grid's own `send_and_receive` it looks more often than every three seconds, and takes few at a time.
    while waiting:
        came = set()
        for start in range(0, len(waiting), _PULLED):
            for reply in patiently(grid.pull_messages, waiting[start : start + _PULLED]):
                came.add(reply.metadata.reply_to_message_id)
                yield reply
        waiting = [sent for sent in waiting if sent not in came]
        if time.monotonic() >= deadline:
            break
        if waiting:
            time.sleep(min(_POLL, max(deadline - time.monotonic(), 0)))


@final
class Nodes:
    """Assignment of nodes to clients: every node is asked once and keeps its answer."""

    def __init__(
        self, clients: Iterable[int], *, timeout: float, most_examples: float, registered: Mapping[int, int] | None
    ) -> None:
        self._clients = frozenset(clients)
        # Seconds to wait for answers.
        self._timeout = timeout
        self._most_examples = most_examples
        # Node id → client number, if the operator has registered the nodes.
        self._registered = registered
        self._number: dict[int, int] = {}
        # Client number → the first node that claimed it.
        self._holder: dict[int, int] = {}
        # Client number → number of examples, by which it is weighted.
        self.examples: dict[int, int] = {}

    def connected(self, grid: Grid) -> tuple[dict[int, int], dict[int, str]]:
        """Return client → node for all clients that can be asked, and client → why for those that cannot."""
        here = patiently(grid.get_node_ids)
        self._ask(grid, [node for node in here if node not in self._number])
        claims: dict[int, list[int]] = {}
        for node in here:
            if node in self._number:
                claims.setdefault(self._number[node], []).append(node)
        holders, absent = {}, dict.fromkeys(self._clients - claims.keys(), "has no node that is connected and answers")
        for client, nodes in claims.items():
            holder = nodes[0] if len(nodes) == 1 else self._holder.get(client)
            if holder in nodes:
                holders[client] = self._holder[client] = holder
            else:
                absent[client] = f"is claimed by {len(nodes)} nodes"
            for node in (node for node in nodes if len(nodes) > 1 and holder in nodes and node != holder):
                _LOG.warning("Node %d claims to be client %d, who is node %d; it is not asked.", node, client, holder)
        return holders, absent

    def _ask(self, grid: Grid, strangers: Sequence[int]) -> None:
        questions = [Message(RecordDict(), node, MessageType.QUERY, ttl=self._timeout + GRACE) for node in strangers]
        said: dict[int, int] = {}
        for reply in exchange(grid, questions, timeout=self._timeout):
            node = _asked(questions, reply)
            if node is None:
                continue
            try:
                report = reply.content.config_records[REPORT]
                number, examples = int(str(report["client"])), int(str(report["n"]))
            except Exception as error:
                # The reply is an error message, or not a number.
                _LOG.warning("Node %d did not report its client number and examples: %s.", node, error)
                continue
            if number not in self._clients:
                _LOG.warning("Node %d claims to be client %d, which the task does not have.", node, number)
            elif self._registered is not None and self._registered.get(node) != number:
                _LOG.warning("Node %d claims to be client %d; it is not registered as this client.", node, number)
            else:
                self._number[node] = number
                said.setdefault(number, examples)
        for number, examples in said.items():
            self.examples.setdefault(number, examples)

    def weight(self, client: int) -> int:
        """Return the examples by which a client may weigh in a sum: as it said when it came, up to a bound."""
        counts = [examples for examples in self.examples.values() if examples > 0]
        return int(min(self.examples.get(client, 1), self._most_examples * median(counts))) if counts else 1


def _asked(questions: Sequence[Message], reply: Message) -> int | None:
    """Return whom a reply's question went to: an error may come from the SuperLink in a node's stead."""
    nodes: Mapping[str, int] = {q.metadata.message_id: q.metadata.dst_node_id for q in questions}
    return nodes.get(reply.metadata.reply_to_message_id)


@final
class OverGrid:
    """The transport of a federation whose clients are Flower's nodes."""

    def __init__(
        self, rounds: Rounds, *, federation: str, timeout: float, patience: float = 0.0, grid: Grid | None = None,
        registered: Mapping[int, int] | None = None, summed: Summed | None = None,
    ) -> None:  # fmt: skip
        self.rounds, self.grid, self.timeout, self._patience = rounds, grid, timeout, patience
        self._federation, self._summed = federation, summed
        most = rounds.settings.most_examples
        self.nodes = Nodes(rounds.clients, timeout=timeout, most_examples=most, registered=registered)
        self._here: dict[int, int] = {}

    def reach(self) -> tuple[Container[int], Mapping[int, str]]:
        """Return the clients whose nodes are connected."""
        assert self.grid is not None
        self._here, absent = self.nodes.connected(self.grid)
        return self._here, absent

    def messages(self, trial: RoundAttempt) -> dict[int, Message]:
        """Return each client's message."""
        # Most methods send the same tensors to all clients.
        records = {id(tensors): to_record(tensors) for tensors in trial.messages.values()}
        lives, group, rounds = self.timeout + GRACE, str(trial.round), self.rounds
        evaluate, seed = rounds.settings.evaluates(trial.round), rounds.settings.seed
        made = {}
        for client, tensors in trial.messages.items():
            order = ClientRequest(self._federation, trial.round, seed, evaluate, rounds.last_taken(client)).to_record()
            content = RecordDict({ARRAYS: records[id(tensors)], ORDER: order})
            made[client] = Message(content, self._here[client], MessageType.TRAIN, ttl=lives, group_id=group)
        return made

    def collect(self, trial: RoundAttempt) -> list[Update]:
        """Send the round's messages and read the replies."""
        assert self.grid is not None
        messages = self.messages(trial)
        if self._summed is not None:
            return self._summed(self, trial, messages)
        return self.read(trial, messages, exchange(self.grid, list(messages.values()), timeout=self.timeout))

    def read(self, trial: RoundAttempt, messages: Mapping[int, Message], replies: Iterable[Message]) -> list[Update]:
        """Read replies: who answered is known by the question, not by what the answer says of itself."""
        client_of = {message.metadata.message_id: client for client, message in messages.items()}
        folder = self.rounds.job.folder if self.rounds.job is not None else None
        updates: list[Update] = []
        for reply in replies:
            client = client_of.get(reply.metadata.reply_to_message_id)
            if client is None:
                _LOG.warning("Round %d: node %d answered what was not asked.", trial.round, reply.metadata.src_node_id)
                continue
            if reply.has_error():
                updates.append(Update(client, 0, {}, trial.round, fault=fault_of_error(reply)))
                continue
            try:
                update = read_answer(reply, client)
                if (said := self.nodes.examples[client]) != update.n:
                    raise UsageError(f"reports {update.n} examples; it registered {said}")
                updates.append(_on_disk(_against_state(update, trial.messages[client], self.rounds.state), folder))
            except UsageError as error:
                updates.append(Update(client, 0, {}, trial.round, fault=Fault(error.reason, "error")))
        return updates

    def finish_round(self, done: Round) -> None:
        """Keep nothing: clients keep what is theirs."""

    def before_retry(self) -> None:
        """Wait for nodes to come back."""
        assert self.grid is not None
        wait_for_nodes(self.grid, self.rounds.settings.min_clients, self._patience)


# Runs a round in which the server sees a sum alone.
Summed = Callable[[OverGrid, RoundAttempt, Mapping[int, Message]], list[Update]]


def wait_for_nodes(grid: Grid, count: int, patience: float) -> None:
    """Wait until so many nodes are connected, or until patience ends."""
    deadline = time.monotonic() + patience
    while (here := len(patiently(grid.get_node_ids))) < count and time.monotonic() < deadline:
        time.sleep(_POLL)
    if here < count:
        _LOG.warning("%d of %d nodes are connected after %.0f seconds; continuing with these.", here, count, patience)


@final
class MethodStrategy(Strategy):
    """A federated method for Flower's own `start`: a round with too few sound updates leaves the model as it was."""

    def __init__(
        self, method: Method, settings: Federation, clients: Sequence[int], *, federation: str, timeout: float = 600.0
    ) -> None:
        self.rounds = Rounds(method, settings, sorted(clients), {})
        self._over = OverGrid(self.rounds, federation=federation, timeout=timeout)
        self._trial: RoundAttempt | None = None
        self._messages: dict[int, Message] = {}

    def summary(self) -> None:
        """Log what is run."""
        rounds = self.rounds
        _LOG.info("%s with %d clients: %s", rounds.method.name, len(rounds.clients), rounds.settings)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's clients and return a message for each that is connected."""
        self._over.grid, self.rounds.state = grid, from_record(arrays)
        self._trial = self.rounds.select(server_round, 0, *self._over.reach())
        self._messages = self._over.messages(self._trial)
        return list(self._messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Join the sound updates; None and None if there are too few."""
        if self._trial is None or self._trial.round != server_round:
            raise UsageError(f"Round {server_round} was not configured.")
        if not self.rounds.conclude(self._trial, self._over.read(self._trial, self._messages, replies)):
            return None, None
        done = self.rounds.rounds[-1]
        said = {"before": done.before, "after": done.after, "loss": done.loss, "epsilon": done.epsilon}
        each = {f"{kind}.{client}": value for kind, values in said.items() for client, value in values.items()}
        means = {kind: sum(values.values()) / len(values) for kind, values in said.items() if values}
        return to_record(self.rounds.state), MetricRecord({**means, **each})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Send no messages, because accuracies before and after local training come with the updates."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None: there is nothing beside the training's metrics."""
        return None


def _on_disk(update: Update, folder: Path | None) -> Update:
    """Return an update whose tensors are read from a file as they are needed: memory contains no round's updates."""
    # The name of the file is deleted at once, and its bytes with the last tensor.
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(safetensors.torch.save({n: value.contiguous() for n, value in to_wire(update.tensors).items()}))
        file.flush()
        with safetensors.safe_open(file.name, framework="pt") as stored:
            tensors = from_wire({name: stored.get_tensor(name) for name in stored.keys()})
    return replace(update, tensors=tensors)


def _against_state(update: Update, sent: Tensors, state: Tensors) -> Update:
    """Return an update whose low-rank matrices all refer to the state: those of a message of one's own become dense."""

    def of_state(name: str, value: Tensor | LowRankUpdate) -> Tensor | LowRankUpdate:
        own = isinstance(value, LowRankUpdate) and name in sent and sent[name] is not state.get(name)
        return (
            value.dense(sent[name])
            if own and isinstance(value, LowRankUpdate) and value.shape == sent[name].shape
            else value
        )

    tensors = {name: of_state(name, value) for name, value in update.tensors.items()}
    return replace(update, tensors=tensors)
