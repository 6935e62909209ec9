"""Single clients out of a sum over clients: what secure aggregation does not hide when heads are linear.

The sum of the clients' changes is `Σ gᵢ mᵢᵀ`. Codes of different clients are different keys: with more hidden units
than clients and the codes known, each gᵢ is solved for. A client's code follows from its embedding, which one round
without secure aggregation gives away. A malicious server needs no such round: a trunk of thresholds along one direction
makes codes that the sum's columns can be told apart by.
"""

from __future__ import annotations

import torch
from torch import Tensor

from netweight.attacks.gradient_inversion.analytic import heads_gradient
from netweight.attacks.gradient_inversion.victim import Tensors
from netweight.core import seeds
from netweight.errors import UsageError

__all__ = ["read_thresholds", "separate_clients", "threshold_trunk"]


def separate_clients(before: Tensors, after: Tensors, codes: Tensor, *, lr: float, weight_decay: float = 0.0) -> Tensor:
    """Return each client's gradient from the sum or average of their updates.

    Args:
        before: The shared state that all clients received, as for `recover_gradient`.
        after: The average of what they sent back.
        codes: The clients' hidden codes, `(n, H)`: `RecoveredGradient.code` of an earlier round, or the trunk's answer
            to their embeddings. Fewer than H + 2 clients.
        lr: The clients' learning rate.
        weight_decay: Their weight decay.

    Returns:
        Shape `(n, P)`, float64, in the order of the codes: each exact up to a positive factor if every client took one
        step and every client's code was given; otherwise an estimate.

    Raises:
        UsageError: There are too many clients, or the codes have another length.
    """
    weight, bias = heads_gradient(before, after, lr=lr, weight_decay=weight_decay)
    if codes.ndim != 2 or codes.shape[1] != weight.shape[1] or len(codes) > weight.shape[1] + 1:
        raise UsageError(f"Codes of shape {tuple(codes.shape)} do not separate a sum over {weight.shape[1]} units.")
    keys = torch.cat([codes.double(), torch.ones(len(codes), 1, dtype=torch.float64)], dim=1)
    opened: Tensor = torch.cat([weight, bias[:, None]], dim=1) @ torch.linalg.pinv(keys)
    return opened.T


def threshold_trunk(state: Tensors, *, seed: int) -> dict[str, Tensor]:
    """Return a state whose trunk makes hidden unit j the part of `u · v` above the j-th of H thresholds.

    The thresholds are quantiles of the standard normal distribution, from which embeddings are drawn. The heads stay
    honest, so no check of generated weights sees anything.

    Args:
        state: The honest shared state, with one hidden layer. Tensors by name.
        seed: Seed of the direction u.

    Raises:
        UsageError: The trunk has more than one layer.
    """
    if any(name.endswith("trunk.1.weight") for name in state):
        raise UsageError("Thresholds are written into trunks of one layer; this one has more.")
    malicious = {name: tensor.detach().clone() for name, tensor in state.items()}
    for name, tensor in malicious.items():
        if name.endswith("trunk.0.weight"):
            direction = torch.randn(tensor.shape[1], generator=seeds.torch_generator(seed, "direction"))
            tensor.copy_((direction / direction.norm()).expand_as(tensor))
        elif name.endswith("trunk.0.bias"):
            tensor.copy_(-_thresholds(len(tensor)))
    return malicious


def read_thresholds(before: Tensors, after: Tensors, *, lr: float, weight_decay: float = 0.0) -> Tensor:
    """Return what the clients between neighboring thresholds sent, `(H - 2, P)`: single gradients where there is one.

    A unit's column of the sum is `Σ gᵢ max(u · vᵢ - tⱼ, 0)`, piecewise linear in tⱼ with a bend at every client. So
    second differences are zero but at the clients. A client between two thresholds bends two of them, both in its
    direction.

    Args:
        before: From `threshold_trunk`. Tensors by name.
        after: The average of what the clients sent back after one step. Of the same names and shapes.
        lr: The clients' learning rate.
        weight_decay: Their weight decay.
    """
    columns = heads_gradient(before, after, lr=lr, weight_decay=weight_decay)[0].T
    slopes = (columns[:-1] - columns[1:]) / _thresholds(len(columns)).double().diff()[:, None]
    return slopes[:-1] - slopes[1:]


def _thresholds(count: int) -> Tensor:
    quantiles: Tensor = torch.special.ndtri((torch.arange(count) + 0.5) / count)
    return quantiles
