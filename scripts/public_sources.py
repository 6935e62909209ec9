"""Which public names come from a paper, and what their docstrings must name it by. Read by `public_docstrings.py`."""

SOURCES = {
    "codec.lossy.Precision": "2410.20650",
    "methods.compress.runtime.layerwise.LayerwiseOptimizer": "2306.09782",
    "methods.compress.runtime.model.compress_": "2410.20650",
    "methods.federate.aggregate.aggregate": "1602.05629",
    "methods.federate.direct.fedavg": "1602.05629",
    "methods.federate.direct.fedavg_private_head": "2102.07078",
    "methods.federate.hyperfl.HyperFL": "2412.07187",
    "methods.federate.settings.LocalTraining": "2412.07187",
    "methods.federate.settings.Privacy": "1607.00133",
    "methods.space.space.WeightSpace": "2406.09413",
}
