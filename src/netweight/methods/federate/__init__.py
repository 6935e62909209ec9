"""Federated learning: HyperFL and the methods it is compared with, on one interface, for two engines."""

from netweight.methods.federate.config import LocalTraining, Phase, Privacy
from netweight.methods.federate.direct import DirectMethod, fedavg, fedavg_private_head, local_only
from netweight.methods.federate.engine import Run, train
from netweight.methods.federate.hyperfl import HyperFL
from netweight.methods.federate.method import Client, Method, Trained, Weights
from netweight.methods.federate.rounds import Federation, Round
from netweight.methods.federate.task import ClientData, FedTask
from netweight.methods.federate.updates import LowRank, Update, aggregate

__all__ = [
    "Client",
    "ClientData",
    "DirectMethod",
    "FedTask",
    "Federation",
    "HyperFL",
    "LocalTraining",
    "LowRank",
    "Method",
    "Phase",
    "Privacy",
    "Round",
    "Run",
    "Trained",
    "Update",
    "Weights",
    "aggregate",
    "fedavg",
    "fedavg_private_head",
    "local_only",
    "train",
]
