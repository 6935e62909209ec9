"""Copies of training images among generated ones: per prompt and seed, before and after an edit, by kind.

Images are compared by the vectors of a `Descriptor`. The images of a prompt are compared with its training image, with
those of the unedited model for the same seeds, with each other, and with every memorized image: an edit may only divert
a prompt to another one's image. Medians hide seeds, so copies are counted seed by seed as well.

Source: Hintersdorf et al. 2024 (NeMo), section 4: SSCD to the original and to the generation, and diversity.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.metrics.descriptors import CenteredPixels, Descriptor, similarity
from netweight.metrics.intervals import ends_if_enough, interval_finding, proportion
from netweight.report.finding import Better, Finding

Kind = Literal["verbatim", "template"]
"""Kind of repetition: the training image itself, or its layout with parts that vary."""

COPY = 0.7
"""Similarity from which an image is called a copy; NeMo's rule for SSCD, by which verbatim copies are told apart."""


@final
@dataclass(frozen=True, eq=False)
class MemorizedImage:
    """A training image that a model repeats."""

    prompt: str
    """Caption under which the image is reproduced."""
    kind: Kind
    """Kind of repetition of the training image."""
    image: Tensor
    """Shape `(3, height, width)`, within 0 and 1."""
    where: Tensor | None = None
    """Shape `(height, width)`, True where a template stays as it is; only `CenteredPixels` can look there alone.
    None is everywhere.
    """
    name: str = ""
    """Name that distinguishes several images of one prompt; empty stands for the prompt."""

    @property
    def label(self) -> str:
        """Its name in tables."""
        return self.name or self.prompt


@final
@dataclass(frozen=True)
class PromptCopies:
    """Copies among one prompt's images; every tuple has one entry per seed."""

    prompt: str
    """The label of the memorized image: its caption, numbered where this has several images."""
    kind: Kind
    """Kind of repetition of the training image."""
    to_image: tuple[float, ...]
    """Similarity to its training image."""
    to_unedited: tuple[float, ...] | None
    """Similarity to what the unedited model makes of the same seed; None if not asked."""
    nearest: tuple[float, ...]
    """The greatest similarity to any memorized image."""
    nearest_prompt: tuple[str, ...]
    """The prompt of that image."""
    diversity: float | None
    """Median similarity of two seeds' images; lower is more diverse. None for a single seed."""

    def copies(self, threshold: float = COPY) -> int:
        """Return how many seeds give a copy of the prompt's own training image."""
        return sum(value >= threshold for value in self.to_image)

    def any_match(self, threshold: float = COPY) -> int:
        """Return how many seeds give a copy of some memorized image."""
        return sum(value >= threshold for value in self.nearest)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self)


def similarity_to_memorized(
    images: Tensor, memorized: Sequence[MemorizedImage], *, descriptor: Descriptor | None = None
) -> Tensor:
    """Return the similarity of every image to every memorized one: a row whose maximum is high is a copy of some.

    `images`: shape `(n, 3, height, width)`, within 0 and 1.

    Returns:
        float64, shape `(n, len(memorized))`, -1 to 1.
    """
    if not memorized:
        raise UsageError("There is no memorized image to compare with.", cure="Give at least one.")
    columns = []
    for each in memorized:
        looking = descriptor if descriptor is not None else CenteredPixels(each.where)
        columns.append(similarity(looking, images, each.image[None]))
    return torch.cat(columns, 1)


def diversity(descriptor: Descriptor, images: Tensor) -> float:
    """Return the median similarity of two images of one prompt; lower is more diverse.

    `images`: shape `(n, 3, height, width)`, at least two, one per seed.

    Source: NeMo's D_SSCD as its code computes it.
    """
    if len(images) < 2:
        raise UsageError("The diversity of one image cannot be measured.", cure="Give images of two seeds or more.")
    between = similarity(descriptor, images, images)
    rows, columns = torch.triu_indices(len(images), len(images), offset=1)
    pairs: list[float] = between[rows, columns].tolist()
    return statistics.median(pairs)


def copies_of_prompt(
    own: MemorizedImage,
    images: Tensor,
    everything: Sequence[MemorizedImage],
    *,
    descriptor: Descriptor | None = None,
    unedited: Tensor | None = None,
) -> PromptCopies:
    """Compare a prompt's images with its training image and with all others that the model is known to repeat.

    `images`: what the model makes of the prompt, shape `(seeds, 3, height, width)`, within 0 and 1.
    """
    if unedited is not None and len(unedited) != len(images):
        raise UsageError(
            f"There are {len(images)} images and {len(unedited)} of the unedited model.",
            cure="Generate both with the same seeds.",
        )
    memorized = [own, *(each for each in everything if each.label != own.label)]
    table = similarity_to_memorized(images, memorized, descriptor=descriptor)
    whole = descriptor if descriptor is not None else CenteredPixels()
    nearest, index = table.max(1)
    return PromptCopies(
        prompt=own.label,
        kind=own.kind,
        to_image=tuple(table[:, 0].tolist()),
        to_unedited=None if unedited is None else tuple(similarity(whole, images, unedited).diagonal().tolist()),
        nearest=tuple(nearest.tolist()),
        nearest_prompt=tuple(memorized[place].label for place in index.tolist()),
        diversity=diversity(whole, images) if len(images) > 1 else None,
    )


def copy_findings(
    prompts: Sequence[PromptCopies], *, measure: str, threshold: float = COPY, seed: int = 0
) -> list[Finding]:
    """Sum up prompts: the median over seeds of each, then the median and its spread over prompts, kind by kind."""
    if not prompts:
        raise UsageError("No prompt was measured.", cure="Give at least one.")
    # "Better" is the direction of somebody who wants no copies. Intervals of medians are over prompts, from five on;
    # those of shares are over seeds, as if these were independent, which the seeds of one prompt are not quite.
    findings: list[Finding] = []
    for kind in ("verbatim", "template"):
        rows = [each for each in prompts if each.kind == kind]
        if rows:
            findings += _of_kind(rows, kind, measure, threshold, seed)
    return findings


def _of_kind(rows: list[PromptCopies], kind: Kind, measure: str, threshold: float, seed: int) -> list[Finding]:
    def median(what: str, values: list[float], better: Better | None) -> Finding:
        middle = statistics.median(values)
        spread = statistics.median(abs(value - middle) for value in values)
        detail = {"each": dict(zip([row.prompt for row in rows], values, strict=True)), "MAD": spread}
        return Finding(
            f"{measure}, {what}, {kind}", middle, ci95=ends_if_enough(values, "median", seed=seed), n=len(values),
            better=better, seeds=(seed,), detail=detail,
        )  # fmt: skip

    def share(what: str, counts: list[int]) -> Finding:
        interval = proportion(sum(counts), sum(len(row.to_image) for row in rows))
        each = {row.prompt: count for row, count in zip(rows, counts, strict=True)}
        detail = {"copies": sum(counts), "threshold": threshold, "each": each}
        return interval_finding(f"{measure}, {what}, {kind}", interval, better="lower", detail=detail)

    findings = [median("to the training image", [statistics.median(row.to_image) for row in rows], "lower")]
    same_seed = [statistics.median(row.to_unedited) for row in rows if row.to_unedited is not None]
    if len(same_seed) == len(rows):
        findings.append(median("to the unedited generation", same_seed, "lower"))
    between = [row.diversity for row in rows if row.diversity is not None]
    if len(between) == len(rows):
        findings.append(median("between seeds", between, "lower"))
    findings.append(share("seeds that copy the training image", [row.copies(threshold) for row in rows]))
    findings.append(share("seeds that copy any memorized image", [row.any_match(threshold) for row in rows]))
    return findings
