"""Pairs of images as searches compare them, by whatever descriptor is at hand."""

from __future__ import annotations

from torch import Tensor

from netweight.attacks.embedding_search.search import Similarity
from netweight.metrics.copies import CenteredPixels, Descriptor, described

__all__ = ["paired"]


def paired(descriptor: Descriptor | None = None) -> Similarity:
    """Make the function that compares each image with its own target.

    Args:
        descriptor: What turns images into vectors; None takes `CenteredPixels`, which suits small images that are
            copied as they are and is no copy detector.

    Returns:
        Images and targets, shape `(n, 3, height, width)` each → the cosines of their vectors, shape `(n,)`.
    """
    chosen = CenteredPixels() if descriptor is None else descriptor

    def compare(images: Tensor, targets: Tensor) -> Tensor:
        cosines: Tensor = (described(chosen, images) * described(chosen, targets)).sum(1)
        return cosines

    return compare
