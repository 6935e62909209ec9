"""The mean of updates that are shortened to the median length, with noise of the server where it is asked for."""

from pydantic import Field

from netweight.methods.federate.aggregator import AggregatorSettings


class ClippedMean(AggregatorSettings):
    """Average updates that are shortened to the median length.

    Source: Sun et al. (arXiv 1911.07963).
    """

    bounds_to_median = True

    noise: float = Field(
        0.0,
        ge=0,
        description="Standard deviation of the noise that the server adds to the mean, as a multiple of the clipping "
        "norm.",
    )

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise that the server adds to the mean, as a multiple of the clipping norm."""
        return self.noise
