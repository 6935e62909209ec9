"""HyperFL-LPM's ResNets: a frozen, pre-trained network with a trainable adapter after each of its stages.

Both functions return `(body, head)` for a `FedTask`; of the body the adapters alone require gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast, final

import torch
from torch import Tensor, nn

from netweight.zoo.adapters import AdaptedBody, ConvAdapter, MeanStd, Renormalize, freeze, pretrained
from netweight.zoo.cifar_resnet import cifar_resnet20
from netweight.zoo.data.cifar10 import CIFAR_MEAN_STD

__all__ = ["AdaptedResNet", "adapted_resnet", "adapted_resnet20"]


@final
class AdaptedResNet(AdaptedBody):
    """A ResNet with an adapter after each stage; its outputs are the last maps' means.

    Args:
        inputs: Fits images to the network.
        stem: What comes before the first stage.
        stages: The stages.
        planes: Channels that each stage puts out.
    """

    def __init__(self, inputs: nn.Module, stem: nn.Module, stages: Iterable[nn.Module], planes: Sequence[int]) -> None:
        super().__init__()
        self.inputs = inputs
        self.stem = freeze(stem)
        self.stages = nn.ModuleList(freeze(stage) for stage in stages)
        self.adapters = nn.ModuleList(ConvAdapter(count) for count in planes)
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        """Return features, shape `(n, planes of the last stage)`, of normalized images."""
        maps = self.stem(self.inputs(images))
        for stage, adapter in zip(self.stages, self.adapters, strict=True):
            maps = adapter(stage(maps))
        return torch.mean(maps, (2, 3))

    @torch.no_grad()
    def calibrate(self, images: Tensor) -> None:
        """Let the adapters begin as the identity, on the average over some images.

        Args:
            images: Normalized, shape `(n, channels, height, width)`, a hundred or more. What is kept of them, mean and
                variance of each channel after each stage, is a constant that all clients hold: use public images.
        """
        maps = self.stem(self.inputs(images))
        for stage, adapter in zip(self.stages, self.adapters, strict=True):
            maps = stage(maps)
            cast(ConvAdapter, adapter).calibrate(maps)


def adapted_resnet20(
    classes: int = 10,
    *,
    weights: str | Path | None = None,
    normalized_by: MeanStd = CIFAR_MEAN_STD,
    calibration: Tensor | None = None,
    seed: int = 0,
) -> tuple[AdaptedResNet, nn.Linear]:
    """Return the ResNet-20 that was trained on CIFAR-10, frozen, with three adapters, and a classifier.

    A stand-in for the paper's ResNet-18 that was trained on ImageNet: it is smaller, and it has seen the classes of
    CIFAR-10 before.

    Args:
        classes: Classes of the classifier.
        weights: The network's safetensors file; by default in `NETWEIGHT_DATA`/weights.
        normalized_by: Mean and deviation of the images that come in (`images.mean, images.std`); gray ones may come.
        calibration: Public images, normalized, for `AdaptedResNet.calibrate`; None leaves the adapters' norms as they
            are, which hides from later stages the scale of what they were trained on.
        seed: Decides on the classifier's weights.

    Returns:
        The body (64 features) and the head.

    Raises:
        MissingExtra: The weights are not at hand.
        UsageError: They are of another network.
    """
    network = cifar_resnet20(weights)
    stages = (network.layer1, network.layer2, network.layer3)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Linear(64, classes)
    return _calibrated(AdaptedResNet(Renormalize(normalized_by), network.stem, stages, (16, 32, 64)), calibration), head


def adapted_resnet(
    source: str | Path, classes: int, *, normalized_by: MeanStd, calibration: Tensor | None = None, seed: int = 0
) -> tuple[AdaptedResNet, nn.Linear]:
    """Return a ResNet of transformers, frozen, with an adapter after each stage, and a classifier.

    Args:
        source: A model folder, or an id on the hub: "microsoft/resnet-18" is the paper's architecture and training set.
        classes: Classes of the classifier.
        normalized_by: Mean and deviation of the images that come in (`images.mean, images.std`), which keep their size
            as in the paper; gray ones may come.
        calibration: Public images, normalized, for `AdaptedResNet.calibrate`; None leaves the adapters' norms as they
            are, which hides from later stages the scale of what they were trained on.
        seed: Decides on the classifier's weights.

    Returns:
        The body (as many features as the last stage has channels) and the head.

    Raises:
        MissingExtra: transformers is not installed.
        UsageError: The model cannot be loaded, or is no ResNet.

    Source: HyperFL (arXiv 2412.07187). Its code puts a random layer that is never trained between body and classifier,
    and never loads the adapters that it generates; neither is done here.
    """
    network, wanted = pretrained("ResNetModel", source)
    planes = network.config.hidden_sizes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Linear(planes[-1], classes)
    body = AdaptedResNet(Renormalize(normalized_by, wanted), network.embedder, network.encoder.stages, planes)
    return _calibrated(body, calibration), head


def _calibrated(body: AdaptedResNet, images: Tensor | None) -> AdaptedResNet:
    if images is not None:
        body.calibrate(images)
    return body
