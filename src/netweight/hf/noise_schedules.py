"""Noise schedules: the mixture of latents and noise at a timestep, and predictions that follow from an output.

There are two kinds. Diffusion that preserves variance has a table of noise levels and networks that predict noise,
velocity or the sample; flow matching, as in SD3 and Flux, mixes in straight lines, and its networks predict the
direction from the sample to the noise.
"""

from __future__ import annotations

import copy
import inspect
from abc import ABC, abstractmethod
from typing import Any, Literal, final

import torch
from torch import Tensor

from netweight.errors import Unsupported
from netweight.nn.text_to_image import Prediction

_PREDICTIONS = ("epsilon", "v_prediction", "sample")
_FLOWS = ("FlowMatchEulerDiscreteScheduler",)
# Of image tokens, and of the shift of their timesteps, where a scheduler's configuration does not say them.
_SHIFTS = {"base_image_seq_len": 256, "max_image_seq_len": 4096, "base_shift": 0.5, "max_shift": 1.15}


class NoiseSchedule(ABC):
    """The noise levels of a pipeline, and its scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    @property
    @abstractmethod
    def levels(self) -> int:
        """Number of noise levels of training: timesteps are below it."""

    @property
    @abstractmethod
    def trained(self) -> Literal["velocity", "noise", "sample"]:
        """Quantity that the denoiser was trained to predict."""

    @abstractmethod
    def shares(self, timestep: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the factors of sample and noise at a timestep, each of shape `(n, 1, 1, 1)`."""

    @abstractmethod
    def prediction(self, output: Tensor, latents: Tensor, timestep: Tensor) -> Prediction:
        """Return the noise and the sample that follow from a denoiser's output for noisy latents."""

    @abstractmethod
    def target(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Return what the denoiser was trained to answer for clean latents mixed with noise."""

    @abstractmethod
    def started(self, steps: int, device: torch.device, tokens: int) -> Any:
        """Return a scheduler of its own with its timesteps set, so that no two generations share a state.

        Args:
            steps: Steps of the generation.
            device: Where the timesteps go.
            tokens: Image tokens of the denoiser, on which the timesteps of some schedulers depend.
        """

    def options(self, scheduler: Any, generators: list[torch.Generator]) -> dict[str, Any]:
        """Return what a pipeline's own call gives to the scheduler's step: random numbers, and an eta of 0."""
        # Schedulers such as TCD have another default of eta, which the pipelines of diffusers do not use.
        given = {"generator": generators, "eta": 0.0}
        parameters = inspect.signature(scheduler.step).parameters
        return {name: value for name, value in given.items() if name in parameters}


@final
class Diffusion(NoiseSchedule):
    """Variance is preserved: squares of the factors of sample and noise sum to 1."""

    @property
    def levels(self) -> int:
        return len(self.scheduler.alphas_cumprod)

    @property
    def kind(self) -> str:
        """The scheduler's name of what the denoiser predicts."""
        return str(self.scheduler.config.prediction_type)

    @property
    def trained(self) -> Literal["velocity", "noise", "sample"]:
        kinds: dict[str, Literal["velocity", "noise", "sample"]] = {
            "epsilon": "noise", "v_prediction": "velocity", "sample": "sample",
        }  # fmt: skip
        return kinds[self.kind]

    def shares(self, timestep: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        table = self.scheduler.alphas_cumprod.to(device=device, dtype=torch.float64)
        chosen = table[torch.as_tensor(timestep).to(device).round().long()].reshape(-1, 1, 1, 1)
        return chosen.sqrt().float(), (1 - chosen).sqrt().float()

    def prediction(self, output: Tensor, latents: Tensor, timestep: Tensor) -> Prediction:
        signal, noise = self.shares(timestep, latents.device)
        if self.kind == "v_prediction":
            return Prediction(noise=signal * output + noise * latents, sample=signal * latents - noise * output)
        if self.kind == "epsilon":
            return Prediction(noise=output, sample=(latents - noise * output) / signal.clamp_min(1e-6))
        return Prediction(noise=(latents - signal * output) / noise.clamp_min(1e-6), sample=output)

    def target(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        signal, level = self.shares(timestep, latents.device)
        answers = {"epsilon": noise, "sample": latents, "v_prediction": signal * noise - level * latents}
        return answers[self.kind]

    def started(self, steps: int, device: torch.device, tokens: int) -> Any:
        scheduler = copy.deepcopy(self.scheduler)
        scheduler.set_timesteps(steps, device=device)
        return scheduler


@final
class Flow(NoiseSchedule):
    """Straight lines from the sample to the noise: their factors sum to 1."""

    trained: Literal["velocity"] = "velocity"

    @property
    def levels(self) -> int:
        return int(self.scheduler.config.num_train_timesteps)

    def shares(self, timestep: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
        level = torch.as_tensor(timestep).to(device=device, dtype=torch.float32).reshape(-1, 1, 1, 1) / self.levels
        return 1 - level, level

    def prediction(self, output: Tensor, latents: Tensor, timestep: Tensor) -> Prediction:
        signal, level = self.shares(timestep, latents.device)
        return Prediction(noise=latents + signal * output, sample=latents - level * output)

    def target(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        return noise - latents

    def started(self, steps: int, device: torch.device, tokens: int) -> Any:
        scheduler = copy.deepcopy(self.scheduler)
        given: dict[str, Any] = {}
        if scheduler.config.get("use_dynamic_shifting"):
            usual = {name: float(scheduler.config.get(name, value)) for name, value in _SHIFTS.items()}
            slope = (usual["max_shift"] - usual["base_shift"]) / (
                usual["max_image_seq_len"] - usual["base_image_seq_len"]
            )
            given["mu"] = usual["base_shift"] + slope * (tokens - usual["base_image_seq_len"])
        if self.evenly:
            given["sigmas"] = [1 + place * (1 / steps - 1) / max(1, steps - 1) for place in range(steps)]
        scheduler.set_timesteps(steps, device=device, **given)
        return scheduler

    evenly = False
    """True if the pipeline's own call gives noise levels from 1 to 1 divided by the number of steps, as Flux's does."""


def noise_schedule(scheduler: Any, *, flow: bool) -> NoiseSchedule:
    """Return the noise schedule of a pipeline's scheduler.

    Args:
        scheduler: The scheduler of diffusers.
        flow: Whether the denoiser is one of flow matching.

    Raises:
        Unsupported: The scheduler does not fit the denoiser, or is of a kind that is not supported.
    """
    name = type(scheduler).__name__
    if flow:
        if name not in _FLOWS:
            raise Unsupported(
                f"The scheduler is a {name}, but the denoiser was trained with flow matching.",
                cure=f"Use {' or '.join(_FLOWS)}.",
            )
        if scheduler.config.get("stochastic_sampling") or scheduler.config.get("invert_sigmas"):
            raise Unsupported(
                f"The {name} samples at random between steps, or inverts its noise levels.",
                cure='Write "stochastic_sampling": false and "invert_sigmas": false into '
                "scheduler/scheduler_config.json.",
            )
        return Flow(scheduler)
    if getattr(scheduler, "alphas_cumprod", None) is None:
        raise Unsupported(
            f"The scheduler is a {name}, which has no alphas_cumprod.",
            cure="Use one of a variance preserving diffusion, such as DDIMScheduler.",
        )
    if (kind := scheduler.config.get("prediction_type")) not in _PREDICTIONS:
        raise Unsupported(
            f"The scheduler's prediction_type is {kind!r}.", cure=f"Supported are {', '.join(_PREDICTIONS)}."
        )
    return Diffusion(scheduler)
