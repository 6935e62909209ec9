"""What travels: tensors, orders and answers as Flower's records. Client and server call it; answers are not trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TypeVar, final

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor

from netweight.errors import Unsupported, UsageError
from netweight.methods.federate.engine import Answer
from netweight.methods.federate.updates import Tensors, Update, from_wire

# Names of the records of a message: tensors; what the server wants; what a client says of its update; accuracies.
ARRAYS, ORDER, REPORT, METRICS = "arrays", "order", "report", "metrics"

T = TypeVar("T")


def chosen(value: T | Callable[[Context], T], context: Context) -> T:
    """Return a setting as it is, or what a function makes of the run's context."""
    return value(context) if callable(value) else value


def to_record(tensors: Tensors) -> ArrayRecord:
    """Return tensors as an array record, bit for bit."""
    odd = sorted(name for name, value in tensors.items() if value.dtype == torch.bfloat16)
    if odd:
        raise Unsupported(
            f"Flower's arrays hold no bfloat16, which the tensors {odd} are.", cure="Federate a model in float32."
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
class Order:
    """What a server asks of a client."""

    federation: str  # digest of the federation's settings
    round: int  # the round under way, from 1
    seed: int  # the federation's seed
    evaluate: bool  # whether accuracies are wanted
    # The last round in which the server took this client's update; 0 for none. The client goes on from the private
    # tensors that it had after it, so that a round that was lost or refused leaves no trace.
    go_on_from: int

    def to_record(self) -> ConfigRecord:
        """Return it as a record."""
        return ConfigRecord(dict(vars(self)))

    @classmethod
    def of(cls, message: Message) -> Order:
        """Return the order that a message holds."""
        found = message.content.config_records[ORDER]
        numbers = {name: int(str(found[name])) for name in ("round", "seed", "go_on_from")}
        return cls(str(found["federation"]), evaluate=bool(found["evaluate"]), **numbers)


def answer_record(answer: Answer, wire: Tensors) -> RecordDict:
    """Return the records that travel, with the update's tensors as `to_wire` gave them."""
    update = answer.update
    report = ConfigRecord({"client": update.client, "n": update.n, "round": update.round})
    return RecordDict({ARRAYS: to_record(wire), REPORT: report, METRICS: MetricRecord(dict(answer.metrics))})


def read_answer(reply: Message, client: int) -> Answer:
    """Read a client's reply."""
    if reply.has_error():
        said = (reply.error.reason or "no reason given").strip().splitlines()
        raise UsageError(f"answered with error {reply.error.code}: {said[-1][:300] if said else ''}")
    try:
        report = reply.content.config_records[REPORT]
        numbers = {name: int(str(report[name])) for name in ("client", "n", "round")}
        tensors = from_wire(from_record(reply.content.array_records[ARRAYS]))
        metrics = known_metrics(reply.content.metric_records.get(METRICS, MetricRecord()))
    except Exception as error:  # whatever goes wrong in reading what a stranger sent is the stranger's fault
        raise UsageError(f"sent a reply that cannot be read ({type(error).__name__}: {error})") from error
    if numbers["client"] != client:
        raise UsageError(f"answered in the name of client {numbers['client']}")
    return Answer(Update(client, numbers["n"], tensors, numbers["round"]), metrics)


def known_metrics(said: Mapping[str, object]) -> dict[str, float]:
    """Return those of a client's numbers that are known by name and can be."""
    return {name: float(str(value)) for name, value in said.items() if _can_be(name, value)}


def _can_be(name: str, value: object) -> bool:
    if not isinstance(value, float | int) or not math.isfinite(value):
        return False
    return 0 <= value <= 1 if name in ("before", "after") else name == "loss" or (name == "epsilon" and value >= 0)
