"""Neurons scaled: while a block lasts, or for good in the weights; 0 switches them off."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from netweight.core.names import Units
from netweight.errors import Unsupported, UsageError
from netweight.methods.forget.layers import ValueLayer, check_units, value_layers
from netweight.nn.hooks import edit_outputs


@contextmanager
def deactivated(denoiser: nn.Module, units: Units, *, factor: float = 0.0) -> Iterator[None]:
    """Scale neurons while a block lasts; the weights stay as they are.

    Source: arXiv 2406.02366, section 3: neurons are set to 0.
    """
    layers = value_layers(denoiser, scope="all")
    check_units(layers, units)
    with edit_outputs(
        denoiser, {name: _scaling(layers[name].width, indices, factor) for name, indices in units.items()}
    ):
        yield


@torch.no_grad()
def scale_rows_(denoiser: nn.Module, units: Units, *, factor: float = 0.0) -> dict[str, Tensor]:
    """Scale neurons for good: their rows of the weights, and their biases."""
    layers = _editable(denoiser, units)
    removed: dict[str, Tensor] = {}
    for name, indices in units.items():
        for part, parameter in layers[name].linear.named_parameters(recurse=False):
            rows = parameter.data[indices.to(parameter.device)]
            removed[f"{name}.{part}"] = rows.cpu().clone()
            # Not a product with 0, which would keep the sign of zero and leave NaN and infinities.
            parameter.data[indices.to(parameter.device)] = torch.zeros_like(rows) if factor == 0 else rows * factor
    return removed


@torch.no_grad()
def restore_rows_(denoiser: nn.Module, units: Units, removed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Put rows back, bit for bit; return those that were there."""
    layers = _editable(denoiser, units)
    places = [
        (parameter, indices, f"{name}.{part}")
        for name, indices in units.items()
        for part, parameter in layers[name].linear.named_parameters(recurse=False)
    ]
    for parameter, indices, key in places:
        rows = removed.get(key)
        if rows is None or rows.shape != parameter.data[indices].shape or rows.dtype != parameter.dtype:
            raise UsageError(
                f"The rows of {key} do not fit: the model's are {str(parameter.dtype).removeprefix('torch.')}.",
                cure="Restore the model that was edited, in the dtype it was edited in.",
            )
    current = scale_rows_(denoiser, units, factor=1.0)
    for parameter, indices, key in places:
        parameter.data[indices.to(parameter.device)] = removed[key].to(parameter.device)
    return current


def _editable(denoiser: nn.Module, units: Units) -> dict[str, ValueLayer]:
    layers = value_layers(denoiser, scope="all")
    check_units(layers, units)
    adapted = [name for name in units.modules if layers[name].adapted]
    if adapted:
        raise Unsupported(
            f"An adapter is active in {adapted[0]!r}, and scaling the weights would not scale the adapter.",
            cure="Merge it first: pipeline.fuse_lora(), then pipeline.unload_lora_weights().",
        )
    return layers


def _scaling(width: int, indices: Tensor, factor: float) -> Callable[[Tensor], Tensor]:
    def scale(values: Tensor) -> Tensor:
        factors = torch.ones(width, device=values.device, dtype=values.dtype)
        factors[indices.to(values.device)] = factor
        return values * factors

    return scale
