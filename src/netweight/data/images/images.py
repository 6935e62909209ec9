"""`Images`: a labelled image data set as plain tensors, and the way from pixels to what a model sees and back.

Every loader of `netweight.data.images` returns one; `netweight.methods.federate.partition` splits it among clients.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import final

import torch
from torch import Tensor

from netweight.core.digest import of_config, of_tensor
from netweight.errors import UsageError

# Mean and standard deviation of MNIST's pixels, with which HyperFL normalizes Fashion-MNIST and EMNIST too.
MNIST_MEAN_STD = ((0.1307,), (0.3081,))

_BLOCK = 8192  # images converted to floating point at a time when statistics are taken


@final
@dataclass(frozen=True)
class Images:
    """A labelled image data set."""

    name: str  # for example "fashion-mnist"; a stand-in says so in its name, as "cifar10-jpeg" does
    # Images, uint8 of shape `(n, channels, height, width)`, and their labels, int64 of shape `(n,)`.
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: tuple[str, ...]  # name of each class; labels count from 0
    _: KW_ONLY
    # Who wrote each train and each test image, int64 of shape `(n,)`, where that is known.
    writers: tuple[Tensor, Tensor] | None = None
    mean: tuple[float, ...]  # per channel, of pixels in [0, 1]: what `normalized` takes away
    std: tuple[float, ...]  # per channel, of pixels in [0, 1]: what `normalized` divides by
    digest: str = ""  # digest of all images, labels and writers; made when it is not given

    def __post_init__(self) -> None:
        """Check the parts and take the digest."""
        for part, (pixels, labels) in (("train", self.train), ("test", self.test)):
            self._check(part, pixels, labels)
        if self.train[0].shape[1:] != self.test[0].shape[1:]:
            shapes = " and ".join(str(tuple(pixels.shape[1:])) for pixels, _ in (self.train, self.test))
            raise UsageError(f"The train and test images of {self.name} have shapes {shapes}.", cure="Resize them.")
        if not len(self.mean) == len(self.std) == self.shape[0] or min(self.std) <= 0:
            raise UsageError(
                f"{self.name} has {self.shape[0]} channels; mean {self.mean} and std {self.std} do not fit.",
                cure="Give one mean and one positive std per channel.",
            )
        if self.writers is not None and [len(part) for part in self.writers] != [len(self.train[1]), len(self.test[1])]:
            raise UsageError(f"The writers of {self.name} are not as many as its images.", cure="Give one per image.")
        if not self.digest:
            tensors = (*self.train, *self.test, *(self.writers or ()))
            object.__setattr__(self, "digest", of_config([[list(t.shape), of_tensor(t)] for t in tensors]))

    def _check(self, part: str, pixels: Tensor, labels: Tensor) -> None:
        """Check one split's dtypes, shapes and labels."""
        where = f"The {part} split of {self.name}"
        if pixels.dtype != torch.uint8 or pixels.ndim != 4:
            raise UsageError(
                f"{where} has images of {pixels.dtype} and shape {tuple(pixels.shape)}.",
                cure="Give uint8 of shape (n, channels, height, width).",
            )
        if labels.dtype != torch.int64 or labels.shape != pixels.shape[:1]:
            raise UsageError(
                f"{where} has labels of {labels.dtype} and shape {tuple(labels.shape)} for {len(pixels)} images.",
                cure="Give int64 of shape (n,).",
            )
        if not len(labels):
            raise UsageError(f"{where} is empty.", cure="Give at least one image.")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= len(self.classes):
            raise UsageError(
                f"{where} has labels from {low} to {high} and there are {len(self.classes)} classes.",
                cure="Count labels from 0, and name every class.",
            )

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.train[0].shape[1:]
        return channels, height, width

    @property
    def black(self) -> Tensor:
        """What black is once normalized, float32 of shape `(channels, 1, 1)`: what `crop_and_flip` pads with."""
        return self.normalized(torch.zeros(1, self.shape[0], 1, 1, dtype=torch.uint8))[0]

    def normalized(self, pixels: Tensor) -> Tensor:
        """Return what a model sees of some images: `(pixels / 255 − mean) / std`, float32, same shape."""
        mean, std = self._channel(self.mean, pixels), self._channel(self.std, pixels)
        return pixels.to(torch.float32).div_(255).sub_(mean).div_(std)

    def pixels(self, inputs: Tensor) -> Tensor:
        """Return the images in [0, 1] behind normalized inputs: the inverse of `normalized`, differentiable."""
        return inputs * self._channel(self.std, inputs) + self._channel(self.mean, inputs)

    @staticmethod
    def _channel(values: tuple[float, ...], like: Tensor) -> Tensor:
        dtype = like.dtype if like.is_floating_point() else torch.float32
        return torch.tensor(values, dtype=dtype, device=like.device).view(-1, 1, 1)


def measured_mean_std(pixels: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure mean and standard deviation per channel of pixels in [0, 1], rounded to four places."""
    count = pixels.numel() / pixels.shape[1]
    total = torch.zeros(2, pixels.shape[1], dtype=torch.float64)
    for block in torch.split(pixels, _BLOCK):
        values = block.double().div_(255)
        total += torch.stack([values.sum((0, 2, 3)), values.square().sum((0, 2, 3))])
    mean, square = total / count
    deviation = (square - mean.square()).clamp_min(0).sqrt()
    rounded = [round(value, 4) for value in deviation.tolist()]
    return tuple(round(value, 4) for value in mean.tolist()), tuple(value or 1.0 for value in rounded)
