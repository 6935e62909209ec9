"""Inversion of images: the points whose models denoise target images best; and images made with the models of points.

`invert_loss` descends on any loss of changes, `invert_targets` on the denoising loss of images, in batches that are
kept as they go.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netweight.attacks.embedding_search.descent import chosen, weights_fixed
from netweight.attacks.embedding_search.settings import PredictionKind
from netweight.core.digests import digest_tensor
from netweight.core.engines import Outcome
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import TrainingStopped, Unsupported, UsageError
from netweight.hf.adapters import switching
from netweight.hf.pipeline_files import DENOISERS
from netweight.job import Job
from netweight.methods.space.edits import Delay
from netweight.methods.space.points import NamedPoints, scores_digest
from netweight.methods.space.settings import InversionSettings
from netweight.nn.apply_lora import applied
from netweight.nn.text_to_image import OpenTextToImage, Prediction, TextToImage, denoised


class Space(Protocol):
    """The parts of a space that inversion needs."""

    @property
    # Scores of the training models, shape `(n, k)`.
    def scores(self) -> Tensor: ...

    @property
    # Deviations of the training scores, shape `(k,)`.
    def deviations(self) -> Tensor: ...

    def changes(self, scores: Tensor) -> Mapping[str, Tensor]:
        """Module name → ΔW, shape `(b, rows, columns)`, of scores `(b, k)`; gradients flow to these."""


# From changes, module name → ΔW, shape `(b, rows, columns)`, to one number per target, shape `(b,)`.
Loss: TypeAlias = Callable[[Mapping[str, Tensor], torch.Generator], Tensor]


@final
@dataclass(frozen=True, eq=False)
class InversionResult:
    """Points of targets."""

    scores: Tensor
    """Scores of the inverted points, shape `(b, k)`, fp32."""
    losses: Tensor
    """Loss before each step, without the prior; shape `(steps, b)`, fp32."""
    distances: Tensor
    """Root mean square of the scores in standard deviations, over the components that moved, shape `(b,)`: about 1
    for training models; much more is outside of what they span.
    """

    @property
    def improvements(self) -> Tensor:
        """Mean loss of the first tenth of the steps over that of the last tenth, shape `(b,)`."""
        tenth = max(1, len(self.losses) // 10)
        return self.losses[:tenth].mean(0) / self.losses[-tenth:].mean(0)


def invert_loss(
    space: Space,
    loss: Loss,
    count: int,
    settings: InversionSettings | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress = QUIET,
) -> InversionResult:
    """Find the points of targets by descent on a loss, from the mean of the adapters.

    Source: weights2weights (arXiv 2406.09413), inversion of single images.
    """
    if count < 1:
        raise UsageError("There is no target to invert.", cure="Give at least one image.")
    settings = settings or InversionSettings()
    deviations = space.deviations.detach().float().to(device)
    moving = min(settings.components or len(deviations), len(deviations))
    divisor = deviations[:moving].clamp_min(1e-12)
    unit = deviations[:moving] if settings.scaled else torch.ones(moving, device=deviations.device)
    moved = torch.zeros(count, moving, device=deviations.device, requires_grad=True)
    adam = torch.optim.Adam([moved], lr=settings.learning_rate, weight_decay=settings.weight_decay)
    still = torch.zeros(count, len(deviations) - moving, device=deviations.device)
    first = settings.steps - max(1, round(settings.averaged * settings.steps))
    total, losses = torch.zeros_like(moved), []
    with progress.task("invert", settings.steps, unit="steps") as task:
        for step in range(settings.steps):
            scores = torch.cat([moved * unit, still], 1)
            errors = loss(space.changes(scores), torch_generator(seed, "step", step))
            _check_losses(errors, count, step)
            losses.append(errors.detach().float().cpu())
            whole = errors.sum()
            if settings.prior:
                whole = whole + 0.5 * settings.prior * (moved * unit / divisor).square().sum()
            adam.zero_grad(set_to_none=True)
            moved.grad = torch.autograd.grad(whole, moved)[0]
            adam.step()
            if step >= first:
                total += moved.detach()
            task.update()
    mean = total * unit / (settings.steps - first)
    distances = (mean / divisor).square().mean(1).sqrt()
    return InversionResult(torch.cat([mean, still], 1).cpu(), torch.stack(losses), distances.cpu())


def _check_losses(losses: Tensor, count: int, step: int) -> None:
    if losses.shape != (count,):
        raise UsageError(f"The loss of {count} targets has shape {tuple(losses.shape)}.", cure="Return one per target.")
    bad = (~losses.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        raise TrainingStopped(
            f"The loss of target {', '.join(map(str, bad))} is not finite at step {step}: the inversion diverged.",
            cure="Lower the learning rate, or move fewer components; if this is step 0, inspect the images.",
        )


@final
class DenoisingLoss:
    """Mean squared error of denoising images at uniformly drawn timesteps, one number per target."""

    # `images`: shape `(b, m, 3, height, width)`, within 0 and 1: m images that show the same thing; or `(b, 3, height,
    # width)`, one each. Images of the model's own size only.
    # `masks`: what counts, 1, and what does not, 0: shape `(b, m, height, width)` or `(b, height, width)`; None for
    # everything. They are brought to the size of latents, and the mean is taken over what counts.

    def __init__(
        self,
        model: TextToImage,
        images: Tensor,
        prompts: Sequence[str],
        *,
        masks: Tensor | None = None,
        draws: int = 1,
        steps: int = 50,
        said: PredictionKind = "noise",
    ) -> None:
        images = images[:, None] if images.ndim == 4 else images
        _check_images(images, prompts, draws)
        self._model, self._said, self._draws = model, said, draws
        self._each = images.shape[1] * draws
        latents = model.to_latents(images.flatten(0, 1))
        _check_size(model, latents, images)
        self._groups = torch.arange(len(images), device=latents.device).repeat_interleave(self._each)
        self._latents = latents.detach().repeat_interleave(draws, 0)
        self._masks = None if masks is None else _masks(masks, images, latents).repeat_interleave(draws, 0)
        texts = list(prompts) if len(prompts) == len(images) else list(prompts) * len(images)
        self._text = model.embed(texts).rows([row for row in range(len(images)) for _ in range(self._each)])
        self._schedule = model.timesteps(steps)

    def __call__(self, changes: Mapping[str, Tensor], generator: torch.Generator, /) -> Tensor:
        """Return the error of each target, shape `(b,)`; gradients flow to the changes."""
        latents, model = self._latents, self._model
        noise = torch.randn(latents.shape, generator=generator).to(latents)
        drawn = torch.randint(len(self._schedule), (len(latents),), generator=generator)
        times = self._schedule.cpu()[drawn].to(latents.device)
        with applied(model.denoiser, of_denoiser(changes, model.denoiser), self._groups):
            prediction = model.predict(model.add_noise(latents, noise, times), times, self._text)
        first, second = (
            chosen(model, one, times, self._said) for one in (prediction, Prediction(noise=noise, sample=latents))
        )
        errors = (first - second).float().square()
        if self._masks is None:
            means = errors.flatten(1).mean(1)
        else:
            means = (errors * self._masks).flatten(1).sum(1) / self._masks.expand_as(errors).flatten(1).sum(1)
        return means.reshape(-1, self._each).mean(1)


def _check_images(images: Tensor, prompts: Sequence[str], draws: int) -> None:
    if images.ndim != 5 or images.shape[2] != 3 or not images.numel():
        raise UsageError(
            f"Images of shape {tuple(images.shape)} cannot be inverted.",
            cure="Give (targets, 3, height, width), or (targets, images, 3, height, width).",
        )
    if not (images.isfinite().all() and images.min() >= 0 and images.max() <= 1):
        raise UsageError("Images have values outside of 0 and 1, or NaN.", cure="Divide bytes by 255.")
    if len(prompts) not in (1, len(images)) or draws < 1:
        raise UsageError(
            f"{len(images)} targets came with {len(prompts)} prompts and {draws} draws.",
            cure="Give one prompt, or one per target, and at least one draw.",
        )


def _check_size(model: TextToImage, latents: Tensor, images: Tensor) -> None:
    expected = model.initial_noise([0]).shape[1:]
    if latents.shape[1:] != expected:
        scale = images.shape[-1] / latents.shape[-1]
        sides = " × ".join(str(round(side * scale)) for side in expected[1:])
        raise UsageError(
            f"The images are {images.shape[-2]} × {images.shape[-1]} pixels, and {model.name} makes {sides}.",
            cure="Cut and resize them to that size.",
        )


def _masks(masks: Tensor, images: Tensor, latents: Tensor) -> Tensor:
    """Masks at the size of the latents, shape `(b * m, 1, h, w)`."""
    masks = (masks[:, None] if masks.ndim == 3 else masks).float()
    if masks.shape != (*images.shape[:2], *images.shape[3:]):
        raise UsageError(
            f"Masks of shape {tuple(masks.shape)} do not fit images of {tuple(images.shape)}.",
            cure="Give one per image, of its height and width.",
        )
    if not (masks.isfinite().all() and masks.min() >= 0 and masks.max() <= 1):
        raise UsageError("Masks have values outside of 0 and 1, or NaN.", cure="Give 1 where the image counts, else 0.")
    small = F.interpolate(masks.flatten(0, 1)[:, None], latents.shape[2:], mode="bilinear", antialias=True)
    empty = (small.flatten(1).sum(1) == 0).nonzero()[:, 0].tolist()
    if empty:
        raise UsageError(
            f"The mask of image {empty[0]} covers the whole image.",
            cure="Give 1 where the image counts, else 0.",
        )
    return small.to(latents)


@final
@dataclass(frozen=True, eq=False)
class InversionTarget:
    """Images to be inverted."""

    name: str
    """Name of the resulting point."""
    images: Tensor
    """One image, or several of the same subject; shape `(m, 3, height, width)`, within 0 and 1."""
    mask: Tensor | None = None
    """Weight of each pixel, shape `(m, height, width)`; None for all pixels."""


@final
@dataclass(frozen=True)
class InversionTask:
    """Task of inverting targets."""

    prompt: str
    """Prompt with which the images are denoised."""
    settings: InversionSettings
    """Settings of the descent."""
    said: PredictionKind = "noise"
    """Kind of prediction in which the error is measured."""
    draws: int = 1
    """Number of timesteps and noises per image and step."""
    schedule: int = 50
    """Number of scheduler steps among which timesteps are drawn."""
    together: int = 8
    """Largest number of targets in a batch. It changes the random draws of each target."""
    seed: int = 0
    """Seed of timesteps and noises."""

    def to_json(self) -> dict[str, Any]:
        """JSON values."""
        return {**vars(self), "settings": self.settings.to_json()}


def invert_targets(
    model: TextToImage,
    space: Space,
    targets: Sequence[InversionTarget],
    task: InversionTask,
    *,
    folder: str | Path | Job,
    name: str = "inversions",
    progress: Progress = QUIET,
) -> NamedPoints:
    """Find the points of targets, remembering each in a folder's `NAME.jsonl` as soon as it is found."""
    names = [target.name for target in targets]
    if not targets or len(set(names)) < len(names):
        raise UsageError(
            f"There are {len(names)} targets with {len(set(names))} different names.",
            cure="Give at least one target, and each target a name of its own.",
        )
    by_name = {target.name: target for target in targets}
    # All targets are checked before any work begins.
    for target in targets:
        _loss(model, [target], task)
    about = {"model": model.identity(), "space": scores_digest(space.scores), "task": task.to_json()}
    items: list[dict[str, Any]] = [{"name": each.name, "images": _digest(each), **about} for each in targets]

    def alone(item: Mapping[str, Any]) -> dict[str, Any]:
        return _inverted(model, space, [by_name[item["name"]]], task, progress)[0]

    def engine(_: Callable[..., Any], waiting: Sequence[Any], /) -> Iterator[tuple[int, Outcome]]:
        for places in _batches([by_name[item["name"]] for item in waiting], task.together):
            began = time.perf_counter()
            values: list[Any] = [None] * len(places)
            error = None
            try:
                values = _inverted(model, space, [by_name[waiting[place]["name"]] for place in places], task, progress)
            except Exception:
                error = traceback.format_exc()
            seconds = (time.perf_counter() - began) / len(places)
            for place, value in zip(places, values, strict=True):
                yield place, Outcome(value, error, seconds)

    results = []
    with Job.open(folder, shared=True) as job:
        for result in job.map(alone, items, name=name, engine=engine, ordered=True):
            if not result.ok:
                raise TrainingStopped(
                    f"{result.config['name']!r} could not be inverted: {result.reason}",
                    cure=f"The points so far are stored in {job.folder / name}.jsonl.",
                )
            results.append(result.value)
    origin = {
        "distances": {name: value["distance"] for name, value in zip(names, results, strict=True)},
        "improvements": {name: value["improvement"] for name, value in zip(names, results, strict=True)},
        "task": task.to_json(),
    }
    scores = torch.tensor([value["scores"] for value in results], dtype=torch.float32)
    return NamedPoints(tuple(names), scores, scores_digest(space.scores), origin)


def _inverted(
    model: TextToImage, space: Space, targets: Sequence[InversionTarget], task: InversionTask, progress: Progress
) -> list[dict[str, Any]]:
    loss = _loss(model, targets, task)
    device = next(model.denoiser.parameters()).device
    with weights_fixed(model.denoiser):
        inversion = invert_loss(
            space, loss, len(targets), task.settings, seed=task.seed, device=device, progress=progress
        )
    return [
        {"scores": scores, "distance": distance, "improvement": improvement}
        for scores, distance, improvement in zip(
            inversion.scores.tolist(), inversion.distances.tolist(), inversion.improvements.tolist(), strict=True
        )
    ]


def _loss(model: TextToImage, targets: Sequence[InversionTarget], task: InversionTask) -> DenoisingLoss:
    masks = None
    if any(target.mask is not None for target in targets):
        sides = targets[0].images.shape
        masks = torch.stack([torch.ones(sides[0], *sides[2:]) if t.mask is None else t.mask.float() for t in targets])
    try:
        images = torch.stack([target.images for target in targets])
        return DenoisingLoss(
            model, images, [task.prompt], masks=masks, draws=task.draws, steps=task.schedule, said=task.said
        )  # fmt: skip
    except UsageError as error:
        names = ", ".join(repr(target.name) for target in targets)
        raise UsageError(f"{names} cannot be inverted: {error.reason}", cure=error.cure) from error


def _batches(targets: Sequence[InversionTarget], most_rows: int) -> Iterator[list[int]]:
    """Batches of targets, by number, whose images agree in number and size."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, target in enumerate(targets):
        alike.setdefault(tuple(target.images.shape), []).append(place)
    for places in alike.values():
        for start in range(0, len(places), most_rows):
            yield places[start : start + most_rows]


def _digest(target: InversionTarget) -> Mapping[str, Any]:
    mask = None if target.mask is None else digest_tensor(target.mask)
    return {"shape": list(target.images.shape), "images": digest_tensor(target.images), "mask": mask}


def generate_images(
    model: TextToImage,
    space: Space,
    scores: Tensor,
    prompts: Sequence[str],
    seeds: Sequence[int],
    *,
    guidance: float = 3.0,
    steps: int = 50,
    delay: Delay | None = None,
    before: Tensor | None = None,
    rows: int = 64,
) -> Tensor:
    """Images of prompts by the models of points `(b, k)`, shape `(b, seeds, 3, height, width)`, within 0 and 1.

    `before`: points before an edit, shape `(b, k)`; None, with a delay, for the base model alone.
    """
    if scores.ndim != 2 or not seeds or len(prompts) not in (1, len(seeds)):
        raise UsageError(
            f"Points of shape {tuple(scores.shape)} came with {len(prompts)} prompts and {len(seeds)} seeds.",
            cure="Give points (b, k) and one prompt, or one per seed.",
        )
    if before is not None and before.shape != scores.shape:
        raise UsageError(f"Points {tuple(scores.shape)} cannot be appended to {tuple(before.shape)}.")
    text = model.embed(list(prompts) * (len(seeds) // len(prompts)))
    at_once = max(1, rows // len(seeds))
    batches = []
    for start in range(0, len(scores), at_once):
        part = slice(start, start + at_once)
        count = len(scores[part])
        after = _own_changes(model, space, scores[part])
        then = None if before is None else _own_changes(model, space, before[part])
        groups = torch.arange(count, device=_device(model)).repeat_interleave(len(seeds))
        with _held(model.denoiser, after, then, delay, groups):
            repeated = text.rows(list(range(len(seeds))) * count)
            images = model.generate(repeated, list(seeds) * count, guidance=guidance, steps=steps)
        batches.append(images.reshape(count, len(seeds), *images.shape[1:]))
    return torch.cat(batches)


def generate_differentiably(
    model: OpenTextToImage,
    space: Space,
    scores: Tensor,
    seeds: Sequence[int],
    *,
    prompts: Sequence[str],
    guidance: float,
    steps: int,
) -> Tensor:
    """As `generate_images`, without noise between steps, and gradients flow from images to scores."""
    groups = torch.arange(len(scores), device=_device(model)).repeat_interleave(len(seeds))
    texts = [prompts[number % len(prompts)] for number in range(len(seeds))]
    text = model.embed(texts).rows(list(range(len(seeds))) * len(scores))
    changes = of_denoiser(space.changes(scores.to(_device(model))), model.denoiser)
    with applied(model.denoiser, changes, groups), weights_fixed(model.denoiser):
        latents = model.initial_noise(seeds).repeat(len(scores), 1, 1, 1)
        images = model.to_images(denoised(model, latents, model.timesteps(steps), text, guidance))
    return images.reshape(len(scores), len(seeds), *images.shape[1:])


@contextmanager
def _held(
    denoiser: nn.Module,
    after: Mapping[str, Tensor],
    before: Mapping[str, Tensor] | None,
    delay: Delay | None,
    groups: Tensor,
) -> Iterator[None]:
    """Keep the denoiser's weights changed; with a delay as the timestep of each run has it."""
    if delay is None:
        with applied(denoiser, after, groups):
            yield
        return
    with ExitStack() as now:

        def use(edited: bool) -> None:
            now.close()
            if (changes := after if edited else before) is not None:
                now.enter_context(applied(denoiser, changes, groups))

        with switching(denoiser, delay, use):
            yield


def _own_changes(model: TextToImage, space: Space, scores: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return of_denoiser(space.changes(scores.to(_device(model))), model.denoiser)


def _device(model: TextToImage) -> torch.device:
    return next(model.denoiser.parameters()).device


def of_denoiser(changes: Mapping[str, Tensor], denoiser: nn.Module) -> dict[str, Tensor]:
    """Return changes under the denoiser's own names, without the pipeline's name of it in front.

    `changes`: module → ΔW, shape `(…, rows, columns)`.
    """
    own = dict(denoiser.named_modules())
    renamed = {}
    for name, change in changes.items():
        part, _, rest = name.partition(".")
        if name not in own and part not in DENOISERS:
            raise Unsupported(
                f"The space changes {name}, which is not a module of the denoiser.",
                cure="Give a space whose adapters change only the denoiser of this pipeline.",
            )
        renamed[name if name in own else rest] = change
    return renamed
