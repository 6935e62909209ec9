"""diffusers pipelines as `TextToImage`, on which memorization is detected and edited, and edits are attacked.

    model = load_text_to_image("stable-diffusion-v1-4")
    model.generate(model.embed(["a red square"]), seeds=[0])

Stable Diffusion and its like (`UNet2DConditionModel`), SDXL with its two text encoders, PixArt-Alpha and -Sigma, SD3
and Flux are supported (see `denoisers`); others are refused by name. Networks may predict noise, velocity or the
sample. Every part is opened in the dtype that it is stored in (see `pipeline_files`). A LoRA that lies in the folder as
`pytorch_lora_weights.safetensors` is merged when it is opened. A safety checker, which blackens images, is not opened.
"""

from __future__ import annotations

import importlib
import importlib.util
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from netweight.core.bounded_json import read_json
from netweight.core.devices import check_device
from netweight.core.digests import digest_config, digest_tensor
from netweight.core.foreign_errors import opening, refuse_missing_weights, running
from netweight.core.lazy import open_compressed_with
from netweight.core.progress import quiet_imports, silent_bars
from netweight.errors import MissingExtra, OutputExists, Unsupported, UsageError
from netweight.hf.denoisers import Denoiser, denoiser_of, import_diffusers
from netweight.hf.load_tokenizer import has_vocabulary
from netweight.hf.noise_schedules import NoiseSchedule
from netweight.hf.pipeline_files import PipelineFiles
from netweight.hf.pipeline_files import check_pipeline as check_pipeline
from netweight.hf.pipeline_settings import PipelineSettings
from netweight.hf.textual_inversion import has_word, load_textual_inversions, textual_inversions
from netweight.nn.hooks import hooked
from netweight.nn.text_to_image import Prediction, Text
from netweight.store.restoration import restore_file

_PARTS = ("vae", "text_encoder", "tokenizer", "scheduler")
LORA = "pytorch_lora_weights.safetensors"
COMPRESSED_LORA = "pytorch_lora_weights.net.safetensors"
# Tokenizers without a length say a larger number.
_NO_LIMIT = 10**9
# Pixels that an autoencoder decodes or encodes at a time: one picture of 512 × 512.
_PIXELS = 2**18
# Parts of a pipeline that no method here uses.
_UNUSED = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False, "image_encoder": None}


@final
class PipelineModel:
    """A pipeline as a `TextToImage`; made by `text_to_image` or `load_text_to_image`. It shares the pipeline's parts.

    Attributes:
        pipeline: The pipeline of diffusers.
        name: What it is called in reports.
        files: The files that it was read from; None for a pipeline that was given in memory.
        lora: Whether a LoRA of the folder was merged, so that the weights are not those of the files.
        unread_words: Words of textual inversions that lie in the folder and were not loaded, with their files.
    """

    def __init__(self, pipeline: Any, kind: Denoiser, name: str) -> None:
        self.pipeline = pipeline
        self.name = name
        self.files: PipelineFiles | None = None
        self.lora = False
        self.unread_words: dict[str, Path] = {}
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
    def schedule(self) -> NoiseSchedule:
        """Noise levels, and what the denoiser was trained to predict."""
        return self._kind.schedule

    @property
    def tokenizers(self) -> list[tuple[Any, int]]:
        """The tokenizers of its text encoders, each with the number of tokens that are read of a prompt."""
        return self._kind.tokenizers

    @property
    def levels(self) -> int:
        """Number of noise levels of training: timesteps are below it."""
        return self._kind.schedule.levels

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

    def identity(self) -> str:
        """Return a digest of everything that decides on its images: weights, tokenizers, scheduler and size."""
        config = self.pipeline.config
        scheduler = self.pipeline.scheduler
        # Entries that begin with _ say where a configuration came from.
        schedule = {key: repr(value) for key, value in scheduler.config.items() if not key.startswith("_")}
        return digest_config({
            "denoiser": self.digest(),
            "other parts": self._other_parts,
            "scheduler": [type(scheduler).__name__, schedule],
            "pipeline": {key: value for key, value in config.items() if isinstance(value, bool)},
            "latents": list(self.latent_shape),
        })  # fmt: skip

    @cached_property
    def _other_parts(self) -> dict[str, str]:
        """Digests of the text encoders, the autoencoder and the tokenizers, which no method here changes."""
        digests = {}
        for name, part in self.pipeline.components.items():
            if name in _UNUSED or part is self.denoiser:
                continue
            if isinstance(part, nn.Module):
                state = sorted(part.state_dict().items())
                digests[name] = digest_config([[key, str(value.dtype), digest_tensor(value)] for key, value in state])
            elif hasattr(part, "get_vocab"):
                digests[name] = digest_config(ascii([sorted(part.get_vocab().items()), part.model_max_length]))
        return digests

    def embed(self, prompts: Sequence[str], tokens: Tensor | None = None) -> Text:
        """Return prompts as the pipeline itself embeds them; long ones are cut as it cuts them.

        `tokens`: what its text encoder reads in place of their embeddings, with gradients.
        """
        if not prompts:
            raise UsageError("There is no prompt to embed.", cure="Give at least one; the empty one is ''.")
        self._refuse_unread_words(prompts)
        if tokens is None:
            with torch.no_grad():
                return self._kind.embedded(prompts)
        with hooked([(self._token_layer, lambda _module, _inputs, output: tokens.to(output))]):
            return self._kind.embedded(prompts)

    def _refuse_unread_words(self, prompts: Sequence[str]) -> None:
        """Refuse a prompt with the word of a textual inversion that was not loaded: it would be read as letters."""
        for word, file in self.unread_words.items():
            prompt = next((each for each in prompts if has_word(each, word)), None)
            if prompt is not None:
                raise UsageError(
                    f"The prompt {prompt!r} contains {word!r}, the word of a textual inversion that is not loaded.",
                    cure=f"Load it: --embedding {file} (in Python, embeddings=[...]). Where a command has no such "
                    "option, save the pipeline with it once (load_textual_inversion, then save_pretrained), or remove "
                    "the file.",
                )

    def token_embeddings(self, prompts: Sequence[str]) -> Tensor:
        """Return what the text encoder reads for prompts, shape `(n, tokens, width)`."""
        outputs: list[Tensor] = []
        with hooked([(self._token_layer, lambda _module, _inputs, output: outputs.append(output.detach().clone()))]):
            self.embed(prompts)
        return outputs[-1]

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
                f"{self.name} has two text encoders or more, which are not searched together.",
                cure="Leave soft and typed out of the starts: --set 'search.starts=[original,unrelated]'.",
            )
        return self.pipeline.text_encoder.get_input_embeddings()

    def initial_noise(self, seeds: Sequence[int]) -> Tensor:
        """Return standard normal latents, float32, one per seed, drawn on the CPU whatever the device."""
        shape = self._kind.latent_shape
        return torch.stack([torch.randn(shape, generator=_generator(seed)) for seed in seeds]).to(self._device)

    def timesteps(self, steps: int) -> Tensor:
        """Return the timesteps of a schedule of so many steps, the noisiest first, shape `(steps,)`."""
        timesteps: Tensor = self._scheduler(steps).timesteps
        return timesteps

    def predict(self, latents: Tensor, timestep: Tensor, text: Text) -> Prediction:
        """Run the denoiser once, without guidance; gradients flow to latents, text and weights where they are on."""
        output = self._kind(latents, timestep, text).float()
        return self._kind.schedule.prediction(output, latents.float(), timestep)

    def training_errors(self, latents: Tensor, noise: Tensor, timestep: Tensor, text: Text) -> Tensor:
        """Return the mean squared error of what the denoiser was trained to predict: noise, velocity or sample."""
        output = self._kind(self.add_noise(latents, noise, timestep), timestep, text).float()
        target = self._kind.schedule.target(latents, noise, timestep)
        return (output - target).square().flatten(1).mean(1)

    @torch.no_grad()
    def to_latents(self, images: Tensor) -> Tensor:
        """Return clean latents of images, shape `(n, 3, height, width)`, within 0 and 1: the encoder's most likely."""
        parts = []
        with self._decoder() as vae:
            for part in torch.split(images, _at_once(*images.shape[-2:])):
                encoded = vae.encode((part * 2 - 1).to(device=self._device, dtype=vae.dtype))
                parts.append(encoded.latent_dist.mode() if hasattr(encoded, "latent_dist") else encoded.latents)
        latents = torch.cat(parts)
        mean, deviation = self._latent_statistics(latents)
        scaled: Tensor = (latents.float() - mean) * (self.pipeline.vae.config.scaling_factor / deviation)
        return scaled

    def add_noise(self, latents: Tensor, noise: Tensor, timestep: Tensor) -> Tensor:
        """Return clean latents at the noise level of a timestep, a scalar or shape `(n,)`."""
        signal, level = self._kind.schedule.shares(timestep, self._device)
        return signal * latents + level * noise

    @torch.no_grad()
    def generate(self, text: Text, seeds: Sequence[int], *, guidance: float = 7.0, steps: int = 50) -> Tensor:
        """Return images of prompts, shape `(n, 3, height, width)`, within 0 and 1, on the CPU, without gradients."""
        if len(text) != len(seeds):
            raise UsageError(f"There are {len(text)} prompts and {len(seeds)} seeds.", cure="Give one seed per prompt.")
        generators = [_generator(seed) for seed in seeds]
        latents = torch.stack([torch.randn(self._kind.latent_shape, generator=each) for each in generators])
        scheduler = self._scheduler(steps)
        # Schedulers of flow matching scale neither the first noise nor what the denoiser is given.
        latents = latents.to(self._device) * getattr(scheduler, "init_noise_sigma", 1.0)
        scaled = getattr(scheduler, "scale_model_input", lambda given, _timestep: given)
        doubled = guidance > 1 and not self._kind.guided_inside
        empty = self.embed([""]).rows([0] * len(text)) if doubled else None
        extra = self._kind.schedule.options(scheduler, generators)
        for timestep in scheduler.timesteps:
            output = self._guided(scaled(latents, timestep), timestep, text, empty, guidance)
            with self._naming_scheduler():
                latents = scheduler.step(output, timestep, latents, return_dict=False, **extra)[0]
        if not latents.isfinite().all():
            raise UsageError(self._not_finite(scheduler), cure=self._cure_of_infinity(scheduler))
        return self.to_images(latents)

    def _not_finite(self, scheduler: Any) -> str:
        return (
            f"The images of {self.name} are NaN or infinite with its {type(scheduler).__name__} (prediction_type "
            f"{scheduler.config.get('prediction_type', 'flow')}, "
            f"{str(next(self.denoiser.parameters()).dtype).removeprefix('torch.')})."
        )

    def _cure_of_infinity(self, scheduler: Any) -> str:
        file = "scheduler/scheduler_config.json"
        schedule = self._kind.schedule
        if schedule.trained == "noise" and float(scheduler.alphas_cumprod[-1]) < 1e-6:
            return (
                "At zero terminal SNR the first step begins with pure noise, and predicting it gives no information. "
                f'Models that were trained so predict velocity: write "prediction_type": "v_prediction" into {file}; '
                'otherwise write "rescale_betas_zero_snr": false.'
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
            return self._kind(latents, timestep, text, guidance)
        without, with_text = self._kind(torch.cat([latents] * 2), timestep, Text.joined([empty, text])).chunk(2)
        return without + guidance * (with_text - without)

    def to_images(self, latents: Tensor) -> Tensor:
        """Return images of clean latents, shape `(n, 3, height, width)`, within 0 and 1, on the CPU; gradients flow."""
        latents = self._unscaled(latents)
        count = _at_once(*(side * self._kind.scale for side in latents.shape[-2:]))
        with self._decoder() as vae:
            parts = [vae.decode(part.to(vae.dtype), return_dict=False)[0] for part in torch.split(latents, count)]
        return (torch.cat(parts).float() / 2 + 0.5).clamp(0, 1).cpu()

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

    def _scheduler(self, steps: int) -> Any:
        with self._naming_scheduler():
            started = self._kind.schedule.started(steps, self._device, self._kind.tokens)
        if len(started.timesteps) > 1 and started.timesteps[0] < started.timesteps[-1]:
            raise Unsupported(
                f"The {type(started).__name__} of {self.name} adds noise to images and does not generate images.",
                cure='Write a scheduler that removes noise, such as "_class_name": "DDIMScheduler", into '
                "model_index.json and scheduler/scheduler_config.json.",
            )
        return started

    def _naming_scheduler(self) -> AbstractContextManager[None]:
        """Name the scheduler in errors of its code, which configurations that do not fit the pipeline lead to."""
        return running(
            f"The {type(self.pipeline.scheduler).__name__} of {self.name}",
            cure="Correct scheduler/scheduler_config.json, or give another number of --steps.",
        )

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


def _at_once(height: int, width: int) -> int:
    """Return the number of pictures that an autoencoder is given at a time; its memory grows with their pixels."""
    return max(1, _PIXELS // (height * width))


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
    kind = denoiser_of(pipeline)
    kind.choose_size(size)
    _check_tokens(pipeline)
    _check_lengths(kind.tokenizers, pipeline)
    _check_autoencoder(pipeline.vae.config, kind.latent_shape[0])
    encoders = [getattr(pipeline, name, None) for name in ("text_encoder_2", "text_encoder_3")]
    for network in (kind.network, pipeline.vae, pipeline.text_encoder, *encoders):
        if network is not None:
            network.eval()
    source = str(getattr(pipeline, "name_or_path", "") or "")
    return PipelineModel(pipeline, kind, name or Path(source).name or type(pipeline).__name__)


def _check_tokens(pipeline: Any) -> None:
    """Refuse a tokenizer with tokens that its text encoder has no embeddings of, such as words added to one of two."""
    for number in ("", "_2", "_3"):
        tokenizer, encoder = (getattr(pipeline, f"{name}{number}", None) for name in ("tokenizer", "text_encoder"))
        if tokenizer is None or encoder is None:
            continue
        if not has_vocabulary(tokenizer):
            raise UsageError(
                f"tokenizer{number} has no vocabulary: transformers found none among its files.",
                cure="Fetch the pipeline again, with all of its folders.",
            )
        most, rows = max(tokenizer.get_vocab().values()), encoder.get_input_embeddings().num_embeddings
        if most >= rows:
            word = tokenizer.convert_ids_to_tokens(most)
            raise UsageError(
                f"tokenizer{number} has the token {word!r} with the number {most}, and text_encoder{number} has "
                f"embeddings of {rows} tokens.",
                cure="Save the pipeline after its words were added to all of its tokenizers and text encoders "
                "(load_textual_inversion for each), or remove the word from the tokenizer.",
            )


def _check_lengths(tokenizers: Sequence[tuple[Any, int]], pipeline: Any) -> None:
    """Refuse a tokenizer that returns more tokens than its text encoder has positions for."""
    numbers = [n for n in ("", "_2", "_3") if getattr(pipeline, f"tokenizer{n}", None) is not None]
    for number, (_, length) in zip(numbers, tokenizers, strict=True):
        encoder = getattr(pipeline, f"text_encoder{number}", None)
        most = getattr(getattr(encoder, "config", None), "max_position_embeddings", None)
        if most is not None and length > most:
            raise UsageError(
                f"tokenizer{number} returns {'any number of' if length > _NO_LIMIT else length} tokens "
                f"(model_max_length), and text_encoder{number} reads {most}.",
                cure=f'Write "model_max_length": {most} into tokenizer{number}/tokenizer_config.json, or fetch the '
                "pipeline again.",
            )


def _check_autoencoder(config: Any, channels: int) -> None:
    """Refuse an autoencoder whose configuration does not say how its latents are scaled."""
    scale = config.get("scaling_factor")
    if not isinstance(scale, int | float) or not scale > 0:
        raise UsageError(
            f"The scaling_factor of the autoencoder is {scale!r}, and not a positive number.",
            cure="Correct vae/config.json, or fetch the pipeline again.",
        )
    for name in ("latents_mean", "latents_std"):
        values = config.get(name)
        if values is not None and len(values) != channels:
            raise UsageError(
                f"The {name} of the autoencoder has {len(values)} numbers, and its latents have {channels} channels.",
                cure="Correct vae/config.json, or fetch the pipeline again.",
            )


def _check_part(folder: Path, part: str) -> None:
    """Refuse a pipeline without the folder of a part, of which other libraries make an empty one."""
    if not (folder / part).is_dir():
        raise UsageError(
            f"{folder} has no folder {part}, which its model_index.json names.",
            cure="Fetch the pipeline again, with all of its folders.",
        )


def _check_parts(folder: Path, files: PipelineFiles) -> None:
    """Refuse weights that were saved in another form than their part's own."""
    index = _index_of(folder)
    name, diffusers = index.get("_class_name"), import_diffusers()
    if isinstance(name, str) and getattr(diffusers, name, None) is None:
        raise Unsupported(
            f"{folder} is a {name}, a class of pipelines that diffusers {diffusers.__version__} does not have.",
            cure='Install a version that has it, or name a class of diffusers as "_class_name" in model_index.json.',
        )
    for part, named in index.items():
        if isinstance(named, list) and named[:1] != [None] and part not in _UNUSED and part != "_class_name":
            _check_part(folder, part)
    packed = files.compressed
    for part in files.parts:
        # netweight marks its compression as a quantization, and opens such parts.
        if part in packed:
            continue
        config = folder / part / "config.json"
        about = _object(config) if config.is_file() else {}
        if "quantization_config" in about:
            method = dict(about["quantization_config"] or {}).get("quant_method", "an unknown method")
            raise Unsupported(
                f"The {part} of {folder} is quantized ({method}), so that its weights are not numbers that can be read "
                "or edited.",
                cure="Give the pipeline in fp32, bf16 or fp16.",
            )
        adapted = next((name for name in files.places(part) if ".base_layer." in name or ".lora_A." in name), None)
        if adapted is not None:
            raise Unsupported(
                f"The {part} of {folder} was saved with an adapter inside: it has the tensor {adapted!r}.",
                cure="Save it again after pipeline.fuse_lora() and pipeline.unload_lora_weights().",
            )


def load_text_to_image(
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    name: str | None = None,
    variant: str | None = None,
    size: tuple[int, int] | None = None,
    embeddings: Sequence[Path] = (),
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
        embeddings: Files of textual inversions, whose words are added to the tokenizers and text encoders.

    Returns:
        The model.

    Raises:
        UsageError: The folder is none of a pipeline, or something in it cannot be opened.
        NameNotFound: There are no weights of the variant.
        Unsupported: A part is of a kind that is not supported.
    """
    folder = Path(folder)
    files = PipelineFiles(folder, variant)
    diffusers = import_diffusers()
    with quiet_imports():
        open_compressed_with("diffusers")
        _import_parts(folder / "model_index.json")
    _check_parts(folder, files)
    index = _index_of(folder)
    unused = {part: value for part, value in _UNUSED.items() if part in index}
    # Parts that a pipeline was saved without, such as the third text encoder of SD3.
    unused |= {part: None for part, named in index.items() if isinstance(named, list) and named[:1] == [None]}
    with (
        opening(folder, "a diffusion pipeline", cure="Check that all its parts exist, or fetch it again."),
        silent_bars("transformers", "diffusers"), files.as_diffusers_expects() as view,
    ):  # fmt: skip
        dtypes: dict[str, torch.dtype] = dict.fromkeys(files.parts, dtype) if dtype is not None else _dtypes(files)
        pipeline = diffusers.DiffusionPipeline.from_pretrained(
            view, local_files_only=True, dtype=dtype or dtypes, **_networks(view, files, dtypes), **unused
        )
    _decompress(pipeline)
    lora = _merge_lora(pipeline, folder)
    load_textual_inversions(pipeline, embeddings)
    check_device(device)
    model = text_to_image(pipeline.to(device), name=name or folder.resolve().name, size=size)
    model.files, model.lora = files, lora
    model.unread_words = {
        each.word: each.file for each in textual_inversions(folder) if each.word not in pipeline.tokenizer.get_vocab()
    }
    pipeline.set_progress_bar_config(disable=True)
    return model


def _networks(view: Path, files: PipelineFiles, dtypes: dict[str, torch.dtype]) -> dict[str, Any]:
    """Open the networks of a pipeline; diffusers would draw weights at random that their files lack.

    Args:
        view: The folder as diffusers expects it.
        files: The files of the pipeline's own folder.
        dtypes: The dtype that each part is opened in.

    Raises:
        UsageError: A weight is missing, has another shape, is NaN or infinite.
    """
    networks: dict[str, Any] = {}
    for part, named in _index_of(files.folder).items():
        if part in _UNUSED or part not in files.parts or not files.chosen(part):
            continue
        home, name = named
        kind: Any = getattr(importlib.import_module(home), name) if home in ("diffusers", "transformers") else None
        if kind is None:
            continue
        how: dict[str, Any] = {"dtype": dtypes[part]}
        # Diffusers warns without accelerate.
        if home == "diffusers":
            how["low_cpu_mem_usage"] = importlib.util.find_spec("accelerate") is not None
        network, loaded = kind.from_pretrained(view / part, local_files_only=True, output_loading_info=True, **how)
        refuse_missing_weights(files.folder / part, loaded, f"a {name}", unused=False)
        if part not in files.compressed:
            _refuse_whole_numbers(files, part, network)
        odd = next((n for n, w in network.named_parameters() if w.is_floating_point() and not _finite(w)), None)
        if odd is not None:
            raise UsageError(
                f"The weight {odd!r} of {files.folder / part} contains NaN or infinity.",
                cure="Fetch the pipeline again, or give another of its variants with --variant.",
            )
        networks[part] = network
    return networks


def _refuse_whole_numbers(files: PipelineFiles, part: str, network: nn.Module) -> None:
    """Refuse weights that are stored as whole numbers: a program quantized them, and its scales would not be used."""
    weights = {name.removeprefix("text_model.") for name, w in network.named_parameters() if w.is_floating_point()}
    for name, (path, place) in files.places(part).items():
        if name.removeprefix("text_model.") in weights and not place.dtype.is_floating_point:
            raise Unsupported(
                f"The weight {name!r} of {files.folder / path} is stored as {str(place.dtype).removeprefix('torch.')}: "
                "it is quantized, and not a number that can be read or edited.",
                cure="Give the pipeline in fp32, bf16 or fp16.",
            )


def _finite(weight: Tensor) -> bool:
    import netweight

    return isinstance(weight, netweight.CompressedTensor) or bool(weight.isfinite().all())


def open_pipeline(folder: str | Path, settings: PipelineSettings, *, name: str | None = None) -> PipelineModel:
    """Open a pipeline's folder as settings say; see `load_text_to_image`."""
    return load_text_to_image(
        folder, device=settings.device, name=name, variant=settings.variant, size=settings.pixels,
        embeddings=settings.embeddings,
    )  # fmt: skip


def _dtypes(files: PipelineFiles) -> dict[str, torch.dtype]:
    """The dtype that each part is opened in."""
    packed = files.compressed
    return {part: _packed_dtype(files, part) if part in packed else files.dtype(part) for part in files.parts} | {
        "default": torch.float32
    }


def _packed_dtype(files: PipelineFiles, part: str) -> torch.dtype:
    """The dtype of a part that netweight has compressed."""
    from netweight.store import open_store

    dtypes = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
    stored = set()
    for file in files.chosen(part):
        store = open_store(files.folder / file.path)
        stored |= {dtypes[dtype] for name in store.names() if (dtype := store.info(name).dtype) in dtypes}
    return torch.float32 if len(stored) != 1 else stored.pop()


def _index_of(folder: Path) -> dict[str, Any]:
    return _object(folder / "model_index.json")


def _object(path: Path) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        values = read_json(path)
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}.", cure="Fetch the pipeline again.") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} is not a JSON object.", cure="Fetch the pipeline again.")
    return values


def _import_parts(index: Path) -> None:
    """Import the classes that a pipeline names before it is loaded, so that warnings of loading stay visible."""
    named = _index_of(index.parent)
    parts = [("diffusers", named.get("_class_name")), *(part for part in named.values() if isinstance(part, list))]
    for home, name in parts:
        if home in ("diffusers", "transformers") and isinstance(name, str):
            getattr(importlib.import_module(home), name, None)


def _merge_lora(pipeline: Any, folder: Path) -> bool:
    """Merge the LoRA that lies in a pipeline's folder as diffusers' `save_lora_weights` names it, if there is one."""
    file = next((path for name in (LORA, COMPRESSED_LORA) if (path := folder / name).is_file()), None)
    if file is None:
        return False
    if importlib.util.find_spec("peft") is None:
        raise MissingExtra(f"{file} needs peft, which is not installed.", cure="Run: pip install peft")
    with silent_bars("transformers", "diffusers"), tempfile.TemporaryDirectory() as temporary:
        if file.name == COMPRESSED_LORA:
            restore_file(file, Path(temporary) / LORA, threads=1)
            folder = Path(temporary)
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
    return model.schedule.trained


def check_lengths(model: PipelineModel, prompts: Sequence[str]) -> None:
    """Refuse prompts of which no text encoder reads all."""
    for prompt in prompts:
        counts = [
            (len(tokenizer(prompt, truncation=False, verbose=False).input_ids), limit)
            for tokenizer, limit in model.tokenizers
        ]
        if all(count > limit for count, limit in counts):
            count, limit = max(counts, key=lambda each: each[1])
            raise UsageError(
                f"The prompt {prompt!r} has {count} tokens; the text encoder reads {limit}.",
                cure="Shorten it to the part that the encoder reads: the rest does not take part in memorization.",
            )


def token_numbers(model: PipelineModel, prompt: str) -> tuple[tuple[int, ...], ...]:
    """Return what the text encoders read of a prompt: the numbers of its tokens, cut as the pipeline cuts them.

    Prompts of the same numbers are the same to the model, even if they differ in capital letters, spaces, or beyond
    the encoders' windows.
    """
    return tuple(
        tuple(tokenizer(prompt, truncation=True, max_length=limit).input_ids) for tokenizer, limit in model.tokenizers
    )


def padding_masks(model: PipelineModel) -> Callable[[Sequence[str]], Tensor]:
    """Return the function that finds the tokens of prompts that count, as `AttentionScaling` expects it."""

    def masks(prompts: Sequence[str]) -> Tensor:
        mask = model.embed(prompts).mask
        if mask is not None:
            return mask
        tokenizer = model.pipeline.tokenizer
        length = tokenizer.model_max_length
        tokens = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        counted: Tensor = tokens.attention_mask.bool()
        return counted

    return masks


def one_token_words(model: PipelineModel) -> tuple[str, ...]:
    """Return the words that a pipeline's tokenizer makes one token of, for `RandomTokens`."""
    tokenizer = model.pipeline.tokenizer
    pieces = (piece.removesuffix("</w>").removeprefix("▁").lower() for piece in tokenizer.get_vocab())
    words = sorted({piece for piece in pieces if piece.isascii() and piece.isalpha() and len(piece) >= 3})
    single = tuple(word for word in words if len(tokenizer(word, add_special_tokens=False).input_ids) == 1)
    if not single:
        raise Unsupported(f"The tokenizer of {model.name} has no single token for any word of three letters or more.")
    return single
