"""What every way of keeping a model from repeating an image has in common, and the two that touch neurons.

A mitigation takes a model and the prompts that are memorized and, for a block, yields a model to generate with; after
the block the weights are what they were, to the bit. Others are in `baselines.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor, nn

from netweight.core.seeds import torch_generator
from netweight.core.units import Units
from netweight.errors import UsageError
from netweight.methods.forget.edit import deactivated
from netweight.methods.forget.layers import Scope, value_layers
from netweight.nn.text_to_image import Prediction, Text, TextToImage


class Mitigation(Protocol):
    """A way of generating that is to keep a model from repeating images."""

    @property
    def name(self) -> str: ...

    def __call__(self, model: TextToImage, prompts: Sequence[str]) -> AbstractContextManager[TextToImage]:
        """Mitigate for a block."""


@final
@dataclass(frozen=True)
class AllActive:
    """No mitigation: what all others are compared with."""

    name: str = "all neurons active"  # as reports call it

    @contextmanager
    def __call__(self, model: TextToImage, prompts: Sequence[str]) -> Iterator[TextToImage]:
        """Yield the model as it is."""
        yield model


@final
@dataclass(frozen=True)
class Deactivated:
    """Neurons switched off, or scaled, while the model runs."""

    units: Units  # the neurons, by module of the denoiser
    name: str = "neurons off"  # what reports call it
    factor: float = 0.0  # what their outputs are multiplied by

    @contextmanager
    def __call__(self, model: TextToImage, prompts: Sequence[str]) -> Iterator[TextToImage]:
        """Yield the model with hooks on the neurons' modules."""
        with deactivated(model.denoiser, self.units, factor=self.factor):
            yield model


def neuron_counts(denoiser: nn.Module, *, scope: Scope = "down+mid") -> dict[str, int]:
    """Return the number of neurons of each value layer, by name; see `value_layers`."""
    return {name: layer.width for name, layer in value_layers(denoiser, scope=scope).items()}


def random_units(like: Units, counts: dict[str, int], *, layer_matched: bool, seed: int) -> Units:
    """Draw as many neurons as a set has, none of which is in it."""
    elsewhere = [name for name in like.modules if name not in counts]
    if elsewhere:
        raise UsageError(f"The set holds neurons of {elsewhere[0]!r}, which is not among the layers to draw from.")
    others = Units({name: range(count) for name, count in counts.items()}) - like
    groups: list[str | None] = [*like.modules] if layer_matched else [None]
    drawn: dict[str, list[int]] = {}
    for group in groups:
        pool = [unit for unit in others if group in (None, unit[0])]
        wanted = len(like) if group is None else len(like[group])
        if len(pool) < wanted:
            raise UsageError(
                f"There are only {len(pool)} neurons of {group or 'all layers'} besides those of the set, and {wanted} "
                "are to be drawn.",
                cure="Compare with a smaller set.",
            )
        order = torch.randperm(len(pool), generator=torch_generator(seed, "units", group or ""))[:wanted]
        for name, index in (pool[place] for place in order.tolist()):
            drawn.setdefault(name, []).append(index)
    return Units(drawn)


@final
class OtherEmbedding:
    """A `TextToImage` that embeds prompts in another way and is otherwise the one inside."""

    def __init__(self, model: TextToImage, embed: Callable[[Sequence[str]], Text]) -> None:
        self._model, self._embed = model, embed
        self.name = model.name

    @property
    def denoiser(self) -> nn.Module:
        """The network of the model inside."""
        return self._model.denoiser

    def digest(self) -> str:
        """Return the digest of the model inside."""
        return self._model.digest()

    def embed(self, prompts: Sequence[str]) -> Text:
        """Return prompts, embedded in the other way."""
        return self._embed(prompts)

    def initial_noise(self, seeds: Sequence[int]) -> Tensor:
        """Return what the model inside begins with."""
        return self._model.initial_noise(seeds)

    def timesteps(self, steps: int) -> Tensor:
        """Return the timesteps of the model inside."""
        return self._model.timesteps(steps)

    def predict(self, latents: Tensor, timestep: Tensor, text: Text) -> Prediction:
        """Run the denoiser of the model inside."""
        return self._model.predict(latents, timestep, text)

    def to_latents(self, images: Tensor) -> Tensor:
        """Return latents by the model inside."""
        return self._model.to_latents(images)

    def add_noise(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Add noise as the model inside does."""
        return self._model.add_noise(latents, noise, timestep)

    def generate(self, text: Text, seeds: Sequence[int], *, guidance: float = 7.0, steps: int = 50) -> Tensor:
        """Generate with the model inside."""
        return self._model.generate(text, seeds, guidance=guidance, steps=steps)
