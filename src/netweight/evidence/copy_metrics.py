"""Does a model repeat its training images: per prompt and seed, before and after an edit, verbatim and template apart.

A prompt's images are compared with its training image, with what the unedited model makes of the same seeds, with each
other, and with every memorized image: an edit may only divert a prompt to another one's. Similarities are cosines of a
`Descriptor`. Medians hide seeds, so copies are counted seed by seed as well.

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
from netweight.metrics.copies import CenteredPixels, Descriptor, described
from netweight.metrics.intervals import MINIMUM_FOR_BOOTSTRAP, bootstrap, proportion
from netweight.report.finding import Better, Finding

__all__ = [
    "COPY",
    "Kind",
    "Memorized",
    "PromptCopies",
    "copies_of_prompt",
    "copy_findings",
    "diversity",
    "similarity",
    "similarity_to_memorized",
]

Kind = Literal["verbatim", "template"]
"""Whether a training image comes back whole, or its layout with parts that vary."""

COPY = 0.7
"""Similarity from which an image is called a copy; NeMo's rule for SSCD, by which verbatim copies are told apart."""


@final
@dataclass(frozen=True, eq=False)
class Memorized:
    """A training image that a model repeats.

    Attributes:
        prompt: The caption that brings it back.
        kind: How it is repeated.
        image: Shape `(3, height, width)`, within 0 and 1.
        where: Shape `(height, width)`, True where a template stays as it is; only `CenteredPixels` can look there
            alone. None is everywhere.
    """

    prompt: str
    kind: Kind
    image: Tensor
    where: Tensor | None = None


@final
@dataclass(frozen=True)
class PromptCopies:
    """What one prompt's images repeat; every tuple has one entry per seed.

    Attributes:
        prompt: The caption.
        kind: How its training image is repeated.
        to_image: Similarity to its training image.
        to_unedited: Similarity to what the unedited model makes of the same seed; None if not asked.
        nearest: The greatest similarity to any memorized image.
        nearest_prompt: The prompt of that image.
        diversity: Median similarity of two seeds' images; lower is more diverse. None for a single seed.
    """

    prompt: str
    kind: Kind
    to_image: tuple[float, ...]
    to_unedited: tuple[float, ...] | None
    nearest: tuple[float, ...]
    nearest_prompt: tuple[str, ...]
    diversity: float | None

    def copies(self, threshold: float = COPY) -> int:
        """Return how many seeds give a copy of the prompt's own training image.

        Args:
            threshold: Similarity from which on an image is a copy.
        """
        return sum(value >= threshold for value in self.to_image)

    def any_match(self, threshold: float = COPY) -> int:
        """Return how many seeds give a copy of some memorized image.

        Args:
            threshold: Similarity from which on an image is a copy.
        """
        return sum(value >= threshold for value in self.nearest)

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return asdict(self)


def similarity(descriptor: Descriptor, images: Tensor, references: Tensor) -> Tensor:
    """Return the similarity of every image to every reference.

    Args:
        descriptor: What compares them.
        images: Shape `(n, 3, height, width)`, within 0 and 1.
        references: Shape `(m, 3, height, width)`.

    Returns:
        float64, shape `(n, m)`, -1 to 1.

    Raises:
        UsageError: There is no image, a value is not finite, or sizes differ where the descriptor needs equal ones.
    """
    a, b = described(descriptor, images), described(descriptor, references)
    if a.shape[1] != b.shape[1]:
        raise UsageError(
            f"{descriptor.name} cannot compare images of {tuple(images.shape[2:])} pixels with references of "
            f"{tuple(references.shape[2:])}.",
            cure="Resize one of them.",
        )
    return a @ b.T


def similarity_to_memorized(
    images: Tensor, memorized: Sequence[Memorized], *, descriptor: Descriptor | None = None
) -> Tensor:
    """Return the similarity of every image to every memorized one: a row whose maximum is high is a copy of some.

    Args:
        images: Shape `(n, 3, height, width)`, within 0 and 1.
        memorized: At least one.
        descriptor: What compares them; None takes `CenteredPixels`, for a template on the part that stays.

    Returns:
        float64, shape `(n, len(memorized))`, -1 to 1.

    Raises:
        UsageError: There is no image or nothing memorized, or sizes differ.
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

    Args:
        descriptor: What compares them.
        images: Shape `(n, 3, height, width)`, at least two, one per seed.

    Raises:
        UsageError: There are fewer than two.

    Source: NeMo's D_SSCD as its code computes it.
    """
    if len(images) < 2:
        raise UsageError("The diversity of one image is nothing.", cure="Give images of two seeds or more.")
    between = similarity(descriptor, images, images)
    rows, columns = torch.triu_indices(len(images), len(images), offset=1)
    pairs: list[float] = between[rows, columns].tolist()
    return statistics.median(pairs)


def copies_of_prompt(
    own: Memorized,
    images: Tensor,
    everything: Sequence[Memorized],
    *,
    descriptor: Descriptor | None = None,
    unedited: Tensor | None = None,
) -> PromptCopies:
    """Compare a prompt's images with its training image and with all others that the model is known to repeat.

    Args:
        own: The prompt's training image.
        images: What the model makes of the prompt, shape `(seeds, 3, height, width)`, within 0 and 1.
        everything: All memorized images, this one among them or not.
        descriptor: What compares them; None takes `CenteredPixels`, for a template on the part that stays.
        unedited: What the unedited model makes of the same seeds, in the same order. The shape of `images`.

    Raises:
        UsageError: There is no image, or `unedited` has another number of them.
    """
    if unedited is not None and len(unedited) != len(images):
        raise UsageError(
            f"There are {len(images)} images and {len(unedited)} of the unedited model.",
            cure="Generate both with the same seeds.",
        )
    known = [own, *(each for each in everything if each.prompt != own.prompt)]
    table = similarity_to_memorized(images, known, descriptor=descriptor)
    whole = descriptor if descriptor is not None else CenteredPixels()
    nearest, index = table.max(1)
    return PromptCopies(
        prompt=own.prompt,
        kind=own.kind,
        to_image=tuple(table[:, 0].tolist()),
        to_unedited=None if unedited is None else tuple(similarity(whole, images, unedited).diagonal().tolist()),
        nearest=tuple(nearest.tolist()),
        nearest_prompt=tuple(known[place].prompt for place in index.tolist()),
        diversity=diversity(whole, images) if len(images) > 1 else None,
    )


def copy_findings(
    prompts: Sequence[PromptCopies], *, measure: str, threshold: float = COPY, seed: int = 0
) -> list[Finding]:
    """Sum up prompts: the median over seeds of each, then the median and its spread over prompts, kind by kind.

    Args:
        prompts: At least one.
        measure: The descriptor's name.
        threshold: Similarity from which an image is a copy.
        seed: Of the bootstrap.

    Returns:
        For each kind that occurs: similarity to the training image and to the unedited generation, diversity, the
        share of seeds that copy the own image and the share that copy any memorized one. The direction "better" is
        that of somebody who wants no copies. Intervals of medians are over prompts, from five prompts on; those of
        shares are over seeds, as if they were independent, which the seeds of one prompt are not quite.

    Raises:
        UsageError: There is no prompt.
        MissingExtra: scipy, which the intervals need, is not installed.
    """
    if not prompts:
        raise UsageError("No prompt was measured.", cure="Give at least one.")
    findings: list[Finding] = []
    for kind in ("verbatim", "template"):
        rows = [each for each in prompts if each.kind == kind]
        if rows:
            findings += _of_kind(rows, kind, measure, threshold, seed)
    return findings


def _of_kind(rows: list[PromptCopies], kind: Kind, measure: str, threshold: float, seed: int) -> list[Finding]:
    def median(what: str, values: list[float], better: Better | None) -> Finding:
        middle = statistics.median(values)
        ci95 = bootstrap(values, "median", seed=seed).ci95 if len(values) >= MINIMUM_FOR_BOOTSTRAP else None
        spread = statistics.median(abs(value - middle) for value in values)
        detail = {"each": dict(zip([row.prompt for row in rows], values, strict=True)), "MAD": spread}
        return Finding(
            f"{measure}, {what}, {kind}", middle, ci95=ci95, n=len(values), better=better, seeds=(seed,), detail=detail
        )

    def share(what: str, counts: list[int]) -> Finding:
        seeds = [len(row.to_image) for row in rows]
        found = proportion(sum(counts), sum(seeds))
        each = {row.prompt: count for row, count in zip(rows, counts, strict=True)}
        return Finding(
            f"{measure}, {what}, {kind}",
            found.estimate,
            ci95=found.ci95,
            n=sum(seeds),
            better="lower",
            detail={"copies": sum(counts), "threshold": threshold, "each": each},
        )

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
