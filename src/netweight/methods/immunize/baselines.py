"""The plain defenses that RepNoise is compared with: safety training, ascent, an adversarial loss, random weights."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.core.seeds import torch_generator
from netweight.data.examples import Batch
from netweight.errors import UsageError
from netweight.methods.immunize.decoder import structure_of
from netweight.methods.immunize.defense import PairBatch, Side, Term
from netweight.methods.immunize.distributed import ALONE, Ranks, put
from netweight.methods.immunize.lens import Targets, answer_loss
from netweight.nn import edit_outputs
from netweight.nn.hooks import capture


def response_loss(model: nn.Module, side: Batch, ranks: Ranks = ALONE) -> Tensor:
    """Mean cross-entropy of a batch's labeled tokens."""
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
    """Fine-tuning on the harmless answers, and nothing else."""

    # Source: a baseline of RepNoise (arXiv 2405.14577).

    name = "safety-training"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """The harmless side."""
        yield {"retain": Term(response_loss(model, batch.harmless, batch.ranks))}


@final
@dataclass(frozen=True)
class GradientAscent(_Plain):
    """The loss on harmful answers is to grow, whatever becomes of the rest."""

    # Source: a baseline of RepNoise (arXiv 2405.14577).

    name = "gradient-ascent"

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """The harmful side."""
        yield {"ascent": Term(response_loss(model, batch.harmful, batch.ranks), -1.0)}


@final
@dataclass(frozen=True)
class AdversarialLoss(_Plain):
    """The loss on harmless answers is to fall and that on harmful ones to grow, at the last layer alone."""

    # Source: a baseline of RepNoise (arXiv 2405.14577).

    alpha: float = 1.0  # weight of the harmful answers, 0 or more
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
    """All weights are drawn anew: what no trace of ability costs an attacker. A control, not a defense."""

    # Source: a baseline of RepNoise (arXiv 2405.14577).

    std: float = 0.02  # standard deviation of matrices; vectors that scale become 1, and biases 0
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


@final
@dataclass(frozen=True)
class Vaccine:
    """Training on harmless answers that stays good under perturbed representations."""

    # Source: Huang et al., Vaccine (arXiv 2402.01109), algorithm 1.

    rho: float = 1.0  # norm of the perturbations of all blocks together, for the batch; above 0
    name = "vaccine"
    aligned = False
    trains = True

    def __post_init__(self) -> None:
        """Check the norm."""
        if not self.rho > 0:
            raise UsageError(f"rho {self.rho} cannot be.", cure="Give a norm above 0.")

    @contextmanager
    def prepared(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        """Check that the model is a decoder."""
        structure_of(model)
        yield

    def sides(self, model: nn.Module, batch: PairBatch, generator: torch.Generator) -> Generator[Side, None, None]:
        """The harmless side, perturbed along its gradient; hooks stay until it has gone backward."""
        blocks = list(structure_of(model).blocks)
        with torch.random.fork_rng(devices=_devices(model)), capture(model, blocks, gradients=True) as outputs:
            loss = response_loss(model, batch.harmless, batch.ranks)  # the same dropout as below
        states = [outputs[name] for name in blocks]
        grads = torch.autograd.grad(loss, states)
        norm = torch.stack([grad.float().norm() for grad in grads]).norm()
        if batch.ranks.size > 1:  # of all rows; by their gradients' common factor, see `ranks.py`, it is divided out
            norm = batch.ranks.sum(norm.square()).sqrt()
        norm = norm.clamp(min=torch.finfo(torch.float32).tiny)
        shifts = {
            name: (self.rho * grad.float() / norm).to(grad.dtype) for name, grad in zip(blocks, grads, strict=True)
        }
        with edit_outputs(model, {name: _adding(shift) for name, shift in shifts.items()}):
            yield {"retain": Term(response_loss(model, batch.harmless, batch.ranks))}


def _adding(shift: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda states: states + shift


def _devices(model: nn.Module) -> list[torch.device]:
    return sorted({value.device for value in model.parameters() if value.device.type == "cuda"}, key=str)
