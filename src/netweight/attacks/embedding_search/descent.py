"""Several embeddings descending at once, each towards its own target. Searches look at them; defenses collect them.

Every row has its own draws and its own moments, so that it goes the same way whatever other rows are in the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import final

import torch
from torch import Tensor, nn

from netweight.attacks.embedding_search.denoising import denoising_error
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.probe.batches import Batches
from netweight.probe.diffusion import Text, TextToImage

__all__ = ["Descent", "descend", "weights_fixed"]


@contextmanager
def weights_fixed(module: nn.Module) -> Iterator[None]:
    """Take no gradients of a module's weights in a block, which spares the memory that they would need.

    Args:
        module: Its parameters take no gradients in the block, and afterwards as before.
    """
    marked = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in marked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in marked:
            parameter.requires_grad_(True)


@final
class Descent:
    """Embeddings under way.

    Args:
        model: What is searched; its weights stay as they are.
        latents: Of each row's target, clean, shape `(rows, channels, height, width)`.
        start: Where each row begins.
        settings: Learning rate, draws, bound and error.
        seeds: Of each row's draws.

    Raises:
        UsageError: Targets, starts and seeds differ in number.
    """

    def __init__(
        self, model: TextToImage, latents: Tensor, start: Text, settings: SearchSettings, seeds: Sequence[int]
    ) -> None:
        if not len(latents) == len(start) == len(seeds):
            raise UsageError(f"{len(latents)} targets came with {len(start)} starts and {len(seeds)} seeds.")
        self._model, self._latents, self._start, self._settings = model, latents.detach(), start, settings
        self._seeds = tuple(seeds)
        self._schedule = model.timesteps(settings.generation_steps)
        states = start.states.detach().float()
        self._unit = states.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-12)
        # One parameter per row: Adam passes over those that have no gradient, which is how rows leave.
        self._moved = [nn.Parameter(torch.zeros_like(row)) for row in states]
        self._optimizer = torch.optim.Adam(self._moved, lr=settings.lr)
        self._batches = Batches(len(start) * settings.draws)
        self.taken = 0

    def text(self, rows: Sequence[int]) -> Text:
        """Return the embeddings that some rows have come to; no gradient flows."""
        with torch.no_grad():
            moved = torch.stack([self._moved[row] for row in rows])
        return self._text(list(rows), moved)

    def distance(self, row: int) -> float:
        """Return the root mean square of what was added to a row's embedding, as a share of that of its start.

        Args:
            row: From 0.
        """
        return float(self._moved[row].detach().square().mean().sqrt())

    def step(self, rows: Sequence[int]) -> list[float]:
        """Take a step with some rows; the others stay where they are.

        Returns:
            Each row's error before the step.
        """
        draws = self._settings.draws
        drawn = [self._draw(row) for row in rows]
        latents = self._latents[list(rows)].repeat_interleave(draws, 0)
        noise, times = (torch.cat(part).to(latents.device) for part in zip(*drawn, strict=True))
        moved = torch.stack([self._moved[row].detach() for row in rows]).requires_grad_()
        errors = torch.zeros(len(rows))
        gradient = torch.zeros_like(moved)

        def work(chosen: slice) -> None:
            owner = torch.arange(chosen.start, chosen.stop, device=moved.device) // draws
            text = self._text([rows[place] for place in owner.tolist()], moved[owner])
            found = denoising_error(
                self._model, latents[chosen], noise[chosen], times[chosen], text, self._settings.error
            )  # fmt: skip
            gradient.add_(torch.autograd.grad(found.sum() / draws, moved)[0])
            errors.index_add_(0, owner.cpu(), found.detach().cpu() / draws)

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
        return Text(states.to(start.states.dtype), start.mask)

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


def descend(
    model: TextToImage, latents: Tensor, start: Text, settings: SearchSettings, seeds: Sequence[int]
) -> tuple[Text, list[float]]:
    """Search to the last step without looking at images.

    Args:
        model: What is searched.
        latents: Of each row's target, shape `(rows, channels, height, width)`.
        start: Where each row begins.
        settings: How; looks and threshold do not matter.
        seeds: Of each row's draws.

    Returns:
        The embeddings found, and each row's error at the last step.
    """
    rows = range(len(start))
    descent = Descent(model, latents, start, settings, seeds)
    errors: list[float] = []
    with weights_fixed(model.denoiser):
        for _ in range(settings.steps):
            errors = descent.step(rows)
    return descent.text(rows), errors
