"""Attacks on generated weights: the image behind a gradient by peeling, and a joint search with embedding and head.

Rows of the first linear layer's gradient are its input times a number, and that number is the bias's gradient; so one
image's features are exact, and so is the gradient that flows back from them, without label, classifier or embedding.
From there blocks with as many channels as places are undone exactly (`peeling.py`), and the image is searched whose
maps and whose kernels' gradients are those known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from netweight.attacks.gradient_inversion.analytic import RecoveredGradient, state_gradient
from netweight.attacks.gradient_inversion.client import Reconstruction, Tensors
from netweight.attacks.gradient_inversion.matching import Bounds, total_variation
from netweight.attacks.gradient_inversion.optimize import descend
from netweight.attacks.gradient_inversion.peeling import Peel, read_chain
from netweight.core import seeds
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.nn.hypernetwork import ParameterLayout, hidden_code

# Temperatures of the search, in standard deviations of the values compared.
_SOFT, _SHARP = 1.0, 0.02


@final
@dataclass(frozen=True)
class PeelingConfig:
    """How the image is searched whose maps and gradients are known."""

    steps: int = 400
    # Weight of the mean difference of neighboring pixels, at the start and at the end.
    variation: tuple[float, float] = (2.0, 0.2)
    restarts: int = 1  # starting points; the one whose image imitates the gradient best is kept

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        if min(self.steps, self.restarts) < 1 or min(self.variation) <= 0:
            raise UsageError(f"An image cannot be searched with {self}.", cure="All numbers are positive.")


def invert_generated(
    recovered: RecoveredGradient,
    body: nn.Module,
    *,
    shape: tuple[int, int, int, int],
    bounds: Bounds = (0.0, 1.0),
    config: PeelingConfig | None = None,
    seed: int,
    progress: Progress = QUIET,
) -> Reconstruction:
    """Reconstruct the image behind one recovered gradient.

    Args:
        recovered: What `recover_gradient` read from a client that took one step on one image.
        body: The feature extractor: convolutions, max pooling and (leaky) ReLU in a chain up to a linear layer.
        shape: Shape of the image, `(1, c, h, w)`.
        bounds: Least and greatest value of a pixel.
        config: How the image is searched.
        seed: Seed of the first guesses.
        progress: Where progress is shown.

    Returns:
        The image of the best restart; labels are not searched.

    Raises:
        Unsupported: The body is no such chain.
        UsageError: Shapes do not fit.

    Source: exact features as in Phong et al. 2017; the rest is this library's own.
    """
    config = config or PeelingConfig()
    if len(shape) != 4 or shape[0] != 1:
        raise UsageError(f"One image of shape (1, c, h, w) can be searched, not {shape}.")
    peels, pooled, back = _undone(recovered, body, shape[1:])
    low, high = (torch.as_tensor(end, dtype=torch.float32).reshape(-1, 1, 1) for end in bounds)
    known, along = pooled.float(), back.float()
    kernels, slopes = ([getattr(peel, name).float() for peel in peels] for name in ("weight", "gradient"))
    left = 1.0  # of the way from soft to sharp winners, and from smooth images to free ones

    def anneal(share: float) -> None:
        nonlocal left
        left = (share - 0.1) / 0.9

    def objective(image: Tensor) -> Tensor:
        weights, seen = [kernel.detach().requires_grad_() for kernel in kernels], low + (high - low) * image
        for number, (peel, weight) in enumerate(zip(peels, weights, strict=True)):
            seen = F.leaky_relu(seen, peels[number - 1].block.slope) if number else seen
            seen = peel.pooled(seen, weight, _SHARP * (_SOFT / _SHARP) ** left)
        seen = seen.relu() if peels[-1].block.slope == 0 else seen
        found = torch.autograd.grad((seen * along).sum(), weights, create_graph=True)
        pairs = [(seen, known), *zip(found, slopes, strict=True)]
        errors = [(one - wanted).square().sum() / wanted.square().sum().clamp_min(1e-30) for one, wanted in pairs]
        start, end = config.variation
        return torch.stack(errors).sum() + end * (start / end) ** left * total_variation(image)

    start = torch.stack([
        0.5 + 0.01 * torch.randn(shape, generator=seeds.torch_generator(seed, "restart", restart))
        for restart in range(config.restarts)
    ])  # fmt: skip
    found = descend(
        objective, (start,), steps=config.steps, lr=0.025, schedule="cosine", anneal=anneal, progress=progress,
        project=lambda image: image.clamp_(0, 1), description="matching maps and kernels",
    )  # fmt: skip
    image, labels = low + (high - low) * found.variables[0], torch.empty(0, dtype=torch.int64)
    name = "hypernetwork, analytic maps then matching"
    return found.reconstruction(image, labels, steps=config.steps, attack=name)


def _undone(recovered: RecoveredGradient, body: nn.Module, size: tuple[int, ...]) -> tuple[list[Peel], Tensor, Tensor]:
    """Return the blocks that are left when the last ones are undone, what is pooled there and the gradient by it."""
    # What flows back from the features is known, so that neither label nor classifier is searched or guessed.
    chain, layout = read_chain(body), ParameterLayout.of(body)
    weights, slopes = layout.split(recovered.generated), layout.split(recovered.first)
    peels: list[Peel] = []
    for block in chain.blocks:
        weight, bias = weights[f"{block.name}.weight"], weights[f"{block.name}.bias"]
        if weight.shape[1] != size[0]:
            raise UsageError(f"{block.name!r} takes {weight.shape[1]} channels; the shape given leads to {size[0]}.")
        peels.append(Peel(block, weight, bias, slopes[f"{block.name}.weight"], size))
        size = tuple(peels[-1].pooled(weight.new_zeros(1, *size)).shape[1:])
    gradient, bias = slopes[f"{chain.linear}.weight"], slopes[f"{chain.linear}.bias"]
    if gradient.shape[1] != math.prod(size):
        raise UsageError(
            f"{chain.linear!r} takes {gradient.shape[1]} features, but an image of this shape has {size} of them.",
            cure="Give the shape of the images that the body was made for.",
        )
    features, back = (bias @ gradient / (bias @ bias)).view(1, *size), weights[f"{chain.linear}.weight"].T @ bias
    pooled, back = peels[-1].undone(features, back.view(1, *size))
    while len(peels) > 1 and (found := peels[-1].by_span(pooled, back)) is not None:
        peels.pop()
        pooled, back = peels[-1].undone(*found)
    return peels, pooled, back


@final
@dataclass(frozen=True)
class TailoredConfig:
    """How the joint search goes."""

    steps: int = 2000  # steps of Adam per restart
    lr: float = 0.1  # learning rate, the same for image, embedding and classifier
    total_variation: float = 0.01  # weight of the mean absolute difference between neighboring pixels
    restarts: int = 1  # starting points

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
        code = hidden_code(state, embedding)
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
        objective, (start[0].clamp(low, high), *(start[1:] if labels is None else start[1:3])), steps=config.steps,
        lr=config.lr, project=lambda images, *_: images.clamp_(low, high), progress=progress, description="tailored",
    )  # fmt: skip
    labels = found.variables[3].softmax(1) if labels is None else labels
    name = "tailored to HyperFL (a reconstruction of the idea)"
    return found.reconstruction(found.variables[0], labels, steps=config.steps, attack=name)


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
