"""Imports at first use: public names of a package (PEP 562), targets of registrations, modules of users, extras."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, final


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


@final
@dataclass(frozen=True)
class Lazy:
    """A function or a class by its place, "module:name"; imported when it is called or its `value` is read."""

    place: str

    @property
    def value(self) -> Any:
        """The object at the place."""
        # The import is not at the top of the file, because this module is loaded at every start.
        from pkgutil import resolve_name

        return resolve_name(self.place)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call what lies at the place."""
        return self.value(*args, **kwargs)


class _LazyModule:
    """A module that is imported when one of its attributes is read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        value = getattr(importlib.import_module(self._name), attribute)
        setattr(self, attribute, value)
        return value


def lazy_modules(*names: str) -> tuple[Any, ...]:
    """Return modules by name that are imported at their first use, for files whose settings help texts read.

    Such a file imports the same modules under `TYPE_CHECKING`, and these in the other branch.
    """
    return tuple(map(_LazyModule, names))


def lazy(place: str) -> Any:
    """Return a placeholder for the function or class at a place, "module:name", which is imported on its first use."""
    return Lazy(place)


def value_of(given: Any) -> Any:
    """Return what is given, imported where it is lazy."""
    return given.value if isinstance(given, Lazy) else given


def import_named(name: str, what: str) -> Any:
    """Import what a user names as "module:name", from the current folder or from what is installed.

    Args:
        name: The name as the user wrote it.
        what: What it is, for the error, such as "The reader".

    Raises:
        UsageError: The name is not written as "module:name", there is no such module, the module lacks the name, or the
            module fails while it is imported. Each has a message of its own.
    """
    from netweight.errors import UsageError

    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise UsageError(f"{what} {name!r} is not of the form MODULE:NAME.", cure="Write it as in mynet:make.")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        # `python -m` does the same. The folder is not removed again, because the imported module may import its
        # neighbors later.
        sys.path.insert(0, here)
    try:
        value: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise UsageError(
                f"{what} {name!r} cannot be imported: {module} needs {error.name}, which is not installed.",
                cure=f"Install {error.name}.",
            ) from error
        raise UsageError(
            f"{what} {name!r} cannot be imported: there is no module {error.name!r} in {here} or among the installed "
            "packages.",
            cure=f"Run the command in the folder of {error.name.replace('.', '/')}.py, or "
            "add this folder to PYTHONPATH.",
        ) from error
    except Exception as error:
        # A user's module may raise any error while it is imported.
        raise UsageError(
            f"{what} {name!r} cannot be imported: {type(error).__name__} in {module}: {error}.",
            cure=f"For the full error, run: python -c 'import {module}'",
        ) from error
    for part in attribute.split("."):
        if not hasattr(value, part):
            raise UsageError(
                f"{what} {name!r} cannot be imported: {getattr(value, '__name__', module)} has no {part!r}.",
                cure=f"The module is in {getattr(sys.modules[module], '__file__', module)}.",
            )
        value = getattr(value, part)
    return value


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
