"""Adversarial loss: descent on harmless answers, ascent on harmful ones."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, final

from pydantic import Field

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


class AdversarialLoss(DefenseSettings, recommended={"lr": 1e-5}):
    """Lower the loss on harmless answers and raise that on harmful ones, at the last layer alone.

    Source: a baseline of RepNoise (arXiv 2405.14577).
    """

    alpha: float = Field(1.0, ge=0, description="Weight of the harmful answers.")

    def build(self) -> AdversarialLossDefense:
        """Return the defense of these settings."""
        return AdversarialLossDefense(self)


@final
class AdversarialLossDefense(Defense[AdversarialLoss]):
    """Trains the harmless side, then ascends on the harmful one."""

    name = "adversarial-loss"

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        yield {"harmless": Term(losses.response_loss(model, batch.harmless, batch.group))}
        yield {"ascent": Term(losses.response_loss(model, batch.harmful, batch.group), -self.settings.alpha)}
