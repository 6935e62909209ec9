"""Digits as several sites read them, mostly a few of the ten at each. Put your own model and data in their places."""

from collections.abc import Mapping
from functools import cache

from torch import nn

from netweight.data.images import load
from netweight.methods.federate import ClientData
from netweight.methods.federate.partition import federated_images
from netweight.plugins.flower import apps


def model() -> tuple[nn.Module, nn.Module]:
    """The half that is learned together and the half that stays with each client."""
    return nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(49, 32), nn.ReLU()), nn.Linear(32, 10)


@cache
def everyones_data(name: str, clients: int) -> list[ClientData]:
    """All clients' data: here each of them has the whole data set at hand and takes its own part."""
    return federated_images(load(name), clients=clients)


def data(config: Mapping[str, str | int | float | bool], client: int) -> ClientData:
    """One client's data; `config` is the run's, from pyproject.toml and `--run-config`."""
    return everyones_data(str(config["data"]), int(config["clients"]))[client]


both = apps(model, data)
client = both.client
server = both.server
