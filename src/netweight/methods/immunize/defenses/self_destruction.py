"""Self-destruction (SEAM): learning harmful answers undoes what is kept."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.data.tokens import Batch
from netweight.methods.immunize.defense import DefenseSettings, Term, TermGroup
from netweight.methods.immunize.defenses.bases import MovesWeights
from netweight.methods.immunize.defenses.repnoise import RepNoise, harmful_terms

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from netweight.methods.immunize import gradients as drawing
    from netweight.methods.immunize import losses
    from netweight.methods.immunize.defenses import steps
    from netweight.methods.immunize.distributed import ProcessGroup
    from netweight.methods.immunize.pairs import PairBatch
else:
    losses, drawing, steps, torch, nn = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.methods.immunize.gradients",
        "netweight.methods.immunize.defenses.steps",
        "torch",
        "torch.nn",
    )


class SelfDestruction(DefenseSettings):
    """Make the gradients of harmful and of retained answers oppose each other: learning one undoes the other.

    Source: Wang et al., SEAM (arXiv 2505.12186), with its weight of 1e-2 and its distance of 1e-3; the gradient does
    not need second derivatives. The ascent on harmful answers is that of RepNoise.
    """

    coupling: float = Field(1e-2, ge=0, description="Weight of the cosine of the two gradients.")
    distance: float = Field(
        1e-3, gt=0, description="Distance by which weights are moved to measure the gradient of the cosine."
    )

    def build(self) -> SelfDestructionDefense:
        """Return the defense of these settings."""
        return SelfDestructionDefense(self)


@final
class SelfDestructionDefense(MovesWeights[SelfDestruction]):
    """Trains the harmless side, ascends on the harmful one, and turns its gradient against that of what is kept."""

    # The ascent is at every depth, through the unembedding.
    ascent = RepNoise(beta=0.0)

    name = "self-destruction"
    needs_retained = True

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        self._harmful = batch.harmful
        yield {"harmless": Term(losses.response_loss(model, batch.harmless, batch.group))}
        yield {"ascent": Term(harmful_terms(model, batch, self.ascent, generator=generator)[1], -1.0)}

    def retained_terms(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "retained") -> TermGroup:
        """Cross-entropy of the answers, and the cosine of its gradient with that of the step's harmful answers."""
        weights = [value for value in model.parameters() if value.requires_grad]

        def gradients_at(rows: Batch) -> list[Tensor]:
            with drawing.same_draws_after(weights):
                return steps.gradients_of(losses.response_loss(model, rows, group), weights, group)

        both = [(rows, gradients_at(rows)) for rows in (batch, self._harmful)]
        lengths = [max(1e-12, float(nn.utils.get_total_norm(own))) for _, own in both]
        alike = sum(float((one * other).sum()) for one, other in zip(both[0][1], both[1][1], strict=True))
        alike /= lengths[0] * lengths[1]
        pulls = [torch.zeros_like(value) for value in weights]
        for here, there in ((0, 1), (1, 0)):
            rows, own = both[here]
            with steps.returning(weights):
                with torch.no_grad():
                    for value, one, other in zip(weights, own, both[there][1], strict=True):
                        value.add_(other / lengths[there] - alike * one / lengths[here], alpha=self.settings.distance)
                moved = gradients_at(rows)
            for pull, new, old in zip(pulls, moved, own, strict=True):
                pull.add_(new - old, alpha=1 / (self.settings.distance * lengths[here]))
        # A sum whose value is the cosine and whose gradient is what was measured.
        linear = torch.stack([(value * pull).sum() for value, pull in zip(weights, pulls, strict=True)]).sum()
        return {
            **super().retained_terms(model, batch, group, name),
            "cosine": Term(linear - linear.detach() + alike, self.settings.coupling),
        }
