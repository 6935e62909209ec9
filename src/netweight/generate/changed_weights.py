"""A live model whose linear layers have changed weights, other ones for each group of rows in the batch.

with changed(unet, {"mid.to_q": delta}, each=4):   # delta (b, rows, columns): row i of the batch takes delta[i // 4]
    unet(...)                                      # gradients flow to delta; the model's own weights stay as they are
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, Unsupported, UsageError

__all__ = ["changed"]


@contextmanager
def changed(
    model: nn.Module, changes: Mapping[str, Tensor], *, each: int = 1, active: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Add changes to what linear layers compute, for a block; no hook outlives it.

    Args:
        model: The model.
        changes: Module name → ΔW, shape `(rows, columns)` for a whole batch, or `(b, rows, columns)` for b groups.
        each: Rows of the batch in a group. Batches of a multiple of `b * each` rows are that many copies, one after the
            other, as guidance without and with text makes them.
        active: Asked whenever a layer runs: False leaves it as it is.

    Raises:
        NameNotFound: The model has no module of a name.
        Unsupported: A module is not linear.
        UsageError: A change has another shape than the module's weight; later, in the block: a batch has another number
            of rows.
    """
    modules = dict(model.named_modules())
    with ExitStack() as hooks:
        for name, change in changes.items():
            module = _linear(modules, name, change)
            handle = module.register_forward_hook(_added(name, change, each, active))
            hooks.callback(handle.remove)
        yield


def _added(name: str, change: Tensor, each: int, active: Callable[[], bool]) -> Callable[..., Any]:
    def add(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        if not active():
            return None
        entered: Tensor = arguments[0]
        ours = change.to(device=entered.device, dtype=entered.dtype)
        if ours.ndim == 2:
            return output + F.linear(entered, ours)
        groups = len(ours) * each
        if len(entered) % groups:
            raise UsageError(
                f"A batch of {len(entered)} rows meets {len(ours)} changes of {name} for {each} rows each.",
                cure=f"Give a multiple of {groups} rows.",
            )
        grouped = entered.reshape(-1, len(ours), each, *entered.shape[1:]).transpose(0, 1)
        added = grouped.reshape(len(ours), -1, entered.shape[-1]) @ ours.transpose(1, 2)
        added = added.reshape(*grouped.shape[:-1], -1).transpose(0, 1)
        return output + added.reshape(output.shape)

    return add


def _linear(modules: Mapping[str, nn.Module], name: str, change: Tensor) -> nn.Module:
    if name not in modules:
        near = ", ".join(map(repr, nearest_names(name, modules)))
        raise NameNotFound(f"The model has no module {name!r} to change.", cure=f"The nearest are {near}.")
    module = modules[name]
    if not isinstance(module, nn.Linear):
        raise Unsupported(f"{name} is a {type(module).__name__}.", cure="Only linear layers can be changed here.")
    if change.ndim not in (2, 3) or change.shape[-2:] != module.weight.shape:
        raise UsageError(
            f"The change of {name} has shape {tuple(change.shape)}, its weight {tuple(module.weight.shape)}.",
            cure="Is the space of another base model?",
        )
    return module
