"""Linear probes: how well a logistic regression separates two kinds of representations of held-out rows."""

from __future__ import annotations

import torch
from torch import Tensor

from netweight.core.lazy import library
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError

# Share of the examples that a probe is tested on.
_HELD_OUT = 0.3


# Penalty on the squares of a probe's weights.
_PENALTY = 1e-2


def probe_accuracies(first: Tensor, second: Tensor, *, seeds: int = 10, seed: int = 0) -> list[float]:
    """Return the held-out accuracy of a logistic regression that separates two kinds of representations.

    Features are standardized by the training examples. Both kinds are split alike; with unequal numbers the larger kind
    is thinned out to the smaller, so that 0.5 is chance.

    Source: Alain and Bengio, "Understanding intermediate layers using linear classifier probes", 2016.
    """
    count = min(len(first), len(second))
    test = round(count * _HELD_OUT)
    if test < 1:
        raise UsageError(
            f"{len(first)} and {len(second)} examples cannot be split.", cure="Give at least two examples of each kind."
        )
    return [_one_split(first, second, count, test, torch_generator(seed, "split", i)) for i in range(seeds)]


def _one_split(first: Tensor, second: Tensor, count: int, test: int, generator: torch.Generator) -> float:
    drawn = [kind[torch.randperm(len(kind), generator=generator)[:count]].double() for kind in (first, second)]
    features = torch.cat([kind[test:] for kind in drawn])
    labels = torch.cat([features.new_zeros(count - test), features.new_ones(count - test)])
    center, scale = features.mean(0), features.std(0, correction=0).clamp(min=1e-12)
    weights = _fit((features - center) / scale, labels, _PENALTY)
    scores = [(kind[:test] - center) / scale @ weights[1:] + weights[0] for kind in drawn]
    right = (scores[0] < 0).sum() + (scores[1] > 0).sum()
    return int(right) / (2 * test)


def _fit(features: Tensor, labels: Tensor, penalty: float) -> Tensor:
    """Weights of the regression, the constant first. The penalty is on the mean loss of an example."""
    linear = library("sklearn.linear_model", "The probe of a representation", "evidence")
    model = linear.LogisticRegression(C=1 / (penalty * len(labels)), tol=1e-10, max_iter=1000)
    model.fit(features.numpy(), labels.numpy())
    return torch.cat([torch.from_numpy(model.intercept_.copy()), torch.from_numpy(model.coef_[0].copy())])
