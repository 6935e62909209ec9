"""How far a denoiser's prediction is from the truth, latent by latent. Searches and defenses use it."""

from __future__ import annotations

import torch
from torch import Tensor

from netweight.attacks.embedding_search.settings import Said
from netweight.probe.diffusion import Prediction, Text, TextToImage

__all__ = ["chosen", "denoising_error", "difference"]


def denoising_error(
    model: TextToImage, latents: Tensor, noise: Tensor, timestep: Tensor, text: Text, said: Said
) -> Tensor:
    """Return the mean squared error of one denoising per latent.

    Args:
        model: The model.
        latents: Clean, shape `(n, channels, height, width)`.
        noise: Standard normal, of their shape.
        timestep: Shape `(n,)`.
        text: As many prompts.
        said: In which prediction the error is counted.

    Returns:
        Shape `(n,)`, float32.
    """
    told = model.predict(model.add_noise(latents, noise, timestep), timestep, text)
    return difference(model, told, Prediction(noise, latents), timestep, said)


def difference(model: TextToImage, told: Prediction, wanted: Prediction, timestep: Tensor, said: Said) -> Tensor:
    """Return the mean squared difference of two predictions for the same noisy latents.

    Args:
        model: Whose noise levels hold.
        told: One prediction, `n` latents.
        wanted: The other.
        timestep: Shape `(n,)`.
        said: Which of the predictions is compared.

    Returns:
        Shape `(n,)`, float32.
    """
    first, second = (chosen(model, one, timestep, said) for one in (told, wanted))
    return (first - second).float().square().flatten(1).mean(1)


def chosen(model: TextToImage, prediction: Prediction, timestep: Tensor, said: Said) -> Tensor:
    """Return the noise, the sample, or the velocity that follows from both.

    Args:
        model: Whose noise levels hold.
        prediction: For `n` noisy latents.
        timestep: Shape `(n,)`.
        said: Which.
    """
    if said != "velocity":
        return prediction.noise if said == "noise" else prediction.sample
    # The protocol tells no noise levels; what it adds to ones and to zeros does.
    ones, zeros = torch.ones_like(prediction.sample), torch.zeros_like(prediction.sample)
    signal, level = model.add_noise(ones, zeros, timestep), model.add_noise(zeros, ones, timestep)
    return signal * prediction.noise - level * prediction.sample
