"""Weights of a denoiser, exchanged in place."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from netweight.errors import UsageError


@torch.no_grad()
def exchange(denoiser: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put weights in the place of a network's, and return those.

    Args:
        denoiser: The network; changed in place.
        weights: By name, of the shapes and dtypes of the network's.

    Returns:
        The weights that were there, by name, on the CPU.

    Raises:
        UsageError: A weight does not fit.
    """
    current = dict(denoiser.named_parameters())
    wrong = [
        name for name, value in weights.items()
        if name not in current or (current[name].shape, current[name].dtype) != (value.shape, value.dtype)
    ]  # fmt: skip
    if wrong:
        raise UsageError(
            f"The weight {wrong[0]} of the record does not fit this model.",
            cure="Restore the model that was edited, in the dtype it was edited in.",
        )
    before = {name: current[name].detach().cpu().clone() for name in weights}
    for name, value in weights.items():
        current[name].copy_(value)
    return before
