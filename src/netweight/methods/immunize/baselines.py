"""The plain defenses that RepNoise is compared with: safety training, ascent, an adversarial loss, random weights."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.attacks.finetuning.examples import Batch
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.methods.immunize.defense import Side, Term
from netweight.methods.immunize.lens import Targets, answer_loss
from netweight.methods.immunize.pairs import PairBatch
from netweight.methods.immunize.ranks import ALONE, Ranks
from netweight.methods.immunize.sharded import put

__all__ = ["AdversarialLoss", "GradientAscent", "RandomWeights", "SafetyTraining", "response_loss"]


def response_loss(model: nn.Module, side: Batch, ranks: Ranks = ALONE) -> Tensor:
    """Mean cross-entropy of a batch's labeled tokens.

    Args:
        model: A causal language model that is called as those of transformers.
        side: The rows.
        ranks: The processes that share the batch: the mean over them of what each returns is that over all its tokens.

    Returns:
        A scalar in the graph.

    Raises:
        UsageError: No token is labeled.
    """
    result: Any = model(input_ids=side.input_ids, attention_mask=side.attention_mask)
    return answer_loss(result.logits, Targets.of_labels(side.labels, ranks))


class _Plain:
    """A defense that trains all weights on plain losses and asks nothing of the model."""

    aligned = False
    trains = True

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        """Nothing is to be done."""
        yield


@final
@dataclass(frozen=True)
class SafetyTraining(_Plain):
    """Fine-tuning on the harmless answers, and nothing else.

    Source: a baseline of RepNoise (arXiv 2405.14577).
    """

    name = "safety-training"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """The harmless side."""
        yield {"retain": Term(response_loss(model, batch.harmless, batch.ranks))}


@final
@dataclass(frozen=True)
class GradientAscent(_Plain):
    """The loss on harmful answers is to grow, whatever becomes of the rest.

    Source: a baseline of RepNoise (arXiv 2405.14577).
    """

    name = "gradient-ascent"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """The harmful side."""
        yield {"ascent": Term(response_loss(model, batch.harmful, batch.ranks), -1.0)}


@final
@dataclass(frozen=True)
class AdversarialLoss(_Plain):
    """The loss on harmless answers is to fall and that on harmful ones to grow, at the last layer alone.

    Attributes:
        alpha: Weight of the harmful answers, 0 or more.

    Raises:
        UsageError: `alpha` is negative.

    Source: a baseline of RepNoise (arXiv 2405.14577).
    """

    alpha: float = 1.0
    name = "adversarial-loss"

    def __post_init__(self) -> None:
        """Check the weight."""
        if not self.alpha >= 0:
            raise UsageError(f"alpha {self.alpha} cannot be.", cure="Give 0 or more.")

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """The harmless side, then the harmful one."""
        yield {"retain": Term(response_loss(model, batch.harmless, batch.ranks))}
        yield {"ascent": Term(response_loss(model, batch.harmful, batch.ranks), -self.alpha)}


@final
@dataclass(frozen=True)
class RandomWeights(_Plain):
    """All weights are drawn anew: what no trace of ability costs an attacker. A control, not a defense.

    Attributes:
        std: Standard deviation of matrices; vectors that scale become 1, and biases 0.

    Source: a baseline of RepNoise (arXiv 2405.14577).
    """

    std: float = 0.02
    name = "random-weights"
    trains = False

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        """Draw the weights."""
        for path, module in model.named_modules():
            for name, value in module.named_parameters(recurse=False):
                if value.dim() > 1:
                    drawn = torch.randn(value.shape, generator=torch_generator(seed, path, name)) * self.std
                else:
                    drawn = torch.full(value.shape, 0.0 if name == "bias" else 1.0)
                put(value.data, drawn)
        yield

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """None."""
        yield from ()
