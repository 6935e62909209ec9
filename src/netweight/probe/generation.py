"""Images of many prompts and seeds, as many at a time as memory has room for."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from netweight.probe.batches import Batches
from netweight.probe.diffusion import Text, TextToImage

__all__ = ["generated"]


def generated(
    model: TextToImage, text: Text, seeds: Sequence[int], batches: Batches, *, guidance: float, steps: int
) -> Tensor:
    """Generate one image for each prompt.

    Args:
        model: The model.
        text: At least one prompt.
        seeds: As many.
        batches: How many images are made at once.
        guidance: See `TextToImage.generate`.
        steps: See there.

    Returns:
        Shape `(n, 3, height, width)`, within 0 and 1.

    Raises:
        torch.OutOfMemoryError: A single image does not fit.
    """

    def part(rows: slice) -> Tensor:
        chosen = text.rows(range(rows.start, rows.stop))
        return model.generate(chosen, seeds[rows], guidance=guidance, steps=steps)

    return batches.run(part, len(seeds))
