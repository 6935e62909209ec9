"""The attack that the HyperFL paper tests itself with, a reconstruction of the idea: everything unknown is searched.

The paper (arXiv 2412.07187, figure 7) reports that an attack made for HyperFL fails, without saying enough to repeat
it. Most likely image, embedding and classifier are optimized together until they explain the hypernetwork's gradient.
That is what stands here. It fails because it searches what can be read: see `analytic.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from netweight.attacks.gradient_inversion.analytic import state_gradient
from netweight.attacks.gradient_inversion.descent import descend
from netweight.attacks.gradient_inversion.matching import Bounds, total_variation
from netweight.attacks.gradient_inversion.reconstruction import Reconstruction
from netweight.attacks.gradient_inversion.victim import Tensors
from netweight.core import seeds
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.generate.layout import ParameterLayout

__all__ = ["TailoredConfig", "tailored"]


@final
@dataclass(frozen=True)
class TailoredConfig:
    """How the joint search goes.

    Attributes:
        steps: Steps of Adam per restart.
        lr: Learning rate, the same for image, embedding and classifier.
        total_variation: Weight of the mean absolute difference between neighboring pixels.
        restarts: Starting points.

    Raises:
        UsageError: A count or rate is not positive.
    """

    steps: int = 2000
    lr: float = 0.1
    total_variation: float = 0.01
    restarts: int = 1

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if self.steps < 1 or self.restarts < 1 or self.lr <= 0 or self.total_variation < 0:
            raise UsageError(f"The tailored attack cannot run with {self}.", cure="Counts and rates are positive.")


def tailored(
    before: Tensors,
    after: Tensors,
    body: nn.Module,
    *,
    shape: tuple[int, int, int, int],
    classes: int,
    features: int,
    lr: float,
    weight_decay: float = 0.0,
    labels: Tensor | None = None,
    bounds: Bounds = (0.0, 1.0),
    config: TailoredConfig | None = None,
    seed: int,
    progress: Progress = QUIET,
) -> Reconstruction:
    """Search images, embedding and classifier whose gradient points where the hypernetwork's did (one step).

    Args:
        before: The shared state that the client received, with one hidden layer, as for `recover_gradient`.
        after: The state that it sent back.
        body: The feature extractor; its parameters are generated.
        shape: `(n, c, h, w)`.
        classes: Outputs of the private classifier.
        features: Its inputs.
        lr: The client's learning rate.
        weight_decay: The client's weight decay.
        labels: int64 of shape `(n,)` if they are known; otherwise they are searched too.
        bounds: Range of the pixels.
        config: How to search.
        seed: Seed of the starting points.
        progress: Where progress is shown.

    Returns:
        The best restart; `labels` are probabilities when they were searched.

    Raises:
        NameNotFound: A tensor is missing.
        UsageError: Shapes do not fit.

    Source: a reconstruction of the idea behind HyperFL (arXiv 2412.07187), figure 7; not the authors' code or settings.
    """
    config = config or TailoredConfig()
    state, wanted = state_gradient(before, after, lr=lr, weight_decay=weight_decay)
    state, wanted = ({name: tensor.float() for name, tensor in one.items()} for one in (state, wanted))
    if "trunk.1.weight" in state:
        raise UsageError("The tailored attack knows hypernetworks with one hidden layer.")
    layout, length = ParameterLayout.of(body), sum(tensor.double().square().sum() for tensor in wanted.values()) ** 0.5

    def objective(images: Tensor, embedding: Tensor, classifier: Tensor, *guess: Tensor) -> Tensor:
        code = torch.relu(state["trunk.0.weight"] @ embedding + state["trunk.0.bias"])
        theta = state["heads.weight"] @ code + state["heads.bias"]
        seen = functional_call(body, layout.split(theta), (images,), strict=True)
        outputs = F.linear(seen, classifier[:, :-1], classifier[:, -1])
        loss = F.cross_entropy(outputs, labels if labels is not None else guess[0].softmax(1))
        (slope,) = torch.autograd.grad(loss, theta, create_graph=True)
        back = (state["heads.weight"].T @ slope) * (code > 0)
        product = slope @ (wanted["heads.weight"] @ code + wanted["heads.bias"])
        product = product + back @ (wanted["trunk.0.weight"] @ embedding + wanted["trunk.0.bias"])
        own = slope.square().sum() * (code.square().sum() + 1) + back.square().sum() * (embedding.square().sum() + 1)
        distance = 1 - product / (length * own.clamp_min(1e-30).sqrt())
        return distance.float() + config.total_variation * total_variation(images)

    low, high = (torch.as_tensor(end, dtype=torch.float32).reshape(-1, 1, 1) for end in bounds)
    start = _starting_points(config.restarts, shape, state["trunk.0.weight"].shape[1], classes, features, seed)
    found = descend(
        objective,
        (start[0].clamp(low, high), *(start[1:] if labels is None else start[1:3])),
        steps=config.steps,
        lr=config.lr,
        project=lambda images, *_: images.clamp_(low, high),
        progress=progress,
        description="tailored",
    )
    return Reconstruction(
        images=found.variables[0],
        labels=found.variables[3].softmax(1) if labels is None else labels,
        objective=found.objectives[found.best],
        objectives_by_restart=found.objectives,
        history=found.history,
        steps=config.steps,
        attack="tailored to HyperFL (a reconstruction of the idea)",
    )


def _starting_points(
    restarts: int, shape: tuple[int, ...], embedding: int, classes: int, features: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Images, embeddings, classifiers (the bias as last column) and label scores, each drawn as a client would."""
    sizes = (shape, (embedding,), (classes, features + 1), (shape[0], classes))
    drawn = [
        torch.stack(
            [torch.randn(size, generator=seeds.torch_generator(seed, "restart", r, number)) for r in range(restarts)]
        )
        for number, size in enumerate(sizes)
    ]
    return drawn[0], drawn[1], drawn[2] / (3 * features) ** 0.5, drawn[3]
