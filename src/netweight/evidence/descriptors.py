"""What turns images into vectors whose cosine says how alike two images are, and the ones that come with it.

Copy detection, diversity and distances between sets of images are measured on a `Descriptor`. SSCD, which the papers
on memorization use, is a file that the user brings; without one there is `centered_pixels`, which is called what it
is. Anything else with a name that turns images into vectors will do, too.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.errors import UnsafeInput, UsageError

__all__ = ["CenteredPixels", "Descriptor", "TorchScriptDescriptor", "described", "sscd"]

_IMAGENET_MEAN, _IMAGENET_DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
_AT_ONCE = 64
"""Images that are described together."""


class Descriptor(Protocol):
    """Images in, vectors out.

    Attributes:
        name: What reports call similarities by it.
    """

    @property
    def name(self) -> str: ...

    def __call__(self, images: Tensor) -> Tensor:
        """Return vectors of shape `(n, width)` for images of shape `(n, 3, height, width)` within 0 and 1."""


@final
class CenteredPixels:
    """Pixels less their mean: the cosine of two is the centered correlation of two images, NCC. No network is needed.

    It sees copies in place and misses shifted or recolored ones. It is no SSCD and never called so.

    Args:
        where: Shape `(height, width)`, True where pixels are compared, such as the part of a template that stays; None
            compares all.
    """

    def __init__(self, where: Tensor | None = None) -> None:
        self._where = where

    @property
    def name(self) -> str:
        """`"NCC"`, or `"NCC of the fixed part"`."""
        return "NCC" if self._where is None else "NCC of the fixed part"

    def __call__(self, images: Tensor) -> Tensor:
        """Return centered pixels, float64, shape `(n, 3 * pixels)`.

        Raises:
            UsageError: The images are of another size than the mask.
        """
        if self._where is not None and self._where.shape != images.shape[2:]:
            raise UsageError(
                f"Images of {tuple(images.shape[2:])} pixels cannot be compared where a mask of "
                f"{tuple(self._where.shape)} says.",
                cure="Give a mask of the images' size.",
            )
        compared = images.double() if self._where is None else images.double()[:, :, self._where.to(images.device)]
        flat = compared.flatten(1)
        return flat - flat.mean(1, keepdim=True)


@final
class TorchScriptDescriptor:
    """A network in a TorchScript file that the user brings, such as SSCD or an Inception for FID.

    A TorchScript file is a program. It is opened only when its SHA-256 is the one that the user gives.

    Args:
        path: The file.
        sha256: Its digest, 64 hexadecimal digits.
        name: What reports call similarities by it.
        side: Images are resized to so many pixels, squarely, bilinearly with antialiasing.
        mean: Of each channel, subtracted.
        deviation: Of each channel, divided by.

    Raises:
        UsageError: There is no such file, or torch cannot open it.
        UnsafeInput: The file has another digest.
    """

    def __init__(
        self,
        path: str | Path,
        sha256: str,
        *,
        name: str,
        side: int,
        mean: Sequence[float] = _IMAGENET_MEAN,
        deviation: Sequence[float] = _IMAGENET_DEVIATION,
    ) -> None:
        self.name = name
        self.sha256 = sha256.lower()
        self._side, self._mean, self._deviation = side, mean, deviation
        self._network = _opened(Path(path), self.sha256)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return the network's vectors, float32.

        Raises:
            UsageError: It returns something else than one vector per image.
        """
        scaled = F.interpolate(images.float(), (self._side, self._side), mode="bilinear", antialias=True)
        mean, deviation = (torch.tensor(values).reshape(3, 1, 1) for values in (self._mean, self._deviation))
        found = self._network((scaled - mean) / deviation)
        if not isinstance(found, Tensor) or found.ndim != 2 or len(found) != len(images):
            raise UsageError(
                f"The network of {self.name} does not return one vector per image.",
                cure="Give a TorchScript file that turns (n, 3, side, side) into (n, width).",
            )
        return found.float()


def sscd(path: str | Path, sha256: str) -> TorchScriptDescriptor:
    """Open SSCD as its authors published it for copy detection: `sscd_disc_mixup` in TorchScript.

    Args:
        path: The file.
        sha256: Its digest, as the user knows it: with it a report says which network was used.

    Raises:
        UsageError: There is no such file, or torch cannot open it.
        UnsafeInput: The file has another digest.

    Source: Pizzi et al. 2022, "A Self-Supervised Descriptor for Image Copy Detection"; 320 pixels as in their code.
    """
    return TorchScriptDescriptor(path, sha256, name="SSCD", side=320)


def described(descriptor: Descriptor, images: Tensor) -> Tensor:
    """Return vectors of length 1, a few images at a time.

    Args:
        descriptor: Of any kind.
        images: Shape `(n, 3, height, width)`, within 0 and 1.

    Returns:
        float64, shape `(n, width)`; the zero vector where a descriptor finds nothing, as in an image of one color.

    Raises:
        UsageError: There is no image, or the shape or a value is not what an image has.
    """
    if images.ndim != 4 or not images.numel():
        raise UsageError(
            f"Images of shape {tuple(images.shape)} cannot be described.", cure="Give a batch (n, 3, height, width)."
        )
    if not images.isfinite().all():
        raise UsageError("An image holds NaN or infinity, so it cannot be described.", cure="Leave it out, and say so.")
    vectors = torch.cat([descriptor(part).double() for part in torch.split(images.detach(), _AT_ONCE)])
    scaled: Tensor = vectors / vectors.norm(dim=1, keepdim=True).clamp_min(1e-12)
    return scaled


def _opened(path: Path, sha256: str) -> torch.nn.Module:
    if not path.is_file():
        raise UsageError(f"There is no TorchScript file {path}.", cure="Download it first, and name it.")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise UnsafeInput(
            f"{path} has the SHA-256 {found}, not {sha256}; it was not opened.",
            cure="Give the digest of the file that you trust, or fetch the file again.",
        )
    try:
        with warnings.catch_warnings():  # torch 2.9 and later call TorchScript deprecated, and still open it
            warnings.simplefilter("ignore", DeprecationWarning)
            network: torch.nn.Module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise UsageError(
            f"torch cannot open {path} as TorchScript: {error}", cure="Give a TorchScript file."
        ) from error
    return network.eval()
