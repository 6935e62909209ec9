"""Small trainable adapters for frozen backbones, as HyperFL-LPM generates them, and what keeps a backbone frozen.

`netweight.zoo.adapted_resnet` and `netweight.zoo.adapted_vit` put them into networks.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any, Self, cast, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netweight.errors import MissingExtra, UsageError
from netweight.integrations.quiet import silent_bars
from netweight.zoo.cifar_resnet import IMAGENET_MEAN_STD

__all__ = ["AdaptedBody", "BottleneckAdapter", "ConvAdapter", "MeanStd", "Renormalize", "freeze", "pretrained"]

MeanStd = tuple[tuple[float, ...], tuple[float, ...]]
"""Mean and deviation per channel, of pixels in [0, 1]."""


class AdaptedBody(nn.Module):
    """A feature extractor of frozen parts and adapters, in which adapters alone are ever in training mode.

    Frozen batch normalization therefore uses its own trained statistics always, and frozen dropout never drops.
    Subclasses hold the parts.
    """

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the adapters; everything else stays in evaluation mode."""
        super().train(False)
        for module in self.modules():
            if isinstance(module, ConvAdapter | BottleneckAdapter):
                module.train(mode)
        self.training = mode
        return self


@final
class _ScaledNorm(nn.BatchNorm2d):
    """Batch normalization whose learned scale and shift are kept as deviations from fixed ones: 1 and 0 at first.

    Generated values are small numbers around 0; as a scale they would silence the maps, as a deviation they do not.
    """

    fixed_scale: Tensor
    fixed_shift: Tensor

    def __init__(self, planes: int) -> None:
        super().__init__(planes, affine=False)
        self.scale = nn.Parameter(torch.zeros(planes))
        self.shift = nn.Parameter(torch.zeros(planes))
        self.register_buffer("fixed_scale", torch.ones(planes))
        self.register_buffer("fixed_shift", torch.zeros(planes))

    def forward(self, input: Tensor) -> Tensor:
        scale, shift = self.fixed_scale * (1 + self.scale), self.fixed_shift + self.shift
        return super().forward(input) * scale.view(-1, 1, 1) + shift.view(-1, 1, 1)

    @torch.no_grad()
    def expect(self, maps: Tensor) -> None:
        """Take the statistics of some maps as the running ones."""
        assert self.running_mean is not None
        assert self.running_var is not None
        self.running_mean.copy_(maps.mean((0, 2, 3)))
        self.running_var.copy_(maps.var((0, 2, 3)))


@final
class ConvAdapter(nn.Module):
    """`BN(x + Conv1x1(BN(x)))` for maps of `planes` channels; both norms learn a scale and a shift per channel.

    In training mode it normalizes by the batch and keeps running statistics, in evaluation mode by these; they are
    buffers, so that a client keeps its own. The convolution begins at 0. The first norm's shift acts in evaluation mode
    alone: in training mode the second norm takes away whatever it adds.

    Source: HyperFL (arXiv 2412.07187), HyperFL-LPM for ResNet.
    """

    def __init__(self, planes: int) -> None:
        super().__init__()
        self.before = _ScaledNorm(planes)
        self.conv = nn.Conv2d(planes, planes, 1, bias=False)
        self.after = _ScaledNorm(planes)
        nn.init.zeros_(self.conv.weight)

    def forward(self, maps: Tensor) -> Tensor:
        """Return the adapted maps, same shape: `(n, planes, height, width)`."""
        return cast(Tensor, self.after(maps + self.conv(self.before(maps))))

    @torch.no_grad()
    def calibrate(self, maps: Tensor) -> None:
        """Make maps like these come out as they go in, while nothing is learned yet."""
        for norm in (self.before, self.after):
            norm.expect(maps)
        self.after.fixed_scale.copy_((maps.var((0, 2, 3)) + self.after.eps).sqrt())
        self.after.fixed_shift.copy_(maps.mean((0, 2, 3)))


@final
class BottleneckAdapter(nn.Module):
    """`x + LayerNorm(up(ReLU(down(x))))` for tokens of `width` features, through a bottleneck.

    The norm's scale begins at 0, so that a backbone begins as it was trained.

    Source: HyperFL (arXiv 2412.07187), HyperFL-LPM for ViT: a bottleneck of 24.
    """

    def __init__(self, width: int, bottleneck: int = 24) -> None:
        super().__init__()
        self.down = nn.Linear(width, bottleneck)
        self.up = nn.Linear(bottleneck, width)
        self.norm = nn.LayerNorm(width)
        nn.init.zeros_(self.norm.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the adapted tokens, same shape: `(…, width)`."""
        return tokens + cast(Tensor, self.norm(self.up(F.relu(self.down(tokens)))))


@final
class Renormalize(nn.Module):
    """Turns images normalized for our data into images normalized for a backbone, and gray ones into color.

    Args:
        given: Mean and deviation that the images were normalized by.
        wanted: Those that the backbone was trained with.
        size: Height and width to resize to (bilinear); None keeps the images' own.

    Raises:
        UsageError: The channels do not fit.
    """

    scale: Tensor
    shift: Tensor

    def __init__(
        self, given: MeanStd, wanted: MeanStd = IMAGENET_MEAN_STD, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        if len(given[0]) not in (1, len(wanted[0])):
            raise UsageError(
                f"Images of {len(given[0])} channels do not fit a backbone of {len(wanted[0])}.",
                cure="Give gray images, or as many channels.",
            )
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in given)
        wanted_mean, wanted_std = (torch.tensor(values).view(-1, 1, 1) for values in wanted)
        self.register_buffer("scale", std / wanted_std)
        self.register_buffer("shift", (mean - wanted_mean) / wanted_std)
        self.size = size

    def forward(self, images: Tensor) -> Tensor:
        """Return the images as the backbone wants them, shape `(n, channels, height, width)`."""
        images = images * self.scale + self.shift
        if self.size is None or tuple(images.shape[-2:]) == self.size:
            return images
        return F.interpolate(images, size=self.size, mode="bilinear", align_corners=False)


def freeze(module: nn.Module) -> nn.Module:
    """Exclude all parameters of a module from training, and return it in evaluation mode."""
    return module.requires_grad_(False).eval()


def pretrained(kind: str, source: str | Path, **options: Any) -> tuple[Any, MeanStd]:
    """Load a backbone of transformers and the normalization that its folder states.

    Args:
        kind: Name of its class, such as "ResNetModel".
        source: A model folder, or an id on the Hugging Face hub. The weights of a folder that `netweight compress` made
            stay compressed in memory.
        options: Of its constructor.

    Returns:
        The frozen model in fp32, and mean and deviation; ImageNet's where the folder states none.

    Raises:
        MissingExtra: transformers is not installed.
        UsageError: The model cannot be loaded, or is of another architecture.
    """
    try:
        import transformers
        from transformers.utils.hub import cached_file
    except ImportError as error:
        raise MissingExtra(
            f"A {kind} needs transformers, which is not installed.", cure='Run: pip install "netweight[llm]"'
        ) from error
    importlib.import_module("netweight.integrations.transformers")  # so that compressed folders open too
    architecture = getattr(transformers, kind)
    try:
        with silent_bars():
            found = transformers.AutoConfig.from_pretrained(source)
            if not isinstance(found, architecture.config_class):
                raise UsageError(f"{source} is a {found.model_type}, no {kind}.", cure="Name another model.")
            model = architecture.from_pretrained(source, dtype=torch.float32, **options)
            stated = cached_file(source, "preprocessor_config.json", _raise_exceptions_for_missing_entries=False)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"The backbone {source} cannot be loaded: {error}", cure="Name a model folder, or an id on the hub."
        ) from error
    about = json.loads(Path(stated).read_text(encoding="utf-8")) if stated else {}
    mean, std = (
        tuple(about.get(f"image_{key}", own)) for key, own in zip(("mean", "std"), IMAGENET_MEAN_STD, strict=True)
    )
    return freeze(model), (mean, std)
