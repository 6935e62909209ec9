"""What one client's change of a hypernetwork gives away without any search: its gradient, its weights, its embedding.

Each head is linear with a bias, `θ = W m + b`. So the gradient by the bias is the gradient by the generated weights, and
the gradient by W is that vector times mᵀ: both factors can be read from the difference of two states, and θ follows.
The trunk's first layer gives the private embedding in the same way. Labels, classifier and loss are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.attacks.gradient_inversion.victim import Tensors
from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError

__all__ = ["RecoveredGradient", "recover_gradient"]

_HEADS = ("heads.weight", "heads.bias")
_TRUNK = ("trunk.0.weight", "trunk.0.bias")


@final
@dataclass(frozen=True)
class RecoveredGradient:
    """What was read from one client's change of the hypernetwork; all vectors are float64.

    Attributes:
        gradient: The loss's gradient by the generated vector θ, shape `(P,)`: exact up to a positive factor (the
            client's clipping) after one step; after several, the weighted sum of the steps' gradients.
        code: The hidden code m, shape `(H,)`; after several steps, an average of the steps' codes.
        embedding: The private embedding, shape `(E,)`; averaged likewise.
        generated: θ as the client generated it from the state it received, shape `(P,)`.
        movement: How θ moved, `θ after - θ before`, with m held still, shape `(P,)`.
        energies: Share of the change's energy in each of its singular values, largest first; after one step all of it
            is in the first, and the spread over the others is what further steps hide.
    """

    gradient: Tensor
    code: Tensor
    embedding: Tensor
    generated: Tensor
    movement: Tensor
    energies: Tensor

    @property
    def exact(self) -> bool:
        """Whether the change has rank one, so that `gradient` is one step's gradient and not a sum."""
        return float(self.energies[0]) > 1 - 1e-6


def recover_gradient(before: Tensors, after: Tensors, *, lr: float, weight_decay: float = 0.0) -> RecoveredGradient:
    """Read a client's gradient, hidden code, embedding and generated weights from two states of its hypernetwork.

    Args:
        before: The shared state that the client received: `heads.weight` `(P, H)`, `heads.bias` `(P,)`,
            `trunk.0.weight` `(H₁, E)` and `trunk.0.bias`, under any common prefix; other tensors are not read.
        after: The state that it sent back, the same names and shapes.
        lr: The client's learning rate; a wrong one changes the scale of `gradient` only.
        weight_decay: The client's weight decay. It is removed exactly for one step.

    Raises:
        NameNotFound: A tensor is missing.
        UsageError: Shapes differ, a value is not finite, the rate is not positive, or nothing has changed.

    Source: follows from HyperFL (arXiv 2412.07187) equation 4, `θ = h(v; φ)`, with linear heads; not in the paper.
    """
    if not lr > 0:
        raise UsageError(f"A learning rate of {lr} cannot be meant.", cure="Give the client's rate, such as 0.02.")
    old, new = _named(before), _named(after)
    slope = {}
    for name, tensor in old.items():
        if new[name].shape != tensor.shape:
            raise UsageError(f"{name!r} has shape {tuple(new[name].shape)} after and {tuple(tensor.shape)} before.")
        slope[name] = (tensor - new[name]) / lr - weight_decay * tensor
        if not slope[name].isfinite().all():
            raise UsageError(f"The tensor {name!r} holds NaN or infinity.", cure="Leave this client's update out.")
    heads, trunk = (tuple(slope[name] for name in names) for names in (_HEADS, _TRUNK))
    if not heads[1].any():
        raise UsageError("The heads' biases have not changed, so there is no gradient to read.")
    code, embedding = _input_of(*heads), _input_of(*trunk)
    moved_weight, moved_bias = (new[name] - old[name] for name in _HEADS)
    return RecoveredGradient(
        gradient=_output_gradient(*heads, code),
        code=code,
        embedding=embedding,
        generated=old["heads.weight"] @ code + old["heads.bias"],
        movement=moved_weight @ code + moved_bias,
        energies=_energies(*heads),
    )


def _named(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that are read, without their prefix, as float64: differences of float32 lose digits otherwise."""
    found = {}
    for wanted in (*_HEADS, *_TRUNK):
        matches = [name for name in state if name == wanted or name.endswith("." + wanted)]
        if len(matches) != 1:
            near = ", ".join(nearest_names(wanted, state)) or "none"
            raise NameNotFound(f"{len(matches)} tensors are called {wanted!r}, not one.", cure=f"Nearest: {near}.")
        found[wanted] = state[matches[0]].detach().double()
    return found


def _input_of(weight: Tensor, bias: Tensor) -> Tensor:
    """The input of a linear layer from its gradients g xᵀ and g: least squares over all rows."""
    return weight.T @ bias / (bias @ bias).clamp_min(torch.finfo(bias.dtype).tiny)


def _output_gradient(weight: Tensor, bias: Tensor, code: Tensor) -> Tensor:
    """The gradient g from g mᵀ and g together, which averages the rounding of H + 1 stored numbers for each value."""
    return (weight @ code + bias) / (code @ code + 1)


def _energies(weight: Tensor, bias: Tensor) -> Tensor:
    both = torch.cat([weight, bias[:, None]], dim=1)
    values = torch.linalg.eigvalsh(both.T @ both).flip(0).clamp_min(0)
    return values / values.sum()
