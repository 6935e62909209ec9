"""Reading and changing what modules put out while a model runs, by the model's own names. No hook outlives its block.

with capture(model, "**.attn2.to_v", reduce="mean:tokens") as outputs: ...
with intervene(model, scale(units, 0.0)): ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from netweight.core.names import Select, Units, not_found
from netweight.errors import NameNotFound, Unsupported, UsageError

Edit = Callable[[Tensor], Tensor]


@contextmanager
def capture(
    model: nn.Module,
    choice: Select | str | Iterable[str],
    *,
    reduce: Literal["mean:tokens"] | Edit | None = None,
    gradients: bool = False,
) -> Iterator[Captures]:
    """Record the outputs of modules.

        with capture(model, "**.mlp") as outputs:
            model(...)

    Activation checkpointing may be on if it is non-reentrant; what is recomputed during a backward pass is not taken.

    Args:
        model: Any module.
        choice: Modules by the grammar of `Select`.
        reduce: What to keep of each output: "mean:tokens" is the mean over the last dimension but one; None for all.
        gradients: Keep the outputs in the graph, so that a loss can be taken of them; else they are detached.

    Yields:
        Outputs by name; of a module with several the first. They may be read after the block too, when no hook is left.

    Raises:
        NameNotFound: A pattern matches no module.
        Unsupported: A module puts out no tensor; or `gradients` are wanted and the module runs inside a reentrant
            checkpoint, which computes without any.
    """
    modules: dict[str, nn.Module] = Select.of(choice).modules(model)
    captured = Captures(modules)
    reduction = (lambda output: output.mean(-2)) if reduce == "mean:tokens" else reduce
    graph = gradients and torch.is_grad_enabled()

    def taking(name: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            # A backward pass is computing the module again.
            if torch._C._current_graph_task_id() != -1:
                return
            if graph and not torch.is_grad_enabled():
                raise Unsupported(
                    f"Module {name!r} runs without gradients, as inside a reentrant checkpoint.",
                    cure='Use activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": '
                    "False}).",
                )
            value = _first_tensor(name, output)
            value = value if reduction is None else reduction(value)
            captured._outputs[name] = value if gradients else value.detach()

        return hook

    with hooked((module, taking(name)) for name, module in modules.items()):
        yield captured


@contextmanager
def intervene(model: nn.Module, *edits: Mapping[str, Edit]) -> Iterator[None]:
    """Change the outputs of modules within a block; the weights do not change.

        with intervene(model, scale(units, 0.0)):
            model(...)

    Args:
        model: Any module.
        edits: Module name → function of the module's output, or of the first of several; `scale` makes such. Where
            several change one module, the first comes first.

    Raises:
        NameNotFound: The model has no such module; the nearest names are in the message.
        Unsupported: A module puts out no tensor.
    """
    with ExitStack() as stack:
        for each in edits:
            stack.enter_context(edit_outputs(model, each))
        yield


def scale(units: Units, factor: float, *, dim: int = -1) -> dict[str, Edit]:
    """Return the edit that multiplies neurons, for `intervene`.

    Args:
        units: Neurons by module name.
        factor: What they are multiplied with; 0 switches them off.
        dim: Dimension of the outputs that counts neurons: the last of a linear layer, 1 of a convolution.

    Raises:
        UsageError: When the model runs: a module has fewer neurons than the set says.
    """
    return {name: _scaling(name, indices, factor, dim) for name, indices in units.items()}


def _scaling(name: str, indices: Tensor, factor: float, dim: int) -> Edit:
    def edit(output: Tensor) -> Tensor:
        width = output.shape[dim]
        if int(indices.max()) >= width:
            raise UsageError(
                f"Module {name!r} has {width} neurons, and the set contains number {int(indices.max())}.",
                cure="Use a set of this model, or another dim.",
            )
        factors = torch.ones(width, dtype=output.dtype, device=output.device)
        factors[indices.to(output.device)] = factor
        return output * factors.view([-1 if at == dim % output.ndim else 1 for at in range(output.ndim)])

    return edit


@contextmanager
def edit_outputs(model: nn.Module, edits: Mapping[str, Edit]) -> Iterator[None]:
    """Change what modules put out, one function each; the mechanism of `intervene`."""
    # A module that activation checkpointing recomputes is edited again, so the backward pass must happen inside the
    # block where checkpointing is on.
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in edits:
        if name not in modules:
            raise not_found(f"There is no module {name!r}.", name, modules)

    def editing(name: str, edit: Edit) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> Any:
            changed = edit(_first_tensor(name, output))
            return type(output)((changed, *output[1:])) if isinstance(output, tuple | list) else changed

        return hook

    with hooked((modules[name], editing(name, edit)) for name, edit in edits.items()):
        yield


@final
class Captures(Mapping[str, Tensor]):
    """Outputs by module name, each that of the module's latest run; filled while the block of `capture` lasts."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._outputs: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        """A module's latest output."""
        if name not in self._names:
            raise NameNotFound(
                f"Module {name!r} is not watched.", cure=f"The watched modules are {', '.join(self._names)}."
            )
        if name not in self._outputs:
            raise UsageError(f"Module {name!r} has not run.", cure="Call the model inside the block of capture.")
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        """Names of all watched modules, in the model's order."""
        return iter(self._names)

    def __len__(self) -> int:
        """Number of watched modules."""
        return len(self._names)


@contextmanager
def hooked(hooks: Iterable[tuple[nn.Module, Any]]) -> Iterator[None]:
    """Register forward hooks for a block."""
    with ExitStack() as stack:
        for module, hook in hooks:
            stack.callback(module.register_forward_hook(hook).remove)
        yield


def _first_tensor(name: str, output: Any) -> Tensor:
    """The tensor that a module put out, or the first of several."""
    first = output[0] if isinstance(output, tuple | list) and output else output
    if not isinstance(first, Tensor):
        raise Unsupported(
            f"Module {name!r} returns a {type(first).__name__}, not a tensor.", cure="Choose a module inside it."
        )
    return first


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
