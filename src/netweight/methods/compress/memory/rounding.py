"""Stochastic rounding to bf16: small updates are not lost but happen with a probability that is their size.

Used by `layerwise.py`. Each draw's seed is derived from the optimizer's seed, the parameter and the step, so that
nothing but the step's number must be kept to resume exactly.
"""

from __future__ import annotations

import torch

from netweight.core import seeds

__all__ = ["round_stochastically"]


def round_stochastically(values: torch.Tensor, seed: int, *path: str | int) -> torch.Tensor:
    """Round fp32 to bf16, up or down at random so that the expected value is the exact one.

    Args:
        values: fp32 tensor of any shape on the CPU or a GPU.
        seed: Root seed.
        path: Names this draw (see `netweight.core.seeds.derive`).

    Returns:
        A bf16 tensor of the same shape. What bf16 can represent stays as it is, infinities and NaN too.
    """
    generator = seeds.torch_generator(seed, *path, device=str(values.device))
    bits = values.contiguous().view(torch.int32)
    noise = torch.randint(0, 1 << 16, bits.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
