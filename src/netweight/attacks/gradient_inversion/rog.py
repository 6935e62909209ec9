"""ROG, stage 1: images searched as a coarse latent and enlarged, then polished by a network if the user has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias, final

import torch.nn.functional as F
from torch import Tensor, nn

from netweight.attacks.gradient_inversion.client import (
    LocalUpdate,
    Reconstruction,
    Tensors,
    chosen_tensors,
    sgd_difference,
)
from netweight.attacks.gradient_inversion.matching import descend, relative_distance, starting_points
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError

# Images, shape `(n, c, h, w)`, to better ones of the same shape: the trained network of stage 2, which users bring.
PostProcessing: TypeAlias = Callable[[Tensor], Tensor]


@final
@dataclass(frozen=True)
class ROGConfig:
    """How ROG searches.

    Attributes:
        steps: Steps of Adam per restart.
        lr: Its learning rate; lowered to a tenth along a cosine.
        factor: How much coarser than the images the latent is, in each direction.
        restarts: Starting points; the one with the least objective is kept.

    Raises:
        UsageError: A number is not positive.
    """

    steps: int = 100
    lr: float = 0.05
    factor: int = 4
    restarts: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if min(self.steps, self.factor, self.restarts) < 1 or self.lr <= 0:
            raise UsageError(f"ROG cannot run with {self}.", cure="All numbers are positive.")


def rog_client(model: nn.Module) -> LocalUpdate:
    """Return the client that ROG's authors attack: 5 local steps of SGD at rate 0.003, on batches of 16."""
    return sgd_difference(model, lr=0.003, steps=5, batch_size=16)


def rog(
    local_update: LocalUpdate,
    params: Tensors,
    observed: Tensors,
    *,
    shape: tuple[int, ...],
    labels: Tensor,
    config: ROGConfig | None = None,
    post_processing: PostProcessing | None = None,
    seed: int,
    progress: Progress = QUIET,
) -> Reconstruction:
    """Search a coarse latent whose enlargement gives the observed update, by the squared distance.

    The second stage of the paper is a generator and a denoiser trained on public images. They are not part of this
    library: bring one, or the result is labeled "no post-processing" and will be blurred, and is not to be set beside
    the paper's numbers.

    Args:
        local_update: The client's training rule, `rog_client` for the paper's.
        params: The parameters the client started from.
        observed: What the client sent. Tensors by name.
        shape: Shape of the batch, `(n, c, h, w)`.
        labels: The labels, which ROG takes as known. Shape `(n,)`, int64.
        config: How to search.
        post_processing: The second stage.
        seed: Seed of the starting points.
        progress: Where progress is shown.

    Returns:
        The best restart. The objective is half the squared distance over the squared length of the observed
        update, and is that of stage 1 even where a network came after it.

    Raises:
        NameNotFound: The observed names match nothing that the client would send.
        UsageError: Shapes do not fit or values are not finite; or the network returned another shape.

    Source: Yue et al. 2023, "Gradient Obfuscation Gives a False Sense of Security in Federated Learning", section 4.
    """
    config = config or ROGConfig()
    size = shape[2:]
    coarse = (*shape[:2], *(-(-side // config.factor) for side in size))
    latents = starting_points(params, coarse, config.restarts, seed)
    labels = labels.to(latents.device)
    chosen = chosen_tensors(observed, None, local_update(params, (_enlarge(latents[0], size), labels)))
    # Relative, since Adam's epsilon is absolute and updates after small local steps are tiny.
    if not any(tensor.any() for tensor in chosen.values()):
        raise UsageError("The observed update is zero, so there is nothing to match.")

    def objective(latent: Tensor) -> Tensor:
        return relative_distance(local_update(params, (_enlarge(latent, size), labels)), chosen)

    found = descend(
        objective, (latents,), steps=config.steps, lr=config.lr, schedule="cosine", progress=progress, description="ROG"
    )
    images = _enlarge(found.variables[0], size)
    return Reconstruction(
        images=images if post_processing is None else _polished(images, post_processing),
        labels=labels,
        objective=found.objectives[found.best],
        objectives_by_restart=found.objectives,
        history=found.history,
        steps=config.steps,
        attack="ROG (no post-processing)" if post_processing is None else "ROG (the user's post-processing)",
    )


def _enlarge(latent: Tensor, size: tuple[int, ...]) -> Tensor:
    return F.interpolate(latent, size=list(size), mode="bicubic", align_corners=False)


def _polished(images: Tensor, network: PostProcessing) -> Tensor:
    better = network(images).detach()
    if better.shape != images.shape:
        raise UsageError(
            f"The post-processing returned images of shape {tuple(better.shape)}, not {tuple(images.shape)}."
        )
    return better
