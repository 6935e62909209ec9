"""LPIPS, the perceptual distance of Zhang et al. 2018, on a backbone that the user brings. Audits of images call it.

The distance compares features of an AlexNet or VGG-16 trained on ImageNet. Those weights are not part of this library;
without them there is no LPIPS, and no other number is given in its place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from netweight.errors import MissingExtra, UnsafeInput, UsageError
from netweight.metrics.images import checked_pair

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Features", "lpips"]

Features: TypeAlias = "Callable[[Tensor], Sequence[Tensor]]"
"""Feature maps, shape `(n, channels, h, w)` each, of images `(n, 3, h, w)` scaled by ImageNet's means."""

# Channel means and deviations of ImageNet, for images within -1 and 1.
_SHIFT, _SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)
_LEAST_SIDE = 64  # AlexNet's strides leave nothing of smaller images

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

    Args:
        images: Shape `(n, c, h, w)`, c 1 or 3, within 0 and 1. Images with a side below 64 pixels are enlarged
            bilinearly to 64; gray ones are repeated in three channels.
        references: The same shape.
        backbone: A file with the convolutions of torchvision's AlexNet or VGG-16 (`features.0.weight` and so on;
            .safetensors, or .pth as published, which is read without running code), or a function to feature maps.
        heads: A .safetensors file with the heads, `alex.lin0.model.1.weight` and so on; by default
            `weights/lpips_v01_heads.safetensors` in the folder that NETWEIGHT_DATA names.

    Returns:
        Shape `(n,)`; 0 where the images are equal, larger for less alike.

    Raises:
        UsageError: Shapes differ, values are not finite, or the backbone is neither AlexNet nor VGG-16.
        UnsafeInput: The backbone's file would run code when read.
        MissingExtra: There are no heads.

    Source: Zhang et al. 2018, "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", equation 1.
    """
    import torch

    features = backbone if callable(backbone) else _network(_weights(Path(backbone)), str(backbone))
    pair = checked_pair(images, references)
    with torch.no_grad():
        maps, wanted = (features(_scaled(batch.float())) for batch in pair)
        weights = _heads(heads, tuple(part.shape[1] for part in maps))
        distances = [
            ((_unit(a) - _unit(b)).square() * weight.to(a)).sum(1).mean((1, 2))
            for a, b, weight in zip(maps, wanted, weights, strict=True)
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
    known: dict[tuple[int, ...], tuple[tuple[_Stage, ...], int]]
    known = {(64, 3, 11, 11): (_ALEX, 3), (64, 3, 3, 3): (_VGG, 2)}
    stages, window = known.get(tuple(first.shape) if first is not None else (), ((), 0))
    needed = {f"features.{conv[0]}.{kind}" for _, convs in stages for conv in convs for kind in ("weight", "bias")}
    if not stages or not needed <= weights.keys():
        raise UsageError(
            f"{where} holds the convolutions of neither AlexNet nor VGG-16.",
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

    if not path.is_file():
        raise UsageError(f"There is no backbone {path}.", cure="Give the file of an AlexNet or VGG-16.")
    try:
        found = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise UnsafeInput(f"{path} holds more than tensors and was not opened.", cure="Save its state dict.") from error
    except SafetensorError as error:
        raise UsageError(f"{path} is no .safetensors file: {error}.") from error
    return {name: value for name, value in dict(found).items() if isinstance(value, torch.Tensor)}


def _heads(path: Path | None, channels: tuple[int, ...]) -> list[Tensor]:
    """The weights of the heads that belong to feature maps of these channels, shape `(1, channels, 1, 1)` each."""
    network = next((name for name, known in _CHANNELS.items() if known == channels), None)
    if network is None:
        raise UsageError(f"There are no LPIPS heads for feature maps of {channels} channels.")
    data = os.environ.get("NETWEIGHT_DATA")
    file = path or (Path(data) / "weights" / "lpips_v01_heads.safetensors" if data else None)
    if file is None or not file.is_file():
        raise MissingExtra(
            f"LPIPS needs its heads, and {file or 'no file'} holds them.",
            cure="Give their file, or set NETWEIGHT_DATA to the folder that holds weights/lpips_v01_heads.safetensors.",
        )
    weights = _weights(file)
    names = [f"{network}.lin{number}.model.1.weight" for number in range(len(channels))]
    missing = [name for name in names if name not in weights]
    if missing:
        raise UsageError(f"{file} does not hold {missing[0]!r}.", cure="Give the heads of LPIPS version 0.1.")
    return [weights[name] for name in names]
