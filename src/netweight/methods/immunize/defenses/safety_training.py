"""Safety training: fine-tuning on the harmless answers alone."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, final

from netweight.core.lazy import lazy_modules
from netweight.methods.immunize.defense import Defense, DefenseSettings, Term, TermGroup

if TYPE_CHECKING:
    import torch
    from torch import nn

    from netweight.methods.immunize import losses
    from netweight.methods.immunize.pairs import PairBatch
else:
    losses, torch, nn = lazy_modules(
        "netweight.methods.immunize.losses",
        "torch",
        "torch.nn",
    )


class SafetyTraining(DefenseSettings):
    """Fine-tuning on the harmless answers, and nothing else. Source: a baseline of RepNoise (arXiv 2405.14577)."""

    def build(self) -> SafetyTrainingDefense:
        """Return the defense of these settings."""
        return SafetyTrainingDefense(self)


@final
class SafetyTrainingDefense(Defense[SafetyTraining]):
    """Trains the harmless side."""

    name = "safety-training"

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        yield {"harmless": Term(losses.response_loss(model, batch.harmless, batch.group))}
