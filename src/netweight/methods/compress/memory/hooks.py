"""Hooks on compressed parameters survive `module.to()`.

torch converts a dense parameter by writing to its `.data`, which keeps hooks, but a parameter of a tensor subclass by
exchanging its inside, which loses them without a word. A layer that holds compressed weights therefore gets an
`_apply` of its own that puts them back. Used by `model.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import nn

from netweight.methods.compress.memory.tensor import CompressedTensor

__all__ = ["forget_hooks", "keep_hooks"]


@final
class _Apply:
    """`module._apply` that keeps what hangs on the module's compressed parameters. Can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        module = self.module
        result: nn.Module = type(module)._apply(module, fn, recurse)  # type: ignore[no-untyped-call]
        for parameter in module._parameters.values():
            if isinstance(parameter, CompressedTensor):
                # Python still knows the hooks; setting them again tells the exchanged inside.
                after, before = parameter._post_accumulate_grad_hooks, parameter._backward_hooks
                if after is not None:
                    parameter._post_accumulate_grad_hooks = None
                    parameter._post_accumulate_grad_hooks = after
                if before is not None:
                    parameter._backward_hooks = None
                    parameter._backward_hooks = before
        return result


def keep_hooks(module: nn.Module) -> None:
    """Let a module's conversions (`to`, `half`, `cuda`, ...) keep hooks on its compressed parameters.

    Args:
        module: Holds compressed parameters.
    """
    module.__dict__["_apply"] = _Apply(module)


def forget_hooks(module: nn.Module) -> None:
    """Undo `keep_hooks` once no parameter of the module is compressed.

    Args:
        module: What `keep_hooks` was called with.
    """
    if not any(isinstance(parameter, CompressedTensor) for parameter in module._parameters.values()):
        module.__dict__.pop("_apply", None)


def hooks_of(parameter: Any) -> list[Any]:
    """The hooks that run when the parameter's gradient is ready."""
    return list((parameter._post_accumulate_grad_hooks or {}).values())
