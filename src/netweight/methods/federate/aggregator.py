"""Base class of aggregators: settings, and the selection or combination of a round's updates.

An aggregator returns the updates that the method then averages: some of those given, or a single one. Bounds on weight
and length come before every aggregator; see `screening`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from netweight.settings import Settings

if TYPE_CHECKING:
    from netweight.methods.federate.updates import Tensors, Update


class AggregatorSettings(Settings):
    """Settings of an aggregator, and its requirements for a round."""

    compares_values: ClassVar[bool] = False
    """True if values of different clients are compared, so that all clients must be sent the same."""
    leaves_out_suspects: ClassVar[bool] = False
    """True if suspicious updates are left out, as long as they are a minority."""
    bounds_to_median: ClassVar[bool] = False
    """True if an update cannot have more influence than the median update."""
    trusts_examples: ClassVar[bool] = False
    """True if updates are weighted by the number of examples that clients claim."""

    @property
    def noise_multiplier(self) -> float:
        """Standard deviation of the noise that the server adds to the mean, as a multiple of the clipping norm."""
        return 0.0

    def updates_to_average(self, state: Tensors, updates: Sequence[Update]) -> list[Update]:
        """Return the updates to average.

        Args:
            state: The server's tensors by name.
            updates: The round's updates, bounded.
        """
        return list(updates)
