"""Check that a device that a person names exists, before a model is moved to it."""

from __future__ import annotations

from netweight.errors import UsageError


def check_device(device: str) -> None:
    """Refuse a device that torch does not know or cannot use.

    Args:
        device: Name of a device, such as cpu, cuda or cuda:1.

    Raises:
        UsageError: No tensor can be made there.
    """
    import torch

    try:
        if torch.empty(1, device=device).is_meta:
            raise NotImplementedError("its tensors have no values")
    except (RuntimeError, AssertionError, NotImplementedError, TypeError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(".")
        raise UsageError(
            f"The device {device!r} cannot be used: {reason}.", cure="Give --device cpu, or install torch for this one."
        ) from error
