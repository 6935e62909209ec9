"""Distillation (UNDO): noise in every matrix, then imitation of the original on all but harmful answers."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.core.seeds import torch_generator
from netweight.data.tokens import Batch
from netweight.methods.immunize.defense import DefenseSettings, Term, TermGroup
from netweight.methods.immunize.defenses.bases import WithOriginal

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn import functional

    from netweight.hf import load_language_model as language_model
    from netweight.methods.immunize import losses
    from netweight.methods.immunize.distributed import ProcessGroup
    from netweight.methods.immunize.pairs import PairBatch
else:
    losses, language_model, torch, nn, functional = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.hf.load_language_model",
        "torch",
        "torch.nn",
        "torch.nn.functional",
    )


class Distillation(DefenseSettings, recommended={"lr": 1e-4}):
    """Replace a share of every matrix by noise, then relearn the original's predictions except on harmful answers.

    Source: UNDO (Lee et al., arXiv 2506.06278), with the refusing model as its own teacher.
    """

    noise: float = Field(
        0.8, ge=0, le=1, description="Share of every matrix that is replaced by noise like that of new weights."
    )
    random_rows: float = Field(
        0.3, ge=0,
        description="Rows of random tokens for each pair on which the original is imitated as well, so that the model "
        "can still learn new tasks.",
    )  # fmt: skip

    def build(self) -> DistillationDefense:
        """Return the defense of these settings."""
        return DistillationDefense(self)


@final
class DistillationDefense(WithOriginal[Distillation]):
    """Imitates a frozen copy of the original where it refuses and where it is to stay."""

    name = "distillation"

    @contextmanager
    def preparation(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        with super().preparation(model, seed=seed):
            initial = getattr(getattr(model, "config", None), "initializer_range", None)
            for name, value in model.named_parameters():
                if value.requires_grad and value.dim() > 1:
                    drawn = torch.randn(value.shape, generator=torch_generator(seed, name))
                    std = value.data.std() if initial is None else initial
                    value.data.lerp_(drawn.to(value) * std, self.settings.noise)
            yield

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        yield self.retained_terms(model, batch.harmless, batch.group, "harmless")
        rows = round(self.settings.random_rows * len(batch.harmless.input_ids))
        if rows:
            like = batch.harmless.input_ids
            drawn = torch.randint(
                language_model.vocabulary_of(model) or 1, (rows, like.shape[1]), generator=generator
            ).to(like)
            yield self.retained_terms(model, Batch(drawn, torch.ones_like(drawn), drawn), batch.group, "random")

    def retained_terms(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "retained") -> TermGroup:
        """Divergence from the original at every token."""
        target, output = (
            each.logits[losses.token_mask(batch)].float().log_softmax(-1) for each in self.both(model, batch)
        )
        return {
            name: Term(
                losses.mean_of_all(functional.kl_div(output, target, reduction="none", log_target=True).sum(-1), group)
            )
        }
