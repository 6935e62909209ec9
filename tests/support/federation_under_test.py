"""Small federations that tests train: linear bodies or small CNNs on random or real digits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from netweight.methods.federate import ClientData, Task


def examples(n: int, seed: int, *, shape: tuple[int, ...] = (6,), classes: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs around a mean of their class, so that there is something to learn."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (n,), generator=generator)
    centers = torch.randn(classes, *shape, generator=torch.Generator().manual_seed(99))
    return centers[labels] + 0.5 * torch.randn(n, *shape, generator=generator), labels


def small_task(
    clients: int = 4, n: int = 20, *, seed: int = 0, sizes: tuple[int, ...] | None = None, body: nn.Module | None = None
) -> Task:
    """A task of linear layers; clients have n examples each, or `sizes`."""
    torch.manual_seed(seed)
    body = body or nn.Sequential(nn.Linear(6, 5), nn.Tanh())
    head = nn.Linear(5, 3)
    data = [
        ClientData(examples(size, 10 + index), examples(10, 1000 + index))
        for index, size in enumerate(sizes or (n,) * clients)
    ]
    return Task(body, head, data)


def as_double(task: Task) -> Task:
    """The same task in double precision."""
    data = [
        ClientData((c.train[0].double(), c.train[1]), (c.test[0].double(), c.test[1]))
        for c in map(task.client, task.clients)
    ]
    return Task(task.body.double(), task.head.double(), data)


def with_private(private: dict[str, Tensor], **changed: Tensor) -> dict[str, Tensor]:
    """Private tensors with some replaced."""
    return {**private, **changed}
