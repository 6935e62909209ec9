"""Membership tests: does a model's error on a picture show that the model was trained on it, or made to forget it?

A picture that was trained on has a small error, and one that was unlearned too far a large one. Both are signs, so the
measure is two-sided. Errors are measured under the picture's own prompt and under the empty one, which an edit of
prompts does not reach, over the same noises and timesteps for every picture and model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.attacks.embedding_search.descent import difference
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.methods.forget.detect import roc
from netweight.nn.text_to_image import Batches, Prediction, TextToImage, most_rows

NOISES = 24
"""Noise levels, each with a noise of its own, at which an error is measured."""


@final
@dataclass(frozen=True)
class PictureErrors:
    """The errors of one model on pictures; a number for each."""

    own: Mapping[str, float]
    """Under the picture's own prompt, by the picture's name."""
    empty: Mapping[str, float]
    """Under the empty prompt."""


@final
@dataclass(frozen=True)
class Membership:
    """Errors on memorized pictures and on others that were never trained on, before and after an edit."""

    before: PictureErrors
    """Errors on memorized pictures of the model before the edit."""
    after: PictureErrors
    """Errors on memorized pictures of the edited model."""
    controls_before: PictureErrors
    """Errors on pictures that were never trained on, of the model before the edit."""
    controls_after: PictureErrors
    """Errors on these pictures of the edited model."""
    own_controls: bool
    """True if the controls were given; otherwise they are turned copies of the memorized pictures."""

    def auc(self, *, edited: bool, prompt: bool) -> float:
        """Return the area under the curve of small errors as a sign of memorized pictures; 0.5 is that of chance."""
        errors, others = (self.after, self.controls_after) if edited else (self.before, self.controls_before)
        kind = "own" if prompt else "empty"
        memorized, never = (list(getattr(each, kind).values()) for each in (errors, others))
        return roc([-each for each in memorized], [-each for each in never]).auc


def two_sided(auc: float) -> float:
    """Return how well a score separates two groups, in either direction: from 0.5, not at all, to 1."""
    return 0.5 + abs(auc - 0.5)


@torch.no_grad()
def picture_errors(
    model: TextToImage,
    pictures: Sequence[tuple[str, str, Tensor]],
    *,
    seed: int = 0,
    noises: int = NOISES,
    rows: int = 24,
    progress: Progress = QUIET,
) -> PictureErrors:
    """Measure a model's errors on pictures, of the velocity that follows from its prediction.

    Args:
        model: The model.
        pictures: Name, prompt and picture of each, the picture of shape `(3, height, width)`, within 0 and 1.
        seed: Seed of the noises, which are the same for every picture.
        noises: Noise levels at which an error is measured, each with a noise of its own.
        rows: Most latents at a time; halved where memory runs out.
        progress: Reports pictures.

    Returns:
        The errors, each a mean over the noise levels.
    """
    levels = int(model.timesteps(2)[0]) + 1
    times = (torch.linspace(0.02, 0.98, noises) * levels).long()
    batches = Batches(most_rows(model, rows))
    own: dict[str, float] = {}
    empty: dict[str, float] = {}
    with progress.task(f"errors: {model.name}", 2 * len(pictures), unit="prompts") as task:
        for name, prompt, picture in pictures:
            latents = model.to_latents(picture[None]).expand(noises, -1, -1, -1)
            noise = torch.randn(latents.shape, generator=torch_generator(seed, "errors")).to(latents)
            at = times.to(latents.device)
            noisy = model.add_noise(latents, noise, at)
            for errors, words in ((own, prompt), (empty, "")):
                text = model.embed([words]).rows([0] * noises)

                def part(rows: slice, text=text, noisy=noisy, noise=noise, latents=latents, at=at) -> Tensor:  # type: ignore[no-untyped-def]
                    made = model.predict(noisy[rows], at[rows], text.rows(range(rows.start, rows.stop)))
                    return difference(model, made, Prediction(noise[rows], latents[rows]), at[rows], "velocity")

                errors[name] = float(batches.run(part, noises).mean())
                task.update()
    return PictureErrors(own, empty)
