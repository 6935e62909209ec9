"""The convolutional networks of HyperFL's experiments."""

from __future__ import annotations

from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netweight.errors import UsageError

# Height and width of the images that the network was made for, in pixels.
SMALL_CNN_SIZES = (28, 32)


@final
class SmallCNN(nn.Module):
    """The feature extractor: two convolutions for 28 × 28 images, three for 32 × 32, and a layer of 128 features."""

    # Source: HyperFL (arXiv 2412.07187), the networks for EMNIST and Fashion-MNIST, and for CIFAR-10 and CINIC-10.
    # `size`: height and width of an image, 28 or 32

    def __init__(self, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        if size not in SMALL_CNN_SIZES:
            raise UsageError(f"The small CNN takes images of 28 or 32 pixels, not {size}.", cure="Resize the images.")
        self.conv1 = nn.Conv2d(channels, 16, 5)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1) if size == 32 else None
        self.fc1 = nn.Linear(800 if size == 28 else 576, 128)

    def forward(self, images: Tensor) -> Tensor:
        """Return features, shape `(n, 128)`, of images, shape `(n, channels, size, size)`."""
        maps = images
        for convolution in (self.conv1, self.conv2, self.conv3):
            if convolution is not None:
                # Pooling first gives the same values, since leaky ReLU is monotone, for a quarter of the work.
                maps = F.leaky_relu(F.max_pool2d(convolution(maps), 2))
        return F.leaky_relu(self.fc1(maps.flatten(1)))


def small_cnn(channels: int = 1, size: int = 28, classes: int = 10, *, seed: int = 0) -> tuple[SmallCNN, nn.Linear]:
    """Return the feature extractor and its classifier with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallCNN(channels, size), nn.Linear(128, classes)
