"""The treatments that a recipe may name: a verb, the type of its settings, what it does and what its audits look at."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar, final

from netweight.core.progress import Progress
from netweight.errors import UsageError
from netweight.evidence.audit import audits_of, missing_audits
from netweight.evidence.report import Report

T = TypeVar("T")
Apply = Callable[[Path, Path, T, Progress], object]


@final
@dataclass(frozen=True)
class Treatment(Generic[T]):
    """A treatment of model files that recipes know."""

    verb: str  # its key in the YAML file, and its name in the register of audits
    config: type[T]  # the frozen dataclass of its settings
    home: str  # the module that declares and registers its audits when imported
    # Takes `(source, destination, settings, progress)` and makes `destination`, which does not exist, whole or not at
    # all; it never changes `source`.
    apply: Apply[T]
    # Takes `(audit, destination, source, settings, progress)` and returns the subject and the config that the audit of
    # that name takes. It may work, such as paint images: what an earlier run's audits found is remembered, and it is
    # not called for them.
    examine: Callable[[str, Path, Path, T, Progress], tuple[Any, Any]]
    # Those of its audits that an attack of the recipe holds: audit's name → the attack's verb.
    by_attack: Mapping[str, str] = field(default_factory=dict)
    # Takes `(destination, number, report)` and adds sections with pictures, if there is something to see; `number` is
    # the step's, for their titles.
    illustrate: Callable[[Path, int, Report], object] | None = None
    # Takes `(source, settings)` and raises what work could only find out later; `source` is None where an earlier step
    # makes it.
    check: Callable[[Path | None, T], object] | None = None
    # Takes the settings and returns files that they lead to without naming them, such as the images of a table: another
    # content makes another step.
    reads: Callable[[T], Iterable[Path]] | None = None
    takes: tuple[str, ...] = ("model",)  # what it can be applied to: the kinds that treatments before it make
    makes: str = "model"  # what comes out: "model", "bank", "space", "points", "adapters" or "federation"
    named: Container[str] = ()  # subjects that it knows by name and that are no files here

    @property
    def audits(self) -> tuple[str, ...]:
        """The names of its audits that are written."""
        importlib.import_module(self.home)
        return tuple(audits_of(self.verb))

    @property
    def promised(self) -> tuple[str, ...]:
        """The names of all audits that prove it, those included that no recipe can run."""
        importlib.import_module(self.home)
        return missing_audits(self.verb, ())


_TREATMENTS: dict[str, Treatment[Any]] = {}


def register(treatment: Treatment[Any]) -> None:
    """Make a treatment known to recipes.

    Raises:
        UsageError: Its verb or the type of its settings is taken.
    """
    taken = {known.config for known in _TREATMENTS.values()}
    if treatment.verb in _TREATMENTS or treatment.config in taken:
        raise UsageError(
            f"The treatment {treatment.verb!r} or its settings {treatment.config.__name__} are registered already.",
            cure="Choose another verb and a type of its own.",
        )
    _TREATMENTS[treatment.verb] = treatment


def known_treatments() -> Mapping[str, Treatment[Any]]:
    """Return the treatments that recipes know, by verb."""
    return _TREATMENTS
