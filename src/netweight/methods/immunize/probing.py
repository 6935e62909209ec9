"""What a linear eye sees in representations: probes that tell two kinds apart, and a plane to draw them in.

Reads what `depth.representations` returns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError

__all__ = ["Plane", "probe_accuracies"]


def probe_accuracies(
    first: Tensor, second: Tensor, *, seeds: int = 10, held_out: float = 0.3, penalty: float = 1e-2, seed: int = 0
) -> list[float]:
    """How well a logistic regression tells two kinds of representations apart on examples that it has not seen.

    Features are standardized by the training examples. Both kinds are split alike; with unequal numbers the larger
    kind is thinned out to the smaller, so that 0.5 is chance.

    Args:
        first: One kind, shape `(n, D)`.
        second: The other, shape `(m, D)`.
        seeds: How many random splits.
        held_out: Share of each kind that is tested on.
        penalty: Weight of half the squared norm of the probe beside the mean loss, above 0.
        seed: Of the splits.

    Returns:
        The accuracy of each split, from 0 to 1.

    Raises:
        UsageError: There are too few examples to train and to test on, or a setting is out of its range.

    Source: Alain and Bengio, "Understanding intermediate layers using linear classifier probes", 2016.
    """
    count = min(len(first), len(second))
    test = round(count * held_out)
    if seeds < 1 or penalty <= 0 or test < 1 or count - test < 1:
        raise UsageError(
            f"{len(first)} and {len(second)} examples cannot be split {seeds} times with {held_out} held out and "
            f"penalty {penalty}.",
            cure="Give at least two examples of each kind, a share between 0 and 1, a penalty above 0.",
        )
    return [_one_split(first, second, count, test, penalty, torch_generator(seed, "split", i)) for i in range(seeds)]


def _one_split(
    first: Tensor, second: Tensor, count: int, test: int, penalty: float, generator: torch.Generator
) -> float:
    drawn = [kind[torch.randperm(len(kind), generator=generator)[:count]].double() for kind in (first, second)]
    features = torch.cat([kind[test:] for kind in drawn])
    labels = torch.cat([features.new_zeros(count - test), features.new_ones(count - test)])
    center, scale = features.mean(0), features.std(0, correction=0).clamp(min=1e-12)
    weights = _fit((features - center) / scale, labels, penalty)
    scores = [(kind[:test] - center) / scale @ weights[1:] + weights[0] for kind in drawn]
    right = (scores[0] < 0).sum() + (scores[1] > 0).sum()
    return int(right) / (2 * test)


def _fit(features: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """Weights of the regression, the constant first; its loss is convex, so that the start does not matter."""
    weights = features.new_zeros(features.shape[1] + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights], max_iter=200, tolerance_grad=1e-7, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        scores = features @ weights[1:] + weights[0]
        value = functional.binary_cross_entropy_with_logits(scores, labels)
        value = value + penalty / 2 * weights[1:].square().sum()
        value.backward()  # type: ignore[no-untyped-call]
        return value

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weights.detach()


@final
@dataclass(frozen=True)
class Plane:
    """The directions along which representations differ most, to draw others in too: fit before, place after.

    Attributes:
        center: Mean of what was fitted, shape `(D,)`.
        axes: Orthonormal, the longest first, shape `(k, D)`; of either sign the one whose largest entry is positive.
        shares: Share of the variance along each axis, shape `(k,)`.
    """

    center: Tensor
    axes: Tensor
    shares: Tensor

    @classmethod
    def fit(cls, points: Tensor, *, axes: int = 2) -> Plane:
        """Find the principal components.

        Args:
            points: Shape `(n, D)`.
            axes: How many, at most `min(n, D)`.

        Raises:
            UsageError: There are fewer points or dimensions than axes.
        """
        if not 1 <= axes <= min(points.shape):
            raise UsageError(f"{axes} axes cannot be drawn through points of shape {tuple(points.shape)}.")
        center = points.double().mean(0)
        _, sizes, directions = torch.linalg.svd(points.double() - center, full_matrices=False)
        largest = directions.gather(1, directions.abs().argmax(1, keepdim=True))
        shares = sizes.square() / sizes.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
        return cls(center, (directions * largest.sign())[:axes], shares[:axes])

    def place(self, points: Tensor) -> Tensor:
        """Coordinates of points, shape `(n, k)`, float64.

        Args:
            points: Shape `(n, d)`.

        Returns:
            Shape `(n, k)`, float64.
        """
        return (points.double() - self.center) @ self.axes.T
