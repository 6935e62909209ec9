"""One direction, the mean difference of refused and ordinary prompts at a block, taken out of the residual stream.

Source: Arditi et al., arXiv 2406.11717, sections 2.3 and 2.4; with the model's outputs in place of edited weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, final

from pydantic import Field

from netweight.attacks.refusal.edits.edit import EditMaterial, RefusalEdit, RefusalEditSettings
from netweight.settings import Cli


@final
class Directions(RefusalEditSettings):
    """Removal of one direction, which is computed in one of the blocks, from the residual stream."""

    depth: Annotated[float, Cli(own=False)] = Field(
        0.8, gt=0, le=1, description="Share of the blocks, counted from the first, whose direction is tried."
    )

    def candidates(self, material: EditMaterial) -> Iterator[RefusalEdit]:
        """Yield one edit for each block."""
        from netweight.attacks.refusal.edits.streams import mean_direction, removal

        for number, name in material.blocks(self.depth):
            basis = mean_direction(material.gaps(name))
            yield RefusalEdit("directions", f"of block {number}", removal(material.model, material.structure, basis))
