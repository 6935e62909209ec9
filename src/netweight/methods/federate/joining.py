"""A client that joins after training: it learns an embedding and a head for the hypernetwork as it is."""

from __future__ import annotations

import torch
from torch import nn

from netweight.errors import UsageError
from netweight.methods.federate.algorithms.hyperfl import HyperFL
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.local import Learner, Stream
from netweight.methods.federate.local_model import LocalModel
from netweight.methods.federate.method import ClientWeights
from netweight.methods.federate.task import ClientData, Task


def join(run: TrainedFederation, data: ClientData, *, epochs: int = 5, lr: float = 0.1, seed: int) -> ClientWeights:
    """Return the personal model of a client that comes after training: it learns an embedding and a head alone.

    Args:
        run: A federation trained by HyperFL, whose hypernetwork stays as it is.
        data: The new client's.
        epochs: Passes over its training examples.
        lr: Learning rate of embedding and head.
        seed: Random seed of its start and batches.

    Raises:
        UsageError: The federation has no hypernetwork that clients share.
    """
    method = run.method
    if not isinstance(method, HyperFL):
        raise UsageError(f"{method.name!r} shares no hypernetwork.", cure="Train the federation with --method hyperfl.")
    task = Task(run.task.body, run.task.head, {0: data}, run.task.loss, run.task.augment)
    private = method.private_start(task, 0, seed=seed)
    model, training = LocalModel(task), method.training
    start = method.weights(task, run.state, private)
    network = {name: value.detach() for name, value in run.state.items()}
    embedding, head = (one.clone().requires_grad_() for one in (private["embedding"], start.head))
    optimizer = torch.optim.SGD([embedding, head], lr, training.momentum, weight_decay=training.weight_decay)
    model.train("both")
    state, size = model.layer_state(start.statistics, seed), task.body_layout.size
    for inputs, targets in Stream(model, Learner(0, start, seed), epochs, training.batch_size):
        made = method.generated(network, embedding)
        optimizer.zero_grad()
        loss = model.loss(made[:size], head if method.private_head else made[size:], inputs, targets, state)
        loss.backward()  # type: ignore[no-untyped-call]
        for one in (embedding, head):
            nn.utils.clip_grad_norm_(one, 1.0)
        optimizer.step()
    with torch.no_grad():
        made = method.generated(network, embedding)
    return ClientWeights(made[:size], head.detach() if method.private_head else made[size:], state.buffers)
