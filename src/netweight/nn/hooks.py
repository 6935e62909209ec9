"""What modules put out while a model runs, by the model's own names. Defenses and depth reports call it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.core.names import Select, nearest_names
from netweight.errors import NameNotFound, Unsupported, UsageError


@final
class Captured(Mapping[str, Tensor]):
    """Outputs by module name, each that of the module's latest run; filled while the block of `capture` lasts.

    Reading the output of a module that has not run raises a `UsageError`.

    Args:
        names: Full names of the modules that are watched.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._outputs: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """Return a module's latest output.

        Raises:
            NameNotFound: The module is not watched.
            UsageError: It has not run.
        """
        if name not in self._names:
            raise NameNotFound(f"Module {name!r} is not watched.", cure=f"Watched are {', '.join(self._names)}.")
        if name not in self._outputs:
            raise UsageError(f"Module {name!r} has not run.", cure="Call the model inside the block of capture.")
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        """Yield the names of all watched modules, in the model's order."""
        return iter(self._names)

    def __len__(self) -> int:
        """Count the watched modules."""
        return len(self._names)

    def put(self, name: str, output: Tensor) -> None:
        """Take in an output; for hooks.

        Args:
            name: The module's full name.
            output: What it put out, any shape and dtype.
        """
        self._outputs[name] = output


def first_tensor(name: str, output: Any) -> Tensor:
    """The tensor that a module put out, or the first of several.

    Args:
        name: The module's full name, for messages.
        output: What it put out.

    Raises:
        Unsupported: It put out something else.
    """
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise Unsupported(
            f"Module {name!r} puts out a {type(first).__name__}, not a tensor.", cure="Choose a module inside it."
        )
    return first


def in_backward() -> bool:
    """Tell whether a backward pass is under way, so that a module that runs now is only being recomputed.

    Returns:
        True during a backward pass of this thread.
    """
    return torch._C._current_graph_task_id() != -1


@contextmanager
def capture(model: nn.Module, choice: Select | str | Iterable[str], *, gradients: bool = False) -> Iterator[Captured]:
    """Watch what modules put out.

        with capture(model, "**.mlp") as outputs:
            model(...)

    Activation checkpointing may be on if it is non-reentrant; what is recomputed during a backward pass is not taken.

    Args:
        model: Any module.
        choice: Modules by the grammar of `Select`.
        gradients: Keep the outputs in the graph, so that a loss can be taken of them; else they are detached.

    Yields:
        Outputs by name; of a module with several the first. They may be read after the block too, when no hook is left.

    Raises:
        NameNotFound: A pattern matches no module.
        Unsupported: A module puts out no tensor; or `gradients` are wanted and the module runs inside a reentrant
            checkpoint, which computes without any.
    """
    modules: dict[str, nn.Module] = Select.of(choice).modules(model)
    captured = Captured(modules)
    graph = gradients and torch.is_grad_enabled()
    handles = []
    try:
        for name, module in modules.items():
            handles.append(module.register_forward_hook(_taking(name, captured, gradients=gradients, graph=graph)))
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def _taking(name: str, captured: Captured, *, gradients: bool, graph: bool) -> Any:
    """A forward hook that takes a module's output."""

    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        if in_backward():
            return
        if graph and not torch.is_grad_enabled():
            raise Unsupported(
                f"Module {name!r} runs without gradients, as inside a reentrant checkpoint.",
                cure='Use activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False}).',
            )
        value = first_tensor(name, output)
        captured.put(name, value if gradients else value.detach())

    return hook


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


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put all modules into training or evaluation mode, and back into the mode that each was in."""
    modes = {module: module.training for module in model.modules()}
    model.train(training)
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate a model without dropout and gradients, and leave every part of it in the mode it was in."""
    with in_mode(model, training=False), torch.no_grad():
        yield
