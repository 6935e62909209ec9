"""Attacks on generated weights: the image behind a gradient by peeling, and a joint search with embedding and head.

Rows of the first linear layer's gradient are its input times a number, and that number is the bias's gradient; so one
image's features are exact, and so is the gradient that flows back from them, without label, classifier or embedding.
From there each block of the feature extractor is undone (`chains.py`), from the last to the first, and then all of
them again with what the image says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from netweight.attacks.gradient_inversion.analytic import HypernetworkChange, RecoveredGradient
from netweight.attacks.gradient_inversion.chains import Chain, Peel, pool_softly, read_chain, solve_in_box, undone
from netweight.attacks.gradient_inversion.client import Reconstruction, Tensors
from netweight.attacks.gradient_inversion.matching import Bounds, DescentResult, descend, number_of, total_variation
from netweight.core import seeds
from netweight.core.progress import QUIET, Progress, ProgressTask
from netweight.errors import UsageError
from netweight.nn.hypernetwork import ParameterLayout, hidden_code

# Temperatures of the first descent, in standard deviations of the values compared.
_SOFT, _SHARP = 2.0, 0.07
# Noise at the start and at the end of the search.
_START, _END = 1.0, 0.02
# Blocks that can be undone one after another; what is left open of each adds up.
_PEELED = 2


@final
@dataclass(frozen=True)
class PeelingConfig:
    """Settings of peeling, which inverts one block after the other."""

    softening: int = 26
    """Steps from soft to sharp guesses of the winners, for each block."""
    rounds: int = 16
    """Rounds over all blocks after that."""
    prior: float = 0.5
    """Weight of what the image says about a hidden map, against its equations."""
    smoothness: float = 0.01
    """Weight of squared differences between neighboring pixels, at the first descent; it falls with it."""
    steps: int = 400
    """Steps of the search that takes over if there are too many blocks to undo."""
    variation: float = 2.0
    """Weight of the mean difference of neighboring pixels there; it falls to a tenth."""
    restarts: int = 1
    """Starting points; the one whose image imitates the gradient best is kept."""

    def __post_init__(self) -> None:
        """Refuse what is not valid."""
        if min(self.softening, self.rounds, self.steps, self.restarts) < 1 or self.prior <= 0 or self.smoothness < 0:
            raise UsageError(f"Peeling cannot run with {self}.", cure="Use counts of at least 1, and positive weights.")


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
        config: How blocks are undone.
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
        raise UsageError(f"Peeling needs one image of shape (1, c, h, w), not {shape}.")
    if len(read_chain(body).blocks) > _PEELED:
        return _matched(recovered, body, shape, bounds, config, seed, progress)
    problem = _Problem.of(recovered, body, shape, bounds)
    attempts = []
    with progress.task("peeling", config.restarts * (config.rounds + 1), unit="rounds") as bar:
        for restart in range(config.restarts):
            attempts.append(_attempt(problem, config, seeds.derive(seed, "restart", restart), bar))
    objectives = tuple(history[-1] for _, history in attempts)
    best = min(range(len(attempts)), key=objectives.__getitem__)
    image, history = attempts[best]
    return DescentResult((image,), objectives, best, tuple(history)).reconstruction(
        image[None].to(torch.get_default_dtype()), torch.empty(0, dtype=torch.int64),
        steps=config.softening + config.rounds, attack="hypernetwork, analytic then peeling",
    )  # fmt: skip


def _matched(
    recovered: RecoveredGradient, body: nn.Module, shape: tuple[int, ...], bounds: Bounds, config: PeelingConfig,
    seed: int, progress: Progress,
) -> Reconstruction:  # fmt: skip
    """Search the image whose maps and whose convolutions' gradients are those known, among smooth ones."""
    # What flows back from the features is known, so that neither label nor classifier is searched or guessed.
    chain, layout = read_chain(body), ParameterLayout.of(body)
    weights, slopes = layout.split(recovered.generated), layout.split(recovered.first)
    blocks, sizes = list(chain.blocks), [(shape[1], shape[2], shape[3])]
    for block in blocks:
        weight, maps = weights[f"{block.name}.weight"], recovered.first.new_zeros(1, *sizes[-1])
        _, *size = F.max_pool2d(F.conv2d(maps, weight, None, block.stride, block.padding), block.pool).shape
        sizes.append((size[0], size[1], size[2]))
    target, back = _flattened(chain, weights, slopes, sizes[-1])
    # Blocks with as many channels as places can be inverted exactly.
    while len(blocks) > 1:
        kernel, slope = f"{blocks[-1].name}.weight", slopes[f"{blocks[-1].name}.weight"]
        bias = weights[f"{blocks[-1].name}.bias"]
        solution = Peel(blocks[-1], weights[kernel], bias, slope, sizes[len(blocks) - 1]).by_span(target, back)
        if solution is None:
            break
        blocks.pop()
        target, back = undone(blocks[-1], *solution)
    target_maps, along = target.float()[None], back.float()[None]
    kernels = [weights[f"{block.name}.weight"].float() for block in blocks]
    biases = [weights[f"{block.name}.bias"].float() for block in blocks]
    gradients = [slopes[f"{block.name}.weight"].float() for block in blocks]
    low, high = (torch.as_tensor(end, dtype=torch.float32).reshape(-1, 1, 1) for end in bounds)
    # The share of the search that remains: winners become sharper, and images less smooth.
    left = 1.0

    def anneal(share: float) -> None:
        nonlocal left
        left = (share - 0.1) / 0.9

    def objective(image: Tensor) -> Tensor:
        features, moved = low + (high - low) * image, [kernel.detach().requires_grad_() for kernel in kernels]
        for number, (block, kernel) in enumerate(zip(blocks, moved, strict=True)):
            features = F.leaky_relu(features, blocks[number - 1].slope) if number else features
            features = F.conv2d(features, kernel, biases[number], block.stride, block.padding)
            features = pool_softly(features, block.pool, _END * (_START / _END) ** left)
        features = features.relu() if blocks[-1].slope == 0 else features
        by_kernel = torch.autograd.grad((features * along).sum(), moved, create_graph=True)
        pairs = [(features, target_maps), *zip(by_kernel, gradients, strict=True)]
        errors = [
            (one - target_map).square().sum() / target_map.square().sum().clamp_min(1e-30) for one, target_map in pairs
        ]
        rest: Tensor = torch.stack(errors).sum() + config.variation * 0.1 ** (1 - left) * total_variation(image)
        return rest

    start = torch.stack([
        0.5 + 0.01 * torch.randn(shape, generator=seeds.torch_generator(seed, "restart", restart))
        for restart in range(config.restarts)
    ])  # fmt: skip
    searched = descend(
        objective, (start,), steps=config.steps, lr=0.025, schedule="cosine", anneal=anneal, progress=progress,
        project=lambda image: image.clamp_(0, 1), weights=number_of(weights), description="matching maps and kernels",
    )  # fmt: skip
    image, labels = low + (high - low) * searched.variables[0], torch.empty(0, dtype=torch.int64)
    name = "hypernetwork, analytic maps then matching"
    return searched.reconstruction(image, labels, steps=config.steps, attack=name)


@dataclass(frozen=True)
class _Problem:
    """Known quantities of one image: its features, the gradient at them, and every block's gradient."""

    peels: tuple[Peel, ...]
    target: Tensor
    cotangent: Tensor
    low: Tensor
    high: Tensor
    roughness: Tensor

    @classmethod
    def of(
        cls, recovered: RecoveredGradient, body: nn.Module, shape: tuple[int, int, int, int], bounds: Bounds
    ) -> _Problem:
        chain, layout = read_chain(body), ParameterLayout.of(body)
        weights, slopes = layout.split(recovered.generated), layout.split(recovered.first)
        peels: list[Peel] = []
        size = shape[1:]
        for block in chain.blocks:
            weight, bias = weights[f"{block.name}.weight"], weights[f"{block.name}.bias"]
            if weight.shape[1] != size[0]:
                raise UsageError(
                    f"{block.name!r} takes {weight.shape[1]} channels; the given shape results in {size[0]}."
                )
            peels.append(Peel(block, weight, bias, slopes[f"{block.name}.weight"], size))
            size = peels[-1].out
        target, cotangent = _flattened(chain, weights, slopes, size)
        low, high = (torch.as_tensor(end, dtype=torch.float64).reshape(-1, 1, 1).expand(shape[1:]) for end in bounds)
        return cls(tuple(peels), target, cotangent, low.flatten(), high.flatten(), _roughness(shape[1:]))

    def maps(self, image: Tensor) -> list[Tensor]:
        """The input of every block, the image first."""
        maps = [image]
        for peel in self.peels[:-1]:
            maps.append(peel.forward(maps[-1]))
        return maps

    def misfit(self, image: Tensor) -> float:
        """Mean relative error of the features (before the activation) and of each convolution's gradient."""
        maps, cotangent = self.maps(image), self.cotangent
        errors: list[float] = []
        for peel, inputs in zip(reversed(self.peels), reversed(maps), strict=True):
            shares, pooled = peel.winners(inputs, 0)
            if not errors:
                positive = self.target > 0 if peel.block.slope == 0 else torch.ones_like(self.target, dtype=torch.bool)
                errors.append(float((pooled - self.target)[positive].norm() / self.target[positive].norm()))
            else:
                cotangent = cotangent * peel.slopes(pooled)
            delta = peel.delta(shares, cotangent)
            errors.append(peel.misfit(inputs, delta))
            cotangent = peel.pull(delta)
        return sum(errors) / len(errors)

    def behind(self, index: int, inputs: Tensor, cotangent: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
        """The output of the block before `index`, and the gradient by its pooled values."""
        peel = self.peels[index]
        back = peel.pull(peel.delta(peel.winners(inputs, temperature)[0], cotangent))
        return inputs, back * self.peels[index - 1].slopes(inputs)

    def solve_image(self, rows: Tensor, rest: Tensor, image: Tensor, smoothness: float) -> Tensor:
        """The image within its box from its equations, smooth as far as they leave it open."""
        matrix = rows @ rows.T
        scale = matrix.diagonal().mean()
        matrix = matrix + smoothness * scale * self.roughness
        matrix.diagonal().add_(1e-9 * scale)
        return solve_in_box(matrix, rows @ rest, image.flatten(), self.low, self.high).view(image.shape)


def _flattened(
    chain: Chain, weights: dict[str, Tensor], slopes: dict[str, Tensor], size: tuple[int, int, int]
) -> tuple[Tensor, Tensor]:
    """The last block's pooled values and the gradient by them, from the first linear layer's gradient."""
    gradient, bias = slopes[f"{chain.linear}.weight"], slopes[f"{chain.linear}.bias"]
    if gradient.shape[1] != size[0] * size[1] * size[2]:
        raise UsageError(
            f"{chain.linear!r} takes {gradient.shape[1]} features, but an image of this shape has {size} of them.",
            cure="Give the shape of the images that the body was made for.",
        )
    features, back = bias @ gradient / (bias @ bias), weights[f"{chain.linear}.weight"].T @ bias
    return undone(chain.blocks[-1], features.view(size), back.view(size))


def _attempt(problem: _Problem, config: PeelingConfig, seed: int, bar: ProgressTask) -> tuple[Tensor, list[float]]:
    """One restart: the image with the least misfit on the way, and the misfits, the kept one last."""
    image = _descend(problem, config, seeds.torch_generator(seed))
    best, history, doubt = image, [problem.misfit(image)], 0.1
    bar.update()
    for _ in range(config.rounds):
        image, doubt = _again(problem, config, image, doubt)
        history.append(problem.misfit(image))
        if history[-1] <= min(history):
            best = image
        bar.update()
    return best, [*history, min(history)]


def _descend(problem: _Problem, config: PeelingConfig, generator: torch.Generator) -> Tensor:
    """From the features to the image, each block's input guessed from nothing but what lies behind it."""
    target, cotangent = problem.target, problem.cotangent
    for index in reversed(range(len(problem.peels))):
        peel, last = problem.peels[index], index == len(problem.peels) - 1
        steps = config.softening if last else -(-config.softening // 2)
        inputs = 0.5 + 0.05 * torch.randn(peel.size, generator=generator, dtype=torch.float64)
        if index == 0:
            inputs = (problem.low + (problem.high - problem.low) * 0.2).view(peel.size)
        for step in range(steps):
            part = step / max(steps - 1, 1)
            temperature = _SOFT * (_SHARP / _SOFT) ** part
            if index == 0:
                rows, rest, _ = peel.output_equations(inputs, temperature, target, activated=not last)
                inputs = problem.solve_image(rows, rest, inputs, config.smoothness * 0.01**part)
            else:
                inputs = peel.solve(
                    inputs, temperature, target, cotangent, activated=not last, weight=0.01 * 0.04**part
                )
        if index > 0:
            target, cotangent = problem.behind(index, inputs, cotangent, _SHARP)
    return inputs


def _again(problem: _Problem, config: PeelingConfig, image: Tensor, doubt: float) -> tuple[Tensor, float]:
    """Every block once more, its winners guessed from the image, as softly as the last round's maps disagreed."""
    target, cotangent, maps = problem.target, problem.cotangent, problem.maps(image)
    for index in range(len(problem.peels) - 1, 0, -1):
        last = index == len(problem.peels) - 1
        inputs = problem.peels[index].solve(
            maps[index], 0.8 * doubt, target, cotangent, activated=not last, weight=config.prior
        )
        target, cotangent = problem.behind(index, inputs, cotangent, 0.8 * doubt)
    first, single = problem.peels[0], len(problem.peels) == 1
    for _ in range(2):
        rows, rest, _ = first.output_equations(image, 0.4 * doubt, target, activated=not single)
        image = problem.solve_image(rows, rest, image, 1e-4 * doubt)
    reached = first.winners(image, 0)[1] if single else first.forward(image)
    return image, float((reached - target).norm() / target.norm())


def _roughness(size: tuple[int, int, int]) -> Tensor:
    """The matrix of squared differences between neighboring pixels, and a little of the squares themselves."""
    planes, height, width = size
    steps = [torch.eye(length, dtype=torch.float64).diff(dim=0) for length in (height, width)]
    lines = [step.T @ step for step in steps]
    plane = torch.kron(lines[0], torch.eye(width, dtype=torch.float64))
    plane = plane + torch.kron(torch.eye(height, dtype=torch.float64), lines[1])
    plane.diagonal().add_(0.02)
    return torch.kron(torch.eye(planes, dtype=torch.float64), plane)


@final
@dataclass(frozen=True)
class TailoredConfig:
    """Settings of the joint search."""

    steps: int = 2000
    """Steps of Adam per restart."""
    lr: float = 0.1
    """Learning rate, the same for image, embedding and classifier."""
    total_variation: float = 0.01
    """Weight of the mean absolute difference between neighboring pixels."""
    restarts: int = 1
    """Starting points."""

    def __post_init__(self) -> None:
        """Refuse what is not valid."""
        if self.steps < 1 or self.restarts < 1 or self.lr <= 0 or self.total_variation < 0:
            raise UsageError(f"The tailored attack cannot run with {self}.", cure="Use positive counts and rates.")


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

    `features` are the private classifier's inputs; labels are searched where they are not given, and are then
    probabilities in the result.

    Source: The idea behind HyperFL (arXiv 2412.07187), figure 7; not the authors' code or settings.
    """
    config = config or TailoredConfig()
    change = HypernetworkChange(before, after, lr=lr, weight_decay=weight_decay)
    state, target = ({name: value.float() for name, value in one.items()} for one in (change.before, change.gradient))
    if "trunk.1.weight" in state:
        raise UsageError("The tailored attack supports only hypernetworks with one hidden layer.")
    layout, length = ParameterLayout.of(body), sum(tensor.double().square().sum() for tensor in target.values()) ** 0.5

    def objective(images: Tensor, embedding: Tensor, classifier: Tensor, *guess: Tensor) -> Tensor:
        code = hidden_code(state, embedding)
        theta = state["heads.weight"] @ code + state["heads.bias"]
        outputs_of_body = functional_call(body, layout.split(theta), (images,), strict=True)
        outputs = F.linear(outputs_of_body, classifier[:, :-1], classifier[:, -1])
        loss = F.cross_entropy(outputs, labels if labels is not None else guess[0].softmax(1))
        (slope,) = torch.autograd.grad(loss, theta, create_graph=True)
        back = (state["heads.weight"].T @ slope) * (code > 0)
        product = slope @ (target["heads.weight"] @ code + target["heads.bias"])
        product = product + back @ (target["trunk.0.weight"] @ embedding + target["trunk.0.bias"])
        own = slope.square().sum() * (code.square().sum() + 1) + back.square().sum() * (embedding.square().sum() + 1)
        distance = 1 - product / (length * own.clamp_min(1e-30).sqrt())
        return distance.float() + config.total_variation * total_variation(images)

    low, high = (torch.as_tensor(end, dtype=torch.float32).reshape(-1, 1, 1) for end in bounds)
    start = _starting_points(config.restarts, shape, state["trunk.0.weight"].shape[1], classes, features, seed)
    descended = descend(
        objective, (start[0].clamp(low, high), *(start[1:] if labels is None else start[1:3])), steps=config.steps,
        lr=config.lr, project=lambda images, *_: images.clamp_(low, high), weights=number_of(state), progress=progress,
        description="tailored",
    )  # fmt: skip
    labels = descended.variables[3].softmax(1) if labels is None else labels
    name = "tailored to HyperFL (a reconstruction of the idea)"
    return descended.reconstruction(descended.variables[0], labels, steps=config.steps, attack=name)


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
