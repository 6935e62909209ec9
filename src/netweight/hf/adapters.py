"""Adapters in models of Hugging Face: losses that train many at once, and pipelines whose adapters begin at a timestep.

    adapters = train_pictures(text_to_image(pipeline), [Subject("ada", pictures, prompts), ...])

Single-subject fine-tuning, from one picture or from several, is the case of one subject. Every adapter sees the same
noise and timesteps, so that collections differ by what they were trained on and by nothing else. `train_texts` is the
same of causal language models.

    pipeline.load_lora_weights("person", adapter_name="person")
    pipeline.load_lora_weights("person-with-beard", adapter_name="edited")
    with delayed_injection(pipeline, Delay(700), after="edited", before="person"):
        pipeline("a photo of sks person")

For delayed injection the denoiser itself is watched, not the pipeline's callback, which comes too late for the first
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

import torch
from torch import Tensor, nn

from netweight.core.names import Select, not_found
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.data.tokens import IGNORED, Example, collate
from netweight.errors import Unsupported, UsageError
from netweight.nn.apply_lora import linear_layers
from netweight.nn.train_lora import AdapterRecipe, FittedAdapters, fit_adapters

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel

# Queries and values of self- and cross-attention, as in the paper.
ATTENTION = "**.{attn1,attn2}.{to_q,to_v}"
_LANGUAGE = "**.self_attn.{q_proj,v_proj}"


@final
@dataclass(frozen=True, eq=False)
class AdapterSubject:
    """Subject that one adapter learns."""

    name: str
    """Name of the adapter."""
    images: Tensor
    """Images of the subject, shape `(k, 3, height, width)`, within 0 and 1; k may be 1."""
    prompts: tuple[str, ...]
    """One prompt for each image."""

    def __post_init__(self) -> None:
        """Refuse what cannot be learned."""
        if self.images.ndim != 4 or not len(self.images) or len(self.images) != len(self.prompts):
            raise UsageError(
                f"{self.name!r} has images of shape {tuple(self.images.shape)} and {len(self.prompts)} prompts.",
                cure="Give (k, 3, height, width) and k prompts.",
            )
        # The comparison is also false for NaN.
        if not bool(((self.images >= 0) & (self.images <= 1)).all()):
            raise UsageError(f"The images of {self.name!r} are not within 0 and 1.", cure="Scale them, and drop NaN.")


def train_pictures(
    model: PipelineModel,
    subjects: Sequence[AdapterSubject],
    recipe: AdapterRecipe = AdapterRecipe(),
    *,
    layers: Select | str | tuple[str, ...] = ATTENTION,
    each: int = 4,
    progress: Progress = QUIET,
) -> FittedAdapters:
    """Train one adapter for each subject, all in one forward pass.

    Source: Ruiz et al., DreamBooth, 2023, without prior images; Dravid et al., weights2weights, 2024, section 3.1.
    """
    latents = [model.to_latents(subject.images) for subject in subjects]
    for subject, clean in zip(subjects, latents, strict=True):
        if tuple(clean.shape[1:]) != model.latent_shape:
            raise UsageError(
                f"The images of {subject.name!r} become latents of shape {tuple(clean.shape[1:])}, not "
                f"{model.latent_shape}.",
                cure="Resize them to the size on which the pipeline was trained.",
            )
    said = list(dict.fromkeys(prompt for subject in subjects for prompt in subject.prompts))
    text, place = model.embed(said), {prompt: number for number, prompt in enumerate(said)}
    rows = [torch.tensor([place[prompt] for prompt in subject.prompts]) for subject in subjects]

    def losses(step: int, sign: int) -> Tensor:
        shares, timesteps, noise = _drawn(model, recipe.seed, step, each)
        chosen = [(shares * len(clean)).long() for clean in latents]
        clean = torch.cat([one[index.to(one.device)] for one, index in zip(latents, chosen, strict=True)])
        shown = torch.cat([one[index] for one, index in zip(rows, chosen, strict=True)])
        count = len(subjects)
        errors = model.training_errors(
            clean, noise.repeat(count, 1, 1, 1), timesteps.repeat(count), text.rows(shown.to(clean.device))
        )
        return errors.view(count, each).mean(1)

    names = [subject.name for subject in subjects]
    shapes = linear_layers(model.denoiser, layers, component=model.component)
    return fit_adapters(
        model.denoiser, names, shapes, losses, recipe, each=each, component=model.component, progress=progress
    )


def train_texts(
    model: nn.Module,
    examples: Mapping[str, Sequence[Example]],
    recipe: AdapterRecipe = AdapterRecipe(),
    *,
    pad_id: int,
    layers: Select | str | tuple[str, ...] = _LANGUAGE,
    each: int = 4,
    progress: Progress = QUIET,
) -> FittedAdapters:
    """Train one adapter of a causal language model for each collection of examples, all in one forward pass."""
    empty = [name for name, rows in examples.items() if not rows]
    if empty:
        raise UsageError(f"{empty[0]!r} has no examples.", cure="Leave it out, or give examples of it.")
    device = next(model.parameters()).device
    network: Any = model

    def losses(step: int, sign: int) -> Tensor:
        shares = _shares(each, torch_generator(recipe.seed, "examples", step))
        chosen = [rows[int(share * len(rows))] for rows in examples.values() for share in shares.tolist()]
        batch = collate(chosen, pad_id=pad_id).to(device)
        logits = network(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
        labels = batch.labels[:, 1:]
        errors = nn.functional.cross_entropy(
            logits[:, :-1].float().transpose(1, 2), labels, ignore_index=IGNORED, reduction="none"
        )
        counted = (labels != IGNORED).sum(1).clamp_min(1)
        return (errors.sum(1) / counted).view(len(examples), each).mean(1)

    shapes = linear_layers(model, layers)
    return fit_adapters(model, list(examples), shapes, losses, recipe, each=each, progress=progress)


def _shares(count: int, generator: torch.Generator) -> Tensor:
    """Numbers from 0 to below 1, one in each of as many equal parts, in any order; fp64."""
    offset = torch.rand(count, generator=generator, dtype=torch.float64)
    return ((torch.randperm(count, generator=generator) + offset) / count).clamp_max(1 - 1e-9)


def _drawn(model: PipelineModel, seed: int, step: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw each sample's image, timestep and noise, the same for all subjects."""
    generator = torch_generator(seed, "noise", step)
    shares = _shares(count, generator)
    timesteps = (_shares(count, generator) * model.levels).long()
    noise = torch.randn(count, *model.latent_shape, generator=generator)
    return shares, timesteps.to(model.device), noise.to(model.device)


class Schedule(Protocol):
    """Protocol of schedules of an edit; `methods.space.edits.Delay` is one."""

    def edited(self, timestep: float) -> bool:
        """Return whether a step at this timestep is made with edited weights."""


@contextmanager
def delayed_injection(pipeline: Any, delay: Schedule, *, after: str, before: str | None = None) -> Iterator[None]:
    """Switch a pipeline's adapters by timestep, for a block."""
    denoiser = _denoiser(pipeline)
    _check(denoiser, after, before)
    active = list(denoiser.active_adapters())
    try:
        with switching(denoiser, delay, lambda edited: _use(denoiser, after if edited else before)):
            yield
    finally:
        denoiser.enable_adapters()
        denoiser.set_adapter(active)


@contextmanager
def switching(denoiser: Any, delay: Schedule, use: Callable[[bool], object]) -> Iterator[None]:
    """Call `use` with whether an edit holds: before the denoiser's first run in a block, and whenever that changes."""
    used: list[bool] = []

    def watch(module: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        timestep = torch.as_tensor(named["timestep"] if "timestep" in named else arguments[1])
        edited = delay.edited(float(timestep.max()))
        if used != [edited]:
            used[:] = [edited]
            use(edited)

    handle = denoiser.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def switch_on_step_end(delay: Schedule, *, after: str, before: str | None = None) -> Any:
    """Return a function for a pipeline's `callback_on_step_end` that does the same from the second step on."""
    # Where no hook may be put on the denoiser, such as a compiled one. Use the adapter of the first step, `before` as a
    # rule, when the pipeline is called: `pipeline.unet.set_adapter("person")`.

    def switch(pipeline: Any, step: int, timestep: Any, named: dict[str, Any]) -> dict[str, Any]:
        coming = pipeline.scheduler.timesteps[step + 1 : step + 2]
        if len(coming):
            _use(_denoiser(pipeline), after if delay.edited(float(coming[0])) else before)
        return named

    return switch


def _use(denoiser: Any, adapter: str | None) -> None:
    if adapter is None:
        denoiser.disable_adapters()
    else:
        denoiser.enable_adapters()
        denoiser.set_adapter(adapter)


def _denoiser(pipeline: Any) -> Any:
    denoiser = getattr(pipeline, "unet", None) or getattr(pipeline, "transformer", None)
    if denoiser is None or not hasattr(denoiser, "set_adapter"):
        raise Unsupported(
            f"This {type(pipeline).__name__} has no denoiser that takes adapters.",
            cure="Give a diffusers pipeline with a unet or transformer.",
        )
    return denoiser


def _check(denoiser: Any, after: str, before: str | None) -> None:
    loaded = list(getattr(denoiser, "peft_config", {}))
    for name in (after, before):
        if name is not None and name not in loaded:
            raise not_found(f"No adapter {name!r} was loaded into the pipeline.", name, loaded)
