"""Booster: training under which a step of an attack gains little."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.methods.immunize.defense import DefenseSettings, Term, TermGroup
from netweight.methods.immunize.defenses.bases import MovesWeights

if TYPE_CHECKING:
    import torch
    from torch import nn

    from netweight.methods.immunize import gradients as drawing
    from netweight.methods.immunize import losses
    from netweight.methods.immunize.defenses import steps
    from netweight.methods.immunize.pairs import PairBatch
else:
    losses, drawing, steps, torch, nn = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.methods.immunize.gradients",
        "netweight.methods.immunize.defenses.steps",
        "torch",
        "torch.nn",
    )


class Booster(DefenseSettings, recommended={"lr": 5e-4}):
    """Train on harmless answers so that one step of an attack gains little.

    Source: Huang et al., Booster (arXiv 2409.01586), algorithm 1, with first-order gradients as in the paper.
    """

    strength: float = Field(5.0, ge=0, description="Weight of the gain of one attack step.")
    step: float = Field(0.1, gt=0, description="Length of the attack step, down the gradient of the harmful loss.")

    def build(self) -> BoosterDefense:
        """Return the defense of these settings."""
        return BoosterDefense(self)


@final
class BoosterDefense(MovesWeights[Booster]):
    """Trains the harmless side, and lowers what a step down the harmful loss would gain."""

    name = "booster"

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        yield self.retained_terms(model, batch.harmless, batch.group, "harmless")
        weights = [value for value in model.parameters() if value.requires_grad]
        with drawing.same_draws_after(weights):
            # The dropout is the same as below.
            loss = losses.response_loss(model, batch.harmful, batch.group)
        gradients = steps.gradients_of(loss, weights, batch.group, keep=True)
        length = self.settings.step / max(1e-12, float(nn.utils.get_total_norm(gradients)))
        yield {"harmful": Term(loss, self.settings.strength)}
        del loss
        with steps.returning(weights):
            with torch.no_grad():
                for value, gradient in zip(weights, gradients, strict=True):
                    value.sub_(gradient, alpha=length)
            # Its gradient is taken as one by the weights before the step.
            yield {"attacked": Term(losses.response_loss(model, batch.harmful, batch.group), -self.settings.strength)}
