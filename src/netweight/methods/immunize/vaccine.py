"""Vaccine: harmless answers are learned while the worst small shift is added to every block's output."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from netweight.errors import UsageError
from netweight.methods.immunize.baselines import response_loss
from netweight.methods.immunize.defense import Side, Term
from netweight.methods.immunize.pairs import PairBatch
from netweight.methods.immunize.structure import structure_of
from netweight.probe import capture, edit_outputs

__all__ = ["Vaccine"]


@final
@dataclass(frozen=True)
class Vaccine:
    """Training on harmless answers that stays good under perturbed representations.

    Attributes:
        rho: Norm of the perturbations of all blocks together, for the batch; above 0.

    Raises:
        UsageError: `rho` is not positive.

    Source: Huang et al., Vaccine (arXiv 2402.01109), algorithm 1.
    """

    rho: float = 1.0
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
