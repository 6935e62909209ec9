"""Every block loses its own direction, by a strength: what tools for "abliteration" search over."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Annotated, final

from pydantic import Field

from netweight.attacks.refusal.edits.edit import EditMaterial, RefusalEdit, RefusalEditSettings
from netweight.settings import Cli


@final
class LayerwiseDirections(RefusalEditSettings):
    """Removal of a direction of its own from each block, from a certain depth on."""

    starts: Annotated[tuple[Annotated[float, Field(ge=0, lt=1)], ...], Cli(own=False)] = Field(
        (0.0, 0.3, 0.6), min_length=1, description="Depths from which blocks are edited, as shares of all blocks."
    )
    strengths: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Cli(own=False)] = Field(
        (0.5, 1.0),
        min_length=1,
        description="Share of the component along the direction that is removed from each block; 1 removes all of it.",
    )

    def candidates(self, material: EditMaterial) -> Iterator[RefusalEdit]:
        """Yield one edit for each start and strength."""
        from netweight.attacks.refusal.edits.streams import mean_direction, without
        from netweight.nn.hooks import edit_outputs

        names = list(material.structure.blocks)
        bases = {name: mean_direction(material.gaps(name)) for name in names}
        for first in sorted({int(start * len(names)) for start in self.starts}):
            for strength in self.strengths:
                edits = {name: partial(without, basis=bases[name], strength=strength) for name in names[first:]}
                label = f"blocks {first} to {len(names) - 1}, strength {strength:g}"
                yield RefusalEdit("layerwise", label, partial(edit_outputs, edits=edits))
