"""Images out of a client's update: every attack that fits what the server observed, best image kept.

- *peeling* takes the update for one image's and undoes the network block by block (`tailored.py`).
- *matching* searches a whole batch whose local training sends the same update, with labels read from the update
  (`matching.invert`); it needs the classifier, so that both halves have to be shared.
- *matching, classifier unknown* searches the batch and what flows back into its features, where the classifier stays
  with the client.
- *imprint* reads what a malicious server's trap rows have caught.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from netweight.attacks.gradient_inversion.analytic import RecoveredGradient, labels_of_update
from netweight.attacks.gradient_inversion.chains import Imprint, read_imprint
from netweight.attacks.gradient_inversion.client import sgd_difference
from netweight.attacks.gradient_inversion.matching import (
    Bounds,
    MatchingConfig,
    cosine_distance,
    descend,
    invert,
    number_of,
    starting_points,
    total_variation,
)
from netweight.attacks.gradient_inversion.tailored import PeelingConfig, invert_generated
from netweight.errors import NetweightError, Unsupported
from netweight.methods.federate.settings import LocalTraining
from netweight.methods.federate.task import Task
from netweight.methods.federate.updates import Tensors
from netweight.nn import ParameterLayout

# Weights of the total variation, one for each of the starts that are searched side by side. A large weight suits
# pictures with plain areas, such as letters, and a small one fine patterns.
SMOOTHNESS = (0.01, 0.03, 0.1, 0.01, 0.03, 0.1)
# Each start gets this share of the steps. On batches that no result is from, the best of such short searches was nearer
# than one long search, which depends on its start.
_SHARE = 4
# Two more searches begin with the mean of what all starts found, where an error of a single start is small.
_MEAN_SMOOTHNESS, _MEAN_RATES = 0.03, (0.1, 0.03)
# The most images that are searched together, and the most local steps that are unrolled.
MOST_IMAGES, MOST_STEPS = 16, 8


class OverLimit(Unsupported):
    """An attack was left out because its input is larger than what it searches."""


@final
@dataclass(frozen=True)
class Search:
    """Budget of the attacks' searches."""

    peeling: PeelingConfig | None = None
    """Settings of peeling; None for its defaults."""
    matching: MatchingConfig | None = None
    """Settings of both kinds of matching; None for the attack's defaults. The steps are those of one long search, as a
    measure of the budget: several short ones are made, for up to twice as much time in all.
    """


@final
@dataclass(frozen=True)
class ServerKnowledge:
    """A server's knowledge of one client, or of one sum of clients."""

    task: Task
    """The network in its halves."""
    training: LocalTraining
    """Local training: learning rate, momentum, weight decay."""
    gradient: RecoveredGradient
    """The gradient read from the update, and the body it was taken of."""
    message: Tensors
    """Tensors by name that the server sent."""
    answer: Tensors
    """Tensors by name that the client sent back."""
    images: int
    """Number of images behind the update."""
    shape: tuple[int, ...]
    """Shape of one image, `(c, h, w)`."""
    bounds: Bounds
    """Least and greatest value of a pixel."""
    steps: int
    """Number of local steps of the client."""
    batch_size: int
    """Images of a local step."""
    clients: int = 1
    """Number of clients whose average the server sees."""
    trap: Imprint | None = None
    """Information with which a malicious server reads the answer."""


@final
@dataclass(frozen=True)
class Candidates:
    """Reconstructions of one attack from an update."""

    attack: str
    """The attack's name."""
    images: Tensor
    """Shape `(k, c, h, w)`."""
    seconds: float
    """Processor time of this thread's process."""


def reconstruct(evidence: ServerKnowledge, search: Search, *, seed: int) -> tuple[list[Candidates], list[str]]:
    """Run every attack that fits.

    Args:
        evidence: What the server has.
        search: How long to search.
        seed: Seed of starting points.

    Raises:
        Unsupported: The inputs are not images.
    """
    if len(evidence.shape) != 3:
        raise Unsupported("The inputs are not images.")
    candidates: list[Candidates] = []
    left_out: list[str] = []
    reasons: list[str] = []
    for name, attack in ATTACKS.items():
        began = time.process_time()
        try:
            images = attack(evidence, search, seed)
        except NetweightError as reason:
            reasons.append(f"{name}: {reason}")
            left_out += reasons[-1:] if isinstance(reason, OverLimit) else []
            continue
        if len(images):
            candidates.append(Candidates(name, images, time.process_time() - began))
    if not candidates:
        raise Unsupported("No attack can reconstruct the images of this federation. " + " ".join(reasons))
    return candidates, left_out


def _peeled(evidence: ServerKnowledge, search: Search, seed: int) -> Tensor:
    if evidence.trap is not None:
        raise Unsupported("The body is the malicious server's.")
    shape = (1, *evidence.shape)
    inversion = invert_generated(
        evidence.gradient, evidence.task.body, shape=(1, shape[1], shape[2], shape[3]), bounds=evidence.bounds,
        config=search.peeling, seed=seed,
    )  # fmt: skip
    return inversion.images


def _imprinted(evidence: ServerKnowledge, search: Search, seed: int) -> Tensor:
    if evidence.trap is None:
        raise Unsupported("The server is honest.")
    from netweight.methods.federate.algorithms.hyperfl import rows_of_body

    after = rows_of_body(evidence.answer, evidence.task.body_layout.size)
    low, high = (float(torch.as_tensor(end)) for end in evidence.bounds)
    c, h, w = evidence.shape
    images, _ = read_imprint(
        evidence.trap, after, evidence.task.body, shape=(c, h, w), bounds=(low, high), lr=evidence.training.lr,
        weight_decay=evidence.training.weight_decay,
    )  # fmt: skip
    return images


def _matched(evidence: ServerKnowledge, search: Search, seed: int) -> Tensor:
    layouts = {"body.": evidence.task.body_layout, "head.": evidence.task.head_layout}
    names = [prefix + name for prefix, layout in layouts.items() for name in layout.names]
    if not set(names) <= set(evidence.message):
        raise Unsupported("The classifier stays with the client.")
    _refuse_large(evidence)
    if evidence.steps > MOST_STEPS:
        raise OverLimit(f"{evidence.steps} local steps are not unrolled, only up to {MOST_STEPS}.")
    model = _with_constant_buffers(evidence.task)
    params = {name: evidence.message[name].detach() for name in names}
    observed = {name: evidence.answer[name].detach() - params[name] for name in names}
    training = evidence.training
    local_update = sgd_difference(
        model, lr=training.lr, steps=evidence.steps, batch_size=None if evidence.clients > 1 else evidence.batch_size,
        momentum=training.momentum, weight_decay=training.weight_decay, loss=evidence.task.loss,
    )  # fmt: skip
    shape = (evidence.images, *evidence.shape)
    labels = labels_of_update(local_update, params, observed, shape=shape, seed=seed)
    search_from = partial(
        invert, local_update, params, observed, shape=shape, labels=labels, bounds=evidence.bounds, seed=seed
    )
    config = _side_by_side(search)
    found = search_from(config=config).every
    assert found is not None
    mean = torch.stack([_in_order(images, found[0], labels) for images in found]).mean(0)
    for rate in _MEAN_RATES:
        again = replace(config, restarts=1, total_variation=_MEAN_SMOOTHNESS, lr=rate)
        found = torch.cat([found, search_from(config=again, start=mean[None]).images[None]])
    return found.flatten(0, 1)


def _in_order(images: Tensor, reference: Tensor, labels: Tensor) -> Tensor:
    """Return for each image of the reference the nearest of the images with the same label."""
    apart = torch.cdist(reference.flatten(1), images.flatten(1))
    return images[apart.masked_fill(labels[:, None] != labels, torch.inf).argmin(1)]


def _side_by_side(search: Search) -> MatchingConfig:
    """Divide the steps among several starts. With a small network, all at once take less time than one by one."""
    whole = search.matching or MatchingConfig()
    return replace(
        whole, steps=-(-whole.steps // _SHARE), restarts=len(SMOOTHNESS), total_variation=SMOOTHNESS, schedule="cosine"
    )


def _matched_without_classifier(evidence: ServerKnowledge, search: Search, seed: int) -> Tensor:
    """Search images and the gradients by their features that give the body's gradient, by the cosine of both."""
    if {f"head.{name}" for name in evidence.task.head_layout.names} <= set(evidence.message):
        raise Unsupported("The classifier is shared, so that its gradient is also matched.")
    if evidence.trap is not None:
        raise Unsupported("The body is the malicious server's.")
    _refuse_large(evidence)
    layout: ParameterLayout = evidence.task.body_layout
    body = _constant_half(evidence.task.body)
    weights = {n: v.float() for n, v in layout.split(evidence.gradient.generated).items()}
    target = {n: v.float() for n, v in layout.split(evidence.gradient.first).items()}
    shape = (evidence.images, *evidence.shape)
    low, high = (torch.as_tensor(end, dtype=torch.float32).reshape(-1, 1, 1) for end in evidence.bounds)
    config = _side_by_side(search)
    start = starting_points(weights, shape, config.restarts, seed).clamp(low, high)
    with torch.no_grad():
        features = functional_call(body, weights, (start[0],))
    flows = 0.1 * starting_points(weights, (*features.shape, 1, 1), config.restarts, seed + 1)[..., 0, 0]
    smoothness = 1.0

    def anneal(share: float) -> None:
        nonlocal smoothness
        smoothness = share ** (1 / 3) if config.annealed else 1.0

    def objective(images: Tensor, flow: Tensor, weight: Tensor) -> Tensor:
        moved = {name: value.detach().requires_grad_() for name, value in weights.items()}
        outputs = functional_call(body, moved, (images,))
        slopes = torch.autograd.grad((outputs * flow).sum(), list(moved.values()), create_graph=True)
        distance = cosine_distance(dict(zip(moved, slopes, strict=True)), target)
        return distance + smoothness * weight * total_variation(images)

    def project(images: Tensor, flow: Tensor) -> None:
        images.clamp_(low, high)

    searched = descend(
        objective, (start, flows), steps=config.steps, lr=config.lr, signed=config.signed, schedule=config.schedule,
        project=project, anneal=anneal, constants=(torch.tensor(config.weights).to(start),), weights=number_of(weights),
    )  # fmt: skip
    return searched.every[0].flatten(0, 1)


def _refuse_large(evidence: ServerKnowledge) -> None:
    if evidence.images > MOST_IMAGES:
        raise OverLimit(f"{evidence.images} images are not searched together, only up to {MOST_IMAGES}.")


class BodyAndHead(nn.Module):
    """Body and head under the names that updates have.

    Args:
        body: The feature extractor.
        head: The classifier.
    """

    def __init__(self, body: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, head

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the head's outputs, shape `(n, …)`."""
        outputs: Tensor = self.head(self.body(inputs))
        return outputs


def _with_constant_buffers(task: Task) -> nn.Module:
    return BodyAndHead(_constant_half(task.body), _constant_half(task.head))


def _constant_half(half: nn.Module) -> nn.Module:
    """Return a copy of a half in training mode whose frozen parameters are buffers."""
    own = copy.deepcopy(half).train()
    for module in own.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.requires_grad:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())
    return own


ATTACKS: Mapping[str, Callable[[ServerKnowledge, Search, int], Tensor]] = {
    "imprint": _imprinted,
    "peeling": _peeled,
    "matching": _matched,
    "matching, classifier unknown": _matched_without_classifier,
}


def nearest_pair(
    candidates: Sequence[Tensor], originals: Tensor, likeness: Callable[[Tensor, Tensor], Tensor]
) -> tuple[int, Tensor, Tensor, float]:
    """Return the candidate set, the original and the reconstruction that are most alike, and how much.

    Args:
        candidates: One tensor `(k, c, h, w)` for each attack.
        originals: Shape `(n, c, h, w)`.
        likeness: A measure of each pair of two batches of equal shape, such as PSNR.
    """
    best: tuple[float, int, int, int] | None = None
    for place, images in enumerate(candidates):
        values = torch.stack([likeness(image[None].expand_as(originals), originals) for image in images])
        row, column = divmod(int(values.argmax()), len(originals))
        value = float(values[row, column])
        if best is None or value > best[0]:
            best = value, place, row, column
    if best is None:
        raise Unsupported("No attack reconstructed an image.")
    value, place, row, column = best
    return place, originals[column], candidates[place][row], value
