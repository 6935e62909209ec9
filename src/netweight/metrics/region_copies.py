"""Copies of a training image region by region: the foreground and the background are compared apart.

An edit may change the background and leave copies of the foreground.

Source: Di et al., arXiv 2508.12148, whose masks come from a segmentation network.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.metrics.copies import COPY, Kind, MemorizedImage
from netweight.metrics.descriptors import CenteredPixels, similarity
from netweight.metrics.intervals import interval_finding, proportion
from netweight.report.finding import Finding

_LEAST_PIXELS = 9
"""Pixels that a region needs: correlations over fewer say nothing."""
_LEVELS = 64
"""Distances from the border's color between which the foreground is divided from the background."""


@final
@dataclass(frozen=True)
class RegionCopies:
    """Similarity of one prompt's images and its training image in each region; an entry per image."""

    prompt: str
    """Caption of the training image."""
    kind: Kind
    """Kind of repetition of the training image."""
    share: float
    """Share of the compared pixels that are foreground."""
    foreground: tuple[float, ...] | None
    """Centered correlation (NCC) of the foreground; None where that is too small to compare."""
    background: tuple[float, ...] | None
    """The same of the background."""

    def copies(self, threshold: float = COPY) -> dict[str, int]:
        """Return how many images copy both regions, one of them alone, or none."""
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


def region_copies(own: MemorizedImage, images: Tensor, *, foreground: Tensor | None = None) -> RegionCopies:
    """Compare a prompt's images with its training image, region by region.

    `images`: what the model makes of the prompt, shape `(n, 3, height, width)`, of the training image's size.
    `foreground`: shape `(height, width)`, True in the foreground, such as from a segmentation network; None divides by
    color.
    """
    mask = foreground_by_color(own.image) if foreground is None else foreground.bool()
    if mask.shape != own.image.shape[1:]:
        raise UsageError(
            f"A foreground of {tuple(mask.shape)} pixels does not fit an image of {tuple(own.image.shape[1:])} pixels.",
            cure="Give a mask of the training image's size.",
        )
    where = torch.ones_like(mask) if own.where is None else own.where
    by_region: list[tuple[float, ...] | None] = []
    for region in (mask & where, ~mask & where):
        if int(region.sum()) < _LEAST_PIXELS:
            by_region.append(None)
        else:
            by_region.append(tuple(similarity(CenteredPixels(region), images, own.image[None])[:, 0].tolist()))
    share = float((mask & where).sum() / where.sum().clamp_min(1))
    return RegionCopies(own.label, own.kind, share, by_region[0], by_region[1])


def region_findings(prompts: Sequence[RegionCopies], *, threshold: float = COPY) -> list[Finding]:
    """Sum up regions: the share of images that copy the foreground and the background, kind by kind."""
    # Intervals are over images, as if these were independent.
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
            interval = proportion(sum(counts.values()), sum(map(len, values.values())))
            detail = {
                "copies": sum(counts.values()),
                "threshold": threshold,
                "each": counts,
                "medians": {prompt: statistics.median(part) for prompt, part in values.items()},
                "by region": {each.prompt: each.copies(threshold) for each in whole},
                "without two regions": without,
            }
            findings.append(interval_finding(title, interval, better="lower", detail=detail))
    return findings
