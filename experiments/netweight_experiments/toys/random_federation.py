"""A federation of random images, for measuring time: how long a round takes does not depend on what images show."""

from __future__ import annotations

import torch

from netweight.core import seeds
from netweight.methods.federate.task import ClientData, Task, small_cnn


def random_federation(clients: int, images: int, *, classes: int = 10, seed: int = 0) -> Task:
    """Return clients with images of Fashion-MNIST's size, and the small CNN."""
    data = []
    for client in range(clients):
        generator = seeds.torch_generator(seed, "random images", client)
        inputs = torch.randn(images, 1, 28, 28, generator=generator)
        targets = torch.randint(classes, (images,), generator=generator)
        data.append(ClientData((inputs, targets), (inputs[:1], targets[:1])))
    body, head = small_cnn(1, 28, classes, seed=seed)
    return Task(body, head, data)
