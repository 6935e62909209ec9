"""Changing what modules put out while a model runs. Defenses that perturb representations call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound
from netweight.probe.capture import first_tensor

__all__ = ["edit_outputs"]


@contextmanager
def edit_outputs(model: nn.Module, edits: Mapping[str, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Change what modules put out.

        with edit_outputs(model, {"layers.3": lambda states: states + noise}):
            model(...)

    A module that activation checkpointing recomputes is edited again, so the backward pass must happen inside the
    block where checkpointing is on.

    Args:
        model: Any module.
        edits: For each module, by its full name, what its output (the first, of several) becomes.

    Raises:
        NameNotFound: There is no module of that name.
        Unsupported: A module puts out no tensor.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in edits:
        if name not in modules:
            near = ", ".join(map(repr, nearest_names(name, modules)))
            raise NameNotFound(f"There is no module {name!r}.", cure=f"The nearest are {near}.")
    handles = []
    try:
        for name, edit in edits.items():
            handles.append(modules[name].register_forward_hook(_editing(name, edit)))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _editing(name: str, edit: Callable[[Tensor], Tensor]) -> Any:
    """A forward hook that changes a module's output."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
        changed = edit(first_tensor(name, output))
        if isinstance(output, tuple | list):
            return type(output)((changed, *output[1:]))
        return changed

    return hook
