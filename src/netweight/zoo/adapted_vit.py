"""HyperFL-LPM's vision transformer: a frozen, pre-trained ViT with a trainable adapter after each MLP."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from netweight.zoo.adapters import AdaptedBody, BottleneckAdapter, MeanStd, Renormalize, pretrained

__all__ = ["AdaptedViT", "adapted_vit"]


@final
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
    """A ViT with an adapter after each MLP; its outputs are the first token's states.

    Args:
        inputs: Fits images to the network.
        vit: A frozen `ViTModel` of transformers, without pooling; its MLPs are wrapped in place.
    """

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

    Args:
        source: A model folder of a `ViTModel`, or an id on the hub. The paper uses a ViT-small of timm at 384 pixels.
        classes: Classes of the classifier.
        normalized_by: Mean and deviation of the images that come in (`images.mean, images.std`); they are resized to
            the size that the model was trained with. Gray ones may come.
        seed: Decides on the adapters' and the classifier's weights.

    Returns:
        The body (as many features as the model's hidden size) and the head.

    Raises:
        MissingExtra: transformers is not installed.
        UsageError: The model cannot be loaded, or is no ViT.

    Source: HyperFL (arXiv 2412.07187).
    """
    # Fused attention cannot be batched over clients by vmap.
    vit, wanted = pretrained("ViTModel", source, add_pooling_layer=False, attn_implementation="eager")
    size = vit.config.image_size
    size = (size, size) if isinstance(size, int) else tuple(size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AdaptedViT(Renormalize(normalized_by, wanted, size), vit), nn.Linear(vit.config.hidden_size, classes)
