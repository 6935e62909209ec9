"""How active value neurons usually are: means and deviations over many prompts, from their text alone.

statistics = measure_statistics(model, prompts)
statistics.write("statistics.safetensors")
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self, final

import safetensors.torch
import torch
from torch import Tensor

from netweight.core.files import whole_file
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.methods.forget.layers import Scope, ValueLayer, text_values, value_layers
from netweight.nn.text_to_image import Text, TextToImage

_VERSION = 1


@final
@dataclass(frozen=True)
class Statistics:
    """Mean and deviation of every neuron's activation over prompts."""

    means: Mapping[str, Tensor]  # for each layer, float64 of shape `(width,)`, in the order of `value_layers`
    deviations: Mapping[str, Tensor]  # the same, float64 of shape `(width,)`; unbiased
    prompts: int  # how many prompts they are of
    model: str | None  # digest of the model's denoiser; None if unknown, as in published files

    def z(self, activations: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """How many deviations activations lie from their means; 0 for a neuron that never varies and does not."""
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
                f"The statistics are of another model: theirs is {self.model}, this one {digest}.",
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
        tensors |= {f"{name}.std": found.contiguous() for name, found in self.deviations.items()}
        about = {"version": _VERSION, "prompts": self.prompts, "model": self.model, "layers": list(self.means)}
        data = safetensors.torch.save(tensors, {"netweight.statistics": json.dumps(about)})
        with whole_file(Path(path), overwrite=overwrite) as file:
            file.write(data)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read what `write` wrote."""
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
                f"{path} holds no statistics of version {_VERSION}: {error}.",
                cure="Make it with netweight forget statistics; the name of a published file must end in .pt.",
            ) from None
        return cls(means, deviations, about["prompts"], about["model"])

    @classmethod
    def read_published(cls, path: str | Path, layers: Mapping[str, ValueLayer], *, prompts: int = 50_000) -> Self:
        """Read the file format of the paper's code: a pair of lists, means and deviations layer by layer."""
        # No pickle is executed: `torch.load` takes tensors, lists and tuples only.
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            means, deviations = ([value.double() for value in part] for part in loaded)
        except FileNotFoundError:
            raise UsageError(f"There is no file {path}.") from None
        except Exception as error:
            raise Unsupported(
                f"{path} holds no pair of lists of tensors: {error}", cure="Give statistics made by the paper's code."
            ) from error
        widths = [layer.width for layer in layers.values()]
        if [value.numel() for value in means] != widths or [value.numel() for value in deviations] != widths:
            raise UsageError(
                f"{path} is of layers of {[value.numel() for value in means]} neurons; the model's have {widths}.",
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
    """Return each neuron's activation: the mean over tokens of its absolute value."""
    # Source: arXiv 2406.02366, section 3.2.
    values = text_values(model.denoiser, layers, text)
    weights = torch.ones(text.states.shape[:2]) if text.mask is None else text.mask.double()
    found = {}
    for name, value in values.items():
        share = (weights / weights.sum(1, keepdim=True)).to(device=value.device, dtype=torch.float64)
        found[name] = torch.einsum("ntw,nt->nw", value.double().abs(), share)
    return found


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
    found: Statistics | None = None
    with progress.task("statistics", len(prompts), unit="prompts") as task:
        for start in range(0, len(prompts), batch):
            chosen = list(prompts[start : start + batch])
            part = _of(text_activations(model, layers, model.embed(chosen)))
            found = part if found is None else found.merged(part)
            task.update(len(chosen))
    assert found is not None  # there are prompts
    return Statistics(found.means, found.deviations, found.prompts, model.digest())


def _of(activations: Mapping[str, Tensor]) -> Statistics:
    """The statistics of a batch, of which one prompt has no deviation."""
    count = len(next(iter(activations.values())))
    means = {name: value.mean(0).cpu() for name, value in activations.items()}
    deviations = {
        name: value.std(0).cpu() if count > 1 else torch.zeros_like(means[name]) for name, value in activations.items()
    }
    return Statistics(means, deviations, count, None)
