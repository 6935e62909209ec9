"""Unlearning of pictures: the error on each picture is brought to the error on pictures that were never trained on.

Two things are learned at once. Under memorized prompts the model learns the original's answers to anchors, mostly where
there is nothing but noise yet, since there a memorized prompt decides what is drawn. And on the pictures themselves,
under their prompts and under the empty one, its error is led to that on turned copies of them, which it has never seen:
neither below, which would show that they are remembered, nor above, which would show what was removed.

Source: Alberti et al., arXiv 2503.01034 (SISS), which unlearns pictures by an ascent of bounded weight; the error of
never-seen pictures as the end of the ascent, and anchors, are this library's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, ClassVar, final

from pydantic import Field

from netweight.methods.forget.edits.trained import TrainedEdit
from netweight.settings import Cli

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from netweight.methods.forget.edits.training import EditTraining, MemorizedBatch
    from netweight.nn.text_to_image import Prediction

# A question at the noisiest timesteps is drawn from the last one in this many timesteps.
_TOP = 40
# Weight of the smallest errors.
_LEAST = 0.02


@final
class Siss(TrainedEdit):
    """Pictures unlearned until the error on them is that on pictures that were never seen."""

    name: ClassVar[str] = "siss"
    pictured: ClassVar[bool] = True
    card: ClassVar[str] = "the weights were trained away from their images"

    images: Annotated[int, Cli(own=False)] = Field(
        2,
        ge=1,
        description="Number of images that the original model generates for each ordinary prompt, as training data.",
    )
    memorized: Annotated[float, Cli(own=False)] = Field(
        0.5, gt=0, lt=1, description="Share of a batch with memorized prompts or memorized pictures."
    )
    anchored_share: Annotated[float, Cli(own=False)] = Field(
        0.7,
        gt=0,
        lt=1,
        description="Share of the memorized latents that learn the predictions for the anchors; the others unlearn the "
        "pictures.",
    )
    noisiest: Annotated[float, Cli(own=False)] = Field(
        0.8,
        ge=0,
        le=1,
        description="Share of the anchored latents at the noisiest timesteps; half of these are pure noise.",
    )
    turned: Annotated[int, Cli(own=False)] = Field(
        8,
        ge=1,
        le=14,
        description="Rotated and mirrored copies of each picture, which represent pictures outside the training data.",
    )
    compared: Annotated[int, Cli(own=False)] = Field(
        3, ge=1, description="Rotated copies with which an error is compared in each step."
    )
    offset: Annotated[float, Cli(own=False)] = Field(-0.02, description="Offset of the logarithm of the target error.")

    @property
    def turned_copies(self) -> int:
        return self.turned

    def further(self, memorized: int) -> int:
        return self.compared * (memorized - min(memorized - 1, max(1, round(self.anchored_share * memorized))))

    def questions(self, training: EditTraining, count: int, generator: Generator) -> MemorizedBatch:
        """Ask on images of anchors under memorized prompts, and on the memorized pictures themselves."""
        import torch

        anchored = min(count - 1, max(1, round(self.anchored_share * count)))
        chosen = training.drawn_pairs(count, generator)
        latents = torch.cat([
            training.anchor_latents(chosen[:anchored], generator), training.memorized_latents(chosen[anchored:])
        ])  # fmt: skip
        times = training.drawn_times(count, generator)
        noisiest = torch.zeros(count, dtype=torch.bool)
        noisiest[:anchored] = torch.rand(anchored, generator=generator) < self.noisiest
        times = torch.where(noisiest, training.levels - 1 - times // _TOP, times)
        pure = noisiest & (torch.rand(count, generator=generator) < 0.5)
        unprompted = torch.rand(count, generator=generator) < 0.5
        unprompted[:anchored] = False
        questions = training.questions(latents, chosen, training.anchor_text(chosen), generator, times=times, pure=pure)
        empty = training.empty_text(count)
        return replace(
            questions,
            text=training.either(unprompted, empty, questions.text),
            teacher=training.either(unprompted, empty, questions.teacher),
            unlearned=slice(anchored, count),
        )

    def losses(
        self,
        training: EditTraining,
        questions: MemorizedBatch,
        prediction: Prediction,
        losses: Tensor,
        generator: Generator,
    ) -> Tensor:
        """Replace the losses on memorized pictures: the squared difference of logarithms of errors."""
        import torch

        rows = questions.unlearned
        errors = training.errors(questions, prediction, rows)
        with torch.no_grad():
            others = [training.turned_errors(questions, rows, generator).log() for _ in range(self.compared)]
            target = torch.stack(others).mean(0) + self.offset
        distances = (errors.log() - target).square() * target.exp().clamp_min(_LEAST)
        return torch.cat([losses[: rows.start], distances])
