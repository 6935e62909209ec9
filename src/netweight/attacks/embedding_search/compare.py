"""Searches on several models, for planted and for never-trained images, with several seeds; resumable.

A search alone proves nothing: with steps enough it may generate any image. So every comparison can hold the unedited
model, and images that no model was trained on, which are models and targets like others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

import torch
from torch import Tensor

from netweight.attacks.embedding_search.search import Searched, Similarity, Trial, search
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core.engines import in_process
from netweight.core.files import digest_config, digest_tensor
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.job import Job, Result
from netweight.nn.text_to_image import TextToImage
from netweight.report.finding import encode_json
from netweight.store.writer import open_checkpoint, write_checkpoint

SEARCHES = "searches"  # name of the rows in the folder
_FOUND = "found"  # folder of the embeddings and images of every run


@final
@dataclass(frozen=True)
class Target:
    """An image to be brought back."""

    name: str
    prompt: str  # the prompt that it was trained with, or one like it for an image that was not
    image: Tensor  # shape `(3, height, width)`, within 0 and 1
    trained: bool = True  # whether the unedited model was trained on it; False for controls


def turned(target: Target) -> Target:
    """Make a control of a target: upside down, with its colors exchanged, so that only the picture is another."""
    return Target(f"{target.name}, turned", target.prompt, target.image.flip(1, 2).roll(1, 0), trained=False)


@final
@dataclass(frozen=True)
class Subject:
    """A model to be searched."""

    name: str  # different from those of other subjects
    model: TextToImage
    # Changes the model for a block and yields what is then searched, such as a mitigation that works by hooks; None
    # searches the model as it is.
    mitigated: Callable[[TextToImage], AbstractContextManager[TextToImage]] | None = None
    setting: str = ""  # distinguishes mitigations, such as neurons in JSON: the model's digest does not


@dataclass(frozen=True)
class _RunConfig:
    """All that decides on a run, as the ledger knows it."""

    subject: str
    digest: str
    setting: str
    target: str
    prompt: str
    image: str  # digest of the target's image
    unrelated: tuple[str, ...]
    settings: SearchSettings
    similarity: str  # name of the similarity function
    seed: int


@final
@dataclass(frozen=True)
class Run:
    """The searches for one target in one model with one seed."""

    subject: str
    target: str
    trained: bool  # whether the unedited model was trained on the target
    seed: int
    digest: str
    trials: tuple[Trial, ...]  # one per start and restart

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        return cls(**{**values, "trials": tuple(map(Trial.from_json, values["trials"]))})


@final
@dataclass(frozen=True)
class Comparison:
    """All searches of a comparison."""

    runs: tuple[Run, ...]  # in the order of subjects, targets and seeds
    settings: SearchSettings
    similarity: str  # name of the similarity function
    # Subject, target and the last line of the traceback of every run that failed.
    failures: tuple[tuple[str, str, str], ...] = ()
    seconds: float = 0.0  # time of all runs, added up

    @property
    def subjects(self) -> tuple[str, ...]:
        """The names of the subjects, in their order."""
        return tuple(dict.fromkeys(run.subject for run in self.runs))

    def of(self, subject: str, *, trained: bool | None = None) -> tuple[Run, ...]:
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
            tuple(map(Run.from_json, values["runs"])),
            SearchSettings(**values["settings"]),
            values["similarity"],
            tuple((subject, target, reason) for subject, target, reason in values["failures"]),
            values["seconds"],
        )


def compare(
    subjects: Sequence[Subject],
    targets: Sequence[Target],
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
        UsageError: There is nothing to search, two subjects or targets share a name, or the ledger is another's.
        CorruptBlob: The ledger is damaged.
    """
    _check(subjects, targets, seeds)
    folder = Path(folder)
    by_name = {subject.name: subject for subject in subjects}
    images = {target.name: target for target in targets}
    digests = {subject.name: subject.model.digest() for subject in subjects}
    configs = [
        _RunConfig(
            subject.name, digests[subject.name], subject.setting, target.name, target.prompt,
            digest_tensor(target.image), tuple(unrelated), settings, measure, seed,
        )
        for subject in subjects
        for target in targets
        for seed in seeds
    ]  # fmt: skip

    def search_job(config: _RunConfig) -> list[dict[str, Any]]:  # ledgers hold this name
        target = images[config.target]
        with _opened(by_name[config.subject]) as model:
            found = search(
                model, config.prompt, target.image, unrelated, settings, similarity=similarity, seed=config.seed,
                others=[(one.prompt, one.image) for one in targets if one.trained and one.name != target.name],
                progress=progress,
            )  # fmt: skip
        _keep(folder, config, found)
        return [trial.to_json() for trial in found.trials]

    runs, failures, seconds = [], [], 0.0
    with Job.open(folder, shared=True) as job, progress.task("searches", len(configs), unit="runs") as task:
        for result in job.map(search_job, configs, name=SEARCHES, engine=in_process, ordered=True):
            task.update()
            seconds += result.seconds
            if result.ok:
                runs.append(_run(result, images[result.config.target]))
            else:
                failures.append((result.config.subject, result.config.target, result.reason))
    return Comparison(tuple(runs), settings, measure, tuple(failures), seconds)


def _check(subjects: Sequence[Subject], targets: Sequence[Target], seeds: Sequence[int]) -> None:
    if not subjects or not targets or not seeds:
        raise UsageError("A comparison needs at least one model, one target and one seed.")
    for what, names in (("models", [one.name for one in subjects]), ("targets", [one.name for one in targets])):
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise UsageError(f"Several {what} are called {twice[0]!r}.", cure="Give each a name of its own.")


def _opened(subject: Subject) -> AbstractContextManager[TextToImage]:
    return nullcontext(subject.model) if subject.mitigated is None else subject.mitigated(subject.model)


def _run(result: Result[_RunConfig], target: Target) -> Run:
    config = result.config
    trials = tuple(map(Trial.from_json, result.value))
    return Run(config.subject, config.target, target.trained, config.seed, result.digest, trials)


@final
@dataclass(frozen=True)
class Images:
    """What a run's embeddings made, and the embeddings."""

    before: Tensor  # images of the first evaluation, shape `(trials, images, 3, height, width)`, within 0 and 1
    after: Tensor  # images of each trial's best evaluation
    states: Tensor  # embeddings at the end, shape `(trials, tokens, width)`


def _path(folder: Path, digest: str) -> Path:
    return folder / _FOUND / f"{digest.rpartition(':')[2]}.net.safetensors"


def _keep(folder: Path, config: _RunConfig, found: Searched) -> None:
    tensors = {
        "before": (found.before * 255).round().to(torch.uint8),
        "after": (found.after * 255).round().to(torch.uint8),
        "states": found.text.states,
    }
    digest = digest_config(config)
    write_checkpoint(_path(folder, digest), {"run": digest}, tensors.items())


def images_of(folder: str | Path, run: Run) -> Images:
    """Read the embeddings and images of a run."""
    with open_checkpoint(_path(Path(folder), run.digest), {"run": run.digest}) as (_, store, _):
        before, after = (store.get(name).float() / 255 for name in ("before", "after"))
        return Images(before, after, store.get("states"))
