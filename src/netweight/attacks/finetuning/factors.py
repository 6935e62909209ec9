"""Low-rank factors beside a model's linear layers, which an attack can train in place of the weights."""

from __future__ import annotations

import math
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.core.seeds import torch_generator
from netweight.errors import Unsupported, UsageError

# Name of the part that is added to a linear layer.
_FACTORS = "low_rank_factors"


@final
class Factors(nn.Module):
    """Low-rank term that is added to a linear layer: `scale · B (A x)`, in float32."""

    # `rank`: at least 1

    def __init__(self, inputs: int, outputs: int, rank: int, scale: float, generator: torch.Generator) -> None:
        super().__init__()
        bound = 1 / math.sqrt(inputs)
        # A, shape `(rank, inputs)`.
        self.down = nn.Parameter(torch.empty(rank, inputs).uniform_(-bound, bound, generator=generator))
        # B, shape `(outputs, rank)`; zeros at first, so that the model starts unchanged.
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        # This is α / rank of the paper.
        self.scale = scale

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the addition for inputs of shape `(..., inputs)`, in their dtype."""
        added = (inputs.to(self.down.dtype) @ self.down.T) @ self.up.T
        return (self.scale * added).to(inputs.dtype)


def attach_factors_(model: nn.Module, *, rank: int, alpha: float | None = None, seed: int) -> list[nn.Parameter]:
    """Freeze a model and put trainable factors on its linear layers: an adversary who tunes few weights.

    Source: Hu et al., LoRA, arXiv 2106.09685, section 4.1.
    """
    model.requires_grad_(False)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    layers = {name: layer for name, layer in model.named_modules() if _is_linear(layer)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    shared = {id(layer.weight) for layer in model.modules() if isinstance(layer, nn.Embedding)}
    chosen = {name: layer for name, layer in layers.items() if layer is not head and id(layer.weight) not in shared}
    if not chosen:
        raise Unsupported("The model has no linear layer to put low-rank factors on.", cure="Attack all its weights.")
    parameters: list[nn.Parameter] = []
    for name, layer in chosen.items():
        if hasattr(layer, _FACTORS):
            raise UsageError(f"Layer {name!r} has low-rank factors already.", cure="Merge them first.")
        outputs, inputs = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        scale = (2 * rank if alpha is None else alpha) / rank
        factors = Factors(inputs, outputs, rank, scale, torch_generator(seed, "factors", name)).to(device)
        layer.add_module(_FACTORS, factors)
        layer.register_forward_hook(_add)
        parameters += [factors.down, factors.up]
    return parameters


def _add(layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    added: Tensor = layer.get_submodule(_FACTORS)(inputs[0])
    return output + added


def _is_linear(layer: nn.Module) -> bool:
    """Return whether the layer is `nn.Linear` or transformers' `Conv1D`, whose weight is transposed."""
    if isinstance(layer, nn.Linear):
        return True
    weight = getattr(layer, "weight", None)
    return type(layer).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2 and hasattr(layer, "nf")
