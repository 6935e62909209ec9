"""The protocol of text-to-image latent diffusion models, and rows through a network in batches that fit into memory.

`hf/load_pipeline.py` implements the protocol for diffusers pipelines; anything else with these methods will do, too. A
batch that memory has no room for is halved. `Costs` says what parts of such work took.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn

from netweight.errors import UsageError


@final
class Batches:
    """Runs functions of rows in batches; what it learns of memory holds for later calls."""

    def __init__(self, rows: int) -> None:
        if rows < 1:
            raise UsageError(f"A batch needs at least 1 row, not {rows}.", cure="Raise `rows`.")
        # Rows of a batch: the given number, or fewer after memory ran out.
        self.rows = rows
        # Number of rows computed so far.
        self.done = 0
        # The calls that computed them. A call that ran out of memory does not count.
        self.calls = 0

    def run(self, function: Callable[[slice], Tensor], count: int) -> Tensor:
        """Compute rows 0 to `count` and join them.

        Args:
            function: Takes a slice of rows and returns their results, shape `(rows of the slice, …)`.
            count: At least 1.

        Returns:
            Shape `(count, …)`.
        """
        results: list[Tensor] = []
        self.work(lambda rows: results.append(function(rows)), count)
        return torch.cat(results)

    def work(self, function: Callable[[slice], None], count: int) -> None:
        """Do something with rows 0 to `count`.

        `function`: takes a slice of rows; where memory runs out it must have changed nothing.
        """
        start = 0
        while start < count:
            part = slice(start, min(start + self.rows, count))
            size = part.stop - part.start
            if self._fits(function, part):
                start, self.done, self.calls = part.stop, self.done + size, self.calls + 1
            else:
                self.rows = size // 2
                if torch.cuda.is_available():
                    # This is after the except block, so that the tensors of the failed batch are freed.
                    torch.cuda.empty_cache()

    def _fits(self, function: Callable[[slice], None], part: slice) -> bool:
        try:
            function(part)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            # The CPU's allocator raises a plain RuntimeError.
            full = isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
            if not full or part.stop - part.start == 1:
                raise
            return False
        return True


@final
class Costs:
    """Time and rows of the steps of some work; the first step begins when this is made."""

    def __init__(self) -> None:
        # By the step's name: "seconds", "processor seconds" of all threads, "rows" and "calls".
        self.steps: dict[str, dict[str, float]] = {}
        self._step, self._since = _nothing(), clock()

    def pause(self) -> None:
        """Count no time from here on."""
        self._add({name: value - self._since[name] for name, value in clock().items()})

    def resume(self, cost: Mapping[str, float]) -> None:
        """Go on, and count what this work's share of the pause did cost.

        Args:
            cost: Seconds or counts, by what they are of.
        """
        self._add(cost)
        self._since = clock()

    def end(self, step: str) -> None:
        """End a step; the next one begins."""
        self.pause()
        self.steps[step], self._step, self._since = self._step, _nothing(), clock()

    def _add(self, cost: Mapping[str, float]) -> None:
        for name, value in cost.items():
            self._step[name] += value


def clock() -> dict[str, float]:
    """Return seconds of this moment and processor seconds of this process so far, as `Costs` counts them."""
    return {"seconds": time.perf_counter(), "processor seconds": time.process_time()}


def _nothing() -> dict[str, float]:
    return {"seconds": 0.0, "processor seconds": 0.0, "rows": 0, "calls": 0}


@final
@dataclass(frozen=True)
class Text:
    """Prompts as the denoiser's cross-attention receives them."""

    states: Tensor
    """Shape `(n, tokens, width)`."""
    mask: Tensor | None = None
    """Shape `(n, tokens)`, True where a token counts; None where all do."""
    pooled: Tensor | None = None
    """Shape `(n, width)`, what networks such as SDXL's take beside attention; else None."""

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.states)

    def rows(self, indices: Sequence[int] | Tensor) -> Text:
        """Return some of the prompts, in this order; one may come several times.

        Args:
            indices: Numbers from 0; a tensor has shape `(m,)`, int64.
        """
        chosen = list(indices) if not isinstance(indices, Tensor) else indices
        mask, pooled = (None if part is None else part[chosen] for part in (self.mask, self.pooled))
        return Text(self.states[chosen], mask, pooled)

    @staticmethod
    def joined(texts: Sequence[Text]) -> Text:
        """Concatenate prompts; where some have a mask and others none, every token of the others counts."""
        states = torch.cat([text.states for text in texts])
        parts = [text.pooled for text in texts if text.pooled is not None]
        pooled = torch.cat(parts) if parts else None
        if all(text.mask is None for text in texts):
            return Text(states, pooled=pooled)
        masks = [torch.ones_like(text.states[..., 0], dtype=torch.bool) if text.mask is None else text.mask.bool()
                 for text in texts]  # fmt: skip
        return Text(states, torch.cat(masks), pooled)


@final
@dataclass(frozen=True)
class Prediction:
    """A denoiser's prediction, whatever it was trained to predict (noise, velocity or sample)."""

    noise: Tensor
    """The noise in them, of their shape."""
    sample: Tensor
    """The clean latents, of their shape."""


class TextToImage(Protocol):
    """A text-to-image latent diffusion model."""

    # Everything random comes from seeds, one per image, so that an image does not depend on the batch that it is in.

    @property
    def name(self) -> str: ...

    @property
    def denoiser(self) -> nn.Module: ...

    def digest(self) -> str:
        """Return a digest of the denoiser's weights, which an edit record names."""

    def identity(self) -> str:
        """Return a digest of everything that decides on its images: by it, results of an earlier run are found again.

        It covers the denoiser, the text encoders with their tokenizers, the autoencoder, the scheduler and the size.
        """

    def embed(self, prompts: Sequence[str]) -> Text:
        """Return prompts as the denoiser receives them; `""` is the empty one. No denoiser is run."""

    def initial_noise(self, seeds: Sequence[int]) -> Tensor:
        """Return the latents that a generation begins with, shape `(n, channels, height, width)`, one per seed."""

    def timesteps(self, steps: int) -> Tensor:
        """Return the timesteps of a schedule of `steps` steps, the noisiest first, shape `(steps,)`."""

    def predict(self, latents: Tensor, timestep: Tensor, text: Text) -> Prediction:
        """Run the denoiser once, without guidance; gradients flow to latents, text and weights where they are on.

        `latents`: noisy, shape `(n, channels, height, width)`. `timestep`: a scalar, or shape `(n,)`.

        Returns:
            The prediction, shape `(n, channels, height, width)`.
        """

    def to_latents(self, images: Tensor) -> Tensor:
        """Return clean latents of images, shape `(n, 3, height, width)`, within 0 and 1.

        Args:
            images: Shape `(n, 3, height, width)`, on any device.
        """

    def add_noise(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Return clean latents at the noise level of a timestep, a scalar or shape `(n,)`.

        `latents`: clean, shape `(n, channels, height, width)`. `timestep`: a scalar or shape `(n,)`, from 0 to the
        schedule's last.
        """

    def generate(self, text: Text, seeds: Sequence[int], *, guidance: float = 7.0, steps: int = 50) -> Tensor:
        """Return images of prompts, shape `(n, 3, height, width)`, within 0 and 1, on the CPU, without gradients.

        `guidance`: scale of classifier-free guidance, against the empty prompt; 1 or less is without it.
        """


@runtime_checkable
class OpenTextToImage(TextToImage, Protocol):
    """One whose text encoder and decoder are within reach too."""

    def embed(self, prompts: Sequence[str], tokens: Tensor | None = None) -> Text:
        """Return prompts as the denoiser receives them; with `tokens` these are read in place of theirs.

        `tokens`: shape `(n, tokens, width)`, as from `token_embeddings`; gradients flow to them.
        """

    def token_embeddings(self, prompts: Sequence[str]) -> Tensor:
        """Return what the text encoder reads: its embeddings of tokens, shape `(n, tokens, width)`."""

    def vocabulary(self) -> tuple[tuple[str, ...], Tensor]:
        """Return words that are one token each, and their embeddings, shape `(words, width)`."""

    def to_images(self, latents: Tensor) -> Tensor:
        """Return images of clean latents, shape `(n, 3, height, width)`, within 0 and 1, on the CPU; gradients flow."""


def denoised(
    model: TextToImage, latents: Tensor, times: Tensor, text: Text | Sequence[Text], guidance: float
) -> Tensor:
    """Denoise latents, from the first of some timesteps on, without noise in between (DDIM); gradients flow.

    `text`: one prompt for each latent; or several texts of this kind, one for each timestep.
    """
    empty = model.embed([""]).rows([0] * len(latents)) if guidance > 1 else None
    for place, timestep in enumerate(times):
        prediction = model.predict(latents, timestep, text if isinstance(text, Text) else text[place])
        if empty is not None:
            other = model.predict(latents, timestep, empty)
            prediction = Prediction(torch.lerp(other.noise, prediction.noise, guidance),
                                    torch.lerp(other.sample, prediction.sample, guidance))  # fmt: skip
        last = place + 1 == len(times)
        latents = prediction.sample if last else model.add_noise(prediction.sample, prediction.noise, times[place + 1])
    return latents


# Positions of latents, height times width, that are computed at a time: 16 latents of 512 × 512 pixels in Stable
# Diffusion, and 4 where gradients are taken.
_POSITIONS, _WITH_GRADIENTS = 2**16, 2**14
# Latents of fewer positions than this are kept whole for the way back.
_RECOMPUTED = 2**10


def most_rows(model: TextToImage, rows: int, *, gradients: bool = False) -> int:
    """Return how many latents are computed at a time: so many as are asked for, or fewer where latents are large.

    Args:
        model: The model.
        rows: The number that is asked for, at least 1.
        gradients: Whether gradients are taken, which needs more memory.
    """
    height, width = model.initial_noise([0]).shape[-2:]
    return max(1, min(rows, (_WITH_GRADIENTS if gradients else _POSITIONS) // (height * width)))


@contextmanager
def recomputed(model: TextToImage) -> Iterator[None]:
    """Keep little of a pass through a large denoiser for the way back, in a block, and compute the rest again.

    Gradients are the same, to the same bits; a step takes about a third longer, and memory falls to a fraction. Nothing
    is done for small latents, and for networks that cannot.
    """
    network: Any = model.denoiser
    height, width = model.initial_noise([0]).shape[-2:]
    able = height * width >= _RECOMPUTED and getattr(network, "_supports_gradient_checkpointing", False)
    if not able or network.is_gradient_checkpointing:
        yield
        return
    network.enable_gradient_checkpointing()
    try:
        yield
    finally:
        network.disable_gradient_checkpointing()


def generated(
    model: TextToImage, text: Text, seeds: Sequence[int], batches: Batches, *, guidance: float, steps: int
) -> Tensor:
    """Generate one image for each prompt.

    `text`: at least one prompt.

    Returns:
        Shape `(n, 3, height, width)`, within 0 and 1.
    """

    def part(rows: slice) -> Tensor:
        chosen = text.rows(range(rows.start, rows.stop))
        return model.generate(chosen, seeds[rows], guidance=guidance, steps=steps)

    return batches.run(part, len(seeds))
