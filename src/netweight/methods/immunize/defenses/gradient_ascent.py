"""Gradient ascent on harmful answers alone."""

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


class GradientAscent(DefenseSettings):
    """Raise the loss on harmful answers, and nothing else. Source: a baseline of RepNoise (arXiv 2405.14577)."""

    def build(self) -> GradientAscentDefense:
        """Return the defense of these settings."""
        return GradientAscentDefense(self)


@final
class GradientAscentDefense(Defense[GradientAscent]):
    """Ascends on the harmful side."""

    name = "gradient-ascent"

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        yield {"ascent": Term(losses.response_loss(model, batch.harmful, batch.group), -1.0)}
