"""ResNet-20 for 32 × 32 images, with the published weights of a network that was trained on CIFAR-10.

Used as a frozen backbone where nothing larger is at hand; `netweight.zoo.adapted_resnet` puts adapters into it.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from pathlib import Path
from typing import cast, final

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netweight.errors import MissingExtra, UsageError

__all__ = ["IMAGENET_MEAN_STD", "CifarResNet20", "cifar_resnet20"]

IMAGENET_MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
"""Mean and deviation of ImageNet's pixels, by which the images of this network and of most others are normalized."""
_FILE = "cifar10_resnet20.safetensors"


@final
class _Block(nn.Module):
    """Two convolutions and a shortcut that skips pixels and adds empty channels where the shape changes."""

    def __init__(self, channels: int, planes: int) -> None:
        super().__init__()
        self.stride = 1 if channels == planes else 2
        self.conv1 = nn.Conv2d(channels, planes, 3, self.stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)

    def forward(self, maps: Tensor) -> Tensor:
        inner = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(maps)))))
        if self.stride == 2:
            added = inner.shape[1] - maps.shape[1]
            maps = F.pad(maps[:, :, ::2, ::2], (0, 0, 0, 0, added // 2, added - added // 2))
        return F.relu(inner + maps)


@final
class CifarResNet20(nn.Module):
    """ResNet-20 with three stages of 16, 32 and 64 channels, and parameter-free shortcuts.

    Source: He et al., arXiv 1512.03385, section 4.2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(_Block(channels, planes), _Block(planes, planes), _Block(planes, planes))
            for channels, planes in ((16, 16), (16, 32), (32, 64))
        )
        self.linear = nn.Linear(64, 10)

    @property
    def stem(self) -> nn.Sequential:
        """What comes before the first stage."""
        return nn.Sequential(OrderedDict(conv1=self.conv1, bn1=self.bn1, relu=nn.ReLU()))

    def forward(self, images: Tensor) -> Tensor:
        """Return scores, shape `(n, 10)`, of images normalized as ImageNet's, shape `(n, 3, height, width)`."""
        maps = self.layer3(self.layer2(self.layer1(self.stem(images))))
        return cast(Tensor, self.linear(maps.mean((2, 3))))


def cifar_resnet20(weights: str | Path | None = None) -> CifarResNet20:
    """Load the trained network, in evaluation mode.

    Args:
        weights: A safetensors file; by default cifar10_resnet20.safetensors in `NETWEIGHT_DATA`/weights.

    Returns:
        A network that was trained on lossless CIFAR-10, where its author reports an error of 8.27 %; on JPEG copies of
        the 10,000 test images its accuracy is 81.03 %.

    Raises:
        MissingExtra: No file was named, and `NETWEIGHT_DATA` holds none.
        UsageError: The file is not one of this network.

    Source: Yerlan Idelbayev's ResNet implementation for CIFAR-10 in PyTorch, 2018; BSD license.
    """
    root = os.environ.get("NETWEIGHT_DATA")
    file = Path(weights) if weights is not None else Path(root or "") / "weights" / _FILE
    if weights is None and not (root and file.is_file()):
        raise MissingExtra(
            f"The trained ResNet-20 is not at hand: NETWEIGHT_DATA holds no weights/{_FILE}.",
            cure="Set it to a folder that does, or name a file of weights.",
        )
    network = CifarResNet20()
    try:
        network.load_state_dict(_with_counts(safetensors.torch.load_file(file), network))
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise UsageError(f"{file} holds no ResNet-20 for CIFAR-10: {error}", cure="Name another file.") from error
    return network.eval()


def _with_counts(tensors: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Add the counts of batches seen, which files of older releases of torch do not hold and inference does not use."""
    counts = {name: value for name, value in network.state_dict().items() if name.endswith("num_batches_tracked")}
    return {**{name: torch.zeros_like(value) for name, value in counts.items()}, **tensors}
