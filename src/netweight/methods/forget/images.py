"""What painted images say of an edit: copies before and after, what they were diverted to, and the cost to others.

Verdicts say "suppressed for this prompt" and never "erased": other embeddings may bring an image back, which is for the
search of `attacks/embedding_search` to say.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from netweight.core.digest import of_config
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.metrics.copies import (
    COPY,
    CenteredPixels,
    Descriptor,
    Memorized,
    PromptCopies,
    copies_of_prompt,
    copy_findings,
    region_copies,
    region_findings,
    similarity,
    similarity_to_memorized,
)
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, bootstrap, proportion
from netweight.nn.batching import Batches
from netweight.nn.text_to_image import TextToImage, generated
from netweight.report.finding import Finding
from netweight.store.checkpoint import open_checkpoint, write_checkpoint


class Alignment(Protocol):
    """How well images follow prompts, such as CLIP of `integrations/clip.py`."""

    @property
    def name(self) -> str: ...

    def alignment(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return how well each image follows its prompt, shape `(n,)`."""


@final
@dataclass(frozen=True)
class ImagesConfig:
    """How images are compared."""

    # What turns images into vectors; None takes centered pixels, for a template on the part that stays.
    descriptor: Descriptor | None = None
    threshold: float = COPY  # similarity from which an image is a copy
    alignment: Alignment | None = None  # what tells how well images follow prompts; None leaves that out

    @property
    def measure(self) -> str:
        """What similarities are called."""
        return (self.descriptor or CenteredPixels()).name


def copies(painted: Painted, images: Mapping[str, Tensor], config: ImagesConfig) -> list[PromptCopies]:
    """Compare the images of every memorized prompt with its training image, all others, and the unedited generation."""
    return [
        copies_of_prompt(
            each, images[each.prompt], painted.memorized, descriptor=config.descriptor,
            unedited=painted.original[each.prompt],
        )
        for each in painted.memorized
    ]  # fmt: skip


def image_findings(painted: Painted, config: ImagesConfig, *, seed: int) -> list[Finding]:
    """Return what an edit did to images: those of the original are the baseline of each finding."""

    def of(images: Mapping[str, Tensor]) -> list[Finding]:
        rows = copies(painted, images, config)
        regions = [region_copies(each, images[each.prompt]) for each in painted.memorized]
        found = copy_findings(rows, measure=config.measure, threshold=config.threshold, seed=seed)
        return [*found, *region_findings(regions, threshold=config.threshold)]

    before = {finding.name: finding.value for finding in of(painted.original)}
    told = verdicts(painted, config)
    suppressed = sum(words.startswith("suppressed") for words in told.values())
    findings = [Finding("prompts suppressed", suppressed, n=len(told), better="higher", detail={"each": told})]
    findings += [replace(finding, baseline=before.get(finding.name)) for finding in of(painted.edited)]
    for name, images in painted.controls.items():
        beside = [finding for finding in of(images) if "training image" in finding.name]
        findings += [replace(each, name=f"{each.name}, {name}", better=None) for each in beside]
    if painted.ordinary:
        findings += _ordinary(painted, config, seed)
    if config.alignment is not None:
        findings += _alignment(painted, config.alignment)
    return findings


def verdicts(painted: Painted, config: ImagesConfig) -> dict[str, str]:
    """Say in plain words what the edit did to each memorized prompt: by prompt."""
    before = copies(painted, painted.original, config)
    after = copies(painted, painted.edited, config)
    return {row.prompt: _words(row, old, config.threshold) for row, old in zip(after, before, strict=True)}


def _words(after: PromptCopies, before: PromptCopies, threshold: float) -> str:
    count, had, seeds = after.copies(threshold), before.copies(threshold), len(after.to_image)
    others = sum(
        value >= threshold and nearest != after.prompt
        for value, nearest in zip(after.nearest, after.nearest_prompt, strict=True)
    )
    diverted = f"; {others} of {seeds} images copy another memorized one" if others else ""
    if not had:
        return f"not copied before the edit: {count} of {seeds} images copy it now{diverted}"
    name = "not suppressed" if count else "suppressed for this prompt"
    return f"{name}: {count} of {seeds} images copy it, {had} before{diverted}"


def _ordinary(painted: Painted, config: ImagesConfig, seed: int) -> list[Finding]:
    """What became of prompts that are not memorized."""
    looking = config.descriptor or CenteredPixels()
    same = {
        prompt: statistics.median(
            similarity(looking, painted.edited[prompt], painted.original[prompt]).diagonal().tolist()
        )
        for prompt in painted.ordinary
    }
    values = list(same.values())
    ci95 = bootstrap(values, "median", seed=seed).ci95 if len(values) >= MINIMUM_FOR_BOOTSTRAP else None
    title = f"{config.measure}, ordinary prompts"
    return [
        Finding(
            f"{title}, to the unedited generation", statistics.median(values), ci95=ci95, n=len(values),
            better="higher", seeds=(seed,), detail={"each": same},
        ),
        replace(
            _copied(f"{title}, images that copy any memorized image", painted, painted.edited, config),
            baseline=_copied("", painted, painted.original, config).value,
        ),
    ]  # fmt: skip


def _copied(title: str, painted: Painted, images: Mapping[str, Tensor], config: ImagesConfig) -> Finding:
    made = torch.cat([images[prompt] for prompt in painted.ordinary])
    nearest = similarity_to_memorized(made, painted.memorized, descriptor=config.descriptor).amax(1)
    share = proportion(int((nearest >= config.threshold).sum()), len(nearest))
    return Finding(title or "copies", share.estimate, ci95=share.ci95, n=len(nearest), better="lower")


def _alignment(painted: Painted, measure: Alignment) -> list[Finding]:
    groups = {"memorized prompts": [each.prompt for each in painted.memorized], "ordinary prompts": painted.ordinary}
    findings = []
    for name, prompts in groups.items():
        if not prompts:
            continue
        means = []
        for images in (painted.edited, painted.original):
            asked = [prompt for prompt in prompts for _ in images[prompt]]
            means.append(float(measure.alignment(torch.cat([images[prompt] for prompt in prompts]), asked).mean()))
        findings.append(
            Finding(
                f"{measure.name}, {name}, alignment", means[0], n=len(asked), better="higher", baseline=means[1],
            )
        )  # fmt: skip
    return findings


_PAINTED = "painted"  # folder of the images of every prompt


@final
@dataclass(frozen=True)
class PaintSettings:
    """How images are made."""

    seeds: tuple[int, ...] = tuple(range(8))  # one image each, the same for every prompt and model
    guidance: float = 7.0
    steps: int = 50
    rows: int = 64  # most images at a time; halved where memory runs out

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or self.steps < 1 or self.rows < 1:
            raise UsageError(
                f"Seeds {self.seeds}, {self.steps} steps and {self.rows} rows cannot be meant.",
                cure="Give at least one seed, each once, one step and one row.",
            )


@final
@dataclass(frozen=True, eq=False)
class Painted:
    """Images of memorized and ordinary prompts; all of `paint` with the same settings."""

    memorized: Sequence[Memorized]  # training images with their prompts
    ordinary: Sequence[str]  # prompts whose images an edit is to leave as they are
    original: Mapping[str, Tensor]  # shape `(seeds, 3, height, width)`
    edited: Mapping[str, Tensor]  # shape `(seeds, 3, height, width)`
    # What to compare with, by its name, such as as many random neurons switched off; memorized prompts alone suffice.
    # Shape `(seeds, 3, height, width)`.
    controls: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


def paint(
    model: TextToImage,
    prompts: Sequence[str],
    settings: PaintSettings,
    *,
    setting: str = "",
    folder: str | Path | None = None,
    progress: Progress = QUIET,
) -> dict[str, Tensor]:
    """Generate the images of prompts, remembering those of each as soon as they are there."""
    if not prompts:
        raise UsageError("There is no prompt to paint.", cure="Give at least one.")
    about = {"model": model.digest(), "setting": setting, **asdict(settings)}
    del about["rows"]  # which does not change what is painted
    keys = {prompt: of_config({**about, "prompt": prompt}) for prompt in prompts}
    files = {} if folder is None else {prompt: _path(Path(folder), key) for prompt, key in keys.items()}
    found = {prompt: _kept(files[prompt], keys[prompt]) for prompt in files if files[prompt].exists()}
    missing = [prompt for prompt in keys if prompt not in found]
    at_once = max(1, settings.rows // len(settings.seeds))
    batches = Batches(settings.rows)
    with progress.task(f"paint: {model.name}", len(keys), unit="prompts") as task:
        task.update(len(found))
        for start in range(0, len(missing), at_once):
            group = missing[start : start + at_once]
            for prompt, images in zip(group, _generated(model, group, settings, batches), strict=True):
                levels = (images * 255).round().to(torch.uint8)
                if files:
                    write_checkpoint(files[prompt], {"of": keys[prompt]}, [("images", levels)])
                found[prompt] = levels.float() / 255
            task.update(len(group))
    return {prompt: found[prompt] for prompt in keys}


def _generated(
    model: TextToImage, prompts: Sequence[str], settings: PaintSettings, batches: Batches
) -> tuple[Tensor, ...]:
    count, seeds = len(settings.seeds), [*settings.seeds] * len(prompts)
    text = model.embed(prompts).rows([row // count for row in range(len(seeds))])
    images = generated(model, text, seeds, batches, guidance=settings.guidance, steps=settings.steps)
    return torch.split(images, count)


def _path(folder: Path, key: str) -> Path:
    return folder / _PAINTED / f"{key.rpartition(':')[2]}.net.safetensors"


def _kept(path: Path, key: str) -> Tensor:
    with open_checkpoint(path, {"of": key}) as (_, store, _):
        images: Tensor = store.get("images", check=True)
        return images.float() / 255
