"""Which public names come from a paper, and what their docstrings must name it by. Read by `public_docstrings.py`."""

SOURCES = {
    "attacks.gradient_inversion.analytic.recover_gradient": "2412.07187",
    "attacks.gradient_inversion.chains.imprint": "2110.13057",
    "attacks.gradient_inversion.matching.dlg": "Zhu et al.",
    "attacks.gradient_inversion.matching.invert": "Geiping et al.",
    "attacks.gradient_inversion.matching.rog": "Yue et al.",
    "attacks.gradient_inversion.tailored.invert_generated": "Phong et al.",
    "codec.lossy.Precision": "2410.20650",
    "methods.compress.runtime.layerwise.LayerwiseOptimizer": "2306.09782",
    "methods.compress.runtime.model.compress_": "2410.20650",
    "methods.federate.algorithms.direct.fedavg": "1602.05629",
    "methods.federate.algorithms.hyperfl.HyperFL": "2412.07187",
    "methods.federate.settings.LocalTraining": "2412.07187",
    "methods.federate.updates.aggregate": "1602.05629",
    "methods.space.space.WeightSpace": "2406.09413",
}
