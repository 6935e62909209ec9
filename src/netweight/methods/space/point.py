"""One point of a space at hand: what `WeightSpace.sample` and `WeightSpace.point` return."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from torch import Tensor

from netweight.generate.adapter import Adapter
from netweight.methods.space.exporting import Exported, export_adapter

if TYPE_CHECKING:
    from netweight.methods.space.method import WeightSpace

__all__ = ["Point"]


@final
@dataclass(frozen=True, eq=False)
class Point:
    """A point of a space.

    Attributes:
        space: The space.
        scores: Shape `(k,)`, fp32.
    """

    space: WeightSpace
    scores: Tensor

    @property
    def adapter(self) -> Adapter:
        """The point as an adapter, exactly; see `WeightSpace.adapter`."""
        return self.space.adapter(self.scores)

    def export(
        self,
        path: str | Path,
        *,
        rank: int | None = None,
        layout: Literal["diffusers", "peft", "kohya"] = "diffusers",
        base: str | None = None,
        overwrite: bool = False,
    ) -> Exported:
        """Write the point as an adapter; arguments, result and errors are those of `exporting.export_adapter`."""
        return export_adapter(self.adapter, path, rank=rank, layout=layout, base=base, overwrite=overwrite)
