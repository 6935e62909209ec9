"""TAR: the model stays uncertain of harmful answers while it is attacked."""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import TYPE_CHECKING, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.data.tokens import IGNORED, Batch
from netweight.methods.immunize.defense import DefenseSettings, Term, TermGroup
from netweight.methods.immunize.defenses.bases import WithOriginal

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from netweight.methods.immunize import losses
    from netweight.methods.immunize.defenses import steps
    from netweight.methods.immunize.distributed import ProcessGroup
    from netweight.methods.immunize.pairs import PairBatch
else:
    losses, steps, torch, nn = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.methods.immunize.defenses.steps",
        "torch",
        "torch.nn",
    )


class TAR(DefenseSettings):
    """Raise the uncertainty of a model about harmful answers while it is being attacked.

    Source: Tamirisa et al., TAR (arXiv 2408.00761), algorithm 1, with first-order gradients and entropy as in the
    paper. The weight of a measurement grows by a factor of e every 16 steps of the attack. The model's own safeguard
    takes the place of the paper's initial one.
    """

    attack_steps: int = Field(64, ge=1, description="Steps of the attack within a step.")
    attack_lr: float = Field(
        2e-5,
        gt=0,
        description="Learning rate of the attack; each attack uses a tenth of it, once or twice it, drawn at random.",
    )
    look_every: int = Field(4, ge=1, description="Steps of the attack between two measurements of the uncertainty.")
    strength: float = Field(4.0, ge=0, description="Weight of the uncertainty at the attack's end.")

    def build(self) -> TARDefense:
        """Return the defense of these settings."""
        return TARDefense(self)


@final
class TARDefense(WithOriginal[TAR]):
    """Attacks with some rows' harmful answers, and raises the uncertainty of others' on the attack's way."""

    name = "tar"
    looks_ahead = True

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        settings, group = self.settings, batch.group
        yield self.retained_terms(model, batch.harmless, group, "harmless")
        weights = [value for value in model.parameters() if value.requires_grad]
        drawn = (0.1, 1.0, 2.0)[int(torch.randint(3, (), generator=generator))]
        attack = torch.optim.AdamW(weights, lr=settings.attack_lr * drawn)
        # A process without rows has one row that does not count.
        real = (batch.harmful.labels != IGNORED).any(1)
        numbers = real.cumsum(0) + sum(group.counts(int(real.sum()))[: group.rank])
        used, others = (steps.rows_of(batch.harmful, numbers % 2 == odd) for odd in (1, 0))
        with steps.returning(weights):
            for step in range(1, settings.attack_steps + 1):
                slopes = steps.gradients_of(losses.response_loss(model, used, group), weights, group)
                held = [value.grad for value in weights]
                for value, gradient in zip(weights, slopes, strict=True):
                    value.grad = gradient
                attack.step()
                for value, former in zip(weights, held, strict=True):
                    value.grad = former
                if step % settings.look_every == 0 or step == settings.attack_steps:
                    # Its gradient, too, is taken as one by the weights before the attack; later looks weigh more.
                    weight = settings.strength * math.exp((step - settings.attack_steps) / 16)
                    yield {"uncertainty": Term(self.uncertainty(model, others, group), -weight)}

    def retained_terms(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "retained") -> TermGroup:
        """Cross-entropy of the answers, and how far states moved at every depth."""
        output, moved = self.moved(model, batch, group)
        return {
            name: Term(losses.answer_loss(output.logits, losses.Targets.of_labels(batch.labels, group))),
            f"{name} moved": Term(moved),
        }

    def uncertainty(self, model: nn.Module, batch: Batch, group: ProcessGroup) -> Tensor:
        """Mean entropy of what is predicted for the answers' tokens."""
        logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
        log_probabilities = logits[:, :-1][batch.labels[:, 1:] != IGNORED].float().log_softmax(-1)
        return losses.mean_of_all(-(log_probabilities.exp() * log_probabilities).sum(-1), group)
