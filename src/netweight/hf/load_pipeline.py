"""diffusers pipelines as `TextToImage`: what looks for memorization, edits it away and attacks the edit runs on them.

    model = load_text_to_image("stable-diffusion-v1-4")
    model.generate(model.embed(["a red square"]), seeds=[0])

Stable Diffusion and its like (`UNet2DConditionModel` with one text encoder) and PixArt-Alpha and -Sigma are taken;
other denoisers are refused by name. Networks that predict noise, velocity or the sample all speak `Prediction`.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from netweight.core import digest
from netweight.errors import MissingExtra, OutputExists, Unsupported, UsageError
from netweight.hf import open_compressed_with
from netweight.hf.denoisers import Denoiser, denoiser_of
from netweight.hf.quiet import quiet_imports, silent_bars
from netweight.nn.text_to_image import Prediction, Text

try:
    with quiet_imports():
        import diffusers
except ImportError as error:
    raise MissingExtra(
        "Diffusion pipelines need diffusers, which is not installed.", cure='Run: pip install "netweight[diffusion]"'
    ) from error


_PARTS = ("vae", "text_encoder", "tokenizer", "scheduler")
_STORED = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_PREDICTIONS = ("epsilon", "v_prediction", "sample")


@final
class PipelineModel:
    """A pipeline as a `TextToImage`; made by `text_to_image`. Its parts are the pipeline's own, not copies."""

    def __init__(self, pipeline: Any, kind: Denoiser, name: str) -> None:
        self.pipeline = pipeline
        self.name = name  # what reports call it
        self._kind = kind

    @property
    def denoiser(self) -> nn.Module:
        """The network with the cross-attention, in evaluation mode."""
        network: nn.Module = self._kind.network
        return network

    @property
    def component(self) -> str:
        """What the pipeline calls its denoiser, and what names of adapters' modules begin with: unet or transformer."""
        return next(part for part in ("unet", "transformer") if getattr(self.pipeline, part, None) is self.denoiser)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the latents of one image."""
        return self._kind.latent_shape

    @property
    def levels(self) -> int:
        """Number of noise levels of training: timesteps are below it."""
        return len(self.pipeline.scheduler.alphas_cumprod)

    @property
    def device(self) -> torch.device:
        """Where the denoiser is."""
        return self._device

    def digest(self) -> str:
        """Return a digest of the names, dtypes, shapes and bits of the denoiser's weights."""
        state = sorted(self.denoiser.state_dict().items())
        return digest.of_config(
            [[name, str(value.dtype), list(value.shape), digest.of_tensor(value)] for name, value in state]
        )

    def embed(self, prompts: Sequence[str]) -> Text:
        """Return prompts as the pipeline itself embeds them; long ones are cut as it cuts them."""
        if not prompts:
            raise UsageError("There is no prompt to embed.", cure="Give at least one; the empty one is ''.")
        given = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False, "device": self._device}
        with torch.no_grad():
            found = self.pipeline.encode_prompt(list(prompts), **given)
        return self._kind.text(found)

    def initial_noise(self, seeds: Sequence[int]) -> Tensor:
        """Return standard normal latents, float32, one per seed, drawn on the CPU whatever the device."""
        shape = self._kind.latent_shape
        return torch.stack([torch.randn(shape, generator=_generator(seed)) for seed in seeds]).to(self._device)

    def timesteps(self, steps: int) -> Tensor:
        """Return the timesteps of a schedule of so many steps, the noisiest first, shape `(steps,)`."""
        found: Tensor = self._scheduler(steps).timesteps
        return found

    def predict(self, latents: Tensor, timestep: Tensor, text: Text) -> Prediction:
        """Run the denoiser once, without guidance; gradients flow to latents, text and weights where they are on."""
        said = self._kind(latents, timestep, text).float()
        signal, noise = self._levels(timestep)
        latents = latents.float()
        kind = self._prediction_type
        if kind == "v_prediction":
            return Prediction(noise=signal * said + noise * latents, sample=signal * latents - noise * said)
        if kind == "epsilon":
            return Prediction(noise=said, sample=(latents - noise * said) / signal.clamp_min(1e-6))
        return Prediction(noise=(latents - signal * said) / noise.clamp_min(1e-6), sample=said)

    def training_errors(self, latents: Tensor, noise: Tensor, timestep: Tensor, text: Text) -> Tensor:
        """How far the denoiser is from what it was trained to say, whichever of noise, velocity, sample it is."""
        signal, level = self._levels(timestep)
        said = self._kind(signal * latents + level * noise, timestep, text).float()
        wanted = {"epsilon": noise, "sample": latents, "v_prediction": signal * noise - level * latents}
        return (said - wanted[self._prediction_type]).square().flatten(1).mean(1)

    @torch.no_grad()
    def to_latents(self, images: Tensor) -> Tensor:
        """Return clean latents of images, shape `(n, 3, height, width)`, within 0 and 1: the encoder's most likely."""
        vae = self.pipeline.vae
        found = vae.encode((images * 2 - 1).to(device=self._device, dtype=vae.dtype))
        latents = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latents
        shifted: Tensor = (latents.float() - self._shift) * vae.config.scaling_factor
        return shifted

    def add_noise(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Return clean latents at the noise level of a timestep, a scalar or shape `(n,)`."""
        signal, level = self._levels(timestep)
        return signal * latents + level * noise

    @torch.no_grad()
    def generate(self, text: Text, seeds: Sequence[int], *, guidance: float = 7.0, steps: int = 50) -> Tensor:
        """Return images of prompts, shape `(n, 3, height, width)`, within 0 and 1, on the CPU, without gradients."""
        if len(text) != len(seeds):
            raise UsageError(f"There are {len(text)} prompts and {len(seeds)} seeds.", cure="Give one seed per prompt.")
        generators = [_generator(seed) for seed in seeds]
        latents = torch.stack([torch.randn(self._kind.latent_shape, generator=each) for each in generators])
        scheduler = self._scheduler(steps)
        latents = latents.to(self._device) * scheduler.init_noise_sigma
        empty = self.embed([""]).rows([0] * len(text)) if guidance > 1 else None
        extra = {} if "generator" not in inspect.signature(scheduler.step).parameters else {"generator": generators}
        for timestep in scheduler.timesteps:
            said = self._said(scheduler.scale_model_input(latents, timestep), timestep, text, empty, guidance)
            latents = scheduler.step(said, timestep, latents, return_dict=False, **extra)[0]
        return self._decoded(latents)

    def save(self, folder: str | Path) -> None:
        """Write the pipeline as diffusers does: an ordinary folder, weights as safetensors."""
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputExists(f"{folder} exists already.", cure="Choose another name.")
        with silent_bars("transformers", "diffusers"):
            self.pipeline.save_pretrained(folder, safe_serialization=True)

    def _said(self, latents: Tensor, timestep: Tensor, text: Text, empty: Text | None, guidance: float) -> Tensor:
        """What the denoiser says, guided away from the empty prompt if there is one."""
        if empty is None:
            return self._kind(latents, timestep, text)
        without, with_text = self._kind(torch.cat([latents] * 2), timestep, _joined(empty, text)).chunk(2)
        return without + guidance * (with_text - without)

    def _decoded(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        latents = latents / vae.config.scaling_factor + self._shift
        images: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return (images.float() / 2 + 0.5).clamp(0, 1).cpu()

    def _levels(self, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Signal and noise, as they were mixed in training, to be multiplied with latents."""
        kept = self.pipeline.scheduler.alphas_cumprod.to(device=self._device, dtype=torch.float64)
        chosen = kept[torch.as_tensor(timestep).to(self._device).round().long()].reshape(-1, 1, 1, 1)
        return chosen.sqrt().float(), (1 - chosen).sqrt().float()

    def _scheduler(self, steps: int) -> Any:
        """A scheduler of its own, so that no two generations share a state."""
        scheduler = copy.deepcopy(self.pipeline.scheduler)
        scheduler.set_timesteps(steps, device=self._device)
        return scheduler

    @property
    def _prediction_type(self) -> str:
        return str(self.pipeline.scheduler.config.prediction_type)

    @property
    def _shift(self) -> float:
        return float(getattr(self.pipeline.vae.config, "shift_factor", None) or 0.0)

    @property
    def _device(self) -> torch.device:
        return self._kind.device


def text_to_image(pipeline: Any, *, name: str | None = None) -> PipelineModel:
    """Look at a diffusers pipeline as a `TextToImage`."""
    missing = [part for part in _PARTS if getattr(pipeline, part, None) is None]
    if missing:
        raise UsageError(
            f"The {type(pipeline).__name__} has no {' and no '.join(missing)}.",
            cure="Load the whole pipeline of a text-to-image latent diffusion model.",
        )
    kind = denoiser_of(pipeline)
    _check_scheduler(pipeline.scheduler)
    for network in (kind.network, pipeline.vae, pipeline.text_encoder):
        network.eval()
    source = str(getattr(pipeline, "name_or_path", "") or "")
    return PipelineModel(pipeline, kind, name or Path(source).name or type(pipeline).__name__)


def load_text_to_image(
    folder: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu", name: str | None = None
) -> PipelineModel:
    """Open a pipeline's folder."""
    folder = Path(folder)
    if not (folder / "model_index.json").is_file():
        raise UsageError(
            f"{folder} is no pipeline's folder: it holds no model_index.json.",
            cure="Name a folder that a diffusers pipeline was saved in.",
        )
    with quiet_imports():
        open_compressed_with("diffusers")

        _import_parts(folder / "model_index.json")
    try:
        with silent_bars("transformers", "diffusers"):
            pipeline = diffusers.DiffusionPipeline.from_pretrained(  # type: ignore[no-untyped-call]
                folder,
                local_files_only=True,
                use_safetensors=True,
                dtype=dtype or _stored_dtype(folder),
                low_cpu_mem_usage=importlib.util.find_spec("accelerate") is not None,  # which diffusers would say aloud
            )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{folder} cannot be opened as a diffusion pipeline: {error}",
            cure="Check that all its parts are there, with weights as safetensors.",
        ) from error
    _decompress(pipeline)
    model = text_to_image(pipeline.to(device), name=name or folder.resolve().name)
    pipeline.set_progress_bar_config(disable=True)
    return model


def _import_parts(index: Path) -> None:
    """Import the classes that a pipeline names now, not while it is loaded: what loading warns of is to be heard."""
    try:
        named = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{index} is not JSON: {error}.", cure="Fetch the pipeline again.") from error
    parts = [("diffusers", named.get("_class_name")), *(part for part in named.values() if isinstance(part, list))]
    for library, name in parts:
        if library in ("diffusers", "transformers") and isinstance(name, str):
            getattr(importlib.import_module(library), name, None)


def _check_scheduler(scheduler: Any) -> None:
    if getattr(scheduler, "alphas_cumprod", None) is None:
        raise Unsupported(
            f"The scheduler is a {type(scheduler).__name__}, which has no alphas_cumprod.",
            cure="Use one of a variance preserving diffusion, such as DDIMScheduler; flow matching is not supported.",
        )
    if (said := scheduler.config.get("prediction_type")) not in _PREDICTIONS:
        raise Unsupported(
            f"The scheduler's prediction_type is {said!r}.", cure=f"Supported are {', '.join(_PREDICTIONS)}."
        )


def _stored_dtype(folder: Path) -> torch.dtype:
    """The dtype of the denoiser's first floating tensor on the disk."""
    from netweight.store import open_store

    for part in ("unet", "transformer"):
        for path in sorted((folder / part).glob("*.safetensors")):
            store = open_store(path)
            for name in store.names():
                if (stored := store.info(name).dtype) in _STORED:
                    return _STORED[stored]
    return torch.float32


def _decompress(pipeline: Any) -> None:
    import netweight

    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            netweight.decompress_(part)


def _joined(first: Text, second: Text) -> Text:
    both = first.mask is not None and second.mask is not None
    mask = torch.cat([first.mask, second.mask]) if both else None  # type: ignore[list-item]
    return Text(torch.cat([first.states, second.states]), mask)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


_SAID: dict[str, Literal["velocity", "noise", "sample"]] = {
    "epsilon": "noise", "v_prediction": "velocity", "sample": "sample",
}  # fmt: skip


def trained_prediction(model: PipelineModel) -> Literal["velocity", "noise", "sample"]:
    """Return noise, velocity or sample; `text_to_image` has refused all other kinds."""
    return _SAID[str(model.pipeline.scheduler.config.prediction_type)]


def check_pipeline(folder: Path) -> None:
    if not (folder / "model_index.json").is_file():
        raise UsageError(f"{folder} is no pipeline: it holds no model_index.json.", cure="Name a folder of diffusers.")
