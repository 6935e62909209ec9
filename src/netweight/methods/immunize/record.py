"""The record of a training: the defense, its settings, digests of what went in and came out, and every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

from netweight.core.records import read_record, write_record
from netweight.methods.immunize.gradients import TermLog

RECORD = "immunize.json"
"""The record's name in a training's folder and in a defended model's folder."""
_VERSION = 1


@final
@dataclass(frozen=True)
class StepLog:
    """One step of training."""

    step: int
    """Counted from 0."""
    rate: float
    """The learning rate."""
    norm: float
    """Norm of the whole gradient before it was clipped."""
    terms: Mapping[str, TermLog]
    """Terms of the loss by name."""

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` made of one."""
        terms = {name: TermLog(**term) for name, term in values["terms"].items()}
        return cls(values["step"], values["rate"], values["norm"], terms)


@final
@dataclass(frozen=True)
class Record:
    """Record of a model's training."""

    defense: str
    """The defense's name."""
    options: Mapping[str, Any]
    """The defense's settings."""
    settings: Mapping[str, Any]
    """The settings of the training."""
    digests: Mapping[str, str]
    """Digests of pairs, retained rows, and the weights before and after."""
    trained: int
    """Number of weights that were trained."""
    steps: Sequence[StepLog]
    """One entry for each step."""
    environment: Mapping[str, Any]
    """Versions and machine."""

    @property
    def ends(self) -> list[tuple[str, float, float]]:
        """Each term of the loss at the first and at the last step."""
        if not self.steps:
            return []
        first, last = self.steps[0].terms, self.steps[-1].terms
        return [(name, first[name].value, term.value) for name, term in last.items() if name in first]

    def write(self, path: str | Path) -> None:
        """Write the record as JSON, over one that is there."""
        write_record(path, asdict(self), version=_VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record."""

        def made(values: dict[str, Any]) -> Self:
            return cls(steps=[StepLog.from_json(step) for step in values.pop("steps")], **values)

        return read_record(path, made, version=_VERSION, of="an immunized model")
