"""Secure sums: the server sees the sum of a round's updates and no single one. Client and server call their halves.

The protocol is SecAgg+ as Flower has it (Bell et al., ePrint 2020/704): pairwise masks that cancel in the sum, a mask
of each client's own, shares of the secrets so that the others can stand in for who vanishes. One thing is replaced.
Flower draws a mask of millions of words from a Mersenne Twister whose seed is 32 bits, whatever the length of the
secret: a server can try all of them. Here masks are ChaCha20's stream under the whole secret (`stream_mask`).
"""

# What it does not do: the server passes on the clients' public keys, so that it must follow the protocol (honest but
# curious) and not collude with clients up to the threshold; it still sees the sum, numbers of examples and accuracies;
# and nobody can examine single updates: a client checks its own, and the server what the sum says: that its weights are
# those that clients registered, that no value leaves the range, and how far it moves beside the sums before it. A
# malicious client can do what stays within that, and have a sum refused without being named. With three groups and
# more, drawn anew in every round, sums are compared as updates are in the clear: an odd one is left out, and who is in
# odd ones round after round is the liar. That shows the server sums of fewer clients, at least `FEWEST`.
# What it costs: low-rank factors cannot be summed under masks, so that dense changes are sent, as words of 8 bytes
# each; four messages each way instead of one; values are rounded at random to steps of 2 · CLIP / 2²².

from __future__ import annotations

import hashlib
import importlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.serverapp import Grid

from netweight.core import seeds
from netweight.errors import Unsupported, UsageError
from netweight.methods.federate.aggregators import AGGREGATORS
from netweight.methods.federate.rounds import RoundAttempt
from netweight.methods.federate.updates import Fault, LowRankUpdate, Tensors, Update, fault_of
from netweight.plugins.flower.strategy import OverGrid, Summed, exchange, fault_of_error, known_metrics

# Largest change of a weight in one round that can be summed; a client with a larger one leaves itself out.
CLIP = 2.0
# A sum over fewer clients is refused by both sides.
FEWEST = 3

# Words have 32 bits, and values 22.
_MOST_CLIENTS = 1000
# The smallest share of a round's clients that must remain to the end, or must collude to remove a client's mask.
_THRESHOLD = 2 / 3
_LOG = logging.getLogger(__name__)


def stream_mask(seed: bytes, num_range: int, dimensions_list: Sequence[tuple[int, ...]]) -> list[np.ndarray[Any, Any]]:
    """Return a mask drawn from a secret that is used once, uniform in [0, num_range)."""
    key = hashlib.sha256(b"netweight secure sum" + seed).digest()
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    masks = []
    for shape in dimensions_list:
        words = np.frombuffer(stream.update(bytes(4 * math.prod(shape))), dtype="<u4")
        masks.append((words.astype(np.int64) % num_range).reshape(shape))
    return masks


def _protocol(side: str) -> Any:
    """Return Flower's module of one side of the protocol, drawing masks from whole secrets."""
    try:
        module = importlib.import_module(side)
    except ModuleNotFoundError as error:
        raise Unsupported(f"This release of Flower has no {side}.", cure="Install flwr 1.41.") from error
    if not hasattr(module, "pseudo_rand_gen"):
        raise Unsupported(f"{side} of this release of Flower draws masks in an unknown way.", cure="Use flwr 1.41.")
    vars(module)["pseudo_rand_gen"] = stream_mask
    return module


def under_masks(
    message: Message, context: Context, train: Callable[[Message, Context], Message], *, masked: bool
) -> Message:
    """Run a client's part of the protocol around its training, or the training alone where no masks are wanted."""
    protocol = _protocol("flwr.client.mod.secure_aggregation.secaggplus_mod") if masked else None
    record = "secaggplus_configs" if protocol is None else str(protocol.RECORD_KEY_CONFIGS)
    configs = message.content.config_records.get(record)
    if (configs is not None) != masked:
        said, own = ("under masks", "in the clear") if configs is not None else ("in the clear", "under masks")
        raise UsageError(f"The server asks for updates {said}; this client sends them only {own}.")
    if protocol is None or configs is None:
        return train(message, context)
    key = protocol.Key
    if configs[key.STAGE] == protocol.Stage.SETUP:
        clients, shares, needed = (int(str(configs[k])) for k in (key.SAMPLE_NUMBER, key.SHARE_NUMBER, key.THRESHOLD))
        if clients < FEWEST or shares < FEWEST or needed < _THRESHOLD * shares - 0.5:
            raise UsageError(
                f"The server asked for a secure sum over {clients} clients, whose masks {needed} of {shares} clients "
                "can remove."
            )
    return cast(Message, protocol.secaggplus_mod(message, context, train))


def masked_reply(message: Message, received: Tensors, update: Update) -> Message:
    """Return the training's reply as the protocol wants it: dense changes by sorted names, which it masks."""
    compat = importlib.import_module("flwr.compat.common.recorddict_compat")
    changes = []
    for name in sorted(received):
        value = update.tensors[name]
        dense = value.dense(received[name]) if isinstance(value, LowRankUpdate) else value
        change = dense.double() - received[name].double()
        largest = float(change.abs().max()) if change.numel() else 0.0
        if not largest <= CLIP:
            raise UsageError(f"The change of {name!r} is up to {largest:g}; up to {CLIP:g} can be summed under masks.")
        changes.append(change.cpu().numpy())
    n = update.n
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters(changes), num_examples=n, metrics=dict(update.metrics))
    return Message(compat.fitres_to_recorddict(result, keep_input=False), reply_to=message)


class _Listening:
    """A grid that remembers which node failed, and why."""

    def __init__(self, grid: Grid, timeout: float) -> None:
        self._grid, self._timeout = grid, timeout
        self.faults: dict[int, Fault] = {}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """Send messages and return the replies, each with the node that was asked."""
        sent = list(messages)
        replies = list(exchange(self._grid, sent, timeout=self._timeout))
        nodes = {message.metadata.message_id: message.metadata.dst_node_id for message in sent}
        answered = set()
        for reply in replies:
            node = nodes[reply.metadata.reply_to_message_id]
            answered.add(node)
            if reply.has_error():
                self.faults[node] = fault_of_error(reply)
        self.faults.update({node: Fault("sent nothing") for node in nodes.values() if node not in answered})
        return replies


class _OneSum:
    """Stand-in for a strategy and a client manager in the protocol of one secure sum."""

    def __init__(self, nodes: Sequence[int]) -> None:
        self._nodes = nodes
        self.mean: list[np.ndarray[Any, Any]] | None = None
        self.results: dict[int, FitRes] = {}

    def num_available(self) -> int:
        """Return how many nodes there are."""
        return len(self._nodes)

    def configure_fit(self, server_round: int, parameters: Parameters, manager: object) -> list[tuple[Any, FitIns]]:
        """Return the nodes; what they are sent is put in afterwards."""
        return [(SimpleNamespace(node_id=node), FitIns(Parameters([], ""), {})) for node in self._nodes]

    def aggregate_fit(
        self, server_round: int, results: Sequence[tuple[Any, FitRes]], failures: Sequence[object]
    ) -> tuple[None, dict[str, float]]:
        """Take the mean."""
        self.results = {proxy.node_id: result for proxy, result in results}
        self.mean = parameters_to_ndarrays(results[0][1].parameters)
        return None, {}


def masked_sum(context: Context, groups: int = 1) -> Summed:
    """Return what runs a round in which the server sees the weighted means of groups of clients alone."""
    # Lengths of the sums so far.
    lengths: list[float] = []

    def exchange_masked(over: OverGrid, trial: RoundAttempt, messages: Mapping[int, Message]) -> list[Update]:
        rounds = over.rounds
        state, settings = rounds.state, rounds.settings
        if any(tensors.keys() != state.keys() for tensors in trial.messages.values()) or any(
            tensors[name] is not state[name] for tensors in trial.messages.values() for name in tensors
        ):
            raise UsageError(
                f"{rounds.method.name} sends each client something else, so that its updates cannot be summed."
            )
        compares = settings.aggregator.compares_values or settings.aggregator.leaves_out_suspects
        # A single sum is compared only with those of earlier rounds.
        if compares and groups < 3:
            name = AGGREGATORS.name_of(settings.aggregator)
            raise UsageError(
                f"The aggregator {name} compares single updates, which a secure sum hides.",
                cure="Set aggregator='mean', or sums=3 or more.",
            )
        if len(trial.messages) > _MOST_CLIENTS:
            raise UsageError(
                f"A sum over {len(trial.messages)} clients could overflow its integers; up to {_MOST_CLIENTS} can be "
                "summed.",
                cure=f"Ask at most {_MOST_CLIENTS} clients in a round: give server_app a Federation with a smaller "
                "`fraction`.",
            )
        # A weight is what the client said before any sum, and no more than the bound: one that says more takes no part.
        weights = over.nodes.examples
        faults = {
            client: Fault(f"reports {weights[client]} examples, more than {over.nodes.weight(client)} can be summed")
            for client in trial.messages
            if weights[client] > over.nodes.weight(client)
        }
        # The same groups whenever a round is tried: other sums of the same updates would give single ones away.
        count = max(1, min(groups, len(trial.clients) // FEWEST))
        drawn = torch.randperm(len(trial.clients), generator=seeds.torch_generator(settings.seed, "sums", trial.round))
        there = messages.keys() - faults.keys()
        sums = list[Update]()
        for start in range(count):
            group = sorted(there & {trial.clients[place] for place in drawn[start::count].tolist()})
            if len(group) < FEWEST or len(there) < settings.min_clients:
                faults |= dict.fromkeys(group, Fault("is not in a sum, which would be of too few"))
                continue
            joint, others = one_sum(over, trial, {client: messages[client] for client in group}, count)
            faults |= others
            sums += [] if joint is None else [joint]
        return [*sums, *(Update(client, 0, {}, trial.round, fault=why) for client, why in faults.items())]

    def one_sum(
        over: OverGrid, trial: RoundAttempt, questions: Mapping[int, Message], count: int
    ) -> tuple[Update | None, dict[int, Fault]]:
        settings, weights, faults = over.rounds.settings, over.nodes.examples, dict[int, Fault]()
        assert over.grid is not None
        listening = _Listening(over.grid, over.timeout)
        # Fewer than are wanted are not unmasked: beside the sum of the next attempt theirs would tell who was missing.
        threshold = max(_THRESHOLD, min(1.0, settings.min_clients / count / len(questions)))
        committed = {message.metadata.dst_node_id: weights[client] for client, message in questions.items()}
        total = _summed(trial.round, questions, listening, context, committed, threshold)
        client_of = {message.metadata.dst_node_id: client for client, message in questions.items()}
        results = {client_of[node]: result for node, result in total.results.items()}
        silent = {client_of[node]: why for node, why in listening.faults.items()}
        faults |= {client: why for client, why in silent.items() if client not in results}
        for client, result in results.items():
            if result.num_examples != weights[client]:
                faults[client] = Fault(f"reports {result.num_examples} examples; it registered {weights[client]}")
                # With this number, the client takes no part in another attempt.
                over.nodes.examples[client] = 2**62
                total.mean = None
        # In this case, sums are also compared with each other.
        most = settings.most_norm if count < 3 else settings.most_norm**2
        mean = None if total.mean is None else _bounded(total.mean, lengths, most, trial.round)
        joint = None if mean is None else _joined(over.rounds.state, mean, results, trial.round)
        return joint, faults

    return exchange_masked


def _bounded(
    mean: Sequence[np.ndarray[Any, Any]], lengths: list[float], most: float, round: int
) -> list[np.ndarray[Any, Any]]:
    """Shorten a mean of changes that is many times as long as those of the last rounds, and note its length."""
    length = math.sqrt(sum(float(np.square(part).sum()) for part in mean))
    longest = most * median(lengths[-5:]) if lengths else math.inf
    if length > longest:
        _LOG.warning("Round %d: the sum moves %.3g times as far as may be; it is shortened.", round, length / longest)
    lengths.append(min(length, longest))
    return [part * min(1.0, longest / max(length, 1e-30)) for part in mean]


def _summed(
    round: int, messages: Mapping[int, Message], grid: _Listening, context: Context, committed: Mapping[int, int],
    threshold: float,
) -> _OneSum:  # fmt: skip
    """Run the protocol, with the weight that each node committed to; the mean is None if it was halted."""
    server = importlib.import_module("flwr.server")
    protocol = _protocol("flwr.server.workflow.secure_aggregation.secaggplus_workflow")
    contents: dict[int, RecordDict] = {m.metadata.dst_node_id: m.content for m in messages.values()}

    one = _OneSum(list(contents))
    own = Context(context.run_id, context.node_id, context.node_config, RecordDict(), context.run_config)
    legacy = server.LegacyContext(
        context=own, config=server.ServerConfig(num_rounds=1), strategy=one, client_manager=one
    )
    legacy.state.config_records[protocol.MAIN_CONFIGS_RECORD] = ConfigRecord(
        {protocol.WorkflowKey.CURRENT_ROUND: round}
    )
    legacy.state.array_records[protocol.MAIN_PARAMS_RECORD] = ArrayRecord()
    largest = float(max(committed.values()))
    workflow = protocol.SecAggPlusWorkflow(1.0, threshold, max_weight=largest, clipping_range=CLIP)
    _amend(workflow, contents, protocol, committed)
    try:
        workflow(grid, legacy)
    except Exception as error:
        # Flower's part of the protocol trusts the clients' messages, and a wrong message must not stop the server.
        _LOG.warning("Round %d: the sum failed: %s: %s", round, type(error).__name__, error)
        one.mean = None
    return one


def _amend(workflow: Any, contents: Mapping[int, RecordDict], protocol: Any, committed: Mapping[int, int]) -> None:
    """Send netweight's own records, go on without who vanishes before secrets are shared, and check what was summed."""
    # Flower asks in the end for shares of their secrets too, which nobody has, and no masks are to be taken off for
    # them.
    set_up, share_keys = workflow.setup_stage, workflow.share_keys_stage

    def set_up_with_own_records(*arguments: Any) -> bool:
        done = bool(set_up(*arguments))
        arguments[-1].nid_to_fitins = dict(contents)
        return done

    def share_keys_of_who_is_there(*arguments: Any) -> bool:
        done, state = bool(share_keys(*arguments)), arguments[-1]
        here = set(state.active_node_ids)
        state.sampled_node_ids = here
        state.nid_to_neighbours = {node: others & here for node, others in state.nid_to_neighbours.items()}
        return done

    unmask = workflow.unmask_stage

    def unmask_and_check(*arguments: Any) -> bool:
        state = arguments[-1]
        here, steps = state.active_node_ids, state.quantization_range
        ratios = sum(round(committed[node] / state.max_weight * steps) for node in here)
        # The middle and the range of the sum of this many values.
        middle, reach = len(here) * steps / 2, ratios / 2 + len(here)

        def checked(summed: Sequence[np.ndarray[Any, Any]]) -> tuple[int, Sequence[np.ndarray[Any, Any]]]:
            if int(summed[0][0]) != ratios:
                raise UsageError("its weights are not those that clients registered")
            if any(float(np.abs(part - middle).max(initial=0)) > reach for part in summed[1:]):
                raise UsageError("a value is out of the range of those that were to be summed")
            return int(summed[0][0]), summed[1:]

        vars(protocol)["factor_extract"] = checked
        return bool(unmask(*arguments))

    workflow.setup_stage, workflow.share_keys_stage = set_up_with_own_records, share_keys_of_who_is_there
    workflow.unmask_stage = unmask_and_check


def _joined(
    state: Tensors, mean: Sequence[np.ndarray[Any, Any]], results: Mapping[int, FitRes], round: int
) -> Update | None:
    """Return the update that a mean of changes makes of the state, or None if it cannot be one."""
    names = sorted(state)
    changes = {name: torch.from_numpy(value) for name, value in zip(names, mean, strict=False)}
    if len(mean) != len(names) or any(changes[name].shape != state[name].shape for name in names):
        _LOG.warning("Round %d: the sum has other shapes than the state.", round)
        return None
    tensors = {name: (state[name].double() + changes[name]).to(state[name]) for name in names}
    own = tuple(
        Update(client, result.num_examples, {}, round, known_metrics(result.metrics))
        for client, result in sorted(results.items())
    )
    joint = Update(min(results), sum(one.n for one in own), tensors, round, members=own)
    if (fault := fault_of(state, joint, round=round)) is not None:
        _LOG.warning("Round %d: the sum %s.", round, fault)
        return None
    return joint
