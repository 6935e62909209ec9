"""What `training.py` asks of every defense: terms of a loss, one side of the pairs after the other."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn

from netweight.methods.immunize.pairs import PairBatch

__all__ = ["Defense", "Side", "Term"]


@final
@dataclass(frozen=True)
class Term:
    """A term of a loss.

    Attributes:
        value: A scalar in the graph.
        weight: What it is multiplied by; negative for what is to grow.
        share: If given, the weight is found such that the norm of this term's gradient is that of the side's other
            terms times this number, and `weight` is not used.
    """

    value: Tensor
    weight: float = 1.0
    share: float | None = None


Side = Mapping[str, Term]
"""Terms by name whose graphs may be shared and that go backward together."""


class Defense(Protocol):
    """A way to immunize a model; a frozen dataclass whose fields are its settings, so that a record can hold it."""

    @property
    def name(self) -> str:
        """What the catalog, records and tables call it."""

    @property
    def aligned(self) -> bool:
        """Whether the sides of a batch must have one width."""

    @property
    def trains(self) -> bool:
        """Whether there is anything to train; else `prepared` does it all."""

    def prepared(self, model: nn.Module, *, seed: int) -> AbstractContextManager[None]:
        """Check the model and make it ready; it is trained within the block, and left as a user wants it after.

        Args:
            model: What is to be trained.
            seed: Where what is added to the model is drawn from.

        Returns:
            A context manager.

        Raises:
            Unsupported: The model lacks a part that the defense needs.
        """

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """Compute the loss of a batch, each side when it is asked for, after the one before went backward.

        Args:
            model: In training mode.
            batch: Pairs on the model's device.
            generator: Where random draws come from, on the CPU.

        Returns:
            A generator of the sides' losses.
        """
