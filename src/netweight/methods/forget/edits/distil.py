"""Noise and distillation: part of every weight becomes noise, and the original teaches all but memorized prompts.

What nobody asks about is not taught, so that pictures return neither under their prompts nor easily under other
embeddings. Source: Lee et al., arXiv 2506.06278 (UNDO), of language models; the answers under memorized prompts are
this library's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, final

from pydantic import Field

from netweight.methods.forget.edits.trained import TrainedEdit

if TYPE_CHECKING:
    from torch import Generator

    from netweight.methods.forget.edits.training import EditTraining, MemorizedBatch


@final
class Distil(TrainedEdit):
    """Noise in every weight, and distillation of all but memorized prompts."""

    name: ClassVar[str] = "distil"
    card: ClassVar[str] = "noise was added to the weights, and the rest was distilled from the model before"

    noise: float = Field(
        0.5, ge=0, le=1, description="Share of each weight that is replaced by random noise before the training."
    )
    steps: int = Field(600, ge=1, description="Training steps.")

    def questions(self, training: EditTraining, count: int, generator: Generator) -> MemorizedBatch:
        """Ask on images of ordinary prompts, and take the answers to anchors."""
        chosen = training.drawn_pairs(count, generator)
        return training.questions(
            training.drawn_latents(count, generator), chosen, training.anchor_text(chosen), generator
        )
