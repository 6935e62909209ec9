"""One direction taken out of every block's output, whose length is then restored.

Removal alone makes states shorter, which later layers feel; with the length restored, other abilities change less
("norm-preserving" or "projected" abliteration).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Annotated, final

from pydantic import Field

from netweight.attacks.refusal.edits.edit import EditMaterial, RefusalEdit, RefusalEditSettings
from netweight.settings import Cli

if TYPE_CHECKING:
    from torch import Tensor


@final
class NormPreservingDirections(RefusalEditSettings):
    """Removal of one direction from the residual stream, with the length of states restored."""

    depth: Annotated[float, Cli(own=False)] = Field(
        0.8, gt=0, le=1, description="Share of the blocks, counted from the first, whose direction is tried."
    )

    def candidates(self, material: EditMaterial) -> Iterator[RefusalEdit]:
        """Yield one edit for each block."""
        from netweight.attacks.refusal.edits.streams import mean_direction
        from netweight.nn.hooks import edit_outputs

        for number, name in material.blocks(self.depth):
            turned = partial(_turned, basis=mean_direction(material.gaps(name)))
            edits = dict.fromkeys(material.structure.blocks, turned)
            yield RefusalEdit("norm-preserving", f"of block {number}", partial(edit_outputs, edits=edits))


def _turned(output: Tensor, basis: Tensor) -> Tensor:
    """Return states without their part along a direction, as long as they were."""
    from netweight.attacks.refusal.edits.streams import without

    rest = without(output, basis)
    turned: Tensor = rest * (output.norm(dim=-1, keepdim=True) / rest.norm(dim=-1, keepdim=True).clamp_min(1e-12))
    return turned
