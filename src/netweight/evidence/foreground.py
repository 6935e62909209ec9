"""Copies by region: an image whose foreground alone is copied is a copy that a comparison of whole images may miss.

A training image is divided into foreground and background, and generated images are compared with each by itself. The
division that comes with the library is one by color: it suits objects on a plain ground, and is no segmentation. Masks
from a network are taken as they are.

Source: Di et al., arXiv 2508.12148, who measure foreground and background apart, by masks of a segmentation network,
and find that switching neurons off leaves copies of the foreground.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.metrics.copies import COPY, CenteredPixels, Kind, Memorized, similarity
from netweight.metrics.intervals import proportion
from netweight.report.finding import Finding

__all__ = ["RegionCopies", "foreground_by_color", "region_copies", "region_findings"]

_LEAST = 9
"""Pixels that a region needs: correlations over fewer say nothing."""
_LEVELS = 64


@final
@dataclass(frozen=True)
class RegionCopies:
    """How alike one prompt's images and its training image are in each region; an entry per image.

    Attributes:
        prompt: The caption.
        kind: How its training image is repeated.
        share: Share of the compared pixels that are foreground.
        foreground: Centered correlation (NCC) of the foreground; None where that is too small to compare.
        background: The same of the background.
    """

    prompt: str
    kind: Kind
    share: float
    foreground: tuple[float, ...] | None
    background: tuple[float, ...] | None

    def copies(self, threshold: float = COPY) -> dict[str, int]:
        """Return how many images copy both regions, one of them alone, or none.

        Args:
            threshold: Similarity from which on a region is a copy.
        """
        if self.foreground is None or self.background is None:
            return {}
        pairs = [(a >= threshold, b >= threshold) for a, b in zip(self.foreground, self.background, strict=True)]
        named = {"both": (True, True), "foreground alone": (True, False), "background alone": (False, True)}
        return {**{name: pairs.count(pair) for name, pair in named.items()}, "neither": pairs.count((False, False))}


def foreground_by_color(image: Tensor) -> Tensor:
    """Divide an image by how far pixels are from the mean color of its border, where both parts differ most (Otsu).

    Args:
        image: Shape `(3, height, width)`, within 0 and 1, at least 3 pixels high and wide.

    Returns:
        Shape `(height, width)`, True in the foreground; False everywhere if the image has one color.

    Raises:
        UsageError: It has another shape.
    """
    if image.ndim != 3 or image.shape[0] != 3 or min(image.shape[1:]) < 3:
        raise UsageError(
            f"An image of shape {tuple(image.shape)} has no foreground.", cure="Give (3, height, width), from 3 pixels."
        )
    edge = torch.ones(image.shape[1:], dtype=torch.bool, device=image.device)
    edge[1:-1, 1:-1] = False
    pixels = image.double()
    away = (pixels - pixels[:, edge].mean(1)[:, None, None]).square().sum(0).sqrt()
    greatest = float(away.max())
    if greatest < 1e-6:
        return torch.zeros_like(edge)
    values = away.flatten()
    limits = torch.linspace(0, greatest, _LEVELS, dtype=torch.float64, device=image.device)[1:-1]
    above = values[None] > limits[:, None]
    share = above.double().mean(1)
    means = [(part.double() @ values) / part.sum(1).clamp_min(1) for part in (above, ~above)]
    between = share * (1 - share) * (means[0] - means[1]).square()
    return away > limits[int(between.argmax())]


def region_copies(own: Memorized, images: Tensor, *, foreground: Tensor | None = None) -> RegionCopies:
    """Compare a prompt's images with its training image, region by region.

    Args:
        own: The prompt's training image; of a template only the part that stays is compared.
        images: What the model makes of the prompt, shape `(n, 3, height, width)`, of the training image's size.
        foreground: Shape `(height, width)`, True in the foreground, such as from a segmentation network; None divides
            by color.

    Raises:
        UsageError: Sizes differ, or there is no image.
    """
    mask = foreground_by_color(own.image) if foreground is None else foreground.bool()
    if mask.shape != own.image.shape[1:]:
        raise UsageError(
            f"A foreground of {tuple(mask.shape)} pixels is not of an image of {tuple(own.image.shape[1:])}.",
            cure="Give a mask of the training image's size.",
        )
    where = torch.ones_like(mask) if own.where is None else own.where
    found: list[tuple[float, ...] | None] = []
    for region in (mask & where, ~mask & where):
        if int(region.sum()) < _LEAST:
            found.append(None)
        else:
            found.append(tuple(similarity(CenteredPixels(region), images, own.image[None])[:, 0].tolist()))
    share = float((mask & where).sum() / where.sum().clamp_min(1))
    return RegionCopies(own.prompt, own.kind, share, found[0], found[1])


def region_findings(prompts: Sequence[RegionCopies], *, threshold: float = COPY) -> list[Finding]:
    """Sum up regions: the share of images that copy the foreground and the background, kind by kind.

    Args:
        prompts: From `region_copies`; those without one of the regions are named and left out.
        threshold: Correlation from which a region is a copy.

    Returns:
        Two findings for each kind that occurs. Intervals are over images, as if they were independent.

    Raises:
        UsageError: There is no prompt.
        MissingExtra: scipy, which the intervals need, is not installed.
    """
    if not prompts:
        raise UsageError("No prompt was measured.", cure="Give at least one.")
    findings = []
    for kind in ("verbatim", "template"):
        rows = [each for each in prompts if each.kind == kind]
        whole = [each for each in rows if each.copies()]
        without = [each.prompt for each in rows if not each.copies()]
        for name in ("foreground", "background") if rows else ():
            title = f"NCC, images that copy the {name}, {kind}"
            if not whole:
                findings.append(Finding(title, None, detail={"reason": "no image has both regions"}))
                continue
            values = {each.prompt: getattr(each, name) for each in whole}
            counts = {prompt: sum(value >= threshold for value in part) for prompt, part in values.items()}
            total = sum(map(len, values.values()))
            found = proportion(sum(counts.values()), total)
            findings.append(
                Finding(
                    title, found.estimate, ci95=found.ci95, n=total, better="lower",
                    detail={
                        "copies": sum(counts.values()), "threshold": threshold, "each": counts,
                        "medians": {prompt: statistics.median(part) for prompt, part in values.items()},
                        "by region": {each.prompt: each.copies(threshold) for each in whole},
                        "without two regions": without,
                    },
                )
            )  # fmt: skip
    return findings
