"""The search for text embeddings from which a model generates a target image: gradient descent on the denoising error.

All starts and restarts for a target descend in one batch; each leaves it when enough of its images reach the target.
`compare` searches several models for several targets.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias, cast, final

import torch
from torch import Tensor

from netweight.attacks.embedding_search.descent import Descent, Walk, further
from netweight.attacks.embedding_search.settings import SearchSettings, Start
from netweight.core.digests import digest_config, digest_tensor
from netweight.core.engines import in_process
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.errors import UsageError
from netweight.job import Job, RunResult
from netweight.metrics.descriptors import CenteredPixels, Descriptor, described
from netweight.nn.text_to_image import Batches, Text, TextToImage, most_rows
from netweight.report.finding import encode_json
from netweight.store.checkpoint import open_checkpoint, write_checkpoint

# Images and targets, shape `(n, 3, height, width)` each, within 0 and 1 → similarity of each pair, shape `(n,)`.
Similarity: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# found: enough images reached the threshold; resisted: not by the last step; diverged: something became NaN.
Outcome = Literal["found", "resisted", "diverged"]


@final
@dataclass(frozen=True)
class SearchEvaluation:
    """Images generated from an embedding, compared with the target."""

    step: int
    """Steps taken before."""
    similarities: tuple[float, ...]
    """Similarity of each image to the target."""
    loss: float | None
    """Denoising error of the step before; None before the first."""
    distance: float
    """Root mean square of what was added to the embedding, as a share of that of the start."""
    guidance: float | None = None
    """The scale, of those compared, whose images are nearest to the target."""

    @property
    def score(self) -> float:
        """The median similarity."""
        return statistics.median(self.similarities)


@final
@dataclass(frozen=True)
class SearchTrial:
    """One search from one starting point."""

    start: Start
    """Kind of the starting point."""
    number: int
    """Number of the restart from there, with this rate."""
    outcome: Outcome
    """Outcome of the search."""
    steps: int | None
    """Steps to success, as far as evaluations resolve them; None without."""
    last: int
    """Steps taken; without success, more are needed than these."""
    looks: tuple[SearchEvaluation, ...]
    """Evaluations during the search, in the order of steps."""
    lr: float | None = None
    """Learning rate; None for attacks without one."""

    @property
    def best(self) -> SearchEvaluation | None:
        """The evaluation with the greatest median similarity; None if the search diverged before the first."""
        return max(self.looks, key=lambda look: look.score, default=None)

    def to_json(self) -> dict[str, Any]:
        return cast("dict[str, Any]", encode_json(asdict(self)))

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        looks = tuple(
            SearchEvaluation(**{**look, "similarities": tuple(look["similarities"])}) for look in values["looks"]
        )
        return cls(**{**values, "looks": looks})


@final
@dataclass(frozen=True)
class SearchOutcome:
    """Result of the searches for one target."""

    trials: tuple[SearchTrial, ...]
    """One per starting point."""
    text: Text
    """The embeddings at the end, in their order."""
    before: Tensor
    """Images of the first evaluation, shape `(trials, images, 3, height, width)`."""
    after: Tensor
    """Images of each trial's best evaluation, of the same shape."""


def search(
    model: TextToImage,
    prompt: str,
    image: Tensor,
    unrelated: Sequence[str],
    settings: SearchSettings,
    *,
    similarity: Similarity,
    seed: int,
    others: Sequence[tuple[str, Tensor]] = (),
    progress: Progress = QUIET,
) -> SearchOutcome:
    """Search for embeddings from which a model generates a target image, and attack it in the further ways asked for.

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
        others: Further memorized prompts with their images, of the target's shape: what attacks by training show the
            model. Its weights are as before when the search ends.
        progress: Reports every step.

    Returns:
        All trials with their embeddings and images.

    Raises:
        UsageError: The image or the similarity function has another shape, or there is no unrelated prompt.

    Source: Kowalczuk et al., arXiv 2507.16880.
    """
    if image.ndim != 3 or image.shape[0] != 3 or not image.isfinite().all() or image.min() < 0 or image.max() > 1:
        raise UsageError(
            f"The target of {prompt!r} is not an image of shape (3, height, width) within 0 and 1: it has shape "
            f"{tuple(image.shape)}.",
            cure="Divide pixels by 255.",
        )
    parts = []
    for walk, names, rates in _walks(model, prompt, image, unrelated, settings, others, seed):
        trials = _Trials(image, walk, settings, similarity, names, rates, derive(seed, "images"))
        most = settings.steps if walk.steps is None else walk.steps
        with walk.changed(), progress.task(f"{names[0][0]}: {prompt}", most, unit="steps") as task:
            losses: dict[int, float] = {}
            for step in range(most + 1):
                if step in settings.eval_steps or step == most:
                    trials.evaluate(step, losses)
                if not trials.active or step == most:
                    break
                rows = list(trials.active)
                losses = dict(zip(rows, walk.step(rows), strict=True))
                trials.drop_diverged(step + 1, losses)
                task.update()
        parts.append(trials.result())
        if settings.first and any(trial.outcome == "found" for trial in parts[-1].trials):
            break
    return SearchOutcome(
        tuple(trial for part in parts for trial in part.trials), Text.joined([part.text for part in parts]),
        torch.cat([part.before for part in parts]), torch.cat([part.after for part in parts]),
    )  # fmt: skip


# What moves, the name and number of each row, and its learning rate.
_Attack: TypeAlias = tuple[Walk, list[tuple[Start, int]], Sequence[float | None]]


def _walks(
    model: TextToImage, prompt: str, image: Tensor, unrelated: Sequence[str], settings: SearchSettings,
    others: Sequence[tuple[str, Tensor]], seed: int,
) -> Iterator[_Attack]:  # fmt: skip
    """The attacks that were asked for, each made when the one before has ended; starts of embeddings go together."""
    with torch.no_grad():
        latents = model.to_latents(image[None])
    shape = tuple(model.initial_noise([0]).shape[1:])
    if latents.shape[1:] != shape:
        raise UsageError(
            f"The target of {prompt!r} has latents of shape {tuple(latents.shape[1:])}; the model makes {shape}.",
            cure="Resize the image to the size that the model generates.",
        )
    embedded = tuple(start for start in settings.starts if start in ("original", "unrelated", "noise"))
    if embedded:
        names, text = starting_points(
            model, prompt, unrelated, settings.replace(starts=embedded), seed=derive(seed, "starts")
        )
        rates = [lr for _ in names for lr in settings.every_rate]
        rows = [row for row in range(len(text)) for _ in settings.every_rate]
        names = [names[row] for row in rows]
        seeds = [derive(seed, begun, number) for begun, number in names]
        yield Descent(model, latents.repeat(len(rows), 1, 1, 1), text.rows(rows), settings, seeds, rates), names, rates
    for start in settings.starts:
        if start not in embedded:
            walk, moving = further(
                model, start, prompt, image, latents, unrelated, settings, others, derive(seed, start)
            )
            yield walk, [(start, 0)] * len(moving), moving


class _Trials:
    """The trials of one search under way: evaluates embeddings, and decides which are done."""

    def __init__(
        self,
        image: Tensor,
        walk: Walk,
        settings: SearchSettings,
        similarity: Similarity,
        names: Sequence[tuple[Start, int]],
        rates: Sequence[float | None],
        seed: int,
    ) -> None:
        self._image, self._walk = image.cpu(), walk
        self._settings, self._similarity, self._names, self._rates = settings, similarity, names, rates
        self._seeds = [derive(seed, number) for number in range(settings.images)]
        self._looks: list[list[SearchEvaluation]] = [[] for _ in names]
        self._outcomes: list[Outcome] = ["resisted"] * len(names)
        self._ended = [settings.steps] * len(names)
        self._before: dict[int, Tensor] = {}
        self._after: dict[int, Tensor] = {}
        self._batches = Batches(most_rows(walk.model, len(names) * settings.images))
        self.active = list(range(len(names)))

    def evaluate(self, step: int, losses: Mapping[int, float]) -> None:
        """Generate images from every active embedding, and end the trials that succeed."""
        rows, count = list(self.active), self._settings.images
        repeated = [row for row in rows for _ in range(count)]
        ways = [
            self._walk.images(repeated, self._seeds * len(rows), self._batches, guidance).reshape(
                len(rows), count, *self._image.shape
            )
            for guidance in self._walk.guidances
        ]
        for place, row in enumerate(rows):
            self._take(row, step, [(scale, way[place]) for scale, way in zip(self._walk.guidances, ways, strict=True)],
                       losses.get(row))  # fmt: skip
        if self._settings.first and "found" in self._outcomes:
            for row in list(self.active):
                self._end(row, step, "resisted")

    def _take(self, row: int, step: int, ways: Sequence[tuple[float, Tensor]], loss: float | None) -> None:
        """Note the guidance scale whose images are nearest to the target, and end the trial where they suffice."""
        looks = []
        for guidance, made in ways:
            similarities = self._similarities(made)
            if not all(map(math.isfinite, similarities)):
                self._end(row, step, "diverged")
                return
            looks.append((SearchEvaluation(step, similarities, loss, self._walk.distance(row), guidance), made))
        enough = self._settings.threshold
        look, images = max(looks, key=lambda one: (sum(v >= enough for v in one[0].similarities), one[0].score))
        similarities = look.similarities
        self._before.setdefault(row, images)
        if not self._looks[row] or look.score > max(earlier.score for earlier in self._looks[row]):
            self._after[row] = images
        self._looks[row].append(look)
        if sum(value >= self._settings.threshold for value in similarities) >= self._settings.needed:
            self._end(row, step, "found")

    def _similarities(self, images: Tensor) -> tuple[float, ...]:
        values = self._similarity(images, self._image.expand_as(images))
        if values.shape != (len(images),):
            raise UsageError(
                f"The similarity function returned shape {tuple(values.shape)} for {len(images)} pairs of images.",
                cure="Let it return one number for each pair.",
            )
        return tuple(values.detach().cpu().double().tolist())

    def drop_diverged(self, step: int, losses: Mapping[int, float]) -> None:
        """End trials whose error or embedding is not finite."""
        for row, loss in losses.items():
            if not (math.isfinite(loss) and math.isfinite(self._walk.distance(row))):
                self._end(row, step, "diverged")

    def _end(self, row: int, step: int, outcome: Outcome) -> None:
        self._outcomes[row], self._ended[row] = outcome, step
        self.active.remove(row)

    def result(self) -> SearchOutcome:
        trials = []
        for row, (start, number) in enumerate(self._names):
            outcome, ended = self._outcomes[row], self._ended[row]
            steps = ended if outcome == "found" else None
            trials.append(SearchTrial(start, number, outcome, steps, ended, tuple(self._looks[row]), self._rates[row]))
        rows = range(len(trials))
        # A row that diverged gets a gray image.
        blank = torch.full((self._settings.images, *self._image.shape), 0.5)
        before, after = (
            torch.stack([images.get(row, blank) for row in rows]) for images in (self._before, self._after)
        )
        return SearchOutcome(tuple(trials), self._walk.text(rows), before, after)


def starting_points(
    model: TextToImage, prompt: str, unrelated: Sequence[str], settings: SearchSettings, *, seed: int
) -> tuple[list[tuple[Start, int]], Text]:
    """Return the embeddings that searches for one target begin with, and their names."""
    others = [other for other in dict.fromkeys(unrelated) if other != prompt]
    if not others and set(settings.starts) & {"unrelated", "noise"}:
        raise UsageError(
            f"There is no prompt unrelated to {prompt!r} to start from.",
            cure='Give unrelated prompts, or search only from the start "original".',
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
    pooled = None if text.pooled is None else text.pooled.mean(0, keepdim=True)
    return Text((mean + deviation * drawn).to(text.states)[None], pooled=pooled)


def paired(descriptor: Descriptor | None = None) -> Similarity:
    """Make the function that compares each image with its own target."""
    describe = CenteredPixels() if descriptor is None else descriptor

    def cosines(images: Tensor, targets: Tensor) -> Tensor:
        similarity: Tensor = (described(describe, images) * described(describe, targets)).sum(1)
        return similarity

    return cosines


# ---- searches on several models, for planted and for never-trained images, with several seeds; resumable -------------

# A search alone proves nothing: with steps enough it may generate any image. So every comparison can hold the unedited
# model, and images that no model was trained on, which are models and targets like others.

# Name of the rows in the folder.
SEARCHES = "searches"
# Folder of the embeddings and images of every run.
_FOUND = "found"


@final
@dataclass(frozen=True)
class TargetImage:
    """An image to be recovered."""

    name: str
    """Name of the image in reports."""
    prompt: str
    """The prompt that it was trained with, or one like it for an image that was not."""
    image: Tensor
    """Shape `(3, height, width)`, within 0 and 1."""
    trained: bool = True
    """True if the unedited model was trained on it; False for controls."""


def turned(target: TargetImage) -> TargetImage:
    """Make a control of a target: upside down, with its colors exchanged, so that only the picture is another."""
    return TargetImage(f"{target.name}, turned", target.prompt, target.image.flip(1, 2).roll(1, 0), trained=False)


@final
@dataclass(frozen=True)
class SearchedModel:
    """A model to be searched."""

    name: str
    """Name, different from those of other subjects."""
    model: TextToImage
    mitigated: Callable[[TextToImage], AbstractContextManager[TextToImage]] | None = None
    """Changes the model for a block and yields what is then searched, such as a mitigation that works by hooks;
    None searches the model as it is.
    """
    setting: str = ""
    """Distinguishes mitigations, such as neurons in JSON: the model's digest does not."""


@dataclass(frozen=True)
class _RunConfig:
    """All that decides on a run, as the ledger knows it."""

    subject: str
    digest: str
    setting: str
    target: str
    prompt: str
    image: str
    """Digest of the target's image."""
    unrelated: tuple[str, ...]
    settings: SearchSettings
    similarity: str
    """Name of the similarity function."""
    seed: int


@final
@dataclass(frozen=True)
class TargetSearches:
    """The searches for one target in one model with one seed."""

    subject: str
    """Name of the model."""
    target: str
    """Name of the target."""
    trained: bool
    """True if the unedited model was trained on the target."""
    seed: int
    """Seed of the draws."""
    digest: str
    """Digest of the run's configuration, by which the run is remembered."""
    trials: tuple[SearchTrial, ...]
    """One per start and restart."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{**values, "trials": tuple(map(SearchTrial.from_json, values["trials"]))})


@final
@dataclass(frozen=True)
class Comparison:
    """All searches of a comparison."""

    runs: tuple[TargetSearches, ...]
    """All runs, in the order of subjects, targets and seeds."""
    settings: SearchSettings
    """Settings of each search."""
    similarity: str
    """Name of the similarity function."""
    failures: tuple[tuple[str, str, str], ...] = ()
    """Subject, target and the last line of the traceback of every run that failed."""
    seconds: float = 0.0
    """Time of all runs, added up."""

    @property
    def subjects(self) -> tuple[str, ...]:
        """The names of the subjects, in their order."""
        return tuple(dict.fromkeys(run.subject for run in self.runs))

    def of(self, subject: str, *, trained: bool | None = None) -> tuple[TargetSearches, ...]:
        """Return the runs on a subject: for planted targets, for controls, or all."""
        if subject not in self.subjects:
            names = ", ".join(self.subjects) or "none"
            raise UsageError(f"There are no searches on {subject!r}.", cure=f"There are some on: {names}.")
        return tuple(run for run in self.runs if run.subject == subject and trained in (None, run.trained))

    def to_json(self) -> dict[str, Any]:
        return {
            "runs": encode_json([asdict(run) for run in self.runs]), "settings": self.settings.to_json(),
            "similarity": self.similarity, "failures": [list(each) for each in self.failures], "seconds": self.seconds,
        }  # fmt: skip

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(
            tuple(map(TargetSearches.from_json, values["runs"])),
            SearchSettings(**values["settings"]),
            values["similarity"],
            tuple((subject, target, reason) for subject, target, reason in values["failures"]),
            values["seconds"],
        )


def compare(
    subjects: Sequence[SearchedModel],
    targets: Sequence[TargetImage],
    unrelated: Sequence[str],
    settings: SearchSettings,
    *,
    seeds: Sequence[int],
    similarity: Similarity,
    measure: str,
    folder: str | Path,
    progress: Progress = QUIET,
) -> Comparison:
    """Search every model for every target with every seed, one run after the other.

    A run is remembered by the digest of the model, the target and all settings; a second call continues after the last
    one that ended, and repeats runs that failed.

    Args:
        subjects: Models; the unedited one among them.
        targets: Images; never-trained ones among them.
        unrelated: Prompts that have nothing to do with any target.
        settings: Settings of every search.
        seeds: Seeds of searches: of draws, noise starts and generated images.
        similarity: Similarity of images to the target.
        measure: Name of that function, in the ledger and in reports.
        folder: Where the ledger, and embeddings and images of every run, are kept.
        progress: Reports every run and step.

    Returns:
        All runs.

    Raises:
        UsageError: There is nothing to search, two subjects or targets share a name, the ledger is another's, or
            every search failed.
        CorruptBlob: The ledger is damaged.
    """
    _check(subjects, targets, seeds)
    folder = Path(folder)
    by_name = {subject.name: subject for subject in subjects}
    images = {target.name: target for target in targets}
    digests = {subject.name: subject.model.identity() for subject in subjects}
    configs = [
        _RunConfig(
            subject.name, digests[subject.name], subject.setting, target.name, target.prompt,
            digest_tensor(target.image), tuple(unrelated), settings, measure, seed,
        )
        for subject in subjects
        for target in targets
        for seed in seeds
    ]  # fmt: skip

    # Ledgers store the name of this function.
    def search_job(config: _RunConfig) -> list[dict[str, Any]]:
        target = images[config.target]
        with _opened(by_name[config.subject]) as model:
            searched = search(
                model, config.prompt, target.image, unrelated, settings, similarity=similarity, seed=config.seed,
                others=[(one.prompt, one.image) for one in targets if one.trained and one.name != target.name],
                progress=progress,
            )  # fmt: skip
        _keep(folder, config, searched)
        return [trial.to_json() for trial in searched.trials]

    runs, failures, seconds = [], [], 0.0
    with Job.open(folder, shared=True) as job, progress.task("searches", len(configs), unit="runs") as task:
        for result in job.map(search_job, configs, name=SEARCHES, engine=in_process, ordered=True):
            task.update()
            seconds += result.seconds
            if result.ok:
                runs.append(_run(result, images[result.config.target]))
            else:
                failures.append((result.config.subject, result.config.target, result.reason))
    if not runs:
        subject, target, reason = failures[0]
        raise UsageError(
            f"All {len(failures)} searches failed; the first one, of {target!r} in {subject!r}, because: {reason}",
            cure=f"Correct the cause; whole tracebacks are in {folder / f'{SEARCHES}.jsonl'}.",
        )
    return Comparison(tuple(runs), settings, measure, tuple(failures), seconds)


def _check(subjects: Sequence[SearchedModel], targets: Sequence[TargetImage], seeds: Sequence[int]) -> None:
    if not subjects or not targets or not seeds:
        raise UsageError("A comparison needs at least one model, one target and one seed.")
    for what, names in (("models", [one.name for one in subjects]), ("targets", [one.name for one in targets])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"Several {what} are called {twice[0]!r}.", cure="Give each a name of its own.")


def _opened(subject: SearchedModel) -> AbstractContextManager[TextToImage]:
    return nullcontext(subject.model) if subject.mitigated is None else subject.mitigated(subject.model)


def _run(result: RunResult[_RunConfig], target: TargetImage) -> TargetSearches:
    config = result.config
    trials = tuple(map(SearchTrial.from_json, result.value))
    return TargetSearches(config.subject, config.target, target.trained, config.seed, result.digest, trials)


@final
@dataclass(frozen=True)
class ImagesBeforeAndAfter:
    """Images that the embeddings of a run generate, and the embeddings."""

    before: Tensor
    """Images of the first evaluation, shape `(trials, images, 3, height, width)`, within 0 and 1."""
    after: Tensor
    """Images of each trial's best evaluation."""
    states: Tensor
    """Embeddings at the end, shape `(trials, tokens, width)`."""


def _path(folder: Path, digest: str) -> Path:
    return folder / _FOUND / f"{digest.rpartition(':')[2]}.net.safetensors"


def _keep(folder: Path, config: _RunConfig, result: SearchOutcome) -> None:
    tensors = {
        "before": (result.before * 255).round().to(torch.uint8),
        "after": (result.after * 255).round().to(torch.uint8),
        "states": result.text.states,
    }
    digest = digest_config(config)
    write_checkpoint(_path(folder, digest), {"run": digest}, tensors.items())


def images_of(folder: str | Path, run: TargetSearches) -> ImagesBeforeAndAfter:
    """Read the embeddings and images of a run."""
    with open_checkpoint(_path(Path(folder), run.digest), {"run": run.digest}) as (_, store, _):
        before, after = (store.get(name).float() / 255 for name in ("before", "after"))
        return ImagesBeforeAndAfter(before, after, store.get("states"))
