"""Trained weights in float32 beside a model in bfloat16 or float16, whose own rounding would swallow small updates.

Used by `training.py`.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from netweight.errors import UsageError
from netweight.methods.immunize.ranks import Ranks
from netweight.methods.immunize.sharded import common_norm, is_sharded, local

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

    def average(self, ranks: Ranks) -> None:
        """Average the gradients over all processes; FSDP has averaged those of its shards.

        Args:
            ranks: The processes.
        """
        if ranks.size > 1:
            for master in self.masters.values():
                if master.grad is None and not is_sharded(master):  # other processes may have one
                    master.grad = torch.zeros_like(master)
            ranks.average(grad for grad in self._gradients() if not is_sharded(grad))

    def norm(self, ranks: Ranks) -> float:
        """The common norm of all gradients.

        Args:
            ranks: The processes.
        """
        return common_norm(self._gradients(), ranks)

    @torch.no_grad()
    def clip(self, norm: float, most: float) -> None:
        """Scale all gradients, whose common norm this is, down so that it becomes `most` if it is above.

        Args:
            norm: As `norm` returned it.
            most: Above 0.
        """
        factor = (most / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)
        for grad in map(local, self._gradients()):
            grad.mul_(factor.to(grad.device))

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self.masters.values() if master.grad is not None]

    def clear(self) -> None:
        """Free all gradients."""
        for value in (*self.trained.values(), *self.masters.values()):
            value.grad = None

    def not_finite(self, ranks: Ranks) -> str | None:
        """The name of a weight whose gradient holds NaN or infinity, in any process.

        Args:
            ranks: The processes.
        """
        bad = [
            master.grad is not None and not torch.isfinite(local(master.grad)).all() for master in self.masters.values()
        ]
        found = ranks.sum(torch.tensor(bad, dtype=torch.int64)).tolist()
        return next((name for name, count in zip(self.masters, found, strict=True) if count), None)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the float32 copies into the model."""
        for name, value in self.trained.items():
            if self.masters[name] is not value:
                value.copy_(self.masters[name])
