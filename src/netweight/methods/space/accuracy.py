"""What is known of how good a fit is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self, final

from netweight.generate.halves import Halves
from netweight.methods.space.sketch import SketchError

__all__ = ["Accuracy"]


@final
@dataclass(frozen=True)
class Accuracy:
    """A fit's account of itself.

    Attributes:
        solver: "dual" captures all that so many components can; "streaming" nearly.
        captured: Share of the variance along the components.
        orthonormality: The greatest magnitude in C Cᵀ − I of the components C, or by inner products of the eigenvectors
            that they are made of; None through a sketch, where components are orthonormal in the sketch only.
        passes: Streaming: the captured share after each pass; growth that has stopped says that it is near the best.
        halves: How well two halves agree; None where they were not fitted.
        sketch: What the sketch gets wrong; None without one.
    """

    solver: Literal["dual", "streaming"]
    captured: float
    orthonormality: float | None
    passes: tuple[float, ...] = ()
    halves: Halves | None = None
    sketch: SketchError | None = None

    def to_json(self) -> dict[str, Any]:
        """Write it as JSON values.

        Returns:
            JSON values.
        """
        parts = {"halves": self.halves, "sketch": self.sketch}
        return {**vars(self), **{name: None if part is None else vars(part) for name, part in parts.items()}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Read what `to_json` wrote.

        Args:
            values: JSON values.
        """
        halves, sketch = values["halves"], values["sketch"]
        if halves is not None:
            agreement = {int(number): share for number, share in halves["agreement"].items()}
            halves = Halves(**{**halves, "agreement": agreement})
        return cls(**{
            **values, "passes": tuple(values["passes"]), "halves": halves,
            "sketch": None if sketch is None else SketchError(**sketch),
        })  # fmt: skip
