"""Neurons and their activity: value layers of cross-attention, their outputs for prompts, and usual outputs.

    statistics = measure_statistics(model, prompts)
    statistics.write("statistics.safetensors")

A neuron is an output of `attn2.to_v`: a number per text token that the text alone decides, so the denoiser is never
run. No model library is needed; any denoiser that names its parts as diffusers does will do.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, final, get_args

import safetensors.torch
import torch
from torch import Tensor, nn

from netweight.core.atomic_writes import whole_file
from netweight.core.names import Units, not_found
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, UnsafeInput, Unsupported, UsageError
from netweight.methods.forget.settings import Scope
from netweight.nn.text_to_image import Text, TextToImage
from netweight.store.torch_archive import refuse_inflated

# Version of the files of statistics.
_VERSION = 1
_STAGES = ("down_blocks", "mid_block", "up_blocks")


@final
@dataclass(frozen=True)
class ValueLayer:
    """A value layer of cross-attention; its outputs are neurons."""

    name: str
    """Name in the denoiser, ending in `attn2.to_v`."""
    attention: Any
    """The module that it belongs to."""
    module: nn.Module
    """The layer; with an adapter, what wraps it."""
    width: int
    """Number of its neurons."""
    adapted: bool
    """True if an adapter such as LoRA is at work in it."""

    @property
    def linear(self) -> nn.Linear:
        """The layer without its adapter."""
        base: Any = self.module.base_layer if self.adapted else self.module
        assert isinstance(base, nn.Linear)
        return base


def value_layers(denoiser: nn.Module, *, scope: Scope = "down+mid") -> dict[str, ValueLayer]:
    """Find the value layers of a denoiser's cross-attention.

    Source: Hintersdorf et al. 2024 (arXiv 2406.02366), section 3: value layers of the down and middle blocks.
    """
    if scope not in get_args(Scope):
        raise UsageError(f"The scope {scope!r} is unknown.", cure='Use "down+mid" or "all".')
    layers = {
        f"{name}.to_v": _layer(name, module)
        for name, module in denoiser.named_modules()
        if name.rpartition(".")[2] == "attn2" and isinstance(getattr(module, "to_v", None), nn.Module)
    }
    everywhere = len(layers)
    if scope == "down+mid":
        layers = {name: layer for name, layer in layers.items() if _stage(name) != _STAGES.index("up_blocks")}
    if everywhere and not layers:
        raise Unsupported(
            f"The {type(denoiser).__name__} attends to text on the way up only.", cure='Search there: scope="all".'
        )
    if not layers and hasattr(denoiser, "context_embedder"):
        raise Unsupported(
            f"In the {type(denoiser).__name__} text and image attend to each other jointly: its values depend on the "
            "image and the timestep, so that it has no neurons of a prompt.",
            cure="Use an edit without neurons: --method closed-form or --method siss.",
        )
    if not layers:
        raise Unsupported(
            f"The {type(denoiser).__name__} has no cross-attention: there is no module attn2.to_v in it.",
            cure="Forgetting needs a model that attends to text in such layers, as Stable Diffusion 1 and 2 do.",
        )
    # The sort is stable, so the order within a stage does not change.
    return dict(sorted(layers.items(), key=lambda item: _stage(item[0])))


@final
@dataclass(frozen=True)
class TextLayer:
    """Linear layers of a denoiser that read text alone, the same input each; what `ClosedForm` edits."""

    modules: tuple[Any, ...]
    """Modules of the layer."""
    read: Callable[[Text], Tensor]
    """Returns their input for prompts, of shape `(n, tokens, width)`."""

    def inputs(self, text: Text) -> Tensor:
        """Return the input of the layers for prompts, of shape `(n, tokens, width)`."""
        return self.read(text)


def text_layers(denoiser: nn.Module) -> list[TextLayer]:
    """Find the layers through which text enters a denoiser and which read nothing else.

    These are keys and values of cross-attention; and where text and image attend to each other jointly, as in SD3 and
    Flux, the embedders of the text's tokens and of the pooled text, through which all of it enters.
    """
    embedder = getattr(denoiser, "context_embedder", None)
    if embedder is None:
        return [
            TextLayer((layer.attention.to_k, layer.module), partial(attended, denoiser, layer))
            for layer in value_layers(denoiser, scope="all").values()
        ]
    pooled: Any = denoiser.get_submodule("time_text_embed.text_embedder.linear_1")
    return [
        TextLayer((embedder,), lambda text: text.states.to(embedder.weight)),
        TextLayer((pooled,), lambda text: _pooled(text)[:, None].to(pooled.weight)),
    ]


def _pooled(text: Text) -> Tensor:
    if text.pooled is None:
        raise UsageError("The prompts were embedded without the pooled text that this denoiser takes.")
    return text.pooled


def attended(denoiser: nn.Module, layer: ValueLayer, text: Text) -> Tensor:
    """Return what a layer's keys and values are made of, for prompts: shape `(n, tokens, width)`."""
    weight = layer.linear.weight
    states = text.states.to(device=weight.device, dtype=weight.dtype)
    projection = getattr(denoiser, "caption_projection", None)
    if isinstance(projection, nn.Module):
        states = projection(states)
    normed = getattr(layer.attention, "norm_cross", None) is not None
    inputs: Tensor = layer.attention.norm_encoder_hidden_states(states) if normed else states
    return inputs


def text_values(
    denoiser: nn.Module, layers: Mapping[str, ValueLayer], text: Text, *, keys: bool = False
) -> dict[str, Tensor]:
    """Compute outputs of value layers for prompts, from the text alone: the denoiser is not run."""
    # Not through the call, so that hooks of deactivated neurons do not act twice where the values are used again.
    return {
        name: (layer.attention.to_k if keys else layer.module).forward(attended(denoiser, layer, text))
        for name, layer in layers.items()
    }


def check_units(layers: Mapping[str, ValueLayer], units: Units) -> None:
    """Check that neurons are of these layers."""
    for name, indices in units.items():
        if name not in layers:
            raise not_found(f"{name!r} is not a value layer of cross-attention here.", name, layers)
        if int(indices[-1]) >= layers[name].width:
            raise UsageError(
                f"{name!r} has {layers[name].width} neurons; there is no neuron {int(indices[-1])}.",
                cure="Give neurons that were found in this model.",
            )


def _layer(name: str, attention: Any) -> ValueLayer:
    processor = type(getattr(attention, "processor", None)).__name__
    if "Fused" in processor:
        raise Unsupported(
            f"Keys and values of {name!r} are fused, so that its to_v is not used.",
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


@final
@dataclass(frozen=True)
class Statistics:
    """Mean and deviation of every neuron's activation over prompts."""

    means: Mapping[str, Tensor]
    """Mean activations of each layer, float64 of shape `(width,)`, in the order of `value_layers`."""
    deviations: Mapping[str, Tensor]
    """Standard deviations, float64 of shape `(width,)`; unbiased."""
    prompts: int
    """Number of prompts that they are of."""
    model: str | None
    """Digest of the model's denoiser; None if unknown, as in published files."""

    def z(self, activations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the deviations of activations from their means, in standard deviations; 0 for a constant neuron."""
        tiny = torch.finfo(torch.float64).tiny
        return {
            name: (values.double() - self.means[name].to(values.device)).abs()
            / self.deviations[name].to(values.device).clamp_min(tiny)
            for name, values in activations.items()
        }

    def merged(self, other: Statistics) -> Statistics:
        """Join the statistics of two sets of prompts of one model; the result is that of both together."""
        if self.means.keys() != other.means.keys() or self.model != other.model:
            raise UsageError("Statistics of different models or layers cannot be joined.")
        count, more = self.prompts, other.prompts
        means, deviations = {}, {}
        for name, mean in self.means.items():
            shift = other.means[name] - mean
            squares = self.deviations[name] ** 2 * (count - 1) + other.deviations[name] ** 2 * (more - 1)
            squares = squares + shift**2 * (count * more / (count + more))
            means[name] = mean + shift * (more / (count + more))
            deviations[name] = (squares / (count + more - 1)).sqrt()
        return Statistics(means, deviations, count + more, self.model)

    def check(self, layers: Mapping[str, ValueLayer], digest: str) -> None:
        """Check that these are statistics of a model."""
        if self.model is not None and self.model != digest:
            raise UsageError(
                f"The statistics were measured on another model: on {self.model}, not on {digest}.",
                cure="Measure them on this model: netweight forget statistics.",
            )
        wrong = [name for name, layer in layers.items() if self.means.get(name, torch.empty(0)).numel() != layer.width]
        if wrong:
            raise UsageError(
                f"The statistics do not fit the layer {wrong[0]!r} of {layers[wrong[0]].width} neurons.",
                cure="Measure them on this model, with the same scope.",
            )

    def write(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write a safetensors file: `{layer}.mean` and `{layer}.std`, number and digest in the metadata."""
        tensors = {f"{name}.mean": mean.contiguous() for name, mean in self.means.items()}
        tensors |= {f"{name}.std": deviation.contiguous() for name, deviation in self.deviations.items()}
        about = {"version": _VERSION, "prompts": self.prompts, "model": self.model, "layers": list(self.means)}
        data = safetensors.torch.save(tensors, {"netweight.statistics": json.dumps(about)})
        with whole_file(Path(path), overwrite=overwrite) as file:
            file.write(data)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a file of `write`."""
        path = Path(path)
        if not path.is_file():
            raise UsageError(f"There is no file {path}.", cure="Make it with netweight forget statistics.")
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                about = json.loads(file.metadata()["netweight.statistics"])
                if about["version"] != _VERSION:
                    raise ValueError(f"version {about['version']}")
                means = {name: file.get_tensor(f"{name}.mean") for name in about["layers"]}
                deviations = {name: file.get_tensor(f"{name}.std") for name in about["layers"]}
        except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
            raise CorruptBlob(
                f"{path} contains no statistics of version {_VERSION}: {error}.",
                cure="Make it with netweight forget statistics; the name of a published file must end in .pt.",
            ) from None
        return cls(means, deviations, about["prompts"], about["model"])

    @classmethod
    def read_published(cls, path: str | Path, layers: Mapping[str, ValueLayer], *, prompts: int = 50_000) -> Self:
        """Read the file format of the paper's code: a pair of lists, means and deviations layer by layer."""
        # No pickle is executed: `torch.load` takes tensors, lists and tuples only.
        try:
            refuse_inflated(path)
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            means, deviations = ([value.double() for value in part] for part in loaded)
        except FileNotFoundError:
            raise UsageError(f"There is no file {path}.") from None
        except UnsafeInput:
            raise
        except Exception as error:
            raise Unsupported(
                f"{path} contains no pair of lists of tensors: {error}",
                cure="Give statistics made by the paper's code.",
            ) from error
        widths = [layer.width for layer in layers.values()]
        if [value.numel() for value in means] != widths or [value.numel() for value in deviations] != widths:
            raise UsageError(
                f"{path} is about layers of {[value.numel() for value in means]} neurons; the model's layers have "
                f"{widths}.",
                cure="Use statistics of this model and scope.",
            )
        return cls(dict(zip(layers, means, strict=True)), dict(zip(layers, deviations, strict=True)), prompts, None)

    def write_published(self, path: str | Path, *, overwrite: bool = False) -> None:
        """Write the file format of the paper's code, float32; number of prompts and digest are lost."""
        pair = tuple([value.float() for value in part.values()] for part in (self.means, self.deviations))
        with whole_file(Path(path), overwrite=overwrite) as file:
            torch.save(pair, file)


@torch.no_grad()
def text_activations(model: TextToImage, layers: Mapping[str, ValueLayer], text: Text) -> dict[str, Tensor]:
    """Return each neuron's activation: the mean over tokens of its absolute value.

    Source: arXiv 2406.02366, section 3.2.
    """
    values = text_values(model.denoiser, layers, text)
    weights = torch.ones(text.states.shape[:2]) if text.mask is None else text.mask.double()
    activations = {}
    for name, value in values.items():
        share = (weights / weights.sum(1, keepdim=True)).to(device=value.device, dtype=torch.float64)
        activations[name] = torch.einsum("ntw,nt->nw", value.double().abs(), share)
    return activations


def changed_neurons(original: TextToImage, edited: TextToImage, neurons: Mapping[str, Units]) -> dict[str, float]:
    """Return, by prompt, the share of its neurons whose activation an edit changed by half or more."""
    shares = {}
    layers = [value_layers(model.denoiser, scope="all") for model in (original, edited)]
    for prompt, units in neurons.items():
        before, after = (
            text_activations(model, value_layers_of_model, model.embed([prompt]))
            for model, value_layers_of_model in zip((original, edited), layers, strict=True)
        )
        moved = [
            float((after[name][0, index] - before[name][0, index]).abs() / before[name][0, index].clamp_min(1e-12))
            for name, index in units
        ]
        if moved:
            shares[prompt] = sum(each >= 0.5 for each in moved) / len(moved)
    return shares


def measure_statistics(
    model: TextToImage,
    prompts: Sequence[str],
    *,
    scope: Scope = "down+mid",
    batch: int = 64,
    progress: Progress = QUIET,
) -> Statistics:
    """Measure how active neurons are over prompts; only the text encoder and the value layers are run."""
    if len(prompts) < 2:
        raise UsageError(
            f"Statistics need at least 2 prompts and got {len(prompts)}.", cure="Give many: 1,000 or more."
        )
    layers = value_layers(model.denoiser, scope=scope)
    statistics: Statistics | None = None
    with progress.task("statistics", len(prompts), unit="prompts") as task:
        for start in range(0, len(prompts), batch):
            chosen = list(prompts[start : start + batch])
            part = _statistics(text_activations(model, layers, model.embed(chosen)))
            statistics = part if statistics is None else statistics.merged(part)
            task.update(len(chosen))
    assert statistics is not None  # there are prompts
    return Statistics(statistics.means, statistics.deviations, statistics.prompts, model.identity())


def _statistics(activations: Mapping[str, Tensor]) -> Statistics:
    """The statistics of a batch; a single prompt has no deviation."""
    count = len(next(iter(activations.values())))
    means = {name: value.mean(0).cpu() for name, value in activations.items()}
    deviations = {
        name: value.std(0).cpu() if count > 1 else torch.zeros_like(means[name]) for name, value in activations.items()
    }
    return Statistics(means, deviations, count, None)
