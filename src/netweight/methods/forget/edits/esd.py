"""Erased Stable Diffusion: cross-attention learns to answer a prompt with the opposite of what the prompt adds.

Source: Gandikota et al., arXiv 2303.07345 (ESD), on images of the original, with ordinary prompts kept.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, final

from pydantic import Field

from netweight.methods.forget.edits.trained import LayerPattern, TrainedEdit

if TYPE_CHECKING:
    from torch import Generator

    from netweight.methods.forget.edits.training import EditTraining, MemorizedBatch


@final
class Esd(TrainedEdit):
    """Cross-attention trained to answer prompts with the opposite of what they add."""

    name: ClassVar[str] = "esd"
    pictured: ClassVar[bool] = True
    card: ClassVar[str] = "cross-attention was trained away from their prompts"
    anchored: ClassVar[bool] = False

    layers: LayerPattern = Field(
        "**.attn2", description='Pattern of the names of modules that are trained; "all" trains all.'
    )

    def further(self, memorized: int) -> int:
        # These are the original's answers to the prompts.
        return memorized

    def questions(self, training: EditTraining, count: int, generator: Generator) -> MemorizedBatch:
        """Ask on memorized images; the answer is that without a prompt, less what the prompt adds to it."""
        chosen = training.drawn_pairs(count, generator)
        questions = training.questions(
            training.memorized_latents(chosen), chosen, training.empty_text(count), generator
        )
        return replace(questions, away=training.pair_text(chosen))
