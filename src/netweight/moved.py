"""Modules under the names that the documentation of 0.1.0 gave them: importing one warns and gives the module of today.

`moved.txt` has a line for each: the former name, and that of today. They go with release 0.3.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

_MOVED: dict[str, str] = dict(
    line.split() for line in Path(__file__).with_suffix(".txt").read_text("ascii").splitlines()
)


def current_name(module: str) -> str:
    """Return the name that a module has today; records and ledgers may hold the one that it had."""
    known = module.startswith("netweight.") and _MOVED.get(module.removeprefix("netweight."))
    return f"netweight.{known}" if known else module


class _Moved(MetaPathFinder, Loader):
    """Finds modules under their former names."""

    def __init__(self) -> None:
        self._own: dict[str, ModuleSpec | None] = {}  # specifications of modules that are being imported

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Take what is in the table, and leave the rest to others."""
        known = fullname.startswith("netweight.") and fullname.removeprefix("netweight.") in _MOVED
        return importlib.util.spec_from_loader(fullname, self) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Import the module under its present name."""
        warnings.warn(f"{spec.name} is {current_name(spec.name)} now.", DeprecationWarning, stacklevel=2)
        found = importlib.import_module(current_name(spec.name))
        self._own[spec.name] = found.__spec__
        return found

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own specification back, which importing it under another name replaced."""
        if module.__spec__ is not None:
            module.__spec__ = self._own.pop(module.__spec__.name, module.__spec__)


FINDER = _Moved()  # asked by `netweight/__init__.py`
