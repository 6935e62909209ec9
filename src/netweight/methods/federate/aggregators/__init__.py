"""The aggregators, each a file with its settings beside its algorithm; adding one takes a file and a line here."""

from netweight.settings import Variants

# The first word is the name in commands, recipes and records.
AGGREGATORS = Variants(
    "aggregator",
    {
        "bounded-mean": "netweight.methods.federate.aggregators.bounded_mean:BoundedMean",
        "mean": "netweight.methods.federate.aggregators.mean:Mean",
        "screened-mean": "netweight.methods.federate.aggregators.screened_mean:ScreenedMean",
        "clipped-mean": "netweight.methods.federate.aggregators.clipped_mean:ClippedMean",
        "trimmed-mean": "netweight.methods.federate.aggregators.trimmed_mean:TrimmedMean",
        "median": "netweight.methods.federate.aggregators.trimmed_mean:CoordinateMedian",
        "krum": "netweight.methods.federate.aggregators.krum:Krum",
        "multi-krum": "netweight.methods.federate.aggregators.krum:MultiKrum",
    },
)
