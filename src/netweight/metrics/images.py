"""Similarity of images: PSNR, SSIM and LPIPS of pairs, FID and KID of sets; and PNG files without an imaging library.

All images are tensors `(n, c, h, w)` within 0 and 1, after any normalization is undone; values outside are clipped.
PSNR is for a range of 1; SSIM has an 11 × 11 Gaussian window of σ = 1.5 and population covariance, averaged over
windows that lie within the image. LPIPS (Zhang et al. 2018) and distances between sets need a network that the user
brings; findings carry its name, so that no number is called FID that was not measured on Inception's features.
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from netweight.core.atomic_writes import whole_file
from netweight.core.lazy import library
from netweight.errors import MissingExtra, UnsafeInput, UsageError
from netweight.metrics.intervals import Interval, mean_interval
from netweight.report.finding import Better, Finding

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor


_WINDOW, _SIGMA = 11, 1.5


def psnr(images: Tensor, references: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio of each image.

    `images`: shape `(n, c, h, w)`, within 0 and 1.

    Returns:
        Decibels, float64 of shape `(n,)`; infinite where the images are equal.
    """
    images, references = checked_pair(images, references)
    return -10 * (images - references).square().flatten(1).mean(1).log10()


def ssim(images: Tensor, references: Tensor) -> Tensor:
    """Return the structural similarity of each image.

    `images`: shape `(n, c, h, w)`, within 0 and 1; at least 11 pixels high and wide.

    Returns:
        float64 of shape `(n,)`, -1 to 1; 1 where the images are equal. Colors are compared channel by channel and
        averaged.

    Source: Wang et al. 2004, with the constants 0.01 and 0.03 of the paper.
    """
    import torch
    import torch.nn.functional as F

    a, b = checked_pair(images, references)
    if min(a.shape[2:]) < _WINDOW:
        raise UsageError(f"SSIM needs images of at least {_WINDOW} pixels; these have {tuple(a.shape[2:])}.")
    offsets = torch.arange(_WINDOW, dtype=a.dtype, device=a.device) - _WINDOW // 2
    bell = (-offsets.square() / (2 * _SIGMA**2)).exp()
    window = torch.outer(bell, bell) / bell.sum().square()

    def mean(values: Tensor) -> Tensor:
        """Weighted means over all windows, every channel by itself."""
        single = values.flatten(0, 1).unsqueeze(1)
        return F.conv2d(single, window[None, None]).reshape(*values.shape[:2], -1)

    mean_a, mean_b = mean(a), mean(b)
    variance_a, variance_b = mean(a * a) - mean_a.square(), mean(b * b) - mean_b.square()
    covariance = mean(a * b) - mean_a * mean_b
    small, smaller = 0.03**2, 0.01**2
    likeness = (2 * mean_a * mean_b + smaller) * (2 * covariance + small)
    most = (mean_a.square() + mean_b.square() + smaller) * (variance_a + variance_b + small)
    return (likeness / most).flatten(1).mean(1)


def match_images(reconstructed: Tensor, references: Tensor) -> Tensor:
    """Find which reconstruction belongs to which reference: the assignment with the greatest sum of PSNR.

    A batch has no order for an attacker, so its images are to be matched before they are compared.

    `reconstructed`: shape `(n, c, h, w)`, within 0 and 1.

    Returns:
        int64 of shape `(n,)`: `reconstructed[permutation]` lies beside `references`.
    """
    import torch

    images, originals = checked_pair(reconstructed, references)
    assign = library("scipy.optimize", "Matching images", "evidence").linear_sum_assignment
    errors = torch.stack([(images - reference).square().flatten(1).mean(1) for reference in originals])
    # Equal images have infinite PSNR; a floor below any error of 8-bit pixels keeps the sum finite.
    decibels = -10 * errors.clamp_min(1e-12).log10()
    _, columns = assign(decibels.cpu().numpy(), maximize=True)
    return torch.as_tensor(columns, dtype=torch.int64, device=images.device)


def image_findings(
    images: Tensor,
    references: Tensor,
    *,
    backbone: str | os.PathLike[str] | Features | None = None,
    heads: Path | None = None,
    seed: int,
) -> list[Finding]:
    """Return mean PSNR, SSIM and LPIPS of a batch as findings, with intervals over its images."""

    # images: Shape `(n, c, h, w)`, within 0 and 1, in the order of the references (`match_images`).
    # Returns: Three findings. The values of the single images are in their details. The direction "better" is the
    # attacker's. What cannot be measured has the value None and says why; an interval needs two images.
    def reported(name: str, values: Tensor, better: Better, unit: str = "") -> Finding:
        numbers: list[float] = values.tolist()
        return Finding(
            name,
            math.fsum(numbers) / len(numbers),
            ci95=_interval(numbers, seed),
            n=len(numbers),
            unit=unit,
            better=better,
            seeds=(seed,),
            detail={"each": numbers},
        )

    findings = [reported("PSNR", psnr(images, references), "higher", "dB")]
    if min(images.shape[2:]) < _WINDOW:
        findings.append(_unavailable("SSIM", f"its window is {_WINDOW} pixels wide, more than the images"))
    else:
        findings.append(reported("SSIM", ssim(images, references), "higher"))
    if backbone is None:
        findings.append(_unavailable("LPIPS", "no backbone was given"))
    else:
        findings.append(reported("LPIPS", lpips(images, references, backbone=backbone, heads=heads), "lower"))
    return findings


def _unavailable(name: str, reason: str) -> Finding:
    return Finding(name, None, detail={"reason": f"unavailable: {reason}"})


def _interval(values: list[float], seed: int) -> tuple[float, float] | None:
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return None
    return mean_interval(values, seed=seed).ci95


def checked_pair(images: Tensor, references: Tensor) -> tuple[Tensor, Tensor]:
    """Check two batches of images and return them in double precision, cut off at 0 and 1.

    `images`: shape `(n, c, h, w)`.
    """
    if images.ndim != 4 or images.shape != references.shape or math.prod(images.shape) == 0:
        raise UsageError(
            f"Images of shape {tuple(images.shape)} cannot be compared with those of {tuple(references.shape)}.",
            cure="Give two batches of the same shape (n, c, h, w).",
        )
    for batch in (images, references):
        if not batch.isfinite().all():
            raise UsageError("An image contains NaN or infinity, so it cannot be compared.")
    return images.detach().double().clamp(0, 1), references.detach().to(images.device).double().clamp(0, 1)


Features: TypeAlias = "Callable[[Tensor], Sequence[Tensor]]"
"""Feature maps, shape `(n, channels, h, w)` each, of images `(n, 3, h, w)` scaled by ImageNet's means."""

# Channel means and deviations of ImageNet, for images within -1 and 1.
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
# With smaller images, the strides of AlexNet leave no feature map.
_LEAST_SIDE = 64

# Channels of the compared feature maps; they tell which heads belong to a backbone.
_CHANNELS = {
    "alex": (64, 192, 384, 256, 256),
    "vgg": (64, 128, 256, 512, 512),
    "squeeze": (64, 128, 256, 384, 384, 512, 512),
}
# Per compared map: whether max-pooling comes first, and the convolutions as (number in `features`, stride, padding).
_Stage: TypeAlias = tuple[bool, tuple[tuple[int, int, int], ...]]
_ALEX: tuple[_Stage, ...] = (
    (False, ((0, 4, 2),)),
    (True, ((3, 1, 2),)),
    (True, ((6, 1, 1),)),
    (False, ((8, 1, 1),)),
    (False, ((10, 1, 1),)),
)
_VGG: tuple[_Stage, ...] = tuple(
    (numbers[0] > 0, tuple((number, 1, 1) for number in numbers))
    for numbers in ((0, 2), (5, 7), (10, 12, 14), (17, 19, 21), (24, 26, 28))
)


def lpips(
    images: Tensor, references: Tensor, *, backbone: str | os.PathLike[str] | Features, heads: Path | None = None
) -> Tensor:
    """Return the perceptual distance of each image, LPIPS version 0.1.

    `images`: shape `(n, c, h, w)`, c 1 or 3, within 0 and 1. Images with a side below 64 pixels are enlarged bilinearly
    to 64; gray ones are repeated in three channels. `backbone`: a file with the convolutions of torchvision's AlexNet
    or VGG-16 (`features.0.weight` and so on; .pth is read without running code), or a function to feature maps.
    `heads`: `alex.lin0.model.1.weight` and so on; by default `weights/lpips_v01_heads.safetensors` in the folder that
    NETWEIGHT_DATA names.

    Returns:
        Shape `(n,)`; 0 where the images are equal, larger for less alike.

    Source: Zhang et al. 2018, "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", equation 1.
    """
    import torch

    features = backbone if callable(backbone) else _network(_weights(Path(backbone)), str(backbone))
    pair = checked_pair(images, references)
    with torch.no_grad():
        maps, reference_maps = (features(_scaled(batch.float())) for batch in pair)
        weights = _heads(heads, tuple(part.shape[1] for part in maps))
        distances = [
            ((_unit(a) - _unit(b)).square() * weight.to(a)).sum(1).mean((1, 2))
            for a, b, weight in zip(maps, reference_maps, weights, strict=True)
        ]
    return torch.stack(distances).sum(0)


def _scaled(batch: Tensor) -> Tensor:
    """Three channels, at least 64 pixels, scaled as the backbone was trained."""
    import torch
    import torch.nn.functional as F

    if batch.shape[1] not in (1, 3):
        raise UsageError(f"LPIPS compares images of 1 or 3 channels, not {batch.shape[1]}.")
    batch = batch.expand(-1, 3, -1, -1) * 2 - 1
    shortest = min(batch.shape[2:])
    if shortest < _LEAST_SIDE:
        size = [round(side * _LEAST_SIDE / shortest) for side in batch.shape[2:]]
        batch = F.interpolate(batch, size=size, mode="bilinear", align_corners=False)
    shift, scale = (torch.tensor(values).to(batch).reshape(3, 1, 1) for values in (_SHIFT, _SCALE))
    scaled: Tensor = (batch - shift) / scale
    return scaled


def _unit(features: Tensor) -> Tensor:
    """Scale each position's channels to unit length."""
    return features / (features.square().sum(1, keepdim=True).sqrt() + 1e-10)


def _network(weights: Mapping[str, Tensor], where: str) -> Features:
    import torch.nn.functional as F

    first = weights.get("features.0.weight")
    architectures: dict[tuple[int, ...], tuple[tuple[_Stage, ...], int]]
    architectures = {(64, 3, 11, 11): (_ALEX, 3), (64, 3, 3, 3): (_VGG, 2)}
    stages, window = architectures.get(tuple(first.shape) if first is not None else (), ((), 0))
    needed = {f"features.{conv[0]}.{kind}" for _, convs in stages for conv in convs for kind in ("weight", "bias")}
    if not stages or not needed <= weights.keys():
        raise UsageError(
            f"{where} contains neither the convolutions of AlexNet nor those of VGG-16.",
            cure="Give torchvision's weights, whose names begin with features.0.weight.",
        )

    def features(batch: Tensor) -> list[Tensor]:
        maps = []
        for pooled, convolutions in stages:
            batch = F.max_pool2d(batch, window, 2) if pooled else batch
            for number, stride, padding in convolutions:
                weight, bias = (weights[f"features.{number}.{kind}"].to(batch) for kind in ("weight", "bias"))
                batch = F.conv2d(batch, weight, bias, stride, padding).relu()
            maps.append(batch)
        return maps

    return features


def _weights(path: Path) -> Mapping[str, Tensor]:
    import pickle

    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from netweight.store.torch_archive import refuse_inflated

    if not path.is_file():
        raise UsageError(f"There is no backbone {path}.", cure="Give the file of an AlexNet or VGG-16.")
    refuse_inflated(path)
    try:
        content = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeInput(
            f"{path} contains more than tensors and was not opened.", cure="Save its state dict."
        ) from error
    except SafetensorError as error:
        raise UsageError(f"{path} is not a .safetensors file: {error}.") from error
    return {name: value for name, value in dict(content).items() if isinstance(value, torch.Tensor)}


def _heads(path: Path | None, channels: tuple[int, ...]) -> list[Tensor]:
    """The weights of the heads that belong to feature maps of these channels, shape `(1, channels, 1, 1)` each."""
    network = next((name for name, widths in _CHANNELS.items() if widths == channels), None)
    if network is None:
        raise UsageError(f"There are no LPIPS heads for feature maps of {channels} channels.")
    data = os.environ.get("NETWEIGHT_DATA")
    file = path or (Path(data) / "weights" / "lpips_v01_heads.safetensors" if data else None)
    if file is None or not file.is_file():
        raise MissingExtra(
            f"LPIPS needs a file with its heads, and {f'there is no file {file}' if file else 'none was given'}.",
            cure="Give their file, or set NETWEIGHT_DATA to the folder that contains "
            "weights/lpips_v01_heads.safetensors.",
        )
    weights = _weights(file)
    names = [f"{network}.lin{number}.model.1.weight" for number in range(len(channels))]
    missing = [name for name in names if name not in weights]
    if missing:
        raise UsageError(f"{file} does not contain {missing[0]!r}.", cure="Give the heads of LPIPS version 0.1.")
    return [weights[name] for name in names]


_NORMAL_95 = 1.959963984540054
# The Fréchet distance is biased upwards when images are few; the kernel distance is not, and has an interval.


def frechet_distance(features: Tensor, references: Tensor) -> float:
    """Return the squared Fréchet distance of two normal distributions fitted to features.

    Args:
        features: Shape `(n, width)`, n at least 2.
        references: Shape `(m, width)`, m at least 2.

    Source: Heusel et al. 2017, equation 6; covariances are unbiased, as in the published code.
    """
    a, b = _pair(features, references)
    shift = a.mean(0) - b.mean(0)
    one, other = np.atleast_2d(np.cov(a, rowvar=False)), np.atleast_2d(np.cov(b, rowvar=False))
    values, vectors = np.linalg.eigh(one)
    root = (vectors * np.sqrt(values.clip(0))) @ vectors.T
    # The product of the covariances has the eigenvalues of this symmetric matrix, which are real and safe to take.
    middle = np.linalg.eigvalsh(root @ other @ root).clip(0)
    return float(shift @ shift + np.trace(one) + np.trace(other) - 2 * np.sqrt(middle).sum())


def kernel_distance(features: Tensor, references: Tensor) -> Interval:
    """Return the squared maximum mean discrepancy of features under the cubic kernel, without bias.

    Args:
        features: Shape `(n, width)`, n at least 3.
        references: Shape `(m, width)`, m at least 3.

    Returns:
        The estimate on all images, which may be below 0, with a normal interval by the jackknife over images of both
        sets. No subsets are drawn, so no seed is needed.

    Source: Binkowski et al. 2018, section 4 and appendix: KID is this on Inception's features.
    """
    a, b = _pair(features, references, least=3)
    n, m = len(a), len(b)
    within_a, within_b, between = _kernel(a, a), _kernel(b, b), _kernel(a, b)
    rows_a, rows_b = within_a.sum(1) - within_a.diagonal(), within_b.sum(1) - within_b.diagonal()
    sum_a, sum_b, sum_between = rows_a.sum(), rows_b.sum(), between.sum()
    estimate = sum_a / (n * (n - 1)) + sum_b / (m * (m - 1)) - 2 * sum_between / (n * m)
    without_a = (
        (sum_a - 2 * rows_a) / ((n - 1) * (n - 2))
        + sum_b / (m * (m - 1))
        - 2 * (sum_between - between.sum(1)) / ((n - 1) * m)
    )
    without_b = (
        sum_a / (n * (n - 1))
        + (sum_b - 2 * rows_b) / ((m - 1) * (m - 2))
        - 2 * (sum_between - between.sum(0)) / (n * (m - 1))
    )
    variance = (n - 1) * without_a.var() + (m - 1) * without_b.var()
    half = _NORMAL_95 * math.sqrt(float(variance))
    return Interval(float(estimate), float(estimate) - half, float(estimate) + half, n, "jackknife, normal")


def _kernel(a: NDArray[np.float64], b: NDArray[np.float64]) -> NDArray[np.float64]:
    cubed: NDArray[np.float64] = (a @ b.T / a.shape[1] + 1) ** 3
    return cubed


def _pair(features: Tensor, references: Tensor, least: int = 2) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    a, b = (values.detach().cpu().double().numpy() for values in (features, references))
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < least:
        raise UsageError(
            f"Features of shape {a.shape} cannot be compared with those of {b.shape}.",
            cure=f"Give (n, width) and (m, width), {least} images or more of each.",
        )
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise UsageError("A feature is NaN or infinite.", cure="Find the image that it comes from.")
    return a, b


def write_png(path: Path, image: Tensor) -> None:
    """Write an image as an 8-bit PNG file, in place of one that may be there.

    `image`: shape `(c, h, w)`, c 1 (gray) or 3 (color), within 0 and 1; values outside are cut off, NaN is black.
    """
    import torch

    if image.ndim != 3 or image.shape[0] not in (1, 3) or not image.numel():
        raise UsageError(f"A PNG cannot contain an image of shape {tuple(image.shape)}.", cure="Give 1 or 3 channels.")
    pixels = (image.detach().cpu().double().nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8)
    with whole_file(path, overwrite=True) as file:
        file.write(png_bytes(pixels.permute(1, 2, 0).numpy()))


def png_bytes(pixels: NDArray[np.uint8]) -> bytes:
    """Return an image as the bytes of a PNG file: of the filters tried, the one that makes it smallest.

    Args:
        pixels: Shape `(h, w, 1)` (gray) or `(h, w, 3)` (color).

    Source: PNG, third edition (W3C 2025), sections 9 (filters) and 11 (chunks).
    """
    if pixels.ndim != 3 or pixels.shape[2] not in (1, 3) or not pixels.size or pixels.dtype != np.uint8:
        raise UsageError(
            f"A PNG cannot contain pixels of shape {pixels.shape} and type {pixels.dtype}.",
            cure="Give uint8 of shape (h, w, 1) or (h, w, 3).",
        )
    height, width, channels = pixels.shape
    padded = np.pad(pixels, ((1, 0), (1, 0), (0, 0)))
    # Outside the image the values are 0. Differences wrap around, as the PNG format requires.
    left, above = padded[1:, :-1], padded[:-1, 1:]
    filtered = (pixels, pixels - left, pixels - above)
    body = min((zlib.compress(_lines(kind, values), 9) for kind, values in enumerate(filtered)), key=len)
    head = struct.pack(">IIBBBBB", width, height, 8, 0 if channels == 1 else 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", head) + _chunk(b"IDAT", body) + _chunk(b"IEND", b"")


def _lines(kind: int, values: NDArray[np.uint8]) -> bytes:
    """Put the number of its filter before each row."""
    return np.pad(values.reshape(len(values), -1), ((0, 0), (1, 0)), constant_values=((0, 0), (kind, 0))).tobytes()


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
