"""What was done to a model to immunize it, step by step; written as JSON beside the weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

from netweight.methods.immunize.backward import TermLog
from netweight.store.record import read_record, write_record

__all__ = ["Record", "StepLog"]

_VERSION = 1


@final
@dataclass(frozen=True)
class StepLog:
    """One step of training.

    Attributes:
        step: Counted from 0.
        rate: The learning rate.
        norm: Norm of the whole gradient before it was clipped.
        terms: What each term of the loss was.
    """

    step: int
    rate: float
    norm: float
    terms: Mapping[str, TermLog]

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` made of one.

        Args:
            values: JSON values.
        """
        terms = {name: TermLog(**term) for name, term in values["terms"].items()}
        return cls(values["step"], values["rate"], values["norm"], terms)


@final
@dataclass(frozen=True)
class Record:
    """What was done to a model.

    Attributes:
        defense: The defense's name.
        options: The defense's settings.
        settings: The settings of training.
        digests: Of the `pairs`, of the `retain` examples, and of the model's weights before and after.
        trained: How many weights were trained.
        steps: What each step was.
        environment: Versions and machine.
    """

    defense: str
    options: Mapping[str, Any]
    settings: Mapping[str, Any]
    digests: Mapping[str, str]
    trained: int
    steps: Sequence[StepLog]
    environment: Mapping[str, Any]

    def write(self, path: str | Path) -> None:
        """Write the record as JSON, over one that is there.

        Args:
            path: The file.

        Raises:
            OutputFailed: The place cannot be written.
        """
        write_record(path, asdict(self), version=_VERSION)

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record.

        Args:
            path: The file.

        Raises:
            CorruptBlob: The file holds none of this version.
            OSError: It cannot be read.
        """

        def made(values: dict[str, Any]) -> Self:
            return cls(steps=[StepLog.from_json(step) for step in values.pop("steps")], **values)

        return read_record(path, made, version=_VERSION, of="an immunized model")
