"""Compare logits that were computed in two ways, such as with and without a cache, up to rounding."""

from __future__ import annotations

import torch
from torch import Tensor

# Types in which two computations of the same agree at every logit. In narrower types, a mixture of experts may choose
# another expert by rounding alone, so there the root of the mean square of the differences is compared.
_FINE = (torch.float32, torch.float64)
# Largest difference, as a share of the standard deviation of the logits.
_FINE_ROUNDING = 0.01
_COARSE_ROUNDING = 0.2
# Difference of logits that are all the same.
_SMALLEST = 1e-6


def alike(first: Tensor, second: Tensor) -> bool:
    """Return whether two computations of the same logits differ by no more than rounding.

    Args:
        first: Logits, of shape `(..., V)`; masked ones may be infinite.
        second: The same logits, computed in another way; its type may differ.
    """
    fine = first.dtype in _FINE and second.dtype in _FINE
    first, second = first.float(), second.float()
    finite = first.isfinite()
    if not bool((finite == second.isfinite()).all()):
        return False
    if not bool(finite.any()):
        return True
    differences = (first - second)[finite]
    scale = float(first[finite].std(correction=0))
    if fine:
        return float(differences.abs().max()) <= _FINE_ROUNDING * scale + _SMALLEST
    return float(differences.square().mean().sqrt()) <= _COARSE_ROUNDING * scale + _SMALLEST
