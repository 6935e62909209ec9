"""What is learned: scikit-learn's 1,797 handwritten digits, each client with five digits of its own and some of all.

The two apps and the tests call it. Put your own model and data here.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor, nn

from netweight.methods.federate import (
    ClientData,
    Federation,
    HyperFL,
    LocalTraining,
    Method,
    fedavg,
    fedavg_private_head,
    local_only,
)

Config = Mapping[str, str | int | float | bool]


def model(seed: int) -> tuple[nn.Module, nn.Module]:
    """The feature extractor and the classifier; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 10)


def client_data(client: int, clients: int, seed: int) -> ClientData:
    """One client's digits: a fifth are drawn from all, the rest from five of the ten; a quarter is for testing."""
    images, targets = _digits()
    order = torch.randperm(len(targets), generator=torch.Generator().manual_seed(seed))
    uniform, rest = order[: len(order) // 5], order[len(order) // 5 :]
    preferred = torch.arange(5 * client, 5 * client + 5) % 10
    wants_it = torch.isin(targets[rest], preferred)
    rivals = [c for c in range(clients) if (5 * c) % 10 == (5 * client) % 10]
    own = torch.cat([uniform[client::clients], rest[wants_it][rivals.index(client) :: len(rivals)]])
    held_out = max(len(own) // 4, 1)
    test, train = own[:held_out], own[held_out:]
    return ClientData((images[train], targets[train]), (images[test], targets[test]))


def method(config: Config) -> Method:
    """The method that the run's configuration names."""
    training = LocalTraining(epochs=int(config["epochs"]), batch_size=25)
    methods: dict[str, Method] = {
        "hyperfl": HyperFL(training, embedding=16, hidden=(32,)),
        "fedavg": fedavg(training),
        "fedavg-private-head": fedavg_private_head(training),
        "local": local_only(training),
    }
    return methods[str(config["method"])]


def settings(config: Config) -> Federation:
    """The rounds that the run's configuration asks for."""
    return Federation(rounds=int(config["rounds"]), seed=int(config["seed"]), min_clients=int(config["min-clients"]))


@cache
def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    found = load_digits()
    return torch.tensor(found.data / 16, dtype=torch.float32), torch.tensor(found.target)
