"""What is learned: handwritten digits, split as in the HyperFL paper: each client has mostly a few digits of its own.

The two apps and the tests call it. Put your own model and data here.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import nn

from netweight.data.images import load
from netweight.methods.federate import ClientData, Federation, LocalTraining, Method
from netweight.methods.federate.folder import named_method
from netweight.methods.federate.partition import federated_images

Config = Mapping[str, str | int | float | bool]


def model(config: Config) -> tuple[nn.Module, nn.Module]:
    """The feature extractor and the classifier of images of 28 × 28; the same for the same seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int(config["seed"]))
        return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 32), nn.ReLU()), nn.Linear(32, 10)


@cache
def everyones_data(data: str, clients: int) -> list[ClientData]:
    """The data of all clients: here each of them has the whole data set at hand and takes its own part."""
    return federated_images(load(data), clients=clients)


def client_data(config: Config, client: int) -> ClientData:
    """One client's data."""
    return everyones_data(str(config["data"]), int(config["clients"]))[client]


def method(config: Config) -> Method:
    """The method that the run's configuration names."""
    return named_method(str(config["method"]), training=LocalTraining(epochs=int(config["epochs"])))


def settings(config: Config) -> Federation:
    """The rounds that the run's configuration asks for; of masked updates there is nothing but their mean."""
    return Federation(
        rounds=int(config["rounds"]), seed=int(config["seed"]), min_clients=int(config["min-clients"]),
        aggregator="mean" if config.get("secure-sum") else config.get("aggregator", "screened-mean"),
    )  # fmt: skip
