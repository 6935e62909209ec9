"""RepNoise as a defense that `immunize` trains."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import final

import torch
from torch import nn

from netweight.methods.immunize.config import RepNoiseConfig
from netweight.methods.immunize.defense import Side, Term
from netweight.methods.immunize.pairs import PairBatch
from netweight.methods.immunize.repnoise import harmful_terms, retain_term
from netweight.methods.immunize.structure import structure_of

__all__ = ["RepNoise"]


@final
@dataclass(frozen=True)
class RepNoise:
    """Keep harmless answers, unlearn harmful ones at every layer, turn their representations to noise.

    Attributes:
        config: Weights and fidelity of the loss.

    Source: RepNoise (arXiv 2405.14577), algorithm 1.
    """

    config: RepNoiseConfig = field(default_factory=RepNoiseConfig)

    @property
    def name(self) -> str:
        """What the catalog calls it."""
        return "repnoise" if self.config.fidelity == "corrected" else "repnoise-reference"

    @property
    def aligned(self) -> bool:
        """The published loss compares sides position by position."""
        return self.config.fidelity == "reference"

    @property
    def trains(self) -> bool:
        """It does."""
        return True

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        """Check that the model is a decoder."""
        structure_of(model)
        yield

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """The harmful side, whose states take most room, while there are no gradients yet; then the harmless one."""
        noise, ascent = harmful_terms(model, batch, self.config, generator=generator)
        side = {"ascent": Term(ascent, -self.config.alpha)}
        if self.config.beta > 0:
            balanced = self.config.fidelity == "corrected" and self.config.alpha > 0
            share = self.config.beta if balanced else None
            side["noise"] = Term(noise, self.config.beta, share)
        yield side
        del noise, ascent, side  # with them goes the graph
        yield {"retain": Term(retain_term(model, batch, self.config))}
