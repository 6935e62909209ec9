"""Aggregation rules: each is one file, and one line here.

A rule takes the server's tensors, the bounded updates and how many liars are reckoned with; it returns the updates that
the method then averages: some of those given, or a single one.
"""

from collections.abc import Callable, Mapping, Sequence

from netweight.methods.federate.aggregators.bounded_mean import bounded_mean
from netweight.methods.federate.aggregators.by_coordinate import coordinate_median, trimmed_mean
from netweight.methods.federate.aggregators.krum import krum, multi_krum
from netweight.methods.federate.settings import Aggregator
from netweight.methods.federate.updates import Tensors, Update

Rule = Callable[[Tensors, Sequence[Update], int], list[Update]]


def everyone(state: Tensors, updates: Sequence[Update], liars: int) -> list[Update]:
    """Return all updates: what bounds and suspicion leave of them is averaged."""
    return list(updates)


RULES: Mapping[Aggregator, Rule] = {
    "bounded-mean": bounded_mean,
    "mean": everyone,
    "screened-mean": everyone,
    "clipped-mean": everyone,
    "trimmed-mean": trimmed_mean,
    "median": coordinate_median,
    "krum": krum,
    "multi-krum": multi_krum,
}
