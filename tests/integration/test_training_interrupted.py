"""Training that is killed resumes from its compressed checkpoint with the same bits."""

import signal
from pathlib import Path

import pytest
import torch
import warm
from models_under_test import Tied, differing, pair, same, stack

import netweight
from netweight.errors import LayerwiseConflict, UsageError

RUN = Path(__file__).parents[1] / "support" / "training_under_test.py"


def start(path, steps):
    return warm.start(RUN, path, steps)


def test_a_killed_run_ends_as_one_that_was_left_alone(tmp_path):
    whole = start(tmp_path / "whole.safetensors", 6)
    expected = whole.communicate(timeout=120)[0].splitlines()[-1]
    assert expected.startswith("digest")
    path = tmp_path / "killed.safetensors"
    run = start(path, 6)
    for line in run.lines():
        if line.startswith("3"):
            run.send_signal(signal.SIGKILL)
    assert run.returncode == -signal.SIGKILL
    resumed = start(path, 6).communicate(timeout=120)[0].splitlines()
    assert int(resumed[0]) > 3
    assert resumed[-1] == expected


def test_checkpoints_are_smaller_and_load_into_dense_and_compressed_models(tmp_path):
    path = tmp_path / "c.safetensors"
    dense, model = pair(Tied, torch.bfloat16)
    ids = torch.randint(0, 300, (2, 5))
    optimizer = netweight.LayerwiseOptimizer(model, torch.optim.AdamW, lr=0.01)
    model(ids).square().mean().backward()
    netweight.save_checkpoint(path, model, optimizer, extra={"note": "α", "list": [1, 2.5, None]})
    dense_bytes = 3 * sum(p.nbytes for p in dense.parameters())
    assert path.stat().st_size < 0.8 * dense_bytes
    for target in pair(Tied, torch.bfloat16, seed=4):
        other = netweight.LayerwiseOptimizer(target, torch.optim.AdamW, lr=0.5)
        assert netweight.load_checkpoint(path, target, other) == {"note": "α", "list": [1, 2.5, None]}
        assert not differing(model, target)
        assert other.steps == 1
        assert other.param_groups[0]["lr"] == 0.01
        for p, q in zip(model.parameters(), target.parameters(), strict=True):
            assert all(same(value, other.state_of(q)[key]) for key, value in optimizer.state_of(p).items())
    plain = torch.optim.AdamW(dense.parameters(), lr=0.01)
    dense(ids).square().mean().backward()
    plain.step()
    netweight.save_checkpoint(path, dense, plain)
    netweight.load_checkpoint(path, model, optimizer)
    assert not differing(model, dense)


def test_what_is_no_checkpoint_of_this_model(tmp_path):
    path = tmp_path / "c.safetensors"
    _, model = pair(stack)
    netweight.save_checkpoint(path, model)
    with pytest.raises(UsageError, match="another model"):
        netweight.load_checkpoint(path, Tied())
    with pytest.raises(UsageError, match="contains no optimizer"):
        netweight.load_checkpoint(path, model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match=r"0\.weight is .* of shape \(64, 64\)"):
        netweight.load_checkpoint(path, stack().bfloat16())
    other = stack()
    other[-1] = torch.nn.Linear(64, 65)
    first = other[0].weight.detach().clone()
    with pytest.raises(UsageError, match=r"of shape \(65, 64\) in the model\. Nothing was loaded"):
        netweight.load_checkpoint(path, other)
    assert torch.equal(other[0].weight, first)
    with netweight.StoreWriter(tmp_path / "d.safetensors") as writer:
        writer.add("weight", torch.zeros(3))
    with pytest.raises(UsageError, match="not a checkpoint"):
        netweight.load_checkpoint(tmp_path / "d.safetensors", model)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="cannot contain this"):
        netweight.save_checkpoint(path, model, extra={"model": model})
    waiting = netweight.LayerwiseOptimizer(model, torch.optim.SGD, lr=0.1, accumulation_steps=2)
    model(torch.randn(2, 64)).sum().backward()
    with pytest.raises(LayerwiseConflict):
        netweight.save_checkpoint(path, model, waiting)
    assert path.read_bytes() == before
