"""What is asked of a text-to-image diffusion model by those who look into it: a protocol, and what it speaks in.

`integrations/diffusion_pipeline.py` makes one of a diffusers pipeline; anything else with these methods will do, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, final

from torch import Tensor, nn

from netweight.nn.batching import Batches


@final
@dataclass(frozen=True)
class Text:
    """Prompts as the denoiser's cross-attention receives them.

    Attributes:
        states: Shape `(n, tokens, width)`.
        mask: Shape `(n, tokens)`, True where a token counts; None where all do.
    """

    states: Tensor
    mask: Tensor | None = None

    def __len__(self) -> int:
        """Return the number of prompts."""
        return len(self.states)

    def rows(self, indices: Sequence[int] | Tensor) -> Text:
        """Return some of the prompts, in this order; one may come several times.

        Args:
            indices: Numbers from 0; a tensor has shape `(m,)`, int64.
        """
        chosen = list(indices) if not isinstance(indices, Tensor) else indices
        return Text(self.states[chosen], None if self.mask is None else self.mask[chosen])


@final
@dataclass(frozen=True)
class Prediction:
    """What a denoiser says of noisy latents, whatever it was trained to say (noise, velocity or sample).

    Attributes:
        noise: The noise in them, of their shape.
        sample: The clean latents, of their shape. At high noise levels a network's error is small in one of the two
            only: in the one that it was trained to say.
    """

    noise: Tensor
    sample: Tensor


class TextToImage(Protocol):
    """A text-to-image latent diffusion model.

    Everything random comes from seeds, one per image, so that an image does not depend on the batch that it is in.

    Attributes:
        name: What reports call it.
        denoiser: The network with the cross-attention, in evaluation mode; edits and hooks go here.
    """

    @property
    def name(self) -> str: ...

    @property
    def denoiser(self) -> nn.Module: ...

    def digest(self) -> str:
        """Return a digest of the denoiser's weights, which an edit record names."""

    def embed(self, prompts: Sequence[str]) -> Text:
        """Return prompts as the denoiser receives them; `""` is the empty one. No denoiser is run.

        Args:
            prompts: At least one.
        """

    def initial_noise(self, seeds: Sequence[int]) -> Tensor:
        """Return the latents that a generation begins with, shape `(n, channels, height, width)`, one per seed.

        Args:
            seeds: One per image; the same seed gives the same noise on one device.
        """

    def timesteps(self, steps: int) -> Tensor:
        """Return the timesteps of a schedule of so many steps, the noisiest first, shape `(steps,)`."""

    def predict(self, latents: Tensor, timestep: Tensor, text: Text) -> Prediction:
        """Run the denoiser once, without guidance; gradients flow to latents, text and weights where they are on.

        Args:
            latents: Noisy, shape `(n, channels, height, width)`.
            timestep: A scalar, or shape `(n,)`.
            text: As many prompts.

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

        Args:
            latents: Clean, shape `(n, channels, height, width)`.
            noise: Standard normal, of the same shape.
            timestep: A scalar or shape `(n,)`, from 0 to the schedule's last.
        """

    def generate(self, text: Text, seeds: Sequence[int], *, guidance: float = 7.0, steps: int = 50) -> Tensor:
        """Return images of prompts, shape `(n, 3, height, width)`, within 0 and 1, on the CPU, without gradients.

        Args:
            text: Prompts.
            seeds: As many seeds.
            guidance: Scale of classifier-free guidance, against the empty prompt; 1 or less is without it.
            steps: Of the scheduler.
        """


def generated(
    model: TextToImage, text: Text, seeds: Sequence[int], batches: Batches, *, guidance: float, steps: int
) -> Tensor:
    """Generate one image for each prompt.

    Args:
        model: The model.
        text: At least one prompt.
        seeds: As many.
        batches: How many images are made at once.
        guidance: See `TextToImage.generate`.
        steps: See there.

    Returns:
        Shape `(n, 3, height, width)`, within 0 and 1.

    Raises:
        torch.OutOfMemoryError: A single image does not fit.
    """

    def part(rows: slice) -> Tensor:
        chosen = text.rows(range(rows.start, rows.stop))
        return model.generate(chosen, seeds[rows], guidance=guidance, steps=steps)

    return batches.run(part, len(seeds))
