"""ResNet-20 for 32 × 32 images, with the published weights of a network that was trained on CIFAR-10.

Used as a frozen backbone where nothing larger is at hand; `adapted_resnet20` puts adapters into it.
"""

from __future__ import annotations

import importlib
import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self, cast, final

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netweight.core.lazy import extra
from netweight.core.progress import silent_bars
from netweight.data.images.public import CIFAR_MEAN_STD
from netweight.errors import MissingExtra, UsageError

# Mean and deviation of ImageNet's pixels, by which the images of this network and of most others are normalized.
IMAGENET_MEAN_STD = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_FILE = "cifar10_resnet20.safetensors"


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
    """ResNet-20 with three stages of 16, 32 and 64 channels, and parameter-free shortcuts."""

    # Source: He et al., arXiv 1512.03385, section 4.2.

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
        """Layers before the first stage."""
        return nn.Sequential(OrderedDict(conv1=self.conv1, bn1=self.bn1, relu=nn.ReLU()))

    def forward(self, images: Tensor) -> Tensor:
        """Return scores, shape `(n, 10)`, of images normalized as ImageNet's, shape `(n, 3, height, width)`."""
        maps = self.layer3(self.layer2(self.layer1(self.stem(images))))
        return cast(Tensor, self.linear(maps.mean((2, 3))))


def cifar_resnet20(weights: str | Path | None = None) -> CifarResNet20:
    """Load the trained network, in evaluation mode.

    Source: Yerlan Idelbayev's ResNet implementation for CIFAR-10 in PyTorch, 2018; BSD license.
    """
    root = os.environ.get("NETWEIGHT_DATA")
    file = Path(weights) if weights is not None else Path(root or "") / "weights" / _FILE
    if weights is None and not (root and file.is_file()):
        raise MissingExtra(
            f"The trained ResNet-20 is missing: NETWEIGHT_DATA contains no weights/{_FILE}.",
            cure=f"Set it to a folder that contains weights/{_FILE}, or name a file of weights.",
        )
    network = CifarResNet20()
    try:
        network.load_state_dict(_with_counts(safetensors.torch.load_file(file), network))
    except (OSError, RuntimeError, safetensors.SafetensorError) as error:
        raise UsageError(f"{file} contains no ResNet-20 for CIFAR-10: {error}", cure="Name another file.") from error
    return network.eval()


def _with_counts(tensors: dict[str, Tensor], network: nn.Module) -> dict[str, Tensor]:
    """Add the counts of batches seen, which files of older releases of torch do not hold and inference does not use."""
    counts = {name: value for name, value in network.state_dict().items() if name.endswith("num_batches_tracked")}
    return {**{name: torch.zeros_like(value) for name, value in counts.items()}, **tensors}


# Mean and deviation per channel, of pixels in [0, 1].
MeanStd = tuple[tuple[float, ...], tuple[float, ...]]


class AdaptedBody(nn.Module):
    """A feature extractor of frozen parts and adapters, in which adapters alone are ever in training mode."""

    # Frozen batch normalization therefore uses its own trained statistics always, and frozen dropout never drops.
    # Subclasses hold the parts.

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the adapters; everything else stays in evaluation mode."""
        super().train(False)
        for module in self.modules():
            if isinstance(module, ConvAdapter | BottleneckAdapter):
                module.train(mode)
        self.training = mode
        return self


class _ScaledNorm(nn.BatchNorm2d):
    """Batch normalization whose learned scale and shift are kept as deviations from fixed ones: 1 and 0 at first."""

    # Generated values are small numbers around 0; as a scale they would silence the maps, as a deviation they do not.

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
    """`BN(x + Conv1x1(BN(x)))` for maps of `planes` channels; both norms learn a scale and a shift per channel."""

    # In training mode it normalizes by the batch and keeps running statistics, in evaluation mode by these; they are
    # buffers, so that a client keeps its own. The convolution begins at 0. The first norm's shift acts in evaluation
    # mode alone: in training mode the second norm takes away whatever it adds.
    # Source: HyperFL (arXiv 2412.07187), HyperFL-LPM for ResNet.

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
        """Initialize layers so that maps like these pass unchanged before training."""
        for norm in (self.before, self.after):
            norm.expect(maps)
        self.after.fixed_scale.copy_((maps.var((0, 2, 3)) + self.after.eps).sqrt())
        self.after.fixed_shift.copy_(maps.mean((0, 2, 3)))


@final
class BottleneckAdapter(nn.Module):
    """`x + LayerNorm(up(ReLU(down(x))))` for tokens of `width` features, through a bottleneck."""

    # The norm's scale begins at 0, so that a backbone begins as it was trained.
    # Source: HyperFL (arXiv 2412.07187), HyperFL-LPM for ViT: a bottleneck of 24.

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
    """Turns images normalized for our data into images normalized for a backbone, and gray ones into color."""

    scale: Tensor
    shift: Tensor

    def __init__(
        self, given: MeanStd, expected: MeanStd = IMAGENET_MEAN_STD, size: tuple[int, int] | None = None
    ) -> None:
        super().__init__()
        if len(given[0]) not in (1, len(expected[0])):
            raise UsageError(
                f"Images of {len(given[0])} channels do not fit a backbone of {len(expected[0])}.",
                cure="Give gray images, or as many channels.",
            )
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in given)
        wanted_mean, wanted_std = (torch.tensor(values).view(-1, 1, 1) for values in expected)
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
    """Load a backbone of transformers and the normalization that its folder states."""
    with extra("llm", f"A {kind} needs transformers"):
        import transformers
        from transformers.utils.hub import cached_file
    # This import lets transformers open compressed folders.
    importlib.import_module("netweight.plugins.transformers")
    architecture = getattr(transformers, kind)
    try:
        with silent_bars():
            config = transformers.AutoConfig.from_pretrained(source)
            if not isinstance(config, architecture.config_class):
                raise UsageError(f"{source} is a {config.model_type}, not a {kind}.", cure="Name another model.")
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


@final
class AdaptedResNet(AdaptedBody):
    """A ResNet with an adapter after each stage; its outputs are the last maps' means."""

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
        """Let the adapters begin as the identity, on the average over some images."""
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
    """Return the ResNet-20 that was trained on CIFAR-10, frozen, with three adapters, and a classifier."""
    # A stand-in for the paper's ResNet-18 that was trained on ImageNet: it is smaller, and it has seen the classes of
    # CIFAR-10 before.
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

    Source: HyperFL (arXiv 2412.07187). Its code puts a random layer that is never trained between body and classifier,
    and never loads the adapters that it generates; neither is done here.
    """
    network, mean_std = pretrained("ResNetModel", source)
    planes = network.config.hidden_sizes
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        head = nn.Linear(planes[-1], classes)
    body = AdaptedResNet(Renormalize(normalized_by, mean_std), network.embedder, network.encoder.stages, planes)
    return _calibrated(body, calibration), head


def _calibrated(body: AdaptedResNet, images: Tensor | None) -> AdaptedResNet:
    if images is not None:
        body.calibrate(images)
    return body


class _AdaptedMLP(nn.Module):
    """A layer's frozen MLP, then its adapter, before the layer adds both to its stream."""

    def __init__(self, mlp: nn.Module, width: int) -> None:
        super().__init__()
        self.mlp = mlp
        self.adapter = BottleneckAdapter(width)

    def forward(self, tokens: Tensor) -> Tensor:
        return cast(Tensor, self.adapter(self.mlp(tokens)))


@final
class AdaptedViT(AdaptedBody):
    """A ViT with an adapter after each MLP; its outputs are the first token's states."""

    def __init__(self, inputs: nn.Module, vit: Any) -> None:
        super().__init__()
        self.inputs = inputs
        for layer in vit.layers:
            layer.mlp = _AdaptedMLP(layer.mlp, vit.config.hidden_size)
        self.vit = vit
        self.train()

    def forward(self, images: Tensor) -> Tensor:
        """Return features, shape `(n, hidden size)`, of normalized images."""
        return cast(Tensor, self.vit(self.inputs(images)).last_hidden_state[:, 0])


def adapted_vit(
    source: str | Path, classes: int, *, normalized_by: MeanStd, seed: int = 0
) -> tuple[AdaptedViT, nn.Linear]:
    """Return a vision transformer, frozen, with an adapter after each MLP, and a classifier.

    Source: HyperFL (arXiv 2412.07187). Fused attention cannot be batched over clients by vmap.
    """
    vit, mean_std = pretrained("ViTModel", source, add_pooling_layer=False, attn_implementation="eager")
    size = vit.config.image_size
    size = (size, size) if isinstance(size, int) else tuple(size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AdaptedViT(Renormalize(normalized_by, mean_std, size), vit), nn.Linear(vit.config.hidden_size, classes)
