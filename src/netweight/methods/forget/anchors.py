"""Anchors: ordinary prompts whose answers memorized ones get."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from netweight.metrics.descriptors import CenteredPixels, described
from netweight.nn.text_to_image import Batches, TextToImage, generated, most_rows

CANDIDATES = 24
"""Ordinary prompts among which anchors are searched."""
GUIDANCE = 3.0
"""Guidance scale of images that are generated for a comparison."""
STEPS = 20
"""Scheduler steps of these images."""


def described_images(model: TextToImage, prompts: Sequence[str], count: int = 1, *, steps: int = STEPS) -> Tensor:
    """Return descriptions of the images of prompts from the first seeds, shape `(prompts, count, width)`."""
    text = model.embed(list(prompts)).rows([row for row in range(len(prompts)) for _ in range(count)])
    batches = Batches(most_rows(model, 16))
    images = generated(model, text, [*range(count)] * len(prompts), batches, guidance=GUIDANCE, steps=steps)
    return described(CenteredPixels(), images).reshape(len(prompts), count, -1)


def ranked_anchors(model: TextToImage, prompts: Sequence[str], ordinary: Sequence[str]) -> list[list[str]]:
    """Return ordinary prompts for each memorized one, those first whose image is least correlated with its own.

    Images are generated from the same noise. An anchor that looks like the memorized image would leave an edit that
    seems not to work, and partly does not; its negative costs ordinary prompts more.
    """
    candidates = list(dict.fromkeys(ordinary))[-CANDIDATES:]
    alike = described_images(model, prompts)[:, 0] @ described_images(model, candidates)[:, 0].T
    return [[candidates[place] for place in row] for row in alike.abs().argsort(1).tolist()]
