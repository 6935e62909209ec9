"""Language models whose weights resist harmful fine-tuning: RepNoise and the defenses it is compared with."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netweight.methods.immunize.folder import immunize_folder
    from netweight.methods.immunize.layer_metrics import analyze_layers
    from netweight.methods.immunize.settings import ImmunizeSettings, RepNoise, TrainingSettings
    from netweight.methods.immunize.train import immunize

__all__ = ["ImmunizeSettings", "RepNoise", "TrainingSettings", "analyze_layers", "immunize", "immunize_folder"]

_HOMES = {"analyze_layers": "layer_metrics", "immunize": "train", "immunize_folder": "folder"}  # others: settings


def __getattr__(name: str) -> Any:
    """Import a public name on first use: settings load without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES.get(name, 'settings')}"), name)
