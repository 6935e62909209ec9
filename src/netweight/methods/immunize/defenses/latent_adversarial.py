"""Latent adversarial training: refusing although the prompt's states are disturbed."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.data.tokens import IGNORED, Batch
from netweight.methods.immunize.defense import DefenseSettings, Term, TermGroup
from netweight.methods.immunize.defenses.bases import LooksAhead

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from netweight.hf import load_language_model as language_model
    from netweight.methods.immunize import losses
    from netweight.methods.immunize.defenses import steps
    from netweight.methods.immunize.distributed import ProcessGroup
    from netweight.methods.immunize.pairs import PairBatch
else:
    losses, language_model, steps, torch, nn = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.hf.load_language_model",
        "netweight.methods.immunize.defenses.steps",
        "torch",
        "torch.nn",
    )


class LatentAdversarial(DefenseSettings):
    """Refuse although the prompt's states are disturbed such that they would give the harmful answer.

    Source: Sheshadri et al., targeted latent adversarial training (arXiv 2407.15549), equations 1 to 4: 16 steps on
    the embedding and blocks 8, 16, 24 and 30 of 32, counted from 0.
    """

    bound: float = Field(6.0, gt=0, description="Largest norm of a token's disturbance, at each depth.")
    search_steps: int = Field(16, ge=1, description="Steps of the search for the worst disturbance.")

    def build(self) -> LatentAdversarialDefense:
        """Return the defense of these settings."""
        return LatentAdversarialDefense(self)


@final
class LatentAdversarialDefense(LooksAhead[LatentAdversarial]):
    """Trains to refuse, and not to answer, under what disturbs the prompt's states the most."""

    name = "latent-adversarial"

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        settings, group, prompts = self.settings, batch.group, batch.harmless
        inside = (prompts.attention_mask.bool() & (prompts.labels == IGNORED))[..., None]
        shape = (*inside.shape[:2], language_model.structure_of(model).hidden_size)
        embedding = [name for name, part in model.named_modules() if part is language_model.embedding_of(model)]
        # The authors count blocks from 0.
        places = [*embedding[:1], *steps.blocks_at(model, 9, 17, 25, 31)]
        shifts = {place: torch.zeros(shape, device=inside.device) for place in places}
        for _ in range(settings.search_steps):
            slopes = steps.slopes(
                model, shifts,
                lambda: losses.response_loss(model, batch.harmful, group) + self.unlikely(model, prompts, group),
            )  # fmt: skip
            for (place, shift), slope in zip(list(shifts.items()), slopes, strict=True):
                down = slope * inside / (slope * inside).norm(dim=-1, keepdim=True).clamp(min=1e-12)
                moved = shift.detach() - 2.5 * settings.bound / settings.search_steps * down
                shifts[place] = moved * (settings.bound / moved.norm(dim=-1, keepdim=True).clamp(min=settings.bound))
        # The term of ordinary answers has three times the weight.
        with steps.disturbed(model, shifts):
            yield {"harmless": Term(losses.response_loss(model, batch.harmless, group), 1 / 3)}
            yield {"harmful": Term(self.unlikely(model, batch.harmful, group), 1 / 3)}

    def unlikely(self, model: nn.Module, batch: Batch, group: ProcessGroup) -> Tensor:
        """Mean of `-log(1 - p)` over the answers' tokens; those with log p below -5 are unlikely enough."""
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits[:, :-1]
        answers = batch.labels[:, 1:] != IGNORED
        logs, own = logits[answers].float().log_softmax(-1), batch.labels[:, 1:][answers][:, None]
        others = logs.scatter(-1, own, -math.inf).logsumexp(-1)
        return losses.mean_of_all(torch.where(logs.gather(-1, own)[:, 0] < -5, 0.0, -others), group)
