"""Trained weights in float32 beside a model in bfloat16 or float16, whose own rounding would swallow small updates.

Used by `training.py`.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from netweight.errors import UsageError

__all__ = ["MasterWeights"]

_NARROW = (torch.bfloat16, torch.float16)


@final
class MasterWeights:
    """What an optimizer steps: a float32 copy of each trained weight that is narrower, else the weight itself.

    Args:
        model: Parameters that require a gradient are trained.

    Attributes:
        trained: The model's own parameters, by name.
        masters: What is stepped in their stead, by the same names.

    Raises:
        UsageError: Nothing requires a gradient.
    """

    def __init__(self, model: nn.Module) -> None:
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        if not self.trained:
            raise UsageError(
                "No weight of the model requires a gradient.", cure="Call requires_grad_(True) on what is to train."
            )
        self.masters = {
            name: nn.Parameter(value.detach().float()) if value.dtype in _NARROW else value
            for name, value in self.trained.items()
        }

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's own trained parameters."""
        return list(self.trained.values())

    def take_gradients(self) -> None:
        """Add the narrow gradients to those of the float32 copies and free them."""
        for name, value in self.trained.items():
            master = self.masters[name]
            if master is not value and value.grad is not None:
                grad = value.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                value.grad = None

    def norm(self) -> float:
        """The common norm of all gradients."""
        grads = [master.grad for master in self.masters.values() if master.grad is not None]
        return float(torch.nn.utils.get_total_norm(grads))

    def clip(self, norm: float, most: float) -> None:
        """Scale all gradients, whose common norm this is, down so that it becomes `most` if it is above."""
        torch.nn.utils.clip_grads_with_norm_(self.masters.values(), most, torch.tensor(norm))

    def clear(self) -> None:
        """Free all gradients."""
        for value in (*self.trained.values(), *self.masters.values()):
            value.grad = None

    def not_finite(self) -> str | None:
        """The name of a weight whose gradient holds NaN or infinity."""
        for name, master in self.masters.items():
            if master.grad is not None and not torch.isfinite(master.grad).all():
                return name
        return None

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the float32 copies into the model."""
        for name, value in self.trained.items():
            if self.masters[name] is not value:
                value.copy_(self.masters[name])

    @torch.no_grad()
    def load(self, weights: dict[str, Tensor]) -> None:
        """Take weights of an earlier time, by name, into copies and model."""
        for name, master in self.masters.items():
            master.copy_(weights[name])
        self.write_back()
