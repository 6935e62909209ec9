"""weights2weights: a collection of low-rank adapters as one space, after arXiv 2406.09413.

Read `settings`, `fitting` (inner products, streaming, bases, fits) and `space`; then `points`, `labels`, `directions`,
`edits`, `sampling` and `inversion`, which work on scores; `view` is the page; `folder`, `recipe` and `report` are what
commands and recipes call.
"""

import importlib
from typing import Any

_HOMES = {
    "Delay": "edits",
    "Direction": "points",
    "Move": "edits",
    "Point": "space",
    "Points": "points",
    "WeightSpace": "space",
    "edit": "edits",
    "fit_direction": "directions",
    "invert": "inversion",
    "read_labels": "labels",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name the first time it is used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
