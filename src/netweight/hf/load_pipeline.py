"""diffusers pipelines as `TextToImage`, on which memorization is detected and edited, and edits are attacked.

    model = load_text_to_image("stable-diffusion-v1-4")
    model.generate(model.embed(["a red square"]), seeds=[0])

Stable Diffusion and its like (`UNet2DConditionModel`), SDXL with its two text encoders, PixArt-Alpha and -Sigma are
supported; other denoisers are refused by name. Networks may predict noise, velocity or the sample. Every part is opened
in the dtype that it is stored in (see `pipeline_files`). A LoRA that lies in the folder as
`pytorch_lora_weights.safetensors` is merged when it is opened. A safety checker, which blackens images, is not opened.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from netweight.core.files import digest_config, digest_tensor
from netweight.core.lazy import library, open_compressed_with
from netweight.core.progress import quiet_imports, silent_bars
from netweight.errors import MissingExtra, OutputExists, Unsupported, UsageError
from netweight.hf.pipeline_files import PipelineFiles
from netweight.hf.pipeline_files import check_pipeline as check_pipeline
from netweight.hf.pipeline_settings import PipelineSettings
from netweight.nn.hooks import hooked
from netweight.nn.text_to_image import Prediction, Text

_PARTS = ("vae", "text_encoder", "tokenizer", "scheduler")
LORA = "pytorch_lora_weights.safetensors"
# Parts of a pipeline that no method here uses.
_UNUSED = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False, "image_encoder": None}
_PREDICTIONS = ("epsilon", "v_prediction", "sample")


@final
class PipelineModel:
    """A pipeline as a `TextToImage`; made by `text_to_image` or `load_text_to_image`. It shares the pipeline's parts.

    Attributes:
        pipeline: The pipeline of diffusers.
        name: What it is called in reports.
        files: The files that it was read from; None for a pipeline that was given in memory.
        lora: Whether a LoRA of the folder was merged, so that the weights are not those of the files.
    """

    def __init__(self, pipeline: Any, kind: _UNet | _XLUNet | _PixArt, name: str) -> None:
        self.pipeline = pipeline
        self.name = name
        self.files: PipelineFiles | None = None
        self.lora = False
        self._kind = kind

    @property
    def denoiser(self) -> nn.Module:
        """The network with the cross-attention, in evaluation mode."""
        network: nn.Module = self._kind.network
        return network

    @property
    def component(self) -> str:
        """The pipeline's name of its denoiser, with which names of adapters' modules begin: unet or transformer."""
        return next(part for part in ("unet", "transformer") if getattr(self.pipeline, part, None) is self.denoiser)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """Channels, height and width of the latents of one image."""
        return self._kind.latent_shape

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width of the images that it makes, in pixels."""
        _, height, width = self.latent_shape
        return height * self._kind.scale, width * self._kind.scale

    @property
    def levels(self) -> int:
        """Number of noise levels of training: timesteps are below it."""
        return len(self.pipeline.scheduler.alphas_cumprod)

    @property
    def device(self) -> torch.device:
        """Device of the denoiser."""
        return self._device

    def digest(self) -> str:
        """Return a digest of the names, dtypes, shapes and bits of the denoiser's weights."""
        state = sorted(self.denoiser.state_dict().items())
        return digest_config(
            [[name, str(value.dtype), list(value.shape), digest_tensor(value)] for name, value in state]
        )

    def embed(self, prompts: Sequence[str], tokens: Tensor | None = None) -> Text:
        """Return prompts as the pipeline itself embeds them; long ones are cut as it cuts them."""
        # `tokens`: what its text encoder reads in place of their embeddings, with gradients
        if not prompts:
            raise UsageError("There is no prompt to embed.", cure="Give at least one; the empty one is ''.")
        given = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False, "device": self._device}
        if tokens is None:
            with torch.no_grad():
                return self._kind.text(self.pipeline.encode_prompt(list(prompts), **given), prompts)
        replaced = [(self._token_layer, lambda _module, _inputs, output: tokens.to(output))]
        with hooked(replaced):
            return self._kind.text(self.pipeline.encode_prompt(list(prompts), **given), prompts)

    def token_embeddings(self, prompts: Sequence[str]) -> Tensor:
        """Return what the text encoder reads for prompts, shape `(n, tokens, width)`."""
        seen: list[Tensor] = []
        with hooked([(self._token_layer, lambda _module, _inputs, output: seen.append(output.detach().clone()))]):
            self.embed(prompts)
        return seen[-1]

    def vocabulary(self) -> tuple[tuple[str, ...], Tensor]:
        """Return words that are one token each, and their embeddings, shape `(words, width)`."""
        words, tokenizer = one_token_words(self), self.pipeline.tokenizer
        ids = [tokenizer(word, add_special_tokens=False).input_ids[0] for word in words]
        weight: Tensor = self._token_layer.weight
        return words, weight.detach()[ids]

    @property
    def _token_layer(self) -> Any:
        if getattr(self.pipeline, "text_encoder_2", None) is not None:
            raise Unsupported(
                f"{self.name} has two text encoders; what they read is not searched together.",
                cure="Search embeddings.",
            )
        return self.pipeline.text_encoder.get_input_embeddings()

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
        output = self._kind(latents, timestep, text).float()
        signal, noise = self._levels(timestep)
        latents = latents.float()
        kind = self._prediction_type
        if kind == "v_prediction":
            return Prediction(noise=signal * output + noise * latents, sample=signal * latents - noise * output)
        if kind == "epsilon":
            return Prediction(noise=output, sample=(latents - noise * output) / signal.clamp_min(1e-6))
        return Prediction(noise=(latents - signal * output) / noise.clamp_min(1e-6), sample=output)

    def training_errors(self, latents: Tensor, noise: Tensor, timestep: Tensor, text: Text) -> Tensor:
        """Return the mean squared error of what the denoiser was trained to predict: noise, velocity or sample."""
        signal, level = self._levels(timestep)
        output = self._kind(signal * latents + level * noise, timestep, text).float()
        wanted = {"epsilon": noise, "sample": latents, "v_prediction": signal * noise - level * latents}
        return (output - wanted[self._prediction_type]).square().flatten(1).mean(1)

    @torch.no_grad()
    def to_latents(self, images: Tensor) -> Tensor:
        """Return clean latents of images, shape `(n, 3, height, width)`, within 0 and 1: the encoder's most likely."""
        with self._decoder() as vae:
            found = vae.encode((images * 2 - 1).to(device=self._device, dtype=vae.dtype))
        latents = found.latent_dist.mode() if hasattr(found, "latent_dist") else found.latents
        mean, deviation = self._latent_statistics(latents)
        scaled: Tensor = (latents.float() - mean) * (self.pipeline.vae.config.scaling_factor / deviation)
        return scaled

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
        extra = self._step_options(scheduler, generators)
        for timestep in scheduler.timesteps:
            output = self._guided(scheduler.scale_model_input(latents, timestep), timestep, text, empty, guidance)
            latents = scheduler.step(output, timestep, latents, return_dict=False, **extra)[0]
        if not latents.isfinite().all():
            raise UsageError(self._not_finite(scheduler), cure=self._cure_of_infinity(scheduler))
        return self.to_images(latents)

    @staticmethod
    def _step_options(scheduler: Any, generators: list[torch.Generator]) -> dict[str, Any]:
        """Return what a pipeline's own call passes to the scheduler's step: random numbers, and an eta of 0."""
        # Schedulers such as TCD have another default of eta, which the pipelines of diffusers do not use.
        given = {"generator": generators, "eta": 0.0}
        known = inspect.signature(scheduler.step).parameters
        return {name: value for name, value in given.items() if name in known}

    def _not_finite(self, scheduler: Any) -> str:
        return (
            f"The images of {self.name} are NaN or infinite with its {type(scheduler).__name__} (prediction_type "
            f"{self._prediction_type}, {str(next(self.denoiser.parameters()).dtype).removeprefix('torch.')})."
        )

    def _cure_of_infinity(self, scheduler: Any) -> str:
        file = "scheduler/scheduler_config.json"
        if self._prediction_type == "epsilon" and float(scheduler.alphas_cumprod[-1]) < 1e-6:
            return (
                "At zero terminal SNR the first step sees pure noise, of which a prediction of noise says nothing. "
                f'Models trained so predict velocity: write "prediction_type": "v_prediction" into {file}; otherwise '
                'write "rescale_betas_zero_snr": false.'
            )
        return "Check the weights for NaN, and try another variant of the pipeline, such as one in fp32."

    def save(self, folder: str | Path) -> None:
        """Write the pipeline as diffusers does: an ordinary folder, weights as safetensors."""
        folder = Path(folder)
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise OutputExists(f"{folder} exists already.", cure="Choose another name.")
        with silent_bars("transformers", "diffusers"):
            self.pipeline.save_pretrained(folder, safe_serialization=True)

    def _guided(self, latents: Tensor, timestep: Tensor, text: Text, empty: Text | None, guidance: float) -> Tensor:
        """The denoiser's output, guided away from the empty prompt if there is one."""
        if empty is None:
            return self._kind(latents, timestep, text)
        without, with_text = self._kind(torch.cat([latents] * 2), timestep, Text.joined([empty, text])).chunk(2)
        return without + guidance * (with_text - without)

    def to_images(self, latents: Tensor) -> Tensor:
        """Return images of clean latents, shape `(n, 3, height, width)`, within 0 and 1, on the CPU; gradients flow."""
        latents = self._unscaled(latents)
        with self._decoder() as vae:
            images: Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return (images.float() / 2 + 0.5).clamp(0, 1).cpu()

    @contextmanager
    def _decoder(self) -> Iterator[Any]:
        """The autoencoder; one that overflows in half precision, as SDXL's does, is widened for a block."""
        vae = self.pipeline.vae
        narrow = vae.dtype == torch.float16 and vae.config.get("force_upcast", False)
        try:
            yield vae.float() if narrow else vae
        finally:
            if narrow:
                vae.half()

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

    def _unscaled(self, latents: Tensor) -> Tensor:
        """Latents as the autoencoder decodes them."""
        mean, deviation = self._latent_statistics(latents)
        unscaled: Tensor = latents * (deviation / self.pipeline.vae.config.scaling_factor) + mean
        return unscaled

    def _latent_statistics(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the autoencoder's latents, by channel where its configuration says them."""
        config = self.pipeline.vae.config
        mean, deviation = (config.get(name) for name in ("latents_mean", "latents_std"))
        if mean is not None and deviation is not None:
            return tuple(torch.tensor(each).to(latents.device).reshape(1, -1, 1, 1) for each in (mean, deviation))  # type: ignore[return-value]
        shift = torch.tensor(float(config.get("shift_factor") or 0.0), device=latents.device)
        return shift, torch.ones_like(shift)

    @property
    def _device(self) -> torch.device:
        return self._kind.device


def text_to_image(pipeline: Any, *, name: str | None = None, size: tuple[int, int] | None = None) -> PipelineModel:
    """Make a `TextToImage` of a diffusers pipeline.

    Args:
        pipeline: The pipeline; its parts are put into evaluation mode.
        name: What it is called in reports; by default the name of its folder.
        size: Height and width of its images in pixels; by default what the configuration of the denoiser says.

    Returns:
        The model, which shares the pipeline's parts.

    Raises:
        UsageError: The pipeline lacks a part, the size is unknown, or the autoencoder cannot make it.
        Unsupported: The denoiser or the scheduler is of a kind that is not supported.
    """
    missing = [part for part in _PARTS if getattr(pipeline, part, None) is None]
    if missing:
        raise UsageError(
            f"The {type(pipeline).__name__} has no {' and no '.join(missing)}.",
            cure="Load the whole pipeline of a text-to-image latent diffusion model.",
        )
    kind = _denoiser_of(pipeline)
    _check_scheduler(pipeline.scheduler)
    kind.choose_size(size)
    for network in (kind.network, pipeline.vae, pipeline.text_encoder):
        network.eval()
    source = str(getattr(pipeline, "name_or_path", "") or "")
    return PipelineModel(pipeline, kind, name or Path(source).name or type(pipeline).__name__)


def load_text_to_image(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    name: str | None = None,
    variant: str | None = None,
    size: tuple[int, int] | None = None,
) -> PipelineModel:
    """Open a pipeline's folder.

    Args:
        folder: A folder with `model_index.json`. Weights are safetensors files, or `.bin` files where a part has no
            others; no code in them is run.
        dtype: The dtype of all parts; by default each part has the one that it is stored in, and the widest of them
            where its tensors are stored in several, so that no number is rounded.
        device: Where the pipeline goes, such as `cuda`.
        name: What the model is called in reports; by default the folder's name.
        variant: Which weights are read where a part has several, such as `fp16`; by default the usual files.
        size: Height and width of images in pixels; by default what the configuration of the denoiser says.

    Returns:
        The model.

    Raises:
        UsageError: The folder is none of a pipeline, or something in it cannot be opened.
        NameNotFound: There are no weights of the variant.
        Unsupported: A part is of a kind that is not supported.
    """
    folder = Path(folder)
    files = PipelineFiles(folder, variant)
    diffusers = _diffusers()
    with quiet_imports():
        open_compressed_with("diffusers")
        _import_parts(folder / "model_index.json")
    unused = {part: value for part, value in _UNUSED.items() if part in _index_of(folder)}
    try:
        with silent_bars("transformers", "diffusers"), files.as_diffusers_expects() as view:
            pipeline = diffusers.DiffusionPipeline.from_pretrained(
                view,
                local_files_only=True,
                dtype=dtype or _dtypes(files),
                low_cpu_mem_usage=importlib.util.find_spec("accelerate") is not None,  # else diffusers warns
                **unused,
            )
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise UsageError(
            f"{folder} cannot be opened as a diffusion pipeline: {error}",
            cure="Check that all its parts are there.",
        ) from error
    _decompress(pipeline)
    lora = _merge_lora(pipeline, folder)
    model = text_to_image(pipeline.to(device), name=name or folder.resolve().name, size=size)
    model.files, model.lora = files, lora
    pipeline.set_progress_bar_config(disable=True)
    return model


def open_pipeline(folder: str | Path, settings: PipelineSettings, *, name: str | None = None) -> PipelineModel:
    """Open a pipeline's folder as settings say; see `load_text_to_image`."""
    return load_text_to_image(folder, device=settings.device, name=name, variant=settings.variant, size=settings.pixels)


def _dtypes(files: PipelineFiles) -> dict[str, torch.dtype]:
    """The dtype that each part is opened in."""
    packed = files.compressed
    return {part: _packed_dtype(files, part) if part in packed else files.dtype(part) for part in files.parts} | {
        "default": torch.float32
    }


def _packed_dtype(files: PipelineFiles, part: str) -> torch.dtype:
    """The dtype of a part that netweight has compressed."""
    from netweight.store import open_store

    known = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
    stored = set()
    for file in files.chosen(part):
        store = open_store(files.folder / file.path)
        stored |= {known[dtype] for name in store.names() if (dtype := store.info(name).dtype) in known}
    return torch.float32 if len(stored) != 1 else stored.pop()


def _index_of(folder: Path) -> dict[str, Any]:
    index = folder / "model_index.json"
    try:
        found: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UsageError(f"{index} is not JSON: {error}.", cure="Fetch the pipeline again.") from error
    return found


def _import_parts(index: Path) -> None:
    """Import the classes that a pipeline names before it is loaded, so that warnings of loading stay visible."""
    named = _index_of(index.parent)
    parts = [("diffusers", named.get("_class_name")), *(part for part in named.values() if isinstance(part, list))]
    for home, name in parts:
        if home in ("diffusers", "transformers") and isinstance(name, str):
            getattr(importlib.import_module(home), name, None)


def _check_scheduler(scheduler: Any) -> None:
    if getattr(scheduler, "alphas_cumprod", None) is None:
        raise Unsupported(
            f"The scheduler is a {type(scheduler).__name__}, which has no alphas_cumprod.",
            cure="Use one of a variance preserving diffusion, such as DDIMScheduler; flow matching is not supported.",
        )
    if (kind := scheduler.config.get("prediction_type")) not in _PREDICTIONS:
        raise Unsupported(
            f"The scheduler's prediction_type is {kind!r}.", cure=f"Supported are {', '.join(_PREDICTIONS)}."
        )


def _merge_lora(pipeline: Any, folder: Path) -> bool:
    """Merge the LoRA that lies in a pipeline's folder as diffusers' `save_lora_weights` names it, if there is one."""
    if not (folder / LORA).is_file():
        return False
    if importlib.util.find_spec("peft") is None:
        raise MissingExtra(f"{folder / LORA} needs peft, which is not installed.", cure="Run: pip install peft")
    with silent_bars("transformers", "diffusers"):
        pipeline.load_lora_weights(folder, weight_name=LORA)
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
    return True


def _decompress(pipeline: Any) -> None:
    import netweight

    for part in pipeline.components.values():
        if isinstance(part, nn.Module) and any(isinstance(w, netweight.CompressedTensor) for w in part.parameters()):
            netweight.decompress_(part)


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def trained_prediction(model: PipelineModel) -> Literal["velocity", "noise", "sample"]:
    """Return what the denoiser was trained to predict."""
    kinds: dict[str, Literal["velocity", "noise", "sample"]] = {
        "epsilon": "noise", "v_prediction": "velocity", "sample": "sample",
    }  # fmt: skip
    return kinds[str(model.pipeline.scheduler.config.prediction_type)]


def check_lengths(model: PipelineModel, prompts: Sequence[str]) -> None:
    """Refuse prompts of which the text encoder reads a part only."""
    tokenizer = model.pipeline.tokenizer
    for prompt in prompts:
        count = len(tokenizer(prompt, truncation=False, verbose=False).input_ids)
        if count > tokenizer.model_max_length:
            raise UsageError(
                f"The prompt {prompt!r} has {count} tokens; the text encoder reads {tokenizer.model_max_length}.",
                cure="Cut it to what is read: the rest has no part in what is memorized.",
            )


def padding_masks(model: PipelineModel) -> Callable[[Sequence[str]], Tensor]:
    """Make the function that tells which tokens of prompts count, as `AttentionScaling` takes it."""

    def masks(prompts: Sequence[str]) -> Tensor:
        known = model.embed(prompts).mask
        if known is not None:
            return known
        tokenizer = model.pipeline.tokenizer
        length = tokenizer.model_max_length
        tokens = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        found: Tensor = tokens.attention_mask.bool()
        return found

    return masks


def one_token_words(model: PipelineModel) -> tuple[str, ...]:
    """Return the words that a pipeline's tokenizer makes one token of, for `RandomTokens`."""
    tokenizer = model.pipeline.tokenizer
    pieces = (piece.removesuffix("</w>").removeprefix("▁").lower() for piece in tokenizer.get_vocab())
    words = sorted({piece for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) >= 3})
    single = tuple(word for word in words if len(tokenizer(word, add_special_tokens=False).input_ids) == 1)
    if not single:
        raise Unsupported(f"The tokenizer of {model.name} makes no word of three letters or more one token.")
    return single


def _diffusers() -> Any:
    with quiet_imports():
        return library("diffusers", "Opening a diffusion pipeline", "diffusion")


def _denoiser_of(pipeline: Any) -> _UNet | _XLUNet | _PixArt:
    """Find the denoiser of a pipeline."""
    diffusers = _diffusers()
    unet, transformer = (getattr(pipeline, part, None) for part in ("unet", "transformer"))
    if isinstance(unet, diffusers.UNet2DConditionModel):
        _refuse_conditions(unet, pipeline)
        return _XLUNet(unet, pipeline) if _is_xl(unet, pipeline) else _UNet(unet, pipeline)
    if isinstance(transformer, diffusers.PixArtTransformer2DModel):
        return _PixArt(transformer, pipeline)
    found = unet if unet is not None else transformer
    if hasattr(found, "_orig_mod"):
        raise Unsupported(
            "The denoiser is compiled, so that its layers cannot be read or edited one by one.",
            cure="Give the pipeline with the network from before torch.compile, which is in _orig_mod.",
        )
    what = type(pipeline).__name__ if found is None else type(found).__name__
    raise Unsupported(
        f"The denoiser is a {what}." if found is not None else f"The {what} has neither unet nor transformer.",
        cure="Supported are UNet2DConditionModel, as in Stable Diffusion 1 and 2 and SDXL, and "
        "PixArtTransformer2DModel; networks of joint attention such as those of SD3 and Flux are not.",
    )


def _is_xl(unet: Any, pipeline: Any) -> bool:
    """Return whether a U-Net takes SDXL's pooled text and sizes; the refiner's aesthetic score is another condition."""
    return (
        unet.config.get("addition_embed_type") == "text_time"
        and getattr(pipeline, "text_encoder_2", None) is not None
        and not pipeline.config.get("requires_aesthetics_score", False)
    )


def _refuse_conditions(unet: Any, pipeline: Any) -> None:
    """Refuse U-Nets with inputs beside latents, a timestep and text."""
    config = unet.config
    wants = [
        name
        for name in ("addition_embed_type", "class_embed_type", "encoder_hid_dim_type", "time_cond_proj_dim")
        if config.get(name) is not None and not (name == "addition_embed_type" and _is_xl(unet, pipeline))
    ]
    if config.in_channels != pipeline.vae.config.latent_channels:
        wants.append(f"in_channels={config.in_channels}")
    if wants:
        raise Unsupported(
            f"The UNet2DConditionModel of this {type(pipeline).__name__} takes more than latents, timestep and text "
            f"({', '.join(wants)}).",
            cure="Supported are those of Stable Diffusion 1 and 2 and SDXL's base; refiners, inpainting and "
            "adapters are not.",
        )


class _Network:
    """The denoiser of a pipeline, and the size of its latents."""

    def __init__(self, network: Any, pipeline: Any) -> None:
        self.network = network
        self.scale = 2 ** (len(pipeline.vae.config.block_out_channels) - 1)
        self._size: tuple[int, int] | None = None
        # What the pipeline's own class takes where the network's configuration does not say it.
        self._usual = getattr(pipeline, "default_sample_size", None)

    def choose_size(self, size: tuple[int, int] | None) -> None:
        """Fix the size of images in pixels: the one given, or what the configuration says."""
        if size is not None:
            if any(side < self.scale or side % self.scale for side in size):
                raise UsageError(
                    f"Images of {size[0]} × {size[1]} pixels cannot be made: sides are multiples of {self.scale}.",
                    cure="Give another --size.",
                )
            self._size = size[0] // self.scale, size[1] // self.scale
            return
        given = self.network.config.get("sample_size") or self._usual
        if given is None:
            raise UsageError(
                f"The configuration of the {type(self.network).__name__} has no sample_size, so that the size of its "
                "images is not known.",
                cure="Say it in pixels: --size 512.",
            )
        height, width = (given, given) if isinstance(given, int) else given
        self._size = int(height), int(width)

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        assert self._size is not None  # see `text_to_image`
        return (int(self.network.config.in_channels), *self._size)

    @property
    def device(self) -> torch.device:
        return next(self.network.parameters()).device  # type: ignore[no-any-return]


class _UNet(_Network):
    """Stable Diffusion's: it attends to every token, padding too."""

    def text(self, encoded: Any, prompts: Sequence[str]) -> Text:
        return Text(encoded[0])

    def __call__(self, latents: Tensor, timestep: Tensor, text: Text) -> Tensor:
        dtype = self.network.dtype
        output: Tensor = self.network(
            latents.to(dtype), timestep.to(latents.device), text.states.to(dtype), return_dict=False,
            added_cond_kwargs=self.conditions(latents, text),
        )[0]  # fmt: skip
        return output

    def conditions(self, latents: Tensor, text: Text) -> dict[str, Tensor] | None:
        """Inputs beside latents, timestep and text."""
        return None


class _XLUNet(_UNet):
    """SDXL's: states of two encoders, pooled text, and the image's size, uncropped, as its pipeline gives them."""

    def __init__(self, network: Any, pipeline: Any) -> None:
        super().__init__(network, pipeline)
        self._zeros = bool(pipeline.config.get("force_zeros_for_empty_prompt", True))

    def text(self, encoded: Any, prompts: Sequence[str]) -> Text:
        given = torch.tensor([bool(prompt) or not self._zeros for prompt in prompts], device=encoded[0].device)
        return Text(encoded[0] * given[:, None, None], pooled=encoded[2] * given[:, None])

    def conditions(self, latents: Tensor, text: Text) -> dict[str, Tensor] | None:
        assert text.pooled is not None  # see `text`
        height, width = (float(side * self.scale) for side in latents.shape[-2:])
        sizes = torch.tensor([[height, width, 0, 0, height, width]], dtype=self.network.dtype, device=latents.device)
        pooled = text.pooled.to(device=latents.device, dtype=self.network.dtype)
        return {"text_embeds": pooled, "time_ids": sizes.repeat(len(latents), 1)}


class _PixArt(_Network):
    """PixArt-Alpha and -Sigma: padding is masked, and a learned variance is cut off."""

    def text(self, encoded: Any, prompts: Sequence[str]) -> Text:
        return Text(encoded[0], encoded[1].bool())

    def __call__(self, latents: Tensor, timestep: Tensor, text: Text) -> Tensor:
        dtype, count = self.network.dtype, len(latents)
        output: Tensor = self.network(
            latents.to(dtype),
            encoder_hidden_states=text.states.to(dtype),
            encoder_attention_mask=None if text.mask is None else text.mask.to(dtype),
            timestep=timestep.to(latents.device).expand(count),
            added_cond_kwargs=self._sizes(latents),
            return_dict=False,
        )[0]
        return output[:, : latents.shape[1]]

    def _sizes(self, latents: Tensor) -> dict[str, Tensor | None]:
        """The image's size, an input of PixArt-Alpha's largest network, as its pipeline gives it for square ones."""
        if not self.network.use_additional_conditions:
            return {"resolution": None, "aspect_ratio": None}
        count, _, height, width = latents.shape
        made: dict[str, Any] = {"dtype": self.network.dtype, "device": latents.device}
        resolution = torch.tensor([[height * 8.0, width * 8.0]], **made).repeat(count, 1)
        return {"resolution": resolution, "aspect_ratio": torch.full((count, 1), height / width, **made)}
