"""Training on the spot: a resumed run is the uninterrupted one, the best weights are kept, trouble is named."""

from types import SimpleNamespace

import pytest
import torch

from netweight.errors import TrainingStopped, UsageError
from netweight_experiments.toys.fitting import Schedule, fit

INPUTS = torch.randn(64, 5, generator=torch.Generator().manual_seed(0))
TARGETS = INPUTS @ torch.arange(5.0) + 1


class Regression(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(16, 1)
        )

    def forward(self, inputs, targets):
        return SimpleNamespace(loss=(self.layers(inputs)[:, 0].float() - targets).square().mean())


def batch(step):
    rows = torch.randint(64, (8,), generator=torch.Generator().manual_seed(step))
    return {"inputs": INPUTS[rows], "targets": TARGETS[rows]}


def held_out(model):
    with torch.no_grad():
        return float(model(INPUTS[:16], TARGETS[:16]).loss)


def state(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    schedule = Schedule(steps=40, learning_rate=0.02, warmup=5, check_every=10)
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    whole = Regression()
    expected = fit(whole, batch, held_out, schedule, tmp_path / "whole")
    assert expected.steps == 40
    assert expected.curve[-1][2] < expected.curve[0][2]

    class Stopped(Exception):
        pass

    def until_25(step):
        if step == 25:
            raise Stopped
        return batch(step)

    with pytest.raises(Stopped):
        fit(Regression(), until_25, held_out, schedule, tmp_path / "stopped")
    resumed = Regression()
    assert fit(resumed, batch, held_out, schedule, tmp_path / "stopped") == expected
    for name, value in state(whole).items():
        assert torch.equal(value, state(resumed)[name]), name
    with pytest.raises(UsageError, match="steps was 40 and is 41 now"):
        fit(Regression(), batch, held_out, Schedule(steps=41), tmp_path / "stopped")


def test_training_stops_when_it_no_longer_helps_and_keeps_the_best(tmp_path):
    looks = iter([3.0, 1.0, 2.0, 2.5, 9.0])
    seen = []

    def scripted(model):
        seen.append(state(model))
        return next(looks)

    model = Regression()
    found = fit(model, batch, scripted, Schedule(steps=100, check_every=2, patience=2), tmp_path)
    assert (found.steps, found.best_step, found.held_out, found.overfits) == (8, 4, 1.0, True)
    for name, value in seen[1].items():
        assert torch.equal(value, state(model)[name]), name
    assert not model.training


def test_divergence_is_named(tmp_path):
    with pytest.raises(TrainingStopped, match="diverged at step 3"):
        fit(
            Regression(),
            lambda step: batch(step) | ({"targets": torch.full((8,), torch.inf)} if step == 3 else {}),
            held_out,
            Schedule(steps=10),
            tmp_path,
        )
