"""Vaccine and T-Vaccine: training on harmless answers under perturbed states."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.data.tokens import Batch
from netweight.methods.immunize.defense import DefenseSettings, Term, TermGroup
from netweight.methods.immunize.defenses.bases import LooksAhead

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from netweight.hf import load_language_model as language_model
    from netweight.methods.immunize import losses
    from netweight.methods.immunize.defenses import steps
    from netweight.methods.immunize.pairs import PairBatch
else:
    losses, language_model, steps, torch, nn = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.hf.load_language_model",
        "netweight.methods.immunize.defenses.steps",
        "torch",
        "torch.nn",
    )


class Vaccine(DefenseSettings):
    """Train on harmless answers so that the model keeps them under perturbed representations.

    Source: Huang et al., Vaccine (arXiv 2402.01109), algorithm 1; Liu et al., T-Vaccine (arXiv 2410.09760), which
    perturbs a quarter of the blocks by a norm of 3.
    """

    rho: float = Field(1.0, gt=0, description="Norm of the perturbations of all blocks together, for the batch.")
    share: float = Field(
        1.0, gt=0, le=1,
        description="Share of the blocks that are perturbed, drawn anew at each step in proportion to the norm of "
        "the gradient of the harmful loss at their states; 1 for all.",
    )  # fmt: skip

    def build(self) -> VaccineDefense:
        """Return the defense of these settings."""
        return VaccineDefense(self)


class VaccineRho10(Vaccine, defaults={"rho": 10.0}):
    """Vaccine with perturbations of norm 10."""


class TVaccine(Vaccine, defaults={"rho": 3.0, "share": 0.25}, recommended={"lr": 1e-3}):
    """T-Vaccine (arXiv 2410.09760): a quarter of the blocks, perturbations of norm 3."""


@final
class VaccineDefense(LooksAhead[Vaccine]):
    """Trains the harmless side, perturbed along its gradient."""

    name = "vaccine"

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        parts, group = language_model.structure_of(model), batch.group
        blocks = list(parts.blocks)

        def gradients_at(rows: Batch) -> tuple[list[Tensor], Tensor]:
            """Gradients of a loss by the blocks' states, and the norm of each."""
            still = {name: rows.labels.new_zeros((*rows.labels.shape, parts.hidden_size)).float() for name in blocks}
            gradients = steps.slopes(model, still, lambda: losses.response_loss(model, rows, group))
            norms = torch.stack([grad.norm() for grad in gradients])
            # The norm is over the rows of all processes. The common factor of their gradients (see `distributed.py`) is
            # divided out.
            if group.size > 1:
                norms = group.sum(norms.square()).sqrt()
            return gradients, norms.clamp(min=torch.finfo(torch.float32).tiny)

        count, chosen = math.ceil(self.settings.share * len(blocks)), torch.arange(len(blocks))
        if count < len(blocks):
            chosen = torch.multinomial(gradients_at(batch.harmful)[1].cpu(), count, generator=generator)
        grads, norms = gradients_at(batch.harmless)
        norm = norms[chosen.to(norms.device)].norm()
        # Hooks stay until the loss has gone backward.
        with steps.disturbed(model, {blocks[one]: self.settings.rho * grads[one] / norm for one in chosen.tolist()}):
            yield {"harmless": Term(losses.response_loss(model, batch.harmless, group))}
