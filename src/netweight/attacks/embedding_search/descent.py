"""Steps of an attack on a text-to-image model, and the denoising error that they lower."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from netweight.attacks.embedding_search.settings import PredictionKind, SearchSettings
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.nn.text_to_image import Batches, Prediction, Text, TextToImage, generated


class Walk(ABC):
    """What an attack changes step by step, in rows that end one by one."""

    steps: int | None = None  # most steps; None takes those of the settings

    def __init__(self, model: TextToImage, settings: SearchSettings) -> None:
        self._model, self._settings = model, settings
        self.taken = 0

    @abstractmethod
    def text(self, rows: Sequence[int]) -> Text:
        """Return the present embeddings of some rows; no gradient flows."""

    @abstractmethod
    def step(self, rows: Sequence[int]) -> list[float]:
        """Take a step with some rows, and return their errors; the others stay where they are."""

    def distance(self, row: int) -> float:
        """Return how far a row has moved from its start, as a share of that."""
        return 0.0

    def changed(self) -> AbstractContextManager[None]:
        """Attack for a block; the model is as before after it."""
        return weights_fixed(self._model.denoiser)

    def images(self, rows: Sequence[int], seeds: Sequence[int], batches: Batches) -> Tensor:
        """Generate an image of each row from its seed; a row may come several times."""
        guidance, steps = self._settings.guidance, self._settings.generation_steps
        return generated(self._model, self.text(rows), seeds, batches, guidance=guidance, steps=steps)


class Descent(Walk):
    """Adam on many embeddings at once, a row each; rows may stop at any step."""

    # `latents`: shape `(rows, channels, height, width)`

    def __init__(
        self, model: TextToImage, latents: Tensor, start: Text, settings: SearchSettings, seeds: Sequence[int],
        rates: Sequence[float] | None = None,
    ) -> None:  # fmt: skip
        # `rates`: of each row; None takes the first of the settings for all
        if not len(latents) == len(start) == len(seeds):
            raise UsageError(f"{len(latents)} targets came with {len(start)} starts and {len(seeds)} seeds.")
        super().__init__(model, settings)
        self._latents, self._start = latents.detach(), start
        self._seeds = tuple(seeds)
        self._schedule = model.timesteps(settings.generation_steps)
        states = start.states.detach().float()
        self._unit = states.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-12)
        # One parameter per row: Adam passes over those that have no gradient, which is how rows leave.
        self._moved = [nn.Parameter(torch.zeros_like(row)) for row in states]
        chosen = rates or [settings.lr] * len(start)
        self._optimizer = torch.optim.Adam(
            [{"params": [row], "lr": lr} for row, lr in zip(self._moved, chosen, strict=True)]
        )
        self._batches = Batches(len(start) * settings.draws)

    def text(self, rows: Sequence[int]) -> Text:
        with torch.no_grad():
            moved = torch.stack([self._moved[row] for row in rows])
        return self._text(list(rows), moved)

    def distance(self, row: int) -> float:
        """Return the root mean square of what was added to a row's embedding, as a share of that of its start."""
        return float(self._moved[row].detach().square().mean().sqrt())

    def step(self, rows: Sequence[int]) -> list[float]:
        noise_samples = self._settings.draws
        drawn = [self._draw(row) for row in rows]
        latents = self._latents[list(rows)].repeat_interleave(noise_samples, 0)
        noise, times = (torch.cat(part).to(latents.device) for part in zip(*drawn, strict=True))
        moved = torch.stack([self._moved[row].detach() for row in rows]).requires_grad_()
        errors = torch.zeros(len(rows))
        gradient = torch.zeros_like(moved)

        def work(part: slice) -> None:
            owner = torch.arange(part.start, part.stop, device=moved.device) // noise_samples
            text = self._text([rows[place] for place in owner.tolist()], moved[owner])
            found = denoising_error(
                self._model, latents[part], noise[part], times[part], text, self._settings.error
            )  # fmt: skip
            gradient.add_(torch.autograd.grad(found.sum() / noise_samples, moved)[0])
            errors.index_add_(0, owner.cpu(), found.detach().cpu() / noise_samples)

        self._batches.work(work, len(latents))
        self._follow(rows, gradient)
        return errors.tolist()

    def _draw(self, row: int) -> tuple[Tensor, Tensor]:
        generator = torch_generator(self._seeds[row], "draws", self.taken)
        count = self._settings.draws
        noise = torch.randn(count, *self._latents.shape[1:], generator=generator)
        return noise, self._schedule.cpu()[torch.randint(len(self._schedule), (count,), generator=generator)]

    def _text(self, rows: list[int], moved: Tensor) -> Text:
        start = self._start.rows(rows)
        states = start.states.detach().float() + self._unit[rows] * moved
        return replace(start, states=states.to(start.states.dtype))

    def _follow(self, rows: Sequence[int], gradient: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for place, row in enumerate(rows):
            self._moved[row].grad = gradient[place]
        self._optimizer.step()
        self.taken += 1
        if self._settings.radius is None:
            return
        with torch.no_grad():
            for row in rows:
                length = self.distance(row)
                if length > self._settings.radius:
                    self._moved[row].mul_(self._settings.radius / length)


def denoising_error(
    model: TextToImage, latents: Tensor, noise: Tensor, timestep: Tensor, text: Text, kind: PredictionKind
) -> Tensor:
    """Return the mean squared error of one denoising per latent."""
    prediction = model.predict(model.add_noise(latents, noise, timestep), timestep, text)
    return difference(model, prediction, Prediction(noise, latents), timestep, kind)


def difference(
    model: TextToImage, prediction: Prediction, wanted: Prediction, timestep: Tensor, kind: PredictionKind
) -> Tensor:
    """Return the mean squared difference of two predictions for the same noisy latents."""
    first, second = (chosen(model, one, timestep, kind) for one in (prediction, wanted))
    return (first - second).float().square().flatten(1).mean(1)


def chosen(model: TextToImage, prediction: Prediction, timestep: Tensor, kind: PredictionKind) -> Tensor:
    """Return the noise, the sample, or the velocity that follows from both."""
    if kind != "velocity":
        return prediction.noise if kind == "noise" else prediction.sample
    # The protocol has no noise levels; what it adds to ones and to zeros gives them.
    ones, zeros = torch.ones_like(prediction.sample), torch.zeros_like(prediction.sample)
    signal, level = model.add_noise(ones, zeros, timestep), model.add_noise(zeros, ones, timestep)
    return signal * prediction.noise - level * prediction.sample


@contextmanager
def weights_fixed(module: nn.Module, *, but: Collection[nn.Parameter] = ()) -> Iterator[None]:
    """Take no gradients of a module's weights in a block, which spares the memory that they would need."""
    # `but`: weights of which gradients are taken
    marked = {parameter: parameter.requires_grad for parameter in module.parameters()}
    trained = {id(parameter) for parameter in but}
    try:
        for parameter in marked:
            parameter.requires_grad_(id(parameter) in trained)
        yield
    finally:
        for parameter, before in marked.items():
            parameter.requires_grad_(before)
