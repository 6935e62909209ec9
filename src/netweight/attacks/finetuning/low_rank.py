"""Low-rank factors on a model's linear layers: an adversary who tunes few weights. No adapter is stored here.

Works on `nn.Linear` and on anything shaped like transformers' `Conv1D`, whose weight is transposed.
"""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.core.seeds import torch_generator
from netweight.errors import Unsupported, UsageError

__all__ = ["Factors", "attach_factors_", "merge_factors_"]

_NAME = "low_rank_factors"


@final
class Factors(nn.Module):
    """What is added to a linear layer: `scale · B (A x)`, in float32.

    Args:
        inputs: Width of the layer's input.
        outputs: Width of its output.
        rank: At least 1.
        generator: Where `down` is drawn from.

    Attributes:
        down: A, shape `(rank, inputs)`.
        up: B, shape `(outputs, rank)`; zeros at first, so that the model starts unchanged.
        scale: The paper's α / rank.
    """

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        self.down = nn.Parameter(torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator))
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.scale = scale

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the addition for inputs of shape `(..., inputs)`, in their dtype."""
        added = (inputs.to(self.down.dtype) @ self.down.T) @ self.up.T
        return (self.scale * added).to(inputs.dtype)

    def dense(self) -> Tensor:
        """Return the change of the weight, shape `(outputs, inputs)`."""
        return self.scale * (self.up @ self.down)


def attach_factors_(model: nn.Module, *, rank: int, alpha: float | None = None, seed: int) -> list[nn.Parameter]:
    """Freeze a model and put trainable factors on its linear layers.

    The output head is left alone, as is usual: the layer that `get_output_embeddings` returns, where a model has that
    method, and every layer that shares its weight with an embedding.

    Args:
        model: Changed in place.
        rank: Rank of the factors.
        alpha: The strength α of the addition; twice the rank by default.
        seed: Of the factors' start.

    Returns:
        The factors' parameters: the only ones that are still trainable.

    Raises:
        UsageError: The model has factors already.
        Unsupported: The model has no such layer.

    Source: Hu et al., LoRA, arXiv 2106.09685, section 4.1.
    """
    model.requires_grad_(False)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    layers = {name: layer for name, layer in model.named_modules() if _is_linear(layer)}
    head = _head(model)
    shared = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    chosen = {name: layer for name, layer in layers.items() if layer is not head and id(layer.weight) not in shared}
    if not chosen:
        raise Unsupported("The model has no linear layer to put low-rank factors on.", cure="Attack all its weights.")
    parameters: list[nn.Parameter] = []
    for name, layer in chosen.items():
        if hasattr(layer, _NAME):
            raise UsageError(f"Layer {name!r} has low-rank factors already.", cure="Merge them first.")
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        scale = (2 * rank if alpha is None else alpha) / rank
        factors = Factors(inputs, outputs, rank, scale, torch_generator(seed, "factors", name)).to(device)
        layer.add_module(_NAME, factors)
        layer.register_forward_hook(_add)
        parameters += [factors.down, factors.up]
    return parameters


def merge_factors_(model: nn.Module) -> None:
    """Add every layer's factors to its weight and take them away.

    Args:
        model: With factors; changed in place.
    """
    for layer in [layer for layer in model.modules() if hasattr(layer, _NAME)]:
        weight = layer.weight
        factors = layer.get_submodule(_NAME)
        assert isinstance(factors, Factors)
        assert isinstance(weight, Tensor)
        change = factors.dense()
        with torch.no_grad():
            weight.add_((change if isinstance(layer, nn.Linear) else change.T).to(weight.dtype))
        delattr(layer, _NAME)
        for key in [key for key, hook in layer._forward_hooks.items() if hook is _add]:
            del layer._forward_hooks[key]


def _add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    added: Tensor = layer.get_submodule(_NAME)(inputs[0])
    return output + added


def _is_linear(layer: nn.Module) -> bool:
    """Whether the layer multiplies by one matrix: `nn.Linear`, or known by transformers' `Conv1D`'s attributes."""
    if isinstance(layer, nn.Linear):
        return True
    weight = getattr(layer, "weight", None)
    return type(layer).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2 and hasattr(layer, "nf")


def _head(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None
