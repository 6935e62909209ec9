"""The plain mean, weighted by the numbers of examples that clients claim, within a bound."""

from netweight.methods.federate.aggregator import AggregatorSettings


class Mean(AggregatorSettings):
    """Average all updates, weighted by the clients' numbers of examples.

    Source: McMahan et al., FedAvg (arXiv 1602.05629).
    """

    trusts_examples = True
