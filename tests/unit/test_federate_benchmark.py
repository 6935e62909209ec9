"""What rounds are timed against: dense modules train the very rounds that the engine trains."""

from statistics import median

import pytest
import torch

from netweight.methods.federate import Federation, HyperFL, LocalTraining, fedavg, train
from netweight_experiments.federated_rounds import (
    Contender,
    dense_fedavg,
    dense_hyperfl,
    random_federation,
    speed_findings,
)

# One batch holds all examples, so that the order in which they are drawn changes nothing but the last bits.
WHOLE = LocalTraining(epochs=2, batch_size=40)
RENAMED = {"hypernetwork.": "", "body.": "0.", "head.": "1."}


@pytest.mark.parametrize(("method", "dense"), [(fedavg, dense_fedavg), (HyperFL, dense_hyperfl)])
def test_dense_modules_train_the_same_round(method, dense):
    drawn = [differences(random_federation(2, 30, seed=seed), method, dense) for seed in range(3)]
    assert drawn[0].keys() == drawn[1].keys() == drawn[2].keys()
    # A median, since the last bit decides where a ReLU is at its kink; weight decay alone would be 1e-2.
    assert max(median(draw[name] for draw in drawn) for name in drawn[0]) < 3e-3


def differences(task, method, dense):
    """Return how far the two are apart after a round, as a share of what training moved, by tensor."""
    engine = train(task, method(WHOLE), Federation(rounds=1, seed=3, aggregator="mean"), workers=1).state
    start = method(WHOLE).start(task, seed=3)
    found = dense(task, WHOLE, seed=3)()
    assert len(found) == len(engine)
    apart = {}
    for name, value in engine.items():
        prefix = name.partition(".")[0] + "."
        own = found[RENAMED[prefix] + name.removeprefix(prefix)]
        apart[name] = float((own - value).norm() / (value - start[name]).norm())
    return apart


def test_data_are_random_and_repeat():
    one, same, other = (random_federation(2, 5, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(one.client(1).train[0], same.client(1).train[0])
    assert not torch.equal(one.client(1).train[0], other.client(1).train[0])
    assert not torch.equal(one.client(0).train[0], one.client(1).train[0])


def test_ratios_are_taken_within_rounds_and_held_against_targets():
    from netweight_experiments.timing import Samples

    rounds = [1.0, 10.0, 2.0, 5.0, 4.0]  # a machine whose mood changes from round to round
    seconds = {"fedavg": 1.0, "dp-fedavg": 2.5, "ppsgd": 4.0, "centaur": 4.0, "hyperfl": 3.0, "hyperfl-body": 1.5}

    def taken(factor):
        return Samples(tuple(factor * mood for mood in rounds), tuple(factor * mood for mood in rounds))

    times = {Contender(method): taken(factor) for method, factor in seconds.items()}
    times |= {Contender("fedavg", engine=False): taken(1.2), Contender("hyperfl", engine=False): taken(30.0)}
    found = {finding.name: finding for finding in speed_findings(times, seed=0, targets=True)}
    slow = found["time of a round, hyperfl over fedavg, 1 worker"]
    assert (slow.value, slow.ci95, slow.target, slow.passed) == (3.0, (3.0, 3.0), 2.0, False)
    assert found["time of a round, dp-fedavg over fedavg, 1 worker"].passed is True
    assert found["times as fast as dense modules on 1 thread, hyperfl, 1 worker"].value == pytest.approx(10)
    assert found["times as fast as dense modules on 1 thread, fedavg, 1 worker"].passed is True
    assert all(finding.target is None for finding in speed_findings(times, seed=0, targets=False))
