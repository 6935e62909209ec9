"""The bytes of a tensor in row-major order."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def row_major_bytes(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in row-major order, as a flat tensor of uint8; a view where its memory allows.

    Args:
        tensor: A tensor of any shape, strides and data type, on any device.
    """
    import torch

    flat = tensor.contiguous().view(-1)
    if flat.numel() <= 1:
        # One value, or none, counts as contiguous whatever its stride is, as in `torch.tensor(2.0).expand(1)`, but its
        # bytes can be viewed only with a stride of 1.
        flat = flat.as_strided(flat.shape, (1,))
    return flat.view(torch.uint8)
