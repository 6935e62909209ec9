"""The mean of the updates that do not look odd."""

from netweight.methods.federate.aggregator import AggregatorSettings


class ScreenedMean(AggregatorSettings):
    """Average the updates that are not suspicious, if they are at least half of all; otherwise average all."""

    leaves_out_suspects = True
