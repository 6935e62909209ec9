"""Federated learning: HyperFL and the methods it is compared with, on one interface, for two engines.

`train(task, method, settings)` runs a federation in this process, `netweight.plugins.flower` the same methods over a
network. `aggregate` and `validate_updates` are what a server does with updates; `audit` attacks what was trained.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netweight.methods.federate.direct import DirectMethod, fedavg, fedavg_private_head, local_only
    from netweight.methods.federate.engine import Round, Run, train
    from netweight.methods.federate.hyperfl import HyperFL
    from netweight.methods.federate.method import Client, Method, Trained, Weights
    from netweight.methods.federate.report import ThreatModel, audit
    from netweight.methods.federate.settings import Federation, LocalTraining, Phase, Privacy, named_method
    from netweight.methods.federate.task import ClientData, FedTask, small_cnn
    from netweight.methods.federate.updates import LowRank, Update, aggregate, validate_updates

_HOMES = {
    "Client": "method", "ClientData": "task", "DirectMethod": "direct", "FedTask": "task", "Federation": "settings",
    "HyperFL": "hyperfl", "LocalTraining": "settings", "LowRank": "updates", "Method": "method", "Phase": "settings",
    "Privacy": "settings", "Round": "engine", "Run": "engine", "ThreatModel": "report", "Trained": "method",
    "Update": "updates", "Weights": "method", "aggregate": "updates", "audit": "report", "fedavg": "direct",
    "fedavg_private_head": "direct", "local_only": "direct", "named_method": "settings", "small_cnn": "task",
    "train": "engine", "validate_updates": "updates",
}  # fmt: skip

__all__ = [
    "Client", "ClientData", "DirectMethod", "FedTask", "Federation", "HyperFL", "LocalTraining", "LowRank", "Method",
    "Phase", "Privacy", "Round", "Run", "ThreatModel", "Trained", "Update", "Weights", "aggregate", "audit", "fedavg",
    "fedavg_private_head", "local_only", "named_method", "small_cnn", "train", "validate_updates",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: settings are read without torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
