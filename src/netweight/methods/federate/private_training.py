"""Differentially private local SGD, one client after another. `DirectMethod` calls it for phases with privacy.

Every step clips each example's gradient, adds Gaussian noise to their sum and divides by the expected batch size.
The noise comes from the federation's seed, so that a run can be repeated; who knows the seed can take the noise off
again. Where that matters, each client must draw a seed of its own and keep it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from netweight.core import seeds
from netweight.methods.federate.batches import padded
from netweight.methods.federate.config import LocalTraining, Phase, Privacy
from netweight.methods.federate.gradients import one_by_one
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.local_training import Descent, Stream
from netweight.methods.federate.method import Weights
from netweight.methods.federate.per_sample import clipped_sum

__all__ = ["train_privately"]


def train_privately(
    model: LocalModel,
    weights: Sequence[Weights],
    numbers: Sequence[int],
    phase: Phase,
    training: LocalTraining,
    *,
    seeds_by_client: Sequence[int],
) -> tuple[list[Weights], list[float]]:
    """Train clients by one phase with `phase.privacy` set.

    Args:
        model: The thread's model.
        weights: Where each client starts.
        numbers: The clients' numbers.
        phase: What learns, how long, how fast and how privately.
        training: Batch size, momentum, weight decay.
        seeds_by_client: Of each client's batches and noise.

    Returns:
        Each client's weights and mean loss over the steps that had an example; 0 if none had.

    Raises:
        Unsupported: A normalization layer mixes examples; the message names it.

    Source: Abadi et al. (arXiv 1607.00133), algorithm 1.
    """
    trained = [
        _train_one(model, w, number, phase, training, seed)
        for w, number, seed in zip(weights, numbers, seeds_by_client, strict=True)
    ]
    return [w for w, _ in trained], [loss for _, loss in trained]


def _train_one(
    model: LocalModel, weights: Weights, number: int, phase: Phase, training: LocalTraining, seed: int
) -> tuple[Weights, float]:
    assert phase.privacy is not None
    stream = Stream(model, number, phase.epochs, training.batch_size, seed, phase.privacy.sampling)
    expected = min(training.batch_size, model.task.client(number).n)
    model.train("both" if phase.head_lr is not None else phase.trains)
    client = _Client(model, weights, phase, phase.privacy, training, expected)
    losses = []
    for step, index in enumerate(stream.indices):
        noise = seeds.torch_generator(seed, "noise", step, device=str(model.device))
        if not len(index):
            client.step_without_examples(noise)
            continue
        index, mask = padded(index)
        losses.append(client.step(*stream.batch(index), mask.to(model.device), noise))
    loss = float(torch.stack(losses).mean()) if losses else 0.0
    return Weights(client.body.vectors[0], client.head.vectors[0], weights.statistics), loss


@final
class _Client:
    """One client while it trains: its two halves, each with its optimizer."""

    def __init__(
        self,
        model: LocalModel,
        weights: Weights,
        phase: Phase,
        privacy: Privacy,
        training: LocalTraining,
        expected: int,
    ) -> None:
        self._model, self._phase, self._privacy, self._expected = model, phase, privacy, expected
        self._statistics = weights.statistics
        self.body = Descent(weights.body.clone().to(model.device)[None], phase.lr, training)
        self.head = Descent(weights.head.clone().to(model.device)[None], phase.head_lr or phase.lr, training)

    def step(self, inputs: Tensor, targets: Tensor, mask: Tensor, noise: torch.Generator) -> Tensor:
        """Take one step with the examples of the mask; return their mean loss."""
        if self._phase.head_lr is not None:
            self._plain_head_step(inputs[mask], targets[mask])
        found = clipped_sum(
            self._model,
            self.body.vectors[0],
            self.head.vectors[0],
            (inputs, targets),
            mask,
            self._phase.trains,
            self._privacy.clip,
            self._statistics,
        )
        self._descend(found.body, found.head, noise)
        return found.loss

    def step_without_examples(self, noise: torch.Generator) -> None:
        """Take one step with noise alone, as every step must look the same from outside."""
        trains = self._phase.trains
        body = torch.zeros_like(self.body.vectors[0]) if trains != "head" else None
        head = torch.zeros_like(self.head.vectors[0]) if trains != "body" else None
        self._descend(body, head, noise)

    def _plain_head_step(self, inputs: Tensor, targets: Tensor) -> None:
        found = one_by_one(
            self._model, self.body.vectors, self.head.vectors, [(inputs, targets)], "head", [self._statistics]
        )
        assert found.head is not None
        self.head.step(found.head, [0])

    def _descend(self, body: Tensor | None, head: Tensor | None, noise: torch.Generator) -> None:
        """Step what is trained, given sums of clipped gradients."""
        for descent, total in ((self.body, body), (self.head, head)):
            if total is not None:
                descent.step((self._noisy(total, noise) / self._expected)[None], [0])

    def _noisy(self, total: Tensor, generator: torch.Generator) -> Tensor:
        deviation = self._privacy.noise_multiplier * self._privacy.clip
        drawn = torch.randn(total.shape, generator=generator, device=total.device, dtype=total.dtype)
        return total.add(drawn, alpha=deviation)
