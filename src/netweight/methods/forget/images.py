"""Images before and after an edit: generated with the same seeds, and findings about copies, diversions and costs.

Verdicts say "suppressed for this prompt" and never "erased": other embeddings may bring an image back, which is for the
search of `attacks/embedding_search` to find out.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from netweight.core.files import digest_config
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.methods.forget.settings import GenerationSettings
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
from netweight.nn.text_to_image import Batches, TextToImage, generated
from netweight.report.finding import Finding
from netweight.report.text import Conclusion, Criterion, Words
from netweight.store.writer import open_checkpoint, write_checkpoint

_FOLDER = "painted"  # of the images of every prompt
_SAME = 0.5  # similarity to the image before below which a prompt's images count as changed


@final
@dataclass(frozen=True, eq=False)
class GeneratedImages:
    """Images of memorized and ordinary prompts, all with the same settings, each `(seeds, 3, height, width)`."""

    memorized: Sequence[Memorized]  # training images with their prompts
    ordinary: Sequence[str]  # prompts whose images an edit is to leave as they are
    original: Mapping[str, Tensor]
    edited: Mapping[str, Tensor]
    # Other edits to compare with, such as as many random neurons switched off; memorized prompts alone suffice.
    controls: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    warnings: Sequence[str] = ()  # what a reader must know of them
    others: Sequence[str] = ()  # prompts that the edit knew nothing of


def generate_images(
    model: TextToImage,
    prompts: Sequence[str],
    settings: GenerationSettings,
    *,
    setting: str = "",
    folder: str | Path | None = None,
    progress: Progress = QUIET,
) -> dict[str, Tensor]:
    """Generate the images of prompts; those of each are kept in a folder as soon as they are there."""
    if not prompts:
        raise UsageError("There is no prompt to generate images of.", cure="Give at least one.")
    about = {"model": model.digest(), "setting": setting, **settings.to_json()}
    del about["rows"]  # which does not change the images
    keys = {prompt: digest_config({**about, "prompt": prompt}) for prompt in prompts}
    files = {} if folder is None else {prompt: _path(Path(folder), key) for prompt, key in keys.items()}
    found = {prompt: _kept(files[prompt], keys[prompt]) for prompt in files if files[prompt].exists()}
    missing = [prompt for prompt in keys if prompt not in found]
    at_once = max(1, settings.rows // len(settings.seeds))
    batches = Batches(settings.rows)
    with progress.task(f"generate: {model.name}", len(keys), unit="prompts") as task:
        task.update(len(found))
        for start in range(0, len(missing), at_once):
            group = missing[start : start + at_once]
            for prompt, images in zip(group, _seeded(model, group, settings, batches), strict=True):
                levels = (images * 255).round().to(torch.uint8)
                if files:
                    write_checkpoint(files[prompt], {"of": keys[prompt]}, [("images", levels)])
                found[prompt] = levels.float() / 255
            task.update(len(group))
    return {prompt: found[prompt] for prompt in keys}


def _seeded(
    model: TextToImage, prompts: Sequence[str], settings: GenerationSettings, batches: Batches
) -> tuple[Tensor, ...]:
    count, seeds = len(settings.seeds), [*settings.seeds] * len(prompts)
    text = model.embed(prompts).rows([row // count for row in range(len(seeds))])
    images = generated(model, text, seeds, batches, guidance=settings.guidance, steps=settings.steps)
    return torch.split(images, count)


def _path(folder: Path, key: str) -> Path:
    return folder / _FOLDER / f"{key.rpartition(':')[2]}.net.safetensors"


def _kept(path: Path, key: str) -> Tensor:
    with open_checkpoint(path, {"of": key}) as (_, store, _):
        images: Tensor = store.get("images", check=True)
        return images.float() / 255


class Alignment(Protocol):
    """How well images follow prompts, such as `hf.clip.Clip`."""

    @property
    def name(self) -> str: ...

    def alignment(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """Return how well each image follows its prompt, shape `(n,)`."""


@final
@dataclass(frozen=True)
class ImagesConfig:
    """How images are compared."""

    # None compares centered pixels, for a template on the part that stays.
    descriptor: Descriptor | None = None
    threshold: float = COPY  # similarity from which an image is a copy
    alignment: Alignment | None = None  # how well images follow prompts; None leaves that out

    @property
    def measure(self) -> str:
        """The name of similarities."""
        return (self.descriptor or CenteredPixels()).name


def copies(images: GeneratedImages, made: Mapping[str, Tensor], config: ImagesConfig) -> list[PromptCopies]:
    """Compare the images of every memorized prompt with its training image, all others, and the unedited generation."""
    return [
        copies_of_prompt(
            each, made[each.prompt], images.memorized, descriptor=config.descriptor,
            unedited=images.original[each.prompt],
        )
        for each in images.memorized
    ]  # fmt: skip


def image_findings(images: GeneratedImages, config: ImagesConfig, *, seed: int) -> list[Finding]:
    """Return what an edit did to images; the original's are the baseline of each finding."""

    def of(made: Mapping[str, Tensor]) -> list[Finding]:
        rows = copies(images, made, config)
        regions = [region_copies(each, made[each.prompt]) for each in images.memorized]
        found = copy_findings(rows, measure=config.measure, threshold=config.threshold, seed=seed)
        return [*found, *region_findings(regions, threshold=config.threshold)]

    before = {finding.name: finding.value for finding in of(images.original)}
    words = verdicts(images, config)
    suppressed = sum(outcome == "holds" for outcome, _ in words.values())
    each = {prompt: told for prompt, (_, told) in words.items()}
    findings = [Finding("prompts suppressed", suppressed, n=len(words), better="higher", detail={"each": each})]
    findings += [replace(finding, baseline=before.get(finding.name)) for finding in of(images.edited)]
    for name, control in images.controls.items():
        beside = [finding for finding in of(control) if "training image" in finding.name]
        findings += [replace(each, name=f"{each.name}, {name}", better=None) for each in beside]
    for kind, prompts in (("ordinary prompts", images.ordinary), ("other prompts", images.others)):
        if prompts:
            findings += _kept_as_they_were(images, kind, prompts, config, seed)
    if config.alignment is not None:
        findings += _alignment(images, config.alignment)
    return findings


def verdicts(images: GeneratedImages, config: ImagesConfig) -> dict[str, Words]:
    """Return for each memorized prompt what the edit did to its images: an outcome, and words."""
    before, after = (copies(images, made, config) for made in (images.original, images.edited))
    return {row.prompt: _verdict(row, old, config.threshold) for row, old in zip(after, before, strict=True)}


def _verdict(after: PromptCopies, before: PromptCopies, threshold: float) -> Words:
    count, had = after.copies(threshold), before.copies(threshold)
    others = sum(
        value >= threshold and nearest != after.prompt
        for value, nearest in zip(after.nearest, after.nearest_prompt, strict=True)
    )
    share = f"of {len(after.to_image)} images"
    diverted = f"; {others} {share} copy another memorized one" if others else ""
    return _SUPPRESSED(
        [Finding(_BEFORE, had), Finding(_AFTER, count)],
        now=f"{count} {share} copy it", before=str(had), diverted=diverted,
    )  # fmt: skip


def _words(had: bool, gone: bool, *, now: str, before: str, diverted: str) -> Words:
    if not had:
        return "told" if gone else "broken", f"Not copied before the edit: {now} now{diverted}."
    name = "Suppressed for this prompt" if gone else "Not suppressed"
    return "holds" if gone else "broken", f"{name}: {now}, {before} before{diverted}."


_BEFORE, _AFTER = "copies before the edit", "copies after it"
_SUPPRESSED = Conclusion(
    "forget: images", [Criterion(_BEFORE, "higher", than=1), Criterion(_AFTER, "lower", than=0)], _words
)


def _kept_as_they_were(
    images: GeneratedImages, kind: str, prompts: Sequence[str], config: ImagesConfig, seed: int
) -> list[Finding]:
    """The cost to prompts that are not memorized."""
    descriptor = config.descriptor or CenteredPixels()
    same = {
        prompt: statistics.median(
            similarity(descriptor, images.edited[prompt], images.original[prompt]).diagonal().tolist()
        )
        for prompt in prompts
    }
    values = list(same.values())
    ci95 = bootstrap(values, "median", seed=seed).ci95 if len(values) >= MINIMUM_FOR_BOOTSTRAP else None
    title = f"{config.measure}, {kind}"
    moved = proportion(sum(value < _SAME for value in values), len(values))
    return [
        Finding(
            f"{title}, to the unedited generation", statistics.median(values), ci95=ci95, n=len(values),
            better="higher", seeds=(seed,), detail={"each": same},
        ),
        Finding(f"{title}, changed", moved.estimate, ci95=moved.ci95, n=len(values), better="lower"),
        replace(
            _copied(f"{title}, images that copy any memorized image", prompts, images, images.edited, config),
            baseline=_copied("", prompts, images, images.original, config).value,
        ),
    ]  # fmt: skip


def _copied(
    title: str, prompts: Sequence[str], images: GeneratedImages, made: Mapping[str, Tensor], config: ImagesConfig
) -> Finding:
    ordinary = torch.cat([made[prompt] for prompt in prompts])
    nearest = similarity_to_memorized(ordinary, images.memorized, descriptor=config.descriptor).amax(1)
    share = proportion(int((nearest >= config.threshold).sum()), len(nearest))
    return Finding(title or "copies", share.estimate, ci95=share.ci95, n=len(nearest), better="lower")


def _alignment(images: GeneratedImages, measure: Alignment) -> list[Finding]:
    groups = {"memorized prompts": [each.prompt for each in images.memorized], "ordinary prompts": images.ordinary}
    findings = []
    for name, prompts in groups.items():
        if not prompts:
            continue
        means = []
        for made in (images.edited, images.original):
            repeated = [prompt for prompt in prompts for _ in made[prompt]]
            means.append(float(measure.alignment(torch.cat([made[prompt] for prompt in prompts]), repeated).mean()))
        findings.append(
            Finding(
                f"{measure.name}, {name}, alignment", means[0], n=len(repeated), better="higher", baseline=means[1],
            )
        )  # fmt: skip
    return findings
