"""The hypernetwork's heads while clients train: W₀ with low-rank factors, or dense matrices. HyperFL calls it.

For a head θ = W m, one step's gradient is g mᵀ. SGD with momentum, weight decay and clipping is linear in these, so
that within a round, exactly,

    W_t = a_t W₀ − Σᵢ b_{t,i} cᵢ gᵢ mᵢᵀ,    V_t = p_t W₀ + Σᵢ q_{t,i} cᵢ gᵢ mᵢᵀ

with scalars a, p, b, q that obey the recursions of `Coefficients`. No step then touches a client's P × H matrix but by
two products with W₀, which all clients share. The bias is one more column of W, for a code that is always 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

import torch
from torch import Tensor

from netweight.methods.federate.config import LocalTraining
from netweight.methods.federate.reused_memory import ReusedMemory
from netweight.methods.federate.updates import LowRank

__all__ = ["Coefficients", "DenseHeads", "FactoredHeads", "Heads", "heads_for"]


class Heads(Protocol):
    """The heads of K clients while they train, each P × H with the bias as the last column, all begun at W₀.

    Codes are not negative and end with 1, for the bias.
    """

    def generate(self, codes: Tensor, rows: Sequence[int]) -> Tensor:
        """Return W m of the clients `rows`, shape `(k, P)`, for codes of shape `(k, H)`."""
        ...

    def pull_back(self, gradients: Tensor, rows: Sequence[int]) -> Tensor:
        """Return Wᵀ g of the clients `rows`, shape `(k, H)`, for gradients of shape `(k, P)`.

        Only where the last codes were above 0: elsewhere ReLU lets nothing through and the value may be 0.
        """
        ...

    def step(self, gradients: Tensor, codes: Tensor, clips: Tensor, rows: Sequence[int]) -> None:
        """Take one step of SGD with the gradients `clip · g mᵀ` of the clients `rows`; clips have shape `(k,)`.

        Args:
            gradients: g of each client, shape `(k, P)`.
            codes: m of each client, shape `(k, H)`.
            clips: Factors, shape `(k,)`.
            rows: The clients' numbers among those here.
        """
        ...

    def result(self, row: int) -> tuple[Tensor | LowRank, Tensor]:
        """Return a client's weights, as they are sent, and bias, shape `(P,)`.

        Args:
            row: The client's number among those here.
        """
        ...


@final
class Coefficients:
    """The scalars of the low-rank form, the same for all clients that took as many steps; double precision.

    Attributes:
        scale: a_t, the factor of W₀ in W_t.
        weights: b_{t,i}, the factor of step i in W_t.

    Args:
        training: Learning rate, momentum and weight decay.
    """

    def __init__(self, training: LocalTraining) -> None:
        self._training = training
        self.scale, self._drift = 1.0, 0.0
        self.weights = torch.zeros(0, dtype=torch.float64)
        self._velocity = torch.zeros(0, dtype=torch.float64)

    def step(self) -> None:
        """Advance by one step."""
        decay, momentum = self._training.weight_decay, self._training.momentum
        zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        self._drift = momentum * self._drift + decay * self.scale
        self.scale -= self._training.lr * self._drift
        self._velocity = torch.cat([momentum * self._velocity - decay * self.weights, one])
        self.weights = torch.cat([self.weights, zero]) + self._training.lr * self._velocity


@final
class FactoredHeads:
    """Heads as factors: rank one more with each step.

    Of W₀ only the columns of codes that are above 0 are read, which ReLU leaves about half of.

    Args:
        weight: W₀ without the bias, shape `(P, H − 1)`.
        bias: Shape `(P,)`.
        clients: Number of clients K.
        steps: Largest number of steps that any of them takes.
        training: Learning rate, momentum and weight decay.
        memory: Where the factors lie.
    """

    def __init__(
        self, weight: Tensor, bias: Tensor, clients: int, steps: int, training: LocalTraining, memory: ReusedMemory
    ) -> None:
        generated, hidden = weight.shape
        self._weight = weight
        self._left = memory.empty("left", (clients, steps, generated), weight)  # g of each step
        self._right = weight.new_empty(clients, steps, hidden + 1)  # c m of each step
        self._taken = [0] * clients
        self._running = Coefficients(training)
        self._history: list[tuple[float, Tensor]] = [(1.0, weight.new_empty(0))]
        self._units = [hidden]  # whose columns of W₀ were read, in the order of the rows of `_base`
        self._base = memory.empty("base", (hidden + 1, generated), weight)
        self._base[0] = bias

    def generate(self, codes: Tensor, rows: Sequence[int]) -> Tensor:
        """Return W m of the clients `rows`: one product with W₀ for all of them, and a thin one for each."""
        self._read_columns_of(codes)
        generated = codes[:, self._units] @ self._base[: len(self._units)]
        for position, row in enumerate(rows):
            scale, weights, left, right = self._factors(row)
            _add(generated[position], left.T, weights * (right @ codes[position]), scale)
        return generated

    def pull_back(self, gradients: Tensor, rows: Sequence[int]) -> Tensor:
        """Return Wᵀ g of the clients `rows`, 0 where no code of any client was above 0."""
        pulled = gradients.new_zeros(len(rows), len(self._base))
        pulled[:, self._units] = gradients @ self._base[: len(self._units)].T
        for position, row in enumerate(rows):
            scale, weights, left, right = self._factors(row)
            _add(pulled[position], right.T, weights * (left @ gradients[position]), scale)
        return pulled

    def step(self, gradients: Tensor, codes: Tensor, clips: Tensor, rows: Sequence[int]) -> None:
        """Append one column to the factors of the clients `rows`."""
        scaled = codes * clips[:, None]
        for position, row in enumerate(rows):
            self._left[row, self._taken[row]] = gradients[position]
            self._right[row, self._taken[row]] = scaled[position]
            self._taken[row] += 1

    def result(self, row: int) -> tuple[LowRank, Tensor]:
        """Return a client's weights as factors, and the bias."""
        scale, weights, left, right = self._factors(row)
        columns = (right * weights[:, None]).T
        return LowRank(scale, left.T, columns[:-1]), scale * self._base[0] - left.T @ columns[-1]

    def _read_columns_of(self, codes: Tensor) -> None:
        """Read the columns of W₀ that codes above 0 need, if they are not at hand."""
        needed = (codes > 0).any(0)
        needed[self._units] = False
        if not needed.any():
            return
        known, new = len(self._units), needed.nonzero().flatten().tolist()
        self._base[known : known + len(new)] = self._weight[:, new].T
        self._units += new

    def _factors(self, row: int) -> tuple[float, Tensor, Tensor, Tensor]:
        """Return a client's scalars and factors after the steps that it has taken."""
        taken = self._taken[row]
        while len(self._history) <= taken:
            self._running.step()
            self._history.append((self._running.scale, self._running.weights.to(self._weight)))
        return *self._history[taken], self._left[row, :taken], self._right[row, :taken]


def _add(result: Tensor, matrix: Tensor, vector: Tensor, scale: float) -> None:
    """Turn `result` into `scale · result − matrix · vector`, in place."""
    torch.addmv(result, matrix, vector, beta=scale, alpha=-1, out=result)


@final
class DenseHeads:
    """Heads as dense matrices, one per client with its velocity: for more steps than the heads have inputs.

    Args:
        weight: W₀ without the bias, shape `(P, H − 1)`.
        bias: Shape `(P,)`.
        clients: Number of clients K.
        training: Learning rate, momentum and weight decay.
    """

    def __init__(self, weight: Tensor, bias: Tensor, clients: int, training: LocalTraining) -> None:
        base = torch.cat([weight, bias[:, None]], dim=1)
        self._weights = [base.clone() for _ in range(clients)]
        self._velocity = [torch.zeros_like(base) for _ in range(clients)]
        self._training = training

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
            weights.sub_(velocity, alpha=self._training.lr)

    def result(self, row: int) -> tuple[Tensor, Tensor]:
        """Return a client's weights and bias."""
        return self._weights[row][:, :-1], self._weights[row][:, -1]


def heads_for(
    weight: Tensor, bias: Tensor, clients: int, steps: int, training: LocalTraining, memory: ReusedMemory
) -> Heads:
    """Return factored heads where the factors stay smaller than the matrix, dense ones otherwise.

    Args:
        weight: W, shape `(P, H)`.
        bias: Shape `(P,)`.
        clients: How many share this start.
        steps: Most steps that one of them takes.
        training: Learning rate, momentum and weight decay.
        memory: For what is too large for the allocator to keep.
    """
    if steps < weight.shape[1]:
        return FactoredHeads(weight, bias, clients, steps, training, memory)
    return DenseHeads(weight, bias, clients, training)
