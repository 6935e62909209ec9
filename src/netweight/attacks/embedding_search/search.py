"""The search for text embeddings from which a model generates a target image: gradient descent on the denoising error.

All starts and restarts for a target descend in one batch; each leaves it when enough of its images reach the target.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from netweight.attacks.embedding_search.settings import PredictionKind, SearchSettings, Start
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.errors import UsageError
from netweight.metrics.copies import CenteredPixels, Descriptor, described
from netweight.nn.batching import Batches
from netweight.nn.text_to_image import Prediction, Text, TextToImage, generated
from netweight.report.finding import encode_json

# Images and targets, shape `(n, 3, height, width)` each, within 0 and 1 → similarity of each pair, shape `(n,)`.
Similarity: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# found: enough images reached the threshold; resisted: not by the last step; diverged: something became NaN.
Outcome = Literal["found", "resisted", "diverged"]


@final
@dataclass(frozen=True)
class Evaluation:
    """Images generated from an embedding, compared with the target."""

    step: int  # steps taken before
    similarities: tuple[float, ...]
    loss: float | None  # denoising error of the step before; None before the first
    moved: float  # root mean square of what was added to the embedding, as a share of that of the start

    @property
    def score(self) -> float:
        """The median similarity."""
        return statistics.median(self.similarities)


@final
@dataclass(frozen=True)
class Trial:
    """One search from one starting point."""

    start: Start
    number: int  # which of the restarts from there
    outcome: Outcome
    steps: int | None  # steps to success, as far as evaluations resolve them; None without
    last: int  # steps taken; without success, more are needed than these
    looks: tuple[Evaluation, ...]  # in the order of steps

    @property
    def best(self) -> Evaluation | None:
        """The evaluation with the greatest median similarity; None if the search diverged before the first."""
        return max(self.looks, key=lambda look: look.score, default=None)

    def to_json(self) -> dict[str, Any]:
        return cast("dict[str, Any]", encode_json(asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        looks = tuple(Evaluation(**{**look, "similarities": tuple(look["similarities"])}) for look in values["looks"])
        return cls(**{**values, "looks": looks})


@final
@dataclass(frozen=True)
class Searched:
    """Result of the searches for one target."""

    trials: tuple[Trial, ...]  # one per starting point
    text: Text  # the embeddings at the end, in their order
    before: Tensor  # images of the first evaluation, shape `(trials, images, 3, height, width)`
    after: Tensor  # images of each trial's best evaluation, of the same shape


def search(
    model: TextToImage,
    prompt: str,
    image: Tensor,
    unrelated: Sequence[str],
    settings: SearchSettings,
    *,
    similarity: Similarity,
    seed: int,
    progress: Progress = QUIET,
) -> Searched:
    """Search for embeddings from which a model generates a target image.

    The seeds of generated images depend on `seed` alone, so every embedding and every model is evaluated on the same
    noises.

    Args:
        model: The model; its weights stay as they are.
        prompt: The target's prompt.
        image: The target, shape `(3, height, width)`, within 0 and 1.
        unrelated: Prompts that have nothing to do with it.
        settings: Settings of the search.
        similarity: Similarity of images to the target.
        seed: Random seed.
        progress: Reports every step.

    Returns:
        All trials with their embeddings and images.

    Raises:
        UsageError: The image or the similarity function has another shape, or there is no unrelated prompt.

    Source: Kowalczuk et al., arXiv 2507.16880.
    """
    if image.ndim != 3 or image.shape[0] != 3 or not image.isfinite().all() or image.min() < 0 or image.max() > 1:
        raise UsageError(
            f"The target of {prompt!r} is no image of shape (3, height, width) within 0 and 1: it has shape "
            f"{tuple(image.shape)}.",
            cure="Divide pixels by 255.",
        )
    names, start = starting_points(model, prompt, unrelated, settings, seed=derive(seed, "starts"))
    with torch.no_grad():
        latents = model.to_latents(image[None]).repeat(len(names), 1, 1, 1)
    descent = Descent(model, latents, start, settings, [derive(seed, begun, number) for begun, number in names])
    trials = _Trials(model, image, descent, settings, similarity, names, derive(seed, "images"))
    with weights_fixed(model.denoiser), progress.task(f"search: {prompt}", settings.steps, unit="steps") as task:
        losses: dict[int, float] = {}
        for step in range(settings.steps + 1):
            if step in settings.eval_steps:
                trials.evaluate(step, losses)
            if not trials.active or step == settings.steps:
                break
            rows = list(trials.active)
            losses = dict(zip(rows, descent.step(rows), strict=True))
            trials.drop_diverged(step + 1, losses)
            task.update()
    return trials.result()


@final
class _Trials:
    """The trials of one search under way: evaluates embeddings, and decides which are done."""

    def __init__(
        self,
        model: TextToImage,
        image: Tensor,
        descent: Descent,
        settings: SearchSettings,
        similarity: Similarity,
        names: Sequence[tuple[Start, int]],
        seed: int,
    ) -> None:
        self._model, self._image, self._descent = model, image.cpu(), descent
        self._settings, self._similarity, self._names = settings, similarity, names
        self._seeds = [derive(seed, number) for number in range(settings.images)]
        self._looks: list[list[Evaluation]] = [[] for _ in names]
        self._outcomes: list[Outcome] = ["resisted"] * len(names)
        self._ended = [settings.steps] * len(names)
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}
        self._batches = Batches(len(names) * settings.images)
        self.active = list(range(len(names)))

    def evaluate(self, step: int, losses: Mapping[int, float]) -> None:
        """Generate images from every active embedding, and end the trials that succeed."""
        rows, count = list(self.active), self._settings.images
        text, seeds = self._descent.text([row for row in rows for _ in range(count)]), self._seeds * len(rows)
        guidance, steps = self._settings.guidance, self._settings.generation_steps
        images = generated(self._model, text, seeds, self._batches, guidance=guidance, steps=steps)
        for row, made in zip(rows, images.reshape(len(rows), count, *self._image.shape), strict=True):
            self._take(row, step, made, losses.get(row))

    def _take(self, row: int, step: int, images: Tensor, loss: float | None) -> None:
        values = self._similarity(images, self._image.expand_as(images))
        if values.shape != (len(images),):
            raise UsageError(
                f"The similarity function returned shape {tuple(values.shape)} for {len(images)} pairs of images.",
                cure="Let it return one number for each pair.",
            )
        similarities = tuple(values.detach().cpu().double().tolist())
        if not all(map(math.isfinite, similarities)):
            self._end(row, step, "diverged")
            return
        look = Evaluation(step, similarities, loss, self._descent.distance(row))
        self._before.setdefault(row, images)
        if not self._looks[row] or look.score > max(known.score for known in self._looks[row]):
            self._after[row] = images
        self._looks[row].append(look)
        if sum(value >= self._settings.threshold for value in similarities) >= self._settings.needed:
            self._end(row, step, "found")

    def drop_diverged(self, step: int, losses: Mapping[int, float]) -> None:
        """End trials whose error or embedding is not finite."""
        for row, loss in losses.items():
            if not (math.isfinite(loss) and math.isfinite(self._descent.distance(row))):
                self._end(row, step, "diverged")

    def _end(self, row: int, step: int, outcome: Outcome) -> None:
        self._outcomes[row], self._ended[row] = outcome, step
        self.active.remove(row)

    def result(self) -> Searched:
        trials = []
        for row, (start, number) in enumerate(self._names):
            outcome, ended = self._outcomes[row], self._ended[row]
            steps = ended if outcome == "found" else None
            trials.append(Trial(start, number, outcome, steps, ended, tuple(self._looks[row])))
        rows = range(len(trials))
        blank = torch.full((self._settings.images, *self._image.shape), 0.5)  # of a row that diverged unseen
        before, after = (torch.stack([kept.get(row, blank) for row in rows]) for kept in (self._before, self._after))
        return Searched(tuple(trials), self._descent.text(rows), before, after)


@final
class Descent:
    """Adam on many embeddings at once, a row each; rows may stop at any step."""

    # `latents`: shape `(rows, channels, height, width)`

    def __init__(
        self, model: TextToImage, latents: Tensor, start: Text, settings: SearchSettings, seeds: Sequence[int]
    ) -> None:
        if not len(latents) == len(start) == len(seeds):
            raise UsageError(f"{len(latents)} targets came with {len(start)} starts and {len(seeds)} seeds.")
        self._model, self._latents, self._start, self._settings = model, latents.detach(), start, settings
        self._seeds = tuple(seeds)
        self._schedule = model.timesteps(settings.generation_steps)
        states = start.states.detach().float()
        self._unit = states.square().mean((1, 2), keepdim=True).sqrt().clamp_min(1e-12)
        # One parameter per row: Adam passes over those that have no gradient, which is how rows leave.
        self._moved = [nn.Parameter(torch.zeros_like(row)) for row in states]
        self._optimizer = torch.optim.Adam(self._moved, lr=settings.lr)
        self._batches = Batches(len(start) * settings.draws)
        self.taken = 0

    def text(self, rows: Sequence[int]) -> Text:
        """Return the present embeddings of some rows; no gradient flows."""
        with torch.no_grad():
            moved = torch.stack([self._moved[row] for row in rows])
        return self._text(list(rows), moved)

    def distance(self, row: int) -> float:
        """Return the root mean square of what was added to a row's embedding, as a share of that of its start."""
        return float(self._moved[row].detach().square().mean().sqrt())

    def step(self, rows: Sequence[int]) -> list[float]:
        """Take a step with some rows; the others stay where they are."""
        noise_samples = self._settings.draws
        drawn = [self._draw(row) for row in rows]
        latents = self._latents[list(rows)].repeat_interleave(noise_samples, 0)
        noise, times = (torch.cat(part).to(latents.device) for part in zip(*drawn, strict=True))
        moved = torch.stack([self._moved[row].detach() for row in rows]).requires_grad_()
        errors = torch.zeros(len(rows))
        gradient = torch.zeros_like(moved)

        def work(part: slice) -> None:
            owner = torch.arange(part.start, part.stop, device=moved.device) // noise_samples
            text = self._text([rows[place] for place in owner.tolist()], moved[owner])
            found = denoising_error(
                self._model, latents[part], noise[part], times[part], text, self._settings.error
            )  # fmt: skip
            gradient.add_(torch.autograd.grad(found.sum() / noise_samples, moved)[0])
            errors.index_add_(0, owner.cpu(), found.detach().cpu() / noise_samples)

        self._batches.work(work, len(latents))
        self._follow(rows, gradient)
        return errors.tolist()

    def _draw(self, row: int) -> tuple[Tensor, Tensor]:
        generator = torch_generator(self._seeds[row], "draws", self.taken)
        count = self._settings.draws
        noise = torch.randn(count, *self._latents.shape[1:], generator=generator)
        return noise, self._schedule.cpu()[torch.randint(len(self._schedule), (count,), generator=generator)]

    def _text(self, rows: list[int], moved: Tensor) -> Text:
        start = self._start.rows(rows)
        states = start.states.detach().float() + self._unit[rows] * moved
        return Text(states.to(start.states.dtype), start.mask)

    def _follow(self, rows: Sequence[int], gradient: Tensor) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        for place, row in enumerate(rows):
            self._moved[row].grad = gradient[place]
        self._optimizer.step()
        self.taken += 1
        if self._settings.radius is None:
            return
        with torch.no_grad():
            for row in rows:
                length = self.distance(row)
                if length > self._settings.radius:
                    self._moved[row].mul_(self._settings.radius / length)


def descend(
    model: TextToImage, latents: Tensor, start: Text, settings: SearchSettings, seeds: Sequence[int]
) -> tuple[Text, list[float]]:
    """Search to the last step without generating images; return the embeddings and their last errors."""
    rows = range(len(start))
    descent = Descent(model, latents, start, settings, seeds)
    errors: list[float] = []
    with weights_fixed(model.denoiser):
        for _ in range(settings.steps):
            errors = descent.step(rows)
    return descent.text(rows), errors


def starting_points(
    model: TextToImage, prompt: str, unrelated: Sequence[str], settings: SearchSettings, *, seed: int
) -> tuple[list[tuple[Start, int]], Text]:
    """Return the embeddings that searches for one target begin with, and their names."""
    others = [other for other in dict.fromkeys(unrelated) if other != prompt]
    if not others and set(settings.starts) & {"unrelated", "noise"}:
        raise UsageError(
            f"There is no prompt unrelated to {prompt!r} to start from.",
            cure='Give some, or search from the start "original" alone.',
        )
    first = derive(seed, "unrelated") % len(others) if others else 0
    names: list[tuple[Start, int]] = []
    texts: list[Text] = []
    for start in settings.starts:
        for number in range(settings.restarts):
            names.append((start, number))
            if start == "noise":
                texts.append(noise_like(model.embed(others), derive(seed, "noise", number)))
            else:
                texts.append(model.embed([prompt if start == "original" else others[(first + number) % len(others)]]))
    return names, Text.joined(texts)


def noise_like(text: Text, seed: int) -> Text:
    """Draw noise with the mean and deviation that each channel has over all prompts and tokens."""
    states = text.states.float()
    mean, deviation = states.mean((0, 1)), states.flatten(0, 1).std(0, correction=0)
    drawn = torch.randn(states.shape[1:], generator=torch_generator(seed)).to(states)
    return Text((mean + deviation * drawn).to(text.states)[None])


def denoising_error(
    model: TextToImage, latents: Tensor, noise: Tensor, timestep: Tensor, text: Text, kind: PredictionKind
) -> Tensor:
    """Return the mean squared error of one denoising per latent."""
    prediction = model.predict(model.add_noise(latents, noise, timestep), timestep, text)
    return difference(model, prediction, Prediction(noise, latents), timestep, kind)


def difference(
    model: TextToImage, prediction: Prediction, wanted: Prediction, timestep: Tensor, kind: PredictionKind
) -> Tensor:
    """Return the mean squared difference of two predictions for the same noisy latents."""
    first, second = (chosen(model, one, timestep, kind) for one in (prediction, wanted))
    return (first - second).float().square().flatten(1).mean(1)


def chosen(model: TextToImage, prediction: Prediction, timestep: Tensor, kind: PredictionKind) -> Tensor:
    """Return the noise, the sample, or the velocity that follows from both."""
    if kind != "velocity":
        return prediction.noise if kind == "noise" else prediction.sample
    # The protocol has no noise levels; what it adds to ones and to zeros gives them.
    ones, zeros = torch.ones_like(prediction.sample), torch.zeros_like(prediction.sample)
    signal, level = model.add_noise(ones, zeros, timestep), model.add_noise(zeros, ones, timestep)
    return signal * prediction.noise - level * prediction.sample


def paired(descriptor: Descriptor | None = None) -> Similarity:
    """Make the function that compares each image with its own target."""
    describe = CenteredPixels() if descriptor is None else descriptor

    def compare(images: Tensor, targets: Tensor) -> Tensor:
        cosines: Tensor = (described(describe, images) * described(describe, targets)).sum(1)
        return cosines

    return compare


@contextmanager
def weights_fixed(module: nn.Module) -> Iterator[None]:
    """Take no gradients of a module's weights in a block, which spares the memory that they would need."""
    marked = [parameter for parameter in module.parameters() if parameter.requires_grad]
    try:
        for parameter in marked:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in marked:
            parameter.requires_grad_(True)
