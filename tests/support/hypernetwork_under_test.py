"""A client of HyperFL, trained with torch's own optimizer: what its server receives and what it should not learn."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from netweight.nn.hypernetwork import Hypernetwork, ParameterLayout

LR, WEIGHT_DECAY = 0.02, 5e-4


@dataclass
class Sent:
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    embedding: Tensor
    first_gradient: Tensor  # of the first step, by the generated vector
    generated: Tensor
    movement: Tensor  # of the generated vector


def named(network: nn.Module) -> dict[str, Tensor]:
    return {f"hypernetwork.{name}": value.detach().clone() for name, value in network.named_parameters()}


def small_body(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.MaxPool2d(2), nn.LeakyReLU(0.01),
        nn.Conv2d(6, 12, 3, padding=1), nn.MaxPool2d(2), nn.LeakyReLU(0.01),
        nn.Flatten(), nn.Linear(12 * 3 * 3, 16), nn.LeakyReLU(0.01),
    )  # fmt: skip


def hypernetwork_for(body: nn.Module, *, hidden: tuple[int, ...] = (24,), seed: int = 1) -> Hypernetwork:
    torch.manual_seed(seed)
    return Hypernetwork(ParameterLayout.of(body).size, embedding=12, hidden=hidden)


def train_client(
    network: Hypernetwork, body: nn.Module, head: nn.Linear, embedding: Tensor, images: Tensor, labels: Tensor,
    *, steps: int = 1, clip: float = 50.0,
) -> Sent:  # fmt: skip
    layout, before = ParameterLayout.of(body), named(network)
    clone = Hypernetwork(
        layout.size, embedding=len(embedding), hidden=tuple(layer.out_features for layer in network.trunk)
    )
    clone.load_state_dict(network.state_dict())
    code = embedding.clone().requires_grad_()
    optimizer = torch.optim.SGD([*clone.parameters(), code], lr=LR, momentum=0.5, weight_decay=WEIGHT_DECAY)
    firsts = []
    for _ in range(steps):
        theta = clone(code)
        theta.retain_grad()
        outputs = head(functional_call(body, layout.split(theta), (images,), strict=True))
        optimizer.zero_grad()
        F.cross_entropy(outputs, labels).backward()
        firsts.append((theta.grad.clone(), theta.detach()))
        nn.utils.clip_grad_norm_(clone.parameters(), clip)
        optimizer.step()
    with torch.no_grad():
        movement = clone(code) - firsts[0][1]
    return Sent(before, named(clone), embedding, *firsts[0], movement)


def cosine(one: Tensor, other: Tensor) -> float:
    return F.cosine_similarity(one.double().flatten(), other.double().flatten(), dim=0).item()


def strokes(size: int, count: int = 1, seed: int = 0) -> Tensor:
    """Images like handwriting: smooth thick curves on an empty ground, within 0 and 1."""
    generator = torch.Generator().manual_seed(seed)
    y, x = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    images = torch.zeros(count, 1, size, size)
    for image in images:
        points = torch.rand(4, 2, generator=generator) * size * 0.6 + size * 0.2
        for start, end in itertools.pairwise(points):
            for part in torch.linspace(0, 1, 12):
                row, column = start + (end - start) * part
                spot = torch.exp(-((y - row) ** 2 + (x - column) ** 2) / (2 * (size / 22) ** 2))
                image[0] = torch.maximum(image[0], spot)
    return images
