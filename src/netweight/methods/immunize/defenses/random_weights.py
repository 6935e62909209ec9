"""New random weights: a control without any ability."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.core.seeds import torch_generator
from netweight.methods.immunize.defense import Defense, DefenseSettings

if TYPE_CHECKING:
    import torch
    from torch import nn

    from netweight.methods.immunize import distributed
else:
    distributed, torch, nn = lazy_modules(
        "netweight.methods.immunize.distributed",
        "torch",
        "torch.nn",
    )


class RandomWeights(DefenseSettings):
    """New random weights: a control without any ability to recover. Source: RepNoise (arXiv 2405.14577)."""

    std: float = Field(0.02, ge=0, description="Standard deviation of matrices; norms become 1, biases 0.")

    def build(self) -> RandomWeightsDefense:
        """Return the defense of these settings."""
        return RandomWeightsDefense(self)


@final
class RandomWeightsDefense(Defense[RandomWeights]):
    """Draws all weights."""

    name = "random-weights"
    trains = False

    @contextmanager
    def preparation(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        for path, module in model.named_modules():
            for name, value in module.named_parameters(recurse=False):
                if value.dim() > 1:
                    drawn = torch.randn(value.shape, generator=torch_generator(seed, path, name)) * self.settings.std
                else:
                    drawn = torch.full(value.shape, 0.0 if name == "bias" else 1.0)
                distributed.put(value.data, drawn)
        yield
