"""The loss of inversion: how badly the models of points denoise their target images, with masks where wanted."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netweight.attacks.embedding_search.search import chosen, weights_fixed
from netweight.attacks.embedding_search.settings import PredictionKind
from netweight.core import digest
from netweight.core.engines import Outcome
from netweight.core.progress import QUIET, Progress
from netweight.core.runs import map_runs
from netweight.core.seeds import torch_generator
from netweight.errors import TrainingStopped, Unsupported, UsageError
from netweight.methods.space.directions import scores_digest
from netweight.methods.space.edits import Delay
from netweight.methods.space.points import Points
from netweight.nn.apply_lora import applied
from netweight.nn.text_to_image import Prediction, TextToImage


@final
class DenoisingLoss:
    """Mean squared error of denoising images at uniformly drawn timesteps, one number per target.

    Args:
        model: The base model.
        images: Of each target, shape `(b, m, 3, height, width)`, within 0 and 1: m images that show the same thing; or
            `(b, 3, height, width)`, one each. Images of the model's own size only.
        prompts: One for all, or one per target.
        masks: What counts, 1, and what does not, 0: shape `(b, m, height, width)` or `(b, height, width)`; None for
            everything. They are brought to the size of latents, and the mean is taken over what counts.
        draws: Timesteps and noises per image and step.
        steps: Timesteps are drawn from a schedule of so many steps; as many as the model was trained with are all.
        said: The prediction that the error is counted in: "noise" for networks that predict noise.

    Raises:
        UsageError: Shapes do not fit, values lie outside of 0 and 1, a mask has nothing that counts, or images have
            another size than the model makes.
    """

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
        _check(images, prompts, draws)
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
            told = model.predict(model.add_noise(latents, noise, times), times, self._text)
        first, second = (
            chosen(model, one, times, self._said) for one in (told, Prediction(noise=noise, sample=latents))
        )
        errors = (first - second).float().square()
        if self._masks is None:
            found = errors.flatten(1).mean(1)
        else:
            found = (errors * self._masks).flatten(1).sum(1) / self._masks.expand_as(errors).flatten(1).sum(1)
        return found.reshape(-1, self._each).mean(1)


def _check(images: Tensor, prompts: Sequence[str], draws: int) -> None:
    if images.ndim != 5 or images.shape[2] != 3 or not images.numel():
        raise UsageError(
            f"Images of shape {tuple(images.shape)} cannot be inverted.",
            cure="Give (targets, 3, height, width), or (targets, images, 3, height, width).",
        )
    if not (images.isfinite().all() and images.min() >= 0 and images.max() <= 1):
        raise UsageError("Images hold values outside of 0 and 1, or NaN.", cure="Divide bytes by 255.")
    if len(prompts) not in (1, len(images)) or draws < 1:
        raise UsageError(
            f"{len(images)} targets came with {len(prompts)} prompts and {draws} draws.",
            cure="Give one prompt, or one per target, and at least one draw.",
        )


def _check_size(model: TextToImage, latents: Tensor, images: Tensor) -> None:
    wanted = model.initial_noise([0]).shape[1:]
    if latents.shape[1:] != wanted:
        scale = images.shape[-1] / latents.shape[-1]
        sides = " × ".join(str(round(side * scale)) for side in wanted[1:])
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
        raise UsageError("Masks hold values outside of 0 and 1, or NaN.", cure="1 is what counts.")
    small = F.interpolate(masks.flatten(0, 1)[:, None], latents.shape[2:], mode="bilinear", antialias=True)
    empty = (small.flatten(1).sum(1) == 0).nonzero()[:, 0].tolist()
    if empty:
        raise UsageError(f"The mask of image {empty[0]} has nothing that counts.", cure="1 is what counts.")
    return small.to(latents)


_DENOISERS = ("unet", "transformer")


def paint(
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
    """Make images of prompts with the models of points.

    Args:
        model: The base model; its weights stay as they are.
        space: The space, fitted to adapters of this model.
        scores: Points, shape `(b, k)`.
        prompts: One for all images, or one per seed.
        seeds: Of the initial noise; every point begins with the same ones, so that images can be compared.
        guidance: Scale of classifier-free guidance.
        steps: Of the scheduler.
        delay: With it, points hold from its timestep on, and those of `before` until then.
        before: Points before an edit, shape `(b, k)`; None, with a delay, for the base model alone.
        rows: Most images at a time.

    Returns:
        Shape `(b, seeds, 3, height, width)`, within 0 and 1, on the CPU.

    Raises:
        UsageError: Numbers do not fit, or the space is of another model.
        Unsupported: The space changes more than the denoiser.
    """
    if scores.ndim != 2 or not seeds or len(prompts) not in (1, len(seeds)):
        raise UsageError(
            f"Points of shape {tuple(scores.shape)} came with {len(prompts)} prompts and {len(seeds)} seeds.",
            cure="Give points (b, k) and one prompt, or one per seed.",
        )
    if before is not None and before.shape != scores.shape:
        raise UsageError(f"Points {tuple(scores.shape)} cannot follow on {tuple(before.shape)}.")
    text = model.embed(list(prompts) * (len(seeds) // len(prompts)))
    at_once = max(1, rows // len(seeds))
    found = []
    for start in range(0, len(scores), at_once):
        part = slice(start, start + at_once)
        count = len(scores[part])
        after = _own_changes(model, space, scores[part])
        then = None if before is None else _own_changes(model, space, before[part])
        groups = torch.arange(count, device=_device(model)).repeat_interleave(len(seeds))
        with _held(model.denoiser, after, then, delay, groups):
            repeated = text.rows(list(range(len(seeds))) * count)
            images = model.generate(repeated, list(seeds) * count, guidance=guidance, steps=steps)
        found.append(images.reshape(count, len(seeds), *images.shape[1:]))
    return torch.cat(found)


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
    with ExitStack() as stack, ExitStack() as now:
        shown: list[bool] = []

        def look(module: nn.Module, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
            timestep = torch.as_tensor(named["timestep"] if "timestep" in named else arguments[1])
            edited = delay.edited(timestep.float().max())
            if shown != [edited]:
                shown[:] = [edited]
                now.close()
                wanted = after if edited else before
                if wanted is not None:
                    now.enter_context(applied(denoiser, wanted, groups))

        stack.callback(denoiser.register_forward_pre_hook(look, with_kwargs=True).remove)
        yield


def _own_changes(model: TextToImage, space: Space, scores: Tensor) -> dict[str, Tensor]:
    with torch.no_grad():
        return of_denoiser(space.changes(scores.to(_device(model))), model.denoiser)


def _device(model: TextToImage) -> torch.device:
    return next(model.denoiser.parameters()).device


def of_denoiser(changes: Mapping[str, Tensor], denoiser: nn.Module) -> dict[str, Tensor]:
    """Return changes under the denoiser's own names, without the pipeline's name of it in front.

    Args:
        changes: Module → ΔW, shape `(…, rows, columns)`.
        denoiser: Of the pipeline.

    Raises:
        Unsupported: A change is of another part of the pipeline.
    """
    own = dict(denoiser.named_modules())
    found = {}
    for name, change in changes.items():
        part, _, rest = name.partition(".")
        if name not in own and part not in _DENOISERS:
            raise Unsupported(
                f"The space changes {name}, which is no module of the denoiser.",
                cure="Only changes of the denoiser can be painted or inverted; is the space of another model?",
            )
        found[name if name in own else rest] = change
    return found


class Space(Protocol):
    """What is asked of a space.

    Attributes:
        deviations: Standard deviations of the training scores, shape `(k,)`.
    """

    @property
    def deviations(self) -> Tensor: ...

    def changes(self, scores: Tensor) -> Mapping[str, Tensor]:
        """Return module name → ΔW, shape `(b, rows, columns)`, of scores `(b, k)`; gradients flow to these."""


class Loss(Protocol):
    """How far the models of points are from their targets."""

    def __call__(self, changes: Mapping[str, Tensor], generator: torch.Generator, /) -> Tensor:
        """Return one number per target, shape `(b,)`.

        Args:
            changes: Module name → ΔW, shape `(b, rows, columns)`.
            generator: What is drawn in this step comes from here.
        """


@final
@dataclass(frozen=True)
class InversionSettings:
    """How points are sought.

    Attributes:
        steps: Of Adam.
        learning_rate: In standard deviations of the training models, if `scaled`.
        components: Only the first so many components move; None for all. A space of fewer moves all of them.
        prior: Weight of ½ Σ (score / deviation)², a Gaussian prior, against the loss of a target. A denoising loss is a
            mean over pixels, so a prior that a Bayesian would call 1 is tiny here: 1e-4 is too strong in the miniature.
        weight_decay: Of Adam, on what is moved.
        scaled: Whether components are moved in units of their deviations, or as they are.
        averaged: The point is the mean over this last share of the steps, since single steps are noisy; 0 for the last.

    Raises:
        UsageError: A number is out of its range.
    """

    steps: int = 400
    learning_rate: float = 0.05
    components: int | None = None
    prior: float = 0.0
    weight_decay: float = 0.0
    scaled: bool = True
    averaged: float = 0.25

    def __post_init__(self) -> None:
        """Refuse settings that cannot be meant."""
        wrong = self.steps < 1 or not self.learning_rate > 0 or self.prior < 0 or self.weight_decay < 0
        if wrong or not 0 <= self.averaged <= 1 or (self.components is not None and self.components < 1):
            raise UsageError(
                f"These settings of an inversion cannot be meant: {self}.", cure="Begin with the defaults."
            )


SETTINGS: Mapping[str, InversionSettings] = {
    "default": InversionSettings(),
    "reference": InversionSettings(
        learning_rate=0.1, components=10_000, weight_decay=1e-10, scaled=False, averaged=0.0
    ),
    "reference out of distribution": InversionSettings(
        steps=800, learning_rate=1.0, components=1_000, scaled=False, averaged=0.0
    ),
}
"""Ours, those of the authors' code, and those that it takes for images that are no photographs of faces."""


@final
@dataclass(frozen=True, eq=False)
class Inverted:
    """Where targets were found.

    Attributes:
        scores: Shape `(b, k)`, fp32.
        losses: Before each step, the prior left out, shape `(steps, b)`, fp32.
        distances: Root mean square of the scores in standard deviations, over the components that moved, shape `(b,)`:
            about 1 for training models; much more is outside of what they span.
    """

    scores: Tensor
    losses: Tensor
    distances: Tensor

    @property
    def improvements(self) -> Tensor:
        """Mean loss of the first tenth of the steps over that of the last tenth, shape `(b,)`."""
        tenth = max(1, len(self.losses) // 10)
        return self.losses[:tenth].mean(0) / self.losses[-tenth:].mean(0)


def invert(
    space: Space,
    loss: Loss,
    count: int,
    settings: InversionSettings | None = None,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    progress: Progress = QUIET,
) -> Inverted:
    """Seek points of targets.

    Args:
        space: The space; weights are made of the points once per step, whatever the loss draws.
        loss: How far the models are from their targets.
        count: Number of targets, b.
        settings: How; None for the defaults, `SETTINGS` has others.
        seed: Decides on the draws of every step.
        device: Where points, and so the weights made of them, are: the model's.
        progress: Told of every step.

    Raises:
        UsageError: There is no target, or the loss does not return one number per target.
        TrainingStopped: The loss of a target became NaN or infinite; the step and the targets are named.

    Source: weights2weights (arXiv 2406.09413), inversion of single images.
    """
    if count < 1:
        raise UsageError("There is no target to invert.", cure="Give at least one image.")
    settings = settings or SETTINGS["default"]
    deviations = space.deviations.detach().float().to(device)
    moving = min(settings.components or len(deviations), len(deviations))
    unit = deviations[:moving] if settings.scaled else torch.ones(moving, device=deviations.device)
    moved = torch.zeros(count, moving, device=deviations.device, requires_grad=True)
    adam = torch.optim.Adam([moved], lr=settings.learning_rate, weight_decay=settings.weight_decay)
    still = torch.zeros(count, len(deviations) - moving, device=deviations.device)
    first = settings.steps - max(1, round(settings.averaged * settings.steps))
    total, losses = torch.zeros_like(moved), []
    with progress.task("invert", settings.steps, unit="steps") as task:
        for step in range(settings.steps):
            scores = torch.cat([moved * unit, still], 1)
            found = loss(space.changes(scores), torch_generator(seed, "step", step))
            _check_inversion(found, count, step)
            losses.append(found.detach().float().cpu())
            whole = found.sum()
            if settings.prior:
                whole = whole + 0.5 * settings.prior * (moved * unit / _apart(deviations[:moving])).square().sum()
            adam.zero_grad(set_to_none=True)
            moved.grad = torch.autograd.grad(whole, moved)[0]
            adam.step()
            if step >= first:
                total += moved.detach()
            task.update()
    mean = total * unit / (settings.steps - first)
    distances = (mean / _apart(deviations[:moving])).square().mean(1).sqrt()
    return Inverted(torch.cat([mean, still], 1).cpu(), torch.stack(losses), distances.cpu())


def _apart(deviations: Tensor) -> Tensor:
    """Deviations to divide by."""
    return deviations.clamp_min(1e-12)


def _check_inversion(losses: Tensor, count: int, step: int) -> None:
    if losses.shape != (count,):
        raise UsageError(f"The loss of {count} targets has shape {tuple(losses.shape)}.", cure="Return one per target.")
    bad = (~losses.isfinite()).nonzero()[:, 0].tolist()
    if bad:
        raise TrainingStopped(
            f"The loss of target {', '.join(map(str, bad))} is not finite at step {step}: the inversion diverged.",
            cure="Lower the learning rate, or move fewer components; look at the images if this is step 0.",
        )


class _Space(Space, Protocol):
    @property
    def scores(self) -> Tensor: ...


@final
@dataclass(frozen=True, eq=False)
class Target:
    """What is to be inverted.

    Attributes:
        name: Of the target.
        images: Shape `(m, 3, height, width)`, within 0 and 1: one image, or several of the same thing.
        mask: What counts of each, shape `(m, height, width)`; None for everything.
    """

    name: str
    images: Tensor
    mask: Tensor | None = None


@final
@dataclass(frozen=True)
class InversionTask:
    """How targets are inverted.

    Attributes:
        prompt: That the images are denoised with.
        settings: Of the descent.
        said: The prediction that the error is counted in.
        draws: Timesteps and noises per image and step.
        schedule: Timesteps are drawn from a schedule of so many steps.
        together: Most targets in a batch; it changes what is drawn for each.
        seed: Of all draws.
    """

    prompt: str
    settings: InversionSettings
    said: PredictionKind = "noise"
    draws: int = 1
    schedule: int = 50
    together: int = 8
    seed: int = 0


def invert_targets(
    model: TextToImage,
    space: _Space,
    targets: Sequence[Target],
    task: InversionTask,
    *,
    ledger: str | Path,
    progress: Progress = QUIET,
) -> Points:
    """Find the points of targets.

    Args:
        model: The base model; its weights stay as they are.
        space: Fitted to adapters of this model.
        targets: Each name once. Those of the same number of images share a batch.
        task: How.
        ledger: The file to remember points in; a second call with the same arguments continues the first.
        progress: Told of every target.

    Returns:
        The points in the targets' order; `origin` holds each one's distance from the mean and its improvement.

    Raises:
        UsageError: There is no target, a name comes twice, or images do not fit the model.
        TrainingStopped: The loss of a target diverged.
    """
    names = [target.name for target in targets]
    if not targets or len(set(names)) < len(names):
        raise UsageError(f"{len(names)} targets of {len(set(names))} names.", cure="Give at least one, each once.")
    by_name = {target.name: target for target in targets}
    for target in targets:  # before any work begins
        _loss(model, [target], task)
    about = {"model": model.digest(), "space": scores_digest(space.scores), "task": asdict(task)}
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

    found = []
    for result in map_runs(alone, items, ledger=ledger, engine=engine, ordered=True):
        if not result.ok:
            reason = (result.error or "").strip().splitlines()[-1]
            raise TrainingStopped(
                f"{result.config['name']!r} could not be inverted: {reason}",
                cure=f"Points found before are kept in {ledger}.",
            )
        found.append(result.value)
    origin = {
        "distances": {name: value["distance"] for name, value in zip(names, found, strict=True)},
        "improvements": {name: value["improvement"] for name, value in zip(names, found, strict=True)},
        "task": asdict(task),
    }
    scores = torch.tensor([value["scores"] for value in found], dtype=torch.float32)
    return Points(tuple(names), scores, scores_digest(space.scores), origin)


def _inverted(
    model: TextToImage, space: Space, targets: Sequence[Target], task: InversionTask, progress: Progress
) -> list[dict[str, Any]]:
    loss = _loss(model, targets, task)
    device = next(model.denoiser.parameters()).device
    with weights_fixed(model.denoiser):
        found = invert(space, loss, len(targets), task.settings, seed=task.seed, device=device, progress=progress)
    return [
        {"scores": scores, "distance": distance, "improvement": improvement}
        for scores, distance, improvement in zip(
            found.scores.tolist(), found.distances.tolist(), found.improvements.tolist(), strict=True
        )
    ]


def _loss(model: TextToImage, targets: Sequence[Target], task: InversionTask) -> DenoisingLoss:
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


def _batches(targets: Sequence[Target], most: int) -> Iterator[list[int]]:
    """Numbers of targets that have images alike in number and size, at most so many at a time."""
    alike: dict[tuple[int, ...], list[int]] = {}
    for place, target in enumerate(targets):
        alike.setdefault(tuple(target.images.shape), []).append(place)
    for places in alike.values():
        for start in range(0, len(places), most):
            yield places[start : start + most]


def _digest(target: Target) -> Mapping[str, Any]:
    mask = None if target.mask is None else digest.of_tensor(target.mask)
    return {"shape": list(target.images.shape), "images": digest.of_tensor(target.images), "mask": mask}
