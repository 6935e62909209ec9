"""Federated learning: HyperFL and the methods it is compared with, on one interface, for two engines.

`train(task, method, settings)` runs a federation in this process, `netweight.plugins.flower` the same methods over a
network. `validate_updates` and `aggregate` are what a server does with updates; `audit` attacks what was trained.
"""

from netweight.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "ClientData": "netweight.methods.federate.task",
        "Task": "netweight.methods.federate.task",
        "Federation": "netweight.methods.federate.settings",
        "HyperFL": "netweight.methods.federate.algorithms.hyperfl",
        "LocalTraining": "netweight.methods.federate.settings",
        "Method": "netweight.methods.federate.method",
        "aggregate": "netweight.methods.federate.averaging",
        "audit": "netweight.methods.federate.exposure",
        "fedavg": "netweight.methods.federate.algorithms.direct",
        "train": "netweight.methods.federate.engine",
        "validate_updates": "netweight.methods.federate.updates",
    },
)
