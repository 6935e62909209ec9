"""A subspace of a few directions of a block, taken out of the residual stream: low-rank removal.

Refusal may lie in more than one direction (Wollschläger et al., arXiv 2502.17420); the subspace is that of the first
singular directions of the differences between refused prompts and the mean of ordinary ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, final

from pydantic import Field

from netweight.attacks.refusal.edits.edit import EditMaterial, RefusalEdit, RefusalEditSettings
from netweight.settings import Cli


@final
class Subspaces(RefusalEditSettings):
    """Removal of several directions from the residual stream."""

    ranks: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Cli(own=False)] = Field(
        (4,), min_length=1, description="Dimensions of the subspaces that are tried."
    )
    depth: Annotated[float, Cli(own=False)] = Field(
        0.8, gt=0, le=1, description="Share of the blocks, counted from the first, whose subspace is tried."
    )

    def candidates(self, material: EditMaterial) -> Iterator[RefusalEdit]:
        """Yield one edit for each block and rank."""
        from netweight.attacks.refusal.edits.streams import main_directions, removal

        for number, name in material.blocks(self.depth):
            gaps = material.gaps(name)
            for rank in sorted({min(rank, *gaps.shape) for rank in self.ranks}):
                edit = removal(material.model, material.structure, main_directions(gaps, rank))
                yield RefusalEdit("subspaces", f"{rank} directions of block {number}", edit)
