"""Who is who: which connected node is which client. And how messages go to nodes and replies come back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import final

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from netweight.integrations.flower.records import REPORT

__all__ = ["GRACE", "Nodes", "exchange"]

_LOG = logging.getLogger(__name__)
_POLL = 0.5  # seconds between two looks for replies
GRACE = 60.0
"""Seconds that a message is valid beyond the time that is waited for its answer: the SuperLink would else answer first,
with an error that says less than that nothing came."""


def exchange(grid: Grid, messages: Sequence[Message], *, timeout: float) -> list[Message]:
    """Send messages and return the replies that came within `timeout` seconds, errors included.

    Unlike the grid's own `send_and_receive` it looks more often than every three seconds.

    Args:
        grid: Flower's way to the nodes.
        messages: One per node.
        timeout: In seconds.

    Returns:
        The replies, in the order in which they came.
    """
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
    """Which node is which client: every node is asked once.

    A node's word is taken for its number: that only registered nodes connect is Flower's part.

    Args:
        clients: All client numbers of the task.
        timeout: Seconds to wait for answers.
    """

    def __init__(self, clients: Iterable[int], *, timeout: float) -> None:
        self._clients = frozenset(clients)
        self._timeout = timeout
        self._number: dict[int, int] = {}
        self.examples: dict[int, int] = {}

    def connected(self, grid: Grid) -> tuple[dict[int, int], dict[int, str]]:
        """Return client → node for all clients that can be asked, and client → why for those that cannot.

        Args:
            grid: Flower's way to the nodes.
        """
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
