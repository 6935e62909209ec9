"""Float32 copies of narrow weights, which an optimizer steps: steps of bfloat16 weights would be rounded away."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from netweight.errors import UsageError
from netweight.methods.immunize.distributed import ProcessGroup, common_norm, local

_NARROW = (torch.bfloat16, torch.float16)


@final
class MasterWeights:
    """Weights of the optimizer: a float32 copy of each narrower trained weight, or the weight itself."""

    def __init__(self, model: nn.Module, *, compact: bool = False) -> None:
        # True if gradients keep the dtype of the weights.
        self.compact = compact
        # The model's own parameters, by name.
        self.trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        if not self.trained:
            raise UsageError(
                "No weight of the model requires a gradient.", cure="Call requires_grad_(True) on the weights to train."
            )
        # What is stepped in their stead, by the same names.
        self.masters = {
            name: nn.Parameter(value.detach().float()) if value.dtype in _NARROW else value
            for name, value in self.trained.items()
        }

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The model's own trained parameters."""
        return list(self.trained.values())

    def take_gradients(self) -> None:
        """Add the narrow gradients to those of the float32 copies and free them; not where states are compact."""
        if self.compact:
            return
        for name, value in self.trained.items():
            master = self.masters[name]
            if master is not value and value.grad is not None:
                grad = value.grad.float()
                master.grad = grad if master.grad is None else master.grad.add_(grad)
                value.grad = None

    def norm(self, group: ProcessGroup) -> float:
        """Return the common norm of all gradients."""
        return common_norm(self._gradients(), group)

    @torch.no_grad()
    def clip(self, norm: float, largest_norm: float | None) -> None:
        """Scale all gradients, whose common norm this is, down so that it becomes `largest_norm` if it is above."""
        if largest_norm is None:
            return
        factor = (largest_norm / (torch.tensor(norm) + 1e-6)).clamp(max=1.0)
        for grad in map(local, self._gradients()):
            grad.mul_(factor.to(grad.device))

    @property
    def gradients(self) -> dict[str, Tensor]:
        """The gradients by name, of the weights that have one."""
        owners = self.trained if self.compact else self.masters
        return {name: value.grad for name, value in owners.items() if value.grad is not None}

    def _gradients(self) -> list[Tensor]:
        return list(self.gradients.values())

    def clear(self) -> None:
        """Free all gradients."""
        for value in (*self.trained.values(), *self.masters.values()):
            value.grad = None

    def not_finite(self, group: ProcessGroup) -> str | None:
        """Return the name of a weight whose gradient contains NaN or infinity in any process, if there is one."""
        gradients = self.gradients
        bad = [name in gradients and not torch.isfinite(local(gradients[name])).all() for name in self.masters]
        counts = group.sum(torch.tensor(bad, dtype=torch.int64)).tolist()
        return next((name for name, count in zip(self.masters, counts, strict=True) if count), None)

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the float32 copies into the model."""
        for name, value in self.trained.items():
            if self.masters[name] is not value:
                value.copy_(self.masters[name])
