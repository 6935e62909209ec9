"""Settings of a fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final, get_args

from netweight.errors import UsageError
from netweight.nn.basis import Solver

Representation = Literal["delta", "shared-down", "factors"]
"""What an adapter is a point of: its change ΔW; the up factors over one common down; or the raw numbers of both."""


@final
@dataclass(frozen=True)
class FitConfig:
    """How a space is fitted.

    Attributes:
        components: How many; None for as many as there are, at most 1,000.
        representation: See `Representation`. "delta" does not depend on how a change is written as up @ down, nor on
            ranks. "shared-down" gives the same components where all adapters share their down factors, and points of
            the adapters' own rank. "factors" is the reference's; it means something only for adapters that began from
            the same seed.
        standardize: Whether every number is divided by its standard deviation first; "factors" only, as the reference.
        solver: "dual" is exact, from all inner products; "streaming" passes over the bank instead, in "delta" through
            a sketch of the changes; "auto" takes the first up to 10,000 adapters.
        halves: "dual" only: whether to fit two halves of the adapters as well, to see what of components comes back.
        sketch: Side of the sketch of a module's change.
        passes: "streaming" only: passes of iteration at most.
        tolerance: "streaming" only: a pass that adds less than this share to the captured variance is the last.
        seed: Of halves, of sketches, and of the rows that streaming starts from.

    Raises:
        UsageError: A value cannot be meant.
    """

    components: int | None = None
    representation: Representation = "delta"
    standardize: bool = True
    solver: Solver = "auto"
    halves: bool = True
    sketch: int = 32
    passes: int = 6
    tolerance: float = 2e-3
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values."""
        if self.components is not None and self.components < 1:
            raise UsageError(f"{self.components} components cannot be.", cure="Ask for 1 or more.")
        if self.representation not in get_args(Representation):
            known = ", ".join(map(repr, get_args(Representation)))
            raise UsageError(f"The representation {self.representation!r} is unknown.", cure=f"Use one of {known}.")
        if self.solver not in get_args(Solver):
            known = ", ".join(map(repr, get_args(Solver)))
            raise UsageError(f"The solver {self.solver!r} is unknown.", cure=f"Use one of {known}.")
        if self.sketch < 1 or self.passes < 1 or not self.tolerance >= 0:
            raise UsageError(
                f"A sketch of {self.sketch}, {self.passes} passes and tolerance {self.tolerance} cannot be.",
                cure="Give at least 1, 1 and 0.",
            )
