"""Mitigations: ways of generating that keep a model from repeating images, for a block; NeMo's and those of others.

A mitigation takes a model and the prompts that are memorized and yields a model to generate with; after the block the
weights are what they were, to the bit. All speak `Mitigation`, so that one audit measures them side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol, cast, final

import torch
from torch import Tensor, nn

from netweight.core.names import Select, Units
from netweight.core.seeds import derive, numpy_generator, torch_generator
from netweight.errors import UsageError
from netweight.methods.forget.layers import value_layers
from netweight.methods.forget.scaling import deactivated
from netweight.methods.forget.settings import Scope
from netweight.nn.text_to_image import Text, TextToImage


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

    name: str = "all neurons active"

    @contextmanager
    def __call__(self, model: TextToImage, prompts: Sequence[str]) -> Iterator[TextToImage]:
        yield model


@final
@dataclass(frozen=True)
class DeactivatedNeurons:
    """Neurons switched off, or scaled, while the model runs."""

    units: Units
    """The neurons, by module of the denoiser."""
    name: str = "neurons off"
    factor: float = 0.0
    """Factor of their outputs."""

    @contextmanager
    def __call__(self, model: TextToImage, prompts: Sequence[str]) -> Iterator[TextToImage]:
        with deactivated(model.denoiser, self.units, factor=self.factor):
            yield model


def neuron_counts(denoiser: nn.Module, *, scope: Scope = "down+mid") -> dict[str, int]:
    """Return the number of neurons of each value layer, by name; see `value_layers`."""
    return {name: layer.width for name, layer in value_layers(denoiser, scope=scope).items()}


def random_units(like: Units, counts: dict[str, int], *, layer_matched: bool, seed: int) -> Units:
    """Draw as many neurons as a set has, none of which is in it."""
    elsewhere = [name for name in like.modules if name not in counts]
    if elsewhere:
        raise UsageError(f"The set contains neurons of {elsewhere[0]!r}, which is not among the layers to draw from.")
    others = Units({name: range(count) for name, count in counts.items()}) - like
    groups: list[str | None] = [*like.modules] if layer_matched else [None]
    drawn: dict[str, list[int]] = {}
    for group in groups:
        pool = [unit for unit in others if group in (None, unit[0])]
        size = len(like) if group is None else len(like[group])
        if len(pool) < size:
            raise UsageError(
                f"Outside of the set, there are only {len(pool)} neurons of {group or 'all layers'}, and {size} are to "
                "be drawn.",
                cure="Compare with a smaller set.",
            )
        order = torch.randperm(len(pool), generator=torch_generator(seed, "units", group or ""))[:size]
        for name, index in (pool[place] for place in order.tolist()):
            drawn.setdefault(name, []).append(index)
    return Units(drawn)


@final
class OtherEmbedding:
    """A `TextToImage` that embeds prompts in another way and is otherwise the one inside."""

    def __init__(self, model: TextToImage, embed: Callable[[Sequence[str]], Text]) -> None:
        self._model, self.embed = model, embed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


@final
@dataclass(frozen=True)
class EmbeddingAdjustment:
    """Embeddings moved until the text makes less of a difference to the first denoising step."""

    # AdamW on the embedding of each memorized prompt, down the norm of what separates the noise predicted with the
    # prompt from that predicted without, at the noisiest timestep.
    # Source: Wen et al., ICLR 2024, section 4.

    target: float | None = None
    """Norm at which to stop; it depends on the model and is to be calibrated on prompts that are not memorized.
    None takes all iterations.
    """
    lr: float = 0.05
    """Learning rate of AdamW."""
    iterations: int = 10
    """Most iterations."""
    noises: int = 4
    """Initial noises over which the norm is averaged."""
    steps: int = 50
    seed: int = 0
    name: str = "embedding adjustment"

    @contextmanager
    def __call__(self, model: TextToImage, prompts: Sequence[str]) -> Iterator[TextToImage]:
        """Yield the model with adjusted embeddings of the prompts; other prompts are embedded as ever."""
        adjusted = {prompt: self._adjusted(model, prompt) for prompt in dict.fromkeys(prompts)}

        def embed(requested: Sequence[str]) -> Text:
            text = model.embed(requested)
            states = [adjusted.get(prompt, text.states[place]) for place, prompt in enumerate(requested)]
            return replace(text, states=torch.stack(states))

        yield cast("TextToImage", OtherEmbedding(model, embed))

    def _adjusted(self, model: TextToImage, prompt: str) -> Tensor:
        noise = model.initial_noise([derive(self.seed, "noise", number) for number in range(self.noises)])
        time = model.timesteps(self.steps)[:1].expand(self.noises)
        rows = [0] * self.noises
        text = model.embed([prompt])
        states = text.states.detach().float().clone().requires_grad_()
        optimizer = torch.optim.AdamW([states], lr=self.lr)
        with torch.no_grad():
            without = model.predict(noise, time, model.embed([""]).rows(rows)).noise
        for _ in range(self.iterations):
            moved = replace(text, states=states.to(text.states.dtype)).rows(rows)
            apart = model.predict(noise, time, moved).noise - without
            norm = apart.float().flatten(1).norm(dim=1).mean()
            if self.target is not None and float(norm.detach()) <= self.target:
                break
            states.grad = torch.autograd.grad(norm, states)[0]
            optimizer.step()
        return states.detach()[0].to(text.states.dtype)


@final
@dataclass(frozen=True)
class RandomTokens:
    """Random words put into the prompt, at random places."""

    # Source: Somepalli et al. 2023 (random token addition at inference); 1, 4 and 10 are NeMo's counts.

    count: int
    """Number of words."""
    words: tuple[str, ...]
    """Words to draw from; of one token each if tokens are to be counted."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.count < 1 or not self.words:
            raise UsageError(f"Cannot insert {self.count} random tokens out of {len(self.words)} words.")

    @property
    def name(self) -> str:
        return f"{self.count} random token{'s' if self.count > 1 else ''}"

    def prompt(self, prompt: str) -> str:
        """Return a prompt with the words put in; the empty one stays empty."""
        if not prompt.strip():
            return prompt
        rng = numpy_generator(self.seed, "tokens", prompt)
        words = prompt.split()
        for word in rng.choice(self.words, self.count):
            words.insert(int(rng.integers(len(words) + 1)), str(word))
        return " ".join(words)

    @contextmanager
    def __call__(self, model: TextToImage, prompts: Sequence[str]) -> Iterator[TextToImage]:
        """Yield the model with words put into every prompt: who mitigates so does not know which are memorized."""
        embed = lambda prompts: model.embed([self.prompt(prompt) for prompt in prompts])  # noqa: E731
        yield cast("TextToImage", OtherEmbedding(model, embed))


@final
@dataclass(frozen=True)
class AttentionScaling:
    """More attention to the first token, none to padding, in the half of guidance that sees the prompt."""

    # Source: Ren et al., ECCV 2024, section 5.

    masks: Callable[[Sequence[str]], Tensor] | None = None
    """Returns which tokens of prompts count, shape `(prompts, tokens)`, True where they do; see
    `hf.load_pipeline.padding_masks`. None leaves padding alone.
    """
    factor: float = 1.25
    name: str = "attention scaling"

    @contextmanager
    def __call__(self, model: TextToImage, prompts: Sequence[str]) -> Iterator[TextToImage]:
        """Yield the model with hooks on its cross-attentions; padding is masked for the prompts given."""
        layers = [layer.attention for layer in value_layers(model.denoiser, scope="all").values()]
        rows = _PromptRows(model, prompts, None if self.masks is None else self.masks(prompts).bool())
        handles: list[Any] = []
        try:
            handles.append(model.denoiser.register_forward_pre_hook(rows.notice, with_kwargs=True))
            for layer in layers:
                handles.append(layer.register_forward_pre_hook(rows.hide_padding, with_kwargs=True))
                keys: Any = layer.get_submodule("to_k")
                handles.append(keys.register_forward_hook(self._scaling(rows)))
            yield model
        finally:
            for handle in handles:
                handle.remove()

    def _scaling(self, rows: _PromptRows) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        def hook(_module: nn.Module, _inputs: Any, keys: Tensor) -> Tensor:
            factors = torch.ones_like(keys[..., :1])
            factors[rows.prompted.to(keys.device), 0] = self.factor
            return keys * factors

        return hook


class _PromptRows:
    """Finder of the rows of the present batch that hold a prompt, and of the prompt, by their embeddings."""

    def __init__(self, model: TextToImage, prompts: Sequence[str], masks: Tensor | None) -> None:
        with torch.no_grad():
            self._empty = model.embed([""]).states[0]
            self._known = None if masks is None else torch.cat([model.embed([prompt]).states for prompt in prompts])
        self._masks = masks
        self.prompted = torch.zeros(0, dtype=torch.bool)
        self._bias: Tensor | None = None

    def notice(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before the denoiser runs: find the text among its inputs."""
        given = [value.states if isinstance(value, Text) else value for value in (*args, *kwargs.values())]
        shape = self._empty.shape
        for value in given:
            if isinstance(value, Tensor) and value.ndim == 3 and value.shape[1:] == shape:
                empty = self._empty.to(value)
                self.prompted = (value != empty).flatten(1).any(1)
                self._bias = self._bias_of(value)
                return
        raise UsageError("The denoiser does not receive text of the shape in which prompts are embedded.")

    def _bias_of(self, states: Tensor) -> Tensor | None:
        if self._known is None or self._masks is None:
            return None
        bias = states.new_zeros(len(states), 1, states.shape[1])
        for prompt, mask in zip(self._known.to(states), self._masks, strict=True):
            same = (states == prompt).flatten(1).all(1)
            bias[same] = torch.where(mask.to(states.device), 0.0, -10000.0).to(states)
        return bias

    def hide_padding(
        self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Before an attention runs: add what hides padding to its mask."""
        if self._bias is None:
            return args, kwargs
        given = kwargs.get("attention_mask")
        return args, {**kwargs, "attention_mask": self._bias if given is None else given + self._bias}


@final
@dataclass(frozen=True)
class WeightPruning:
    """Weights of feed-forward layers zeroed that memorized prompts use more than ordinary ones."""

    # Source: Chavhan et al., arXiv 2406.18566, with the scores of Wanda (Sun et al. 2024); per row and over all prompts
    # at once.

    ordinary: tuple[str, ...]
    """Prompts that are not memorized."""
    share: float = 0.01
    layers: str = "**.ff.net.2"
    """Linear layers, by the grammar of `Select`."""
    images: int = 2
    """Generations per prompt over which inputs are measured, without guidance."""
    steps: int = 10
    seed: int = 0
    name: str = "weight pruning"

    def __post_init__(self) -> None:
        if not self.ordinary or not 0 < self.share <= 1:
            raise UsageError(f"Cannot prune {self.share} of the weights against {len(self.ordinary)} prompts.")

    @contextmanager
    def __call__(self, model: TextToImage, prompts: Sequence[str]) -> Iterator[TextToImage]:
        layers: dict[str, nn.Module] = Select(self.layers).modules(model.denoiser)
        memorized, ordinary = (self._norms(model, layers, chosen) for chosen in (prompts, self.ordinary))
        originals: dict[str, Tensor] = {}
        try:
            for name, layer in layers.items():
                weight: Any = layer.weight
                originals[name] = weight.detach().clone()
                with torch.no_grad():
                    weight[self._chosen(weight, memorized[name], ordinary[name])] = 0
            yield model
        finally:
            with torch.no_grad():
                for name, values in originals.items():
                    whole: Any = layers[name].weight
                    whole.copy_(values)

    def _chosen(self, weight: Tensor, memorized: Tensor, ordinary: Tensor) -> Tensor:
        """Return the mask of the weights that are removed, of the weight's shape."""
        size = weight.detach().float().abs()
        scores = size * memorized
        count = max(1, int(self.share * scores.shape[1]))
        largest = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, scores.topk(count, dim=1).indices, True)
        return largest & (scores > size * ordinary)

    def _norms(self, model: TextToImage, layers: dict[str, nn.Module], prompts: Sequence[str]) -> dict[str, Tensor]:
        """Root mean squares of each input feature over all generations, by layer."""
        sums: dict[str, Tensor] = {}
        counts: dict[str, int] = {}

        def measuring(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
            def hook(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
                features = inputs[0].detach().float().flatten(0, -2)
                sums[name] = sums.get(name, 0) + features.square().sum(0)
                counts[name] = counts.get(name, 0) + len(features)

            return hook

        handles = [layer.register_forward_pre_hook(measuring(name)) for name, layer in layers.items()]
        try:
            for place, prompt in enumerate(prompts):
                seeds = [derive(self.seed, "pruning", place, image) for image in range(self.images)]
                model.generate(model.embed([prompt]).rows([0] * self.images), seeds, guidance=1.0, steps=self.steps)
        finally:
            for handle in handles:
                handle.remove()
        return {name: (sums[name] / counts[name]).sqrt() for name in layers}
