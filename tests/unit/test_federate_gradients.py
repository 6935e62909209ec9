"""Gradients one client after another and all at once are the same."""

from __future__ import annotations

import pytest
import torch
from federation_under_test import as_double, examples, small_task

from netweight.errors import Unsupported
from netweight.methods.federate import ClientData, Task
from netweight.methods.federate.local import one_by_one, together
from netweight.methods.federate.local_model import LayerState, LocalModel
from netweight.methods.federate.small_cnn import small_cnn


@pytest.mark.parametrize("trains", ["head", "body", "both"])
def test_all_at_once_is_one_by_one(trains: str) -> None:
    task = as_double(small_task(sizes=(9, 4, 7, 5)))
    model = LocalModel(task)
    bodies = task.initial_body() + 0.1 * torch.randn(4, task.body_layout.size, dtype=torch.float64)
    heads = task.initial_head() + 0.1 * torch.randn(4, task.head_layout.size, dtype=torch.float64)
    batches = [task.client(client).train for client in task.clients]
    batches[2] = (batches[2][0][:0], batches[2][1][:0])
    first, second = (rule(model, bodies, heads, batches, trains, [LayerState()] * 4) for rule in (one_by_one, together))  # type: ignore[arg-type]
    for one, other in ((first.body, second.body), (first.head, second.head), (first.losses, second.losses)):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-10)


def test_convolutions_run_together() -> None:
    body, head = small_cnn(1, 28, 3)
    data = [ClientData(examples(4, seed, shape=(1, 28, 28)), examples(4, 9, shape=(1, 28, 28))) for seed in range(3)]
    task = Task(body, head, data)
    model = LocalModel(task)
    bodies = task.initial_body().repeat(3, 1)
    heads = task.initial_head().repeat(3, 1)
    batches = [(torch.randn(n, 1, 28, 28), torch.randint(0, 3, (n,))) for n in (2, 5, 3)]
    first, second = (rule(model, bodies, heads, batches, "both", [LayerState()] * 3) for rule in (one_by_one, together))
    assert first.body is not None
    assert second.body is not None
    torch.testing.assert_close(first.body, second.body, rtol=1e-3, atol=1e-5)


def test_running_statistics_cannot_run_together() -> None:
    task = small_task()
    with pytest.raises(Unsupported, match="GroupNorm"):
        together(
            LocalModel(task),
            task.initial_body()[None],
            task.initial_head()[None],
            [task.client(0).train],
            "body",
            [LayerState({"body.0.running_mean": torch.zeros(5)})],
        )
