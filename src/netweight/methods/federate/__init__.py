"""Federated learning: HyperFL and the methods it is compared with, on one interface, for two engines."""

from netweight.methods.federate.aggregate import LowRank, Update, aggregate
from netweight.methods.federate.direct import DirectMethod, fedavg, fedavg_private_head, local_only
from netweight.methods.federate.engine import Federation, Round, Run, train
from netweight.methods.federate.hyperfl import HyperFL
from netweight.methods.federate.method import Client, Method, Trained, Weights
from netweight.methods.federate.settings import LocalTraining, Phase, Privacy
from netweight.methods.federate.task import ClientData, FedTask

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
