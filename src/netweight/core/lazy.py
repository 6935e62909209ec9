"""What is imported when it is first used: public names of a package (PEP 562), what a user names, what extras bring."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
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


@contextmanager
def extra(name: str, needs: str) -> Iterator[None]:
    """Import what an extra brings: if a library is missing, say what `needs` it and how it is installed."""
    from netweight.errors import MissingExtra

    try:
        yield
    except ImportError as error:
        raise MissingExtra(f"{needs}, which is not installed.", cure=f'Run: pip install "netweight[{name}]"') from error


def library(name: str, purpose: str, bringing: str) -> ModuleType:
    """Import a library for a purpose; `bringing` is the extra that brings it."""
    with extra(bringing, f"{purpose} needs {name.partition('.')[0]}"):
        return importlib.import_module(name)


def open_compressed_with(name: str) -> None:
    """Let `transformers` or `diffusers` open compressed folders: load the plug-ins registered for it."""
    from importlib.metadata import entry_points

    for plugin in entry_points(group="netweight.formats", name=name):
        plugin.load()
