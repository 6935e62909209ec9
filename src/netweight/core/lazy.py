"""Names that are imported when they are first used: public names of a package (PEP 562), and what a user names."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from typing import Any


def lazy_names(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a `package`; `homes` are modules, or public packages."""

    def find(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = importlib.import_module(homes[name])
        value = getattr(home, name, home) if homes[name].rpartition(".")[2] == name else getattr(home, name)
        setattr(sys.modules[package], name, value)
        return value

    return find, lambda: sorted({*homes, *vars(sys.modules[package])}), sorted(homes)


def import_named(name: str, what: str) -> Any:
    """Import what a user names as `module:name`; `what` it is, is for the error."""
    from pkgutil import resolve_name  # not at start-up, which this module is part of

    from netweight.errors import UsageError

    try:
        return resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"{what} {name!r} cannot be imported: {error}.", cure="Write it as MODULE:NAME.") from error
