"""The hypernetwork's heads while clients train: W as the server's W₀ with low-rank factors, or dense. HyperFL calls it.

For a head θ = W m + b, one step's gradient is g mᵀ. SGD with momentum, weight decay and clipping is linear in these,
so that within a round, exactly,

    W_t = a_t W₀ − Σᵢ b_{t,i} cᵢ gᵢ mᵢᵀ,    V_t = p_t W₀ + Σᵢ q_{t,i} cᵢ gᵢ mᵢᵀ

with scalars a, p, b, q that obey the recursions of `Coefficients`. No step then touches the P × H matrix but for two
products with W₀, which all clients share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from netweight.methods.federate.config import LocalTraining
from netweight.methods.federate.updates import LowRank

__all__ = ["Coefficients", "DenseHeads", "FactoredHeads", "Heads", "heads_for"]


class Heads(Protocol):
    """The weight matrices of K clients' heads while they train, each P × H, all begun at W₀."""

    def generate(self, codes: Tensor, rows: Sequence[int]) -> Tensor:
        """Return W m of the clients `rows`, shape `(k, P)`, for codes of shape `(k, H)`."""
        ...

    def pull_back(self, gradients: Tensor, rows: Sequence[int]) -> Tensor:
        """Return Wᵀ g of the clients `rows`, shape `(k, H)`, for gradients of shape `(k, P)`."""
        ...

    def step(self, gradients: Tensor, codes: Tensor, clips: Tensor, rows: Sequence[int]) -> None:
        """Take one step of SGD with the gradients `clip · g mᵀ` of the clients `rows`; clips have shape `(k,)`."""
        ...

    def result(self, row: int) -> Tensor | LowRank:
        """Return a client's matrix, as it is sent."""
        ...


@final
class Coefficients:
    """The scalars of the low-rank form, the same for all clients that took as many steps; double precision.

    Attributes:
        scale: a_t, the factor of W₀ in W_t.
        weights: b_{t,i}, the factor of step i in W_t.

    Args:
        training: Momentum and weight decay.
        lr: Learning rate.
    """

    def __init__(self, training: LocalTraining, lr: float) -> None:
        self._training, self._lr = training, lr
        self.scale, self._drift = 1.0, 0.0
        self.weights = torch.zeros(0, dtype=torch.float64)
        self._velocity = torch.zeros(0, dtype=torch.float64)

    def step(self) -> None:
        """Advance by one step."""
        decay, momentum = self._training.weight_decay, self._training.momentum
        zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        self._drift = momentum * self._drift + decay * self.scale
        self.scale -= self._lr * self._drift
        self._velocity = torch.cat([momentum * self._velocity - decay * self.weights, one])
        self.weights = torch.cat([self.weights, zero]) + self._lr * self._velocity


@final
class FactoredHeads:
    """Heads as factors: rank one more with each step.

    Args:
        base: W₀, shape `(P, H)`.
        clients: Number of clients K.
        steps: Largest number of steps that any of them takes.
        training: Momentum and weight decay.
        lr: Learning rate.
    """

    def __init__(self, base: Tensor, clients: int, steps: int, training: LocalTraining, lr: float) -> None:
        generated, hidden = base.shape
        self._base = base
        self._left = [base.new_empty(steps, generated) for _ in range(clients)]  # g of each step
        self._right = [base.new_empty(steps, hidden) for _ in range(clients)]  # c m of each step
        self._taken = [0] * clients
        self._history: list[tuple[float, Tensor]] = [(1.0, base.new_empty(0))]
        self._running = Coefficients(training, lr)

    def generate(self, codes: Tensor, rows: Sequence[int]) -> Tensor:
        """Return W m of the clients `rows`: one product with W₀ for all of them, and a thin one for each."""
        generated = (self._base @ codes.T).T.contiguous()
        for position, row in enumerate(rows):
            scale, weights = self._at(self._taken[row])
            left, right = self._factors(row)
            along = weights * (right @ codes[position])
            torch.addmv(generated[position], left.T, along, beta=scale, alpha=-1, out=generated[position])
        return generated

    def pull_back(self, gradients: Tensor, rows: Sequence[int]) -> Tensor:
        """Return Wᵀ g of the clients `rows`."""
        pulled = gradients @ self._base
        for position, row in enumerate(rows):
            scale, weights = self._at(self._taken[row])
            left, right = self._factors(row)
            along = weights * (left @ gradients[position])
            torch.addmv(pulled[position], right.T, along, beta=scale, alpha=-1, out=pulled[position])
        return pulled

    def step(self, gradients: Tensor, codes: Tensor, clips: Tensor, rows: Sequence[int]) -> None:
        """Append one column to the factors of the clients `rows`."""
        for position, row in enumerate(rows):
            taken = self._taken[row]
            self._left[row][taken] = gradients[position]
            self._right[row][taken] = codes[position] * clips[position]
            self._taken[row] += 1

    def result(self, row: int) -> LowRank:
        """Return a client's matrix as factors."""
        scale, weights = self._at(self._taken[row])
        left, right = self._factors(row)
        return LowRank(scale, left.T, (right * weights[:, None]).T)

    def _factors(self, row: int) -> tuple[Tensor, Tensor]:
        taken = self._taken[row]
        return self._left[row][:taken], self._right[row][:taken]

    def _at(self, taken: int) -> tuple[float, Tensor]:
        """Return the scalars after `taken` steps."""
        while len(self._history) <= taken:
            self._running.step()
            self._history.append((self._running.scale, self._running.weights.to(self._base)))
        return self._history[taken]


@final
class DenseHeads:
    """Heads as dense matrices, one per client with its velocity: for more steps than the heads have inputs.

    Args:
        base: W₀, shape `(P, H)`.
        clients: Number of clients K.
        training: Momentum and weight decay.
        lr: Learning rate.
    """

    def __init__(self, base: Tensor, clients: int, training: LocalTraining, lr: float) -> None:
        self._weights = [base.clone() for _ in range(clients)]
        self._velocity = [torch.zeros_like(base) for _ in range(clients)]
        self._training, self._lr = training, lr

    def generate(self, codes: Tensor, rows: Sequence[int]) -> Tensor:
        """Return W m of the clients `rows`."""
        return torch.stack([self._weights[row] @ code for row, code in zip(rows, codes, strict=True)])

    def pull_back(self, gradients: Tensor, rows: Sequence[int]) -> Tensor:
        """Return Wᵀ g of the clients `rows`."""
        return torch.stack([gradient @ self._weights[row] for row, gradient in zip(rows, gradients, strict=True)])

    def step(self, gradients: Tensor, codes: Tensor, clips: Tensor, rows: Sequence[int]) -> None:
        """Step each client's matrix."""
        for row, gradient, code in zip(rows, gradients, codes * clips[:, None], strict=True):
            velocity, weights = self._velocity[row], self._weights[row]
            velocity.mul_(self._training.momentum).addr_(gradient, code)
            velocity.add_(weights, alpha=self._training.weight_decay)
            weights.sub_(velocity, alpha=self._lr)

    def result(self, row: int) -> Tensor:
        """Return a client's matrix."""
        return self._weights[row]


def heads_for(base: Tensor, clients: int, steps: int, training: LocalTraining, lr: float) -> Heads:
    """Return factored heads where the factors stay smaller than the matrix, dense ones otherwise."""
    if steps < base.shape[1]:
        return FactoredHeads(base, clients, steps, training, lr)
    return DenseHeads(base, clients, training, lr)
