"""A round on a server: which connected node is which client, messages and replies, and sound updates joined."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from torch import Tensor

from netweight.errors import UsageError
from netweight.methods.federate.engine import Round, sampled_clients, still_there
from netweight.methods.federate.method import Method
from netweight.methods.federate.settings import Federation
from netweight.methods.federate.updates import LowRank, Tensors, Update, validate_updates
from netweight.plugins.flower.records import ARRAYS, ORDER, REPORT, Answer, Order, from_record, read_answer, to_record

_LOG = logging.getLogger(__name__)
_POLL = 0.5  # seconds between two looks for replies
# Seconds that a message is valid beyond the time that is waited for its answer: the SuperLink would else answer first,
# with an error that says less than that nothing came.
GRACE = 60.0


def exchange(grid: Grid, messages: Sequence[Message], *, timeout: float) -> list[Message]:
    """Send messages and return the replies that came within `timeout` seconds, errors included."""
    # Unlike the grid's own `send_and_receive` it looks more often than every three seconds.
    waiting = {sent for sent in grid.push_messages(messages) if sent}
    deadline = time.monotonic() + timeout
    replies: list[Message] = []
    while waiting:
        came = list(grid.pull_messages(waiting))
        replies += came
        waiting -= {reply.metadata.reply_to_message_id for reply in came}
        if time.monotonic() >= deadline:
            break
        if waiting:
            time.sleep(min(_POLL, max(deadline - time.monotonic(), 0)))
    return replies


@final
class Nodes:
    """Which node is which client: every node is asked once."""

    # A node's word is taken for its number: that only registered nodes connect is Flower's part.
    # `timeout`: seconds to wait for answers

    def __init__(self, clients: Iterable[int], *, timeout: float) -> None:
        self._clients = frozenset(clients)
        self._timeout = timeout
        self._number: dict[int, int] = {}
        self.examples: dict[int, int] = {}

    def connected(self, grid: Grid) -> tuple[dict[int, int], dict[int, str]]:
        """Return client → node for all clients that can be asked, and client → why for those that cannot."""
        here = list(grid.get_node_ids())
        self._ask(grid, [node for node in here if node not in self._number])
        claims: dict[int, list[int]] = {}
        for node in here:
            if node in self._number:
                claims.setdefault(self._number[node], []).append(node)
        absent = dict.fromkeys(self._clients - claims.keys(), "has no node that is connected and answers")
        absent |= {client: f"is claimed by {len(nodes)} nodes" for client, nodes in claims.items() if len(nodes) > 1}
        return {client: nodes[0] for client, nodes in claims.items() if len(nodes) == 1}, absent

    def _ask(self, grid: Grid, strangers: Sequence[int]) -> None:
        questions = [Message(RecordDict(), node, MessageType.QUERY, ttl=self._timeout + GRACE) for node in strangers]
        for reply in exchange(grid, questions, timeout=self._timeout) if questions else []:
            node = _asked(questions, reply)
            if node is None:
                continue
            try:
                report = reply.content.config_records[REPORT]
                number, examples = int(str(report["client"])), int(str(report.get("n", 0)))
            except Exception as error:  # an error message, or whatever a stranger sent instead of a number
                _LOG.warning("Node %d did not say its client number: %s.", node, error)
                continue
            if number in self._clients:
                self._number[node], self.examples[number] = number, examples
            else:
                _LOG.warning("Node %d says that it is client %d, whom the task does not have.", node, number)


def _asked(questions: Sequence[Message], reply: Message) -> int | None:
    """Return whom a reply's question went to: an error may come from the SuperLink in a node's stead."""
    nodes: Mapping[str, int] = {q.metadata.message_id: q.metadata.dst_node_id for q in questions}
    return nodes.get(reply.metadata.reply_to_message_id)


@final
@dataclass(frozen=True)
class Trial:
    """A round under way."""

    round: int  # its number, from 1
    attempt: int  # how often it was tried before
    asked: tuple[int, ...]  # clients that were drawn, in order
    state: Tensors  # the server's tensors by name
    sent: Mapping[int, Tensors]  # what each client that was reached got; tensors by name
    absent: Mapping[int, str]  # client → why it was not reached
    messages: Mapping[int, Message]  # client → its message
    started: float  # when, on the monotonic clock

    def client_of(self, reply: Message) -> int | None:
        """Return who was asked what a message answers, by the question, not by what the answer says of itself."""
        for client, message in self.messages.items():
            if message.metadata.message_id == reply.metadata.reply_to_message_id:
                return client
        return None


@final
class MethodStrategy(Strategy):
    """Runs a federated method's rounds: sound updates are joined by `method.aggregate`, the others are named."""

    # `server_app` drives it, with retries and checkpoints. Flower's own `start` can, too, and then a round with too few
    # sound updates leaves the model as it was.

    def __init__(
        self,
        method: Method,
        settings: Federation,
        clients: Sequence[int],
        *,
        federation: str,
        rounds: Sequence[Round] = (),
        timeout: float = 600.0,
    ) -> None:
        self.method, self.settings, self.federation = method, settings, federation
        self.clients = tuple(sorted(clients))
        self.timeout = timeout  # seconds to wait for a round's answers
        self.rounds = list(rounds)
        self.trial: Trial | None = None
        self._nodes = Nodes(self.clients, timeout=timeout)

    def summary(self) -> None:
        """Log what is run."""
        _LOG.info("%s with %d clients: %s", self.method.name, len(self.clients), self.settings)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the round's clients and return a message for each that is connected."""
        again = self.trial is not None and self.trial.round == server_round
        attempt = self.trial.attempt + 1 if again and self.trial is not None else 0
        asked = sampled_clients(self.clients, self.settings, server_round, attempt)
        nodes, absent = self._nodes.connected(grid)
        there = still_there(asked, self.settings, server_round, attempt)
        state = from_record(arrays)
        sent = {client: self.method.message(state, client) for client in there if client in nodes}
        records = {id(tensors): to_record(tensors) for tensors in sent.values()}  # most methods send all the same

        def message(client: int) -> Message:
            order = self._order(server_round, client).to_record()
            content = RecordDict({ARRAYS: records[id(sent[client])], ORDER: order})
            lives, group = self.timeout + GRACE, str(server_round)
            return Message(content, nodes[client], MessageType.TRAIN, ttl=lives, group_id=group)

        messages = {client: message(client) for client in sent}
        missing = {client: absent.get(client, "vanished, as drop_out asks") for client in asked if client not in sent}
        self.trial = Trial(server_round, attempt, asked, state, sent, missing, messages, time.monotonic())
        return list(messages.values())

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Join the sound updates; None and None if there are too few."""
        answers: list[Answer] = []
        faults: dict[int, str] = {}
        for reply in replies:
            client = self._trial(server_round).client_of(reply)
            if client is None:
                _LOG.warning("Round %d: node %d answered what was not asked.", server_round, reply.metadata.src_node_id)
                continue
            try:
                answers.append(read_answer(reply, client))
            except UsageError as error:
                faults[client] = error.reason
        return self.conclude(server_round, answers, faults)

    def conclude(
        self, server_round: int, answers: Sequence[Answer], faults: Mapping[int, str]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Validate a round's answers, join the sound ones and note the round."""
        trial = self._trial(server_round)
        found = validate_updates(trial.sent, [answer.update for answer in answers], round=server_round)
        refused = {**found.refused, **trial.absent, **faults}
        self.log_refused(trial, refused)
        accepted = [_against_state(update, trial) for update in found.accepted if update.client not in refused]
        if len(accepted) < self.settings.min_clients:
            return None, None
        sound = {update.client for update in accepted}
        sound_answers = [answer for answer in answers if answer.update.client in sound]
        return self.finish(trial, self.method.aggregate(trial.state, accepted), sound_answers, refused)

    def examples(self, client: int) -> int:
        """Return how many training examples a client said that it has; 0 if it did not say."""
        return self._nodes.examples.get(client, 0)

    def log_refused(self, trial: Trial, refused: Mapping[int, str]) -> None:
        """Log who was left out of a round, and why."""
        for client, why in sorted(refused.items()):
            _LOG.warning("Round %d, attempt %d: client %d left out: %s.", trial.round, trial.attempt + 1, client, why)

    def finish(
        self, trial: Trial, state: Tensors, answers: Sequence[Answer], refused: Mapping[int, str]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Add a finished round to the history; return the next state and the round's metrics."""
        kinds = ("before", "after", "loss")
        said = {kind: {a.update.client: a.metrics[kind] for a in answers if kind in a.metrics} for kind in kinds}
        seconds = time.monotonic() - trial.started
        done = Round(trial.round, trial.asked, **said, seconds=seconds, refused=refused, attempts=trial.attempt + 1)
        self.rounds.append(done)
        means = {"before": done.mean_before, "after": done.mean_after, "loss": done.mean_loss}
        _LOG.info("Round %d: %d of %d clients; %s", done.round, len(answers), len(done.clients), means)
        each = {f"{kind}.{client}": value for kind, values in said.items() for client, value in values.items()}
        known = {kind: mean for kind, mean in means.items() if mean is not None}
        return to_record(state), MetricRecord({**known, **each})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask nobody: accuracies before and after local training come with the updates."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return None: there is nothing beside the training's metrics."""
        return None

    def _order(self, round: int, client: int) -> Order:
        taken = [done.round for done in self.rounds if client in done.clients and client not in done.refused]
        evaluate = self.settings.evaluates(round)
        return Order(self.federation, round, self.settings.seed, evaluate, max(taken, default=0))

    def _trial(self, round: int) -> Trial:
        if self.trial is None or self.trial.round != round:
            raise UsageError(f"Round {round} was not configured.")
        return self.trial


def _against_state(update: Update, trial: Trial) -> Update:
    """Return an update whose low-rank matrices all refer to the state: those of a message of one's own become dense."""
    sent = trial.sent[update.client]

    def of_state(name: str, value: Tensor | LowRank) -> Tensor | LowRank:
        own = isinstance(value, LowRank) and sent[name] is not trial.state.get(name)
        return value.dense(sent[name]) if own and isinstance(value, LowRank) else value

    return replace(update, tensors={name: of_state(name, value) for name, value in update.tensors.items()})
