"""The parts of a decoder, found by what they are and not by what they are called.

Defenses and attacks that look inside a language model find their way by `structure_of`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

from torch import Tensor, nn

from netweight.errors import Unsupported, UsageError

_CURE = (
    "Needed is a decoder with one list of blocks, each with attention and a feed-forward layer, then a norm and a "
    "linear layer to the vocabulary, such as a causal language model of transformers."
)
_MOST_INPUTS = 2  # a feed-forward layer takes the hidden state, at most the residual too; attention takes far more


@final
@dataclass(frozen=True)
class Structure:
    """A decoder's parts by the names that they have in the model that was searched."""

    blocks: Mapping[str, nn.Module]  # the stack of decoder blocks, first to last
    # For each block the module whose output is that of the feed-forward layer, before the residual.
    feed_forwards: Mapping[str, nn.Module]
    norm: nn.Module  # what normalizes the last block's output
    norm_name: str
    unembedding: nn.Module  # what turns a normalized state into logits
    unembedding_name: str
    hidden_size: int  # width of the residual stream
    vocabulary: int  # how many logits there are


def structure_of(model: nn.Module) -> Structure:
    """Find a decoder's parts."""
    if any(getattr(getattr(module, "config", None), "is_encoder_decoder", False) for module in model.modules()):
        raise Unsupported(f"{type(model).__name__} has an encoder beside its decoder.", cure=_CURE)
    names = {id(module): name for name, module in model.named_modules()}
    unembedding = _unembedding(model)
    vocabulary, hidden = _matrix(unembedding).shape
    path, feed_forwards = _stack(model, hidden)
    stack = model.get_submodule(path)
    norm = _final_norm(model, path, hidden)
    return Structure(
        blocks={f"{path}.{name}": block for name, block in stack.named_children()},
        feed_forwards={name: model.get_submodule(name) for name in feed_forwards},
        norm=norm,
        norm_name=names[id(norm)],
        unembedding=unembedding,
        unembedding_name=names[id(unembedding)],
        hidden_size=hidden,
        vocabulary=vocabulary,
    )


def _matrix(module: nn.Module) -> Tensor:
    weight: Any = module.weight
    tensor: Tensor = weight
    return tensor


def _unembedding(model: nn.Module) -> nn.Module:
    """The layer to the vocabulary: what the model says it is, else the last layer shaped like an embedding."""
    for module in model.modules():
        accessor = getattr(module, "get_output_embeddings", None)
        found = accessor() if callable(accessor) else None
        if isinstance(found, nn.Module) and isinstance(getattr(found, "weight", None), Tensor):
            return found
    shapes = {module.weight.shape for module in model.modules() if isinstance(module, nn.Embedding)}
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module.weight.shape in shapes]
    if not layers:
        raise Unsupported(f"{type(model).__name__} has no layer to its vocabulary.", cure=_CURE)
    return layers[-1]


def _stack(model: nn.Module, hidden: int) -> tuple[str, list[str]]:
    """The name of the list of blocks and the names of their feed-forward layers: of several lists the largest."""
    found: list[tuple[int, str, list[str]]] = []
    lists = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    for path, blocks in lists:
        layers = [_feed_forward(block, hidden) for block in blocks]
        if layers and None not in layers:
            size = sum(parameter.numel() for parameter in blocks.parameters())
            found.append((size, path, [f"{path}.{index}.{layer}" for index, layer in enumerate(layers)]))
    if not found:
        tried = ", ".join(repr(path) for path, _ in lists) or "none"
        raise Unsupported(
            f"{type(model).__name__} has no list of decoder blocks with feed-forward layers of width {hidden} "
            f"(lists of modules: {tried}).",
            cure=_CURE,
        )
    _, path, layers_found = max(found, key=lambda entry: entry[0])
    return path, layers_found


def _shapes(module: nn.Module) -> set[tuple[int, int]]:
    """The shapes of a module's matrices; of stacked ones, such as merged experts, those of one."""
    return {tuple(weight.shape[-2:]) for weight in module.parameters() if weight.dim() >= 2}  # type: ignore[misc]


def _widens_and_narrows(shapes: set[tuple[int, int]], hidden: int) -> bool:
    """Whether matrices lead out of the hidden width and back; gate and way out may be one matrix, twice as wide."""
    out = {wide for first, wide in shapes if first == hidden}
    back = {wide for wide, last in shapes if last == hidden}
    return any(wide in back or 2 * wide in back or wide in {2 * narrow for narrow in back} for wide in out)


def _inputs(module: nn.Module) -> int:
    """How many named arguments a module's forward takes."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(parameter.kind not in kinds for parameter in inspect.signature(module.forward).parameters.values())


def _children(block: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """A block's parts, seen through wrappers that hold nothing but it."""
    children = list(block.named_children())
    if len(children) == 1:
        prefix, inner = children[0]
        yield from ((f"{prefix}.{name}", child) for name, child in _children(inner))
    yield from children


def _feed_forward(block: nn.Module, hidden: int) -> str | None:
    """The name within a block of the module that puts out the feed-forward layer's result, or None."""
    # That is the part that widens and narrows again and takes little but the hidden state; where the two layers stand
    # in the block by themselves, the second of them.
    parts = [(name, part, _shapes(part)) for name, part in _children(block)]
    inputs = {name: _inputs(part) for name, part, shapes in parts if _widens_and_narrows(shapes, hidden)}
    whole = [name for name, count in inputs.items() if count == min(inputs.values()) <= _MOST_INPUTS]
    if whole:
        return whole[0] if len(whole) == 1 else None
    halves = [
        name
        for name, part, shapes in parts
        if _inputs(part) == 1 and any(hidden in shape and shape[0] != shape[1] for shape in shapes)
    ]
    return halves[1] if len(halves) == 2 else None


def _final_norm(model: nn.Module, path: str, hidden: int) -> nn.Module:
    """The last part beside the stack that holds vectors of the hidden width and no matrix."""
    around = model.get_submodule(path.rpartition(".")[0])
    parts = [(name, part, [value.shape for value in part.parameters()]) for name, part in around.named_children()]
    norms = [part for _, part, shapes in parts if shapes and all(tuple(shape) == (hidden,) for shape in shapes)]
    if not norms:
        raise Unsupported(f"No norm of width {hidden} stands beside {path!r}.", cure=_CURE)
    return norms[-1]


def vocabulary_of(model: nn.Module) -> int | None:
    """How many tokens the model knows, by its input embedding; None if it has none that can be found."""
    for module in model.modules():
        accessor = getattr(module, "get_input_embeddings", None)
        found: Any = accessor() if callable(accessor) else module if isinstance(module, nn.Embedding) else None
        if getattr(found, "weight", None) is not None:
            return int(found.weight.shape[0])
    return None


_HOW = 'Write numbers from 0, ranges such as "10-20" with both ends, "last" or "head", with commas between.'


def block_numbers(layers: str, blocks: int) -> tuple[list[int], bool]:
    """Read which layers are meant."""
    # Numbers are read as numbers. The code of RepNoise looks for the digits "0" to "9" in a parameter's name where
    # layers 0 to 10 are meant, and so finds every block of a model with 32: the paper's row "0-10" of table 6 is that
    # of a model all of whose blocks were frozen, if it came from this code.
    numbers: set[int] = set()
    head = False
    for part in (text.strip() for text in layers.split(",")):
        span = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
        if part == "head":
            head = True
        elif part == "last":
            numbers.add(blocks - 1)
        elif span is None:
            raise UsageError(f"{part!r} names no layers.", cure=_HOW)
        else:
            first = int(span[1])
            last = int(span[2] or first)
            if not first <= last < blocks:
                raise UsageError(f"There are no layers {part!r}: the model has blocks 0 to {blocks - 1}.", cure=_HOW)
            numbers.update(range(first, last + 1))
    return sorted(numbers), head


@contextmanager
def frozen(model: nn.Module, layers: str) -> Iterator[list[str]]:
    """Keep layers from being trained within a block of code."""
    parts = structure_of(model)
    numbers, head = block_numbers(layers, len(parts.blocks))
    modules = [list(parts.blocks.values())[number] for number in numbers] + [parts.unembedding] * head
    chosen = {id(value) for module in modules for value in module.parameters()}
    held = {name: value for name, value in model.named_parameters() if id(value) in chosen and value.requires_grad}
    try:
        for value in held.values():
            value.requires_grad_(False)
        yield list(held)
    finally:
        for value in held.values():
            value.requires_grad_(True)
