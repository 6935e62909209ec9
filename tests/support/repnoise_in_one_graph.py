"""RepNoise's loss with both sides in one graph: what trainings, which take one side after the other, come to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from netweight.methods.immunize.defenses.repnoise import RepNoise, harmful_terms, harmless_term
from netweight.methods.immunize.distributed import trained_weights
from netweight.methods.immunize.gradients import gradient_norm
from netweight.methods.immunize.pairs import PairBatch


@final
@dataclass(frozen=True)
class LossParts:
    """The terms of the loss, each a scalar in the graph."""

    harmless: Tensor  # cross-entropy of the harmless answers; a scalar
    noise: Tensor  # discrepancy between the feed-forward outputs on harmful answers and noise, the mean over layers
    ascent: Tensor  # `log(1 + A)`, which is to grow; a scalar
    alpha: float  # weight of the ascent
    noise_weight: float

    @property
    def total(self) -> Tensor:
        """What is to be minimized."""
        return self.harmless + self.noise_weight * self.noise - self.alpha * self.ascent


def repnoise_loss(
    model: nn.Module,
    batch: PairBatch,
    settings: RepNoise = RepNoise(),
    *,
    generator: torch.Generator | None = None,
    noise_weight: float | None = None,
) -> LossParts:
    """Compute RepNoise's loss on a batch of pairs, both sides in one graph."""
    # `immunize` does the same one side after the other, in less memory. Where processes share the batch, values and
    # gradients are such that their means over the processes are those of the whole batch: see `distributed.py`.
    # Source: RepNoise (arXiv 2405.14577), algorithm 1, and the loss of its authors' code.
    parameters = trained_weights(model)
    harmless = harmless_term(model, batch, settings)
    noise, ascent = harmful_terms(model, batch, settings, generator=generator)
    if noise_weight is None:
        noise_weight = settings.beta
        if settings.fidelity == "corrected" and noise.requires_grad and settings.beta > 0:
            pull = gradient_norm(noise, parameters, batch.group)
            noise_weight *= settings.alpha * gradient_norm(ascent, parameters, batch.group) / pull if pull > 0 else 0.0
    return LossParts(harmless, noise, ascent, settings.alpha, noise_weight)
