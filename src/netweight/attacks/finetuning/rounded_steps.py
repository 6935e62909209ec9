"""Step weights that are kept in bfloat16, in float32: what attacks train with where memory is short.

A step that is smaller than half the distance to the next number of bfloat16 is lost when it is rounded to the nearest,
which makes any model look resistant. Rounded at random, up as often as the step is near the upper number, it is kept in
the mean. Source: Gupta et al., arXiv 1502.02551, section 3.1; for bfloat16 Zamirai et al., arXiv 2010.06192.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.attacks.finetuning.optimizers import optimizers_of
from netweight.attacks.finetuning.settings import AttackSettings


@final
class RoundedSteps:
    """Step parameters one after the other in float32 by any optimizer, and round them at random.

    One parameter at a time exists in float32; the states of the optimizers are in float32 throughout. Parameters that
    are in float32 themselves, such as low-rank factors, are stepped as they are.

    Args:
        parameters: What is stepped, in float32 or bfloat16.
        settings: The optimizer and its options.
        generator: Draws the rounding, on the CPU.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], settings: AttackSettings, generator: torch.Generator
    ) -> None:
        self._generator = generator
        self._stepped: list[tuple[nn.Parameter, nn.Parameter, list[torch.optim.Optimizer]]] = []
        for parameter in parameters:
            copy = nn.Parameter(parameter.detach().float())
            optimizers = optimizers_of([copy], settings)
            copy.data = copy.data.new_empty(0)
            self._stepped.append((parameter, copy, optimizers))

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of all optimizers, whose options a schedule changes."""
        return [group for *_, optimizers in self._stepped for each in optimizers for group in each.param_groups]

    @torch.no_grad()
    def step(self) -> None:
        """Step every parameter that has a gradient."""
        for parameter, copy, optimizers in self._stepped:
            if parameter.grad is None:
                continue
            copy.data, copy.grad = parameter.detach().float(), parameter.grad.float()
            for optimizer in optimizers:
                optimizer.step()
            if parameter.dtype == torch.bfloat16:
                parameter.copy_(rounded_at_random(copy.data, self._generator))
            else:
                parameter.copy_(copy.data)
            copy.data, copy.grad = copy.data.new_empty(0), None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients."""
        for parameter, *_ in self._stepped:
            parameter.grad = None


def rounded_at_random(values: Tensor, generator: torch.Generator) -> Tensor:
    """Round float32 to bfloat16, to the upper or the lower neighbor, in the mean to the value itself.

    Args:
        values: Float32, any shape and device.
        generator: Draws which neighbor, on the CPU.

    Returns:
        Bfloat16 of the same shape; values that bfloat16 has, infinities and NaN stay as they are.
    """
    noise = torch.randint(0, 1 << 16, values.shape, generator=generator, dtype=torch.int32).to(values.device)
    bits = (values.contiguous().view(torch.int32) + noise) & -(1 << 16)
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)
