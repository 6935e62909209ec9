"""How like two images are, before and after an edit: what edit curves carry beside the change of attributes.

Each maker returns a name and a function; a stand-in says in its name that it is one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from netweight.metrics.images import lpips, ssim

if TYPE_CHECKING:
    from netweight.metrics.copies import Descriptor
    from netweight.metrics.images import Features

__all__ = ["Compare", "agreement", "alignment", "identity", "perceptual_distance"]

Compare: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From edited images and originals, `(n, 3, height, width)` each, to one number per pair, shape `(n,)`."""


def identity(embed: Descriptor) -> tuple[str, Compare]:
    """Return the cosine of embeddings before and after: the identity score.

    Args:
        embed: From images to vectors: a face recognition network that the user brings, such as a TorchScript file by
            path and digest (`metrics.copies.TorchScriptDescriptor`). Its name goes into that of the score.
    """

    def compare(edited: Tensor, originals: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.nn.functional.cosine_similarity(embed(edited).double(), embed(originals).double())

    return f"identity by {embed.name}", compare


def perceptual_distance(
    backbone: str | os.PathLike[str] | Features | None = None, *, heads: Path | None = None
) -> tuple[str, Compare]:
    """Return LPIPS with a backbone; without one, the structural dissimilarity, named as the stand-in that it is.

    Args:
        backbone: See `metrics.images.lpips`.
        heads: See `metrics.images.lpips`.
    """
    if backbone is None:
        return "1 − SSIM (stand-in for LPIPS)", lambda edited, originals: 1 - ssim(edited, originals)
    return "LPIPS", lambda edited, originals: lpips(edited, originals, backbone=backbone, heads=heads)


def agreement(read: Callable[[Tensor], Tensor], name: str) -> tuple[str, Compare]:
    """Return whether a reader says the same of both: 1 or 0.

    Args:
        read: From images to whole numbers, shape `(n,)`, such as which of the prompt's words is seen.
        name: Of what is to stay.
    """
    return f"{name} kept", lambda edited, originals: (read(edited) == read(originals)).double()


def alignment(score: Callable[[Tensor], Tensor], name: str) -> tuple[str, Compare]:
    """Return how well edited images follow the words of the edit, by CLIP or by a stand-in whose name says so.

    Args:
        score: From images to numbers, shape `(n,)`, such as `lambda images: clip.alignment(images, prompts)`.
        name: Of the score.
    """
    return name, lambda edited, originals: score(edited)
