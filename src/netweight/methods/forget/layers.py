"""The layers whose outputs are neurons: values of cross-attention, found by structure, and what they are fed.

A neuron is an output of `attn2.to_v`: a number per text token that the text alone decides. Nothing here knows a model
library; whatever names its parts as diffusers does will do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from torch import Tensor, nn

from netweight.core.names import nearest_names
from netweight.core.units import Units
from netweight.errors import NameNotFound, Unsupported, UsageError
from netweight.nn.text_to_image import Text

Scope = Literal["down+mid", "all"]

_STAGES = ("down_blocks", "mid_block", "up_blocks")


@final
@dataclass(frozen=True)
class ValueLayer:
    """A value layer of cross-attention."""

    name: str  # in the denoiser, ending in `attn2.to_v`
    attention: Any  # the module that it belongs to
    module: nn.Module  # the layer; with an adapter, what wraps it
    width: int  # how many neurons it has
    adapted: bool  # whether an adapter such as LoRA is at work in it

    @property
    def linear(self) -> nn.Linear:
        """The layer without its adapter."""
        base: Any = self.module.base_layer if self.adapted else self.module
        assert isinstance(base, nn.Linear)
        return base


def value_layers(denoiser: nn.Module, *, scope: Scope = "down+mid") -> dict[str, ValueLayer]:
    """Find the value layers of a denoiser's cross-attention."""
    # Source: Hintersdorf et al. 2024 (arXiv 2406.02366), section 3: value layers of the down and middle blocks.
    if scope not in ("down+mid", "all"):
        raise UsageError(f"The scope {scope!r} is unknown.", cure='Use "down+mid" or "all".')
    found = {
        f"{name}.to_v": _layer(name, module)
        for name, module in denoiser.named_modules()
        if name.rpartition(".")[2] == "attn2" and isinstance(getattr(module, "to_v", None), nn.Module)
    }
    everywhere = len(found)
    if scope == "down+mid":
        found = {name: layer for name, layer in found.items() if _stage(name) != _STAGES.index("up_blocks")}
    if everywhere and not found:
        raise Unsupported(
            f"The {type(denoiser).__name__} attends to text on the way up only.", cure='Look there: scope="all".'
        )
    if not found:
        raise Unsupported(
            f"The {type(denoiser).__name__} has no cross-attention: there is no module attn2.to_v in it.",
            cure="Forgetting needs a model that attends to text in such layers, as Stable Diffusion 1 and 2 do.",
        )
    return dict(sorted(found.items(), key=lambda item: _stage(item[0])))  # stable: the order within a stage stays


def text_values(
    denoiser: nn.Module, layers: Mapping[str, ValueLayer], text: Text, *, keys: bool = False
) -> dict[str, Tensor]:
    """Compute what value layers put out for prompts, from the text alone: the denoiser is not run."""
    weight = next(iter(layers.values())).linear.weight
    states = text.states.to(device=weight.device, dtype=weight.dtype)
    projection = getattr(denoiser, "caption_projection", None)
    if isinstance(projection, nn.Module):
        states = projection(states)
    values = {}
    for name, layer in layers.items():
        normed = getattr(layer.attention, "norm_cross", None) is not None
        module = layer.attention.to_k if keys else layer.module
        # Not through the call, so that hooks of deactivated neurons do not act twice where the values are used again.
        values[name] = module.forward(layer.attention.norm_encoder_hidden_states(states) if normed else states)
    return values


def check_units(layers: Mapping[str, ValueLayer], units: Units) -> None:
    """Check that neurons are of these layers."""
    for name, indices in units.items():
        if name not in layers:
            near = ", ".join(map(repr, nearest_names(name, layers)))
            raise NameNotFound(f"{name!r} is no value layer of cross-attention here.", cure=f"The nearest are {near}.")
        if int(indices[-1]) >= layers[name].width:
            raise UsageError(
                f"{name!r} has {layers[name].width} neurons; there is no neuron {int(indices[-1])}.",
                cure="Were the neurons found in another model?",
            )


def _layer(name: str, attention: Any) -> ValueLayer:
    processor = type(getattr(attention, "processor", None)).__name__
    if "Fused" in processor:
        raise Unsupported(
            f"Keys and values of {name!r} are fused, so that its to_v is not at work.",
            cure="Call unfuse_qkv_projections() first.",
        )
    module = attention.to_v
    base = getattr(module, "base_layer", None)
    linear = module if base is None else base
    if not isinstance(linear, nn.Linear):
        raise Unsupported(
            f"{name}.to_v is a {type(linear).__name__}, not a linear layer.",
            cure="Load the model without quantization.",
        )
    return ValueLayer(f"{name}.to_v", attention, module, linear.out_features, base is not None)


def _stage(name: str) -> int:
    """Down, middle or up; 3 outside of a U-Net."""
    first = name.partition(".")[0]
    return _STAGES.index(first) if first in _STAGES else len(_STAGES)
