"""The search itself: embeddings of one target from several starts, looked at as they go, each stopped at success."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, TypeAlias, cast, final

import torch
from torch import Tensor

from netweight.attacks.embedding_search.descent import Descent, weights_fixed
from netweight.attacks.embedding_search.settings import SearchSettings, Start
from netweight.attacks.embedding_search.starts import starting_points
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive
from netweight.errors import UsageError
from netweight.probe.batches import Batches
from netweight.probe.diffusion import Text, TextToImage
from netweight.probe.generation import generated
from netweight.report.finding import encode_json

__all__ = ["Look", "Outcome", "Searched", "Similarity", "Trial", "search"]

Similarity: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""Images and targets, shape `(n, 3, height, width)` each, within 0 and 1 → how alike each pair is, shape `(n,)`."""
Outcome = Literal["found", "resisted", "diverged"]
"""found: enough images reached the threshold; resisted: not by the last step; diverged: something became NaN."""


@final
@dataclass(frozen=True)
class Look:
    """Images from an embedding beside the target.

    Attributes:
        step: Steps taken before.
        similarities: Of each image to the target.
        loss: Denoising error of the step before; None before the first.
        moved: Root mean square of what was added to the embedding, as a share of that of the start.
    """

    step: int
    similarities: tuple[float, ...]
    loss: float | None
    moved: float

    @property
    def score(self) -> float:
        """The median similarity."""
        return statistics.median(self.similarities)


@final
@dataclass(frozen=True)
class Trial:
    """One search from one starting point.

    Attributes:
        start: Where it began.
        number: Which of the restarts from there.
        outcome: How it ended.
        steps: Steps to success, as far as looks resolve them; None without.
        last: Steps taken: a search without success tells that more are needed than these.
        looks: In the order of steps.
    """

    start: Start
    number: int
    outcome: Outcome
    steps: int | None
    last: int
    looks: tuple[Look, ...]

    @property
    def best(self) -> Look | None:
        """The look with the greatest median similarity; None if the search diverged unseen."""
        return max(self.looks, key=lambda look: look.score, default=None)

    def to_json(self) -> dict[str, Any]:
        """Return the trial as JSON values."""
        return cast("dict[str, Any]", encode_json(asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Return the trial that `to_json` wrote.

        Args:
            values: JSON values.
        """
        looks = tuple(Look(**{**look, "similarities": tuple(look["similarities"])}) for look in values["looks"])
        return cls(**{**values, "looks": looks})


@final
@dataclass(frozen=True)
class Searched:
    """What the searches for one target came to.

    Attributes:
        trials: One per starting point.
        text: The embeddings at the end, in their order.
        before: Images of the first look, shape `(trials, images, 3, height, width)`.
        after: Images of each trial's best look, of the same shape.
    """

    trials: tuple[Trial, ...]
    text: Text
    before: Tensor
    after: Tensor


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
    """Search for embeddings that make a model paint a target image.

    All starts and restarts descend in one batch; each leaves it at success. Which images a look makes depends on the
    seed alone, so the same noises are looked at from every embedding and in every model.

    Args:
        model: What is searched; its weights stay as they are.
        prompt: The target's prompt.
        image: The target, shape `(3, height, width)`, within 0 and 1.
        unrelated: Prompts that have nothing to do with it.
        settings: How.
        similarity: What tells that an image is the target.
        seed: Of everything random.
        progress: Told of every step.

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
    seeds = [derive(seed, begun, number) for begun, number in names]
    descent = Descent(model, latents, start, settings, seeds)
    looking = _Looking(model, image, descent, settings, similarity, names, derive(seed, "images"))
    with weights_fixed(model.denoiser), progress.task(f"search: {prompt}", settings.steps, unit="steps") as task:
        losses: dict[int, float] = {}
        for step in range(settings.steps + 1):
            if step in settings.looked_at:
                looking.look(step, losses)
            if not looking.active or step == settings.steps:
                break
            rows = list(looking.active)
            losses = dict(zip(rows, descent.step(rows), strict=True))
            looking.leave_diverged(step + 1, losses)
            task.update()
    return looking.searched()


@final
class _Looking:
    """Looks at embeddings on their way, keeps what was seen, and decides which are done."""

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
        self._looks: list[list[Look]] = [[] for _ in names]
        self._outcomes: list[Outcome] = ["resisted"] * len(names)
        self._ended = [settings.steps] * len(names)
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}
        self._batches = Batches(len(names) * settings.images)
        self.active = list(range(len(names)))

    def look(self, step: int, losses: Mapping[int, float]) -> None:
        """Generate from every embedding under way, and take out those that have won."""
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
            self._leave(row, step, "diverged")
            return
        look = Look(step, similarities, loss, self._descent.distance(row))
        self._before.setdefault(row, images)
        if not self._looks[row] or look.score > max(known.score for known in self._looks[row]):
            self._after[row] = images
        self._looks[row].append(look)
        if sum(value >= self._settings.threshold for value in similarities) >= self._settings.needed:
            self._leave(row, step, "found")

    def leave_diverged(self, step: int, losses: Mapping[int, float]) -> None:
        """Take out embeddings whose error or place is no number any more."""
        for row, loss in losses.items():
            if not (math.isfinite(loss) and math.isfinite(self._descent.distance(row))):
                self._leave(row, step, "diverged")

    def _leave(self, row: int, step: int, outcome: Outcome) -> None:
        self._outcomes[row], self._ended[row] = outcome, step
        self.active.remove(row)

    def searched(self) -> Searched:
        """Return what happened."""
        trials = []
        for row, (start, number) in enumerate(self._names):
            outcome, ended = self._outcomes[row], self._ended[row]
            steps = ended if outcome == "found" else None
            trials.append(Trial(start, number, outcome, steps, ended, tuple(self._looks[row])))
        rows = range(len(trials))
        blank = torch.full((self._settings.images, *self._image.shape), 0.5)  # of a row that diverged unseen
        before, after = (torch.stack([kept.get(row, blank) for row in rows]) for kept in (self._before, self._after))
        return Searched(tuple(trials), self._descent.text(rows), before, after)
