"""Language models whose weights resist harmful fine-tuning: RepNoise and the defenses it is compared with."""

from netweight.core.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "RepNoise": "netweight.methods.immunize.defenses.repnoise",
        "TrainingSettings": "netweight.methods.immunize.settings",
        "immunize": "netweight.methods.immunize.train",
    },
)
