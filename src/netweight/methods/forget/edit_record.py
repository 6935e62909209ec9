"""What was edited in a model, beside its weights: enough to say it, and to undo it to the last bit.

A pipeline's folder holds one record per edit in `forget/`: `001.json` and the rows as they were, `001.safetensors`. A
further edit adds the next number; undoing takes the last one away.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import safetensors
import safetensors.torch
from torch import Tensor

from netweight.core.environment import describe
from netweight.core.units import Units
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.forget.deactivation import restore_rows_, scale_rows_
from netweight.probe.diffusion import TextToImage
from netweight.store.atomic import whole_file
from netweight.store.reading import open_store
from netweight.store.record import read_record, write_record

__all__ = ["FOLDER", "EditRecord", "apply_edit_", "read_records", "undo_edit_"]

FOLDER = "forget"
"""The folder in a pipeline's folder that holds records."""
_VERSION = 1


@final
@dataclass(frozen=True)
class EditRecord:
    """One edit.

    Attributes:
        units: The neurons, by layer.
        factor: What they were multiplied with.
        before: Digest of the denoiser before.
        after: The same after.
        thresholds: What they were found with, in words or numbers; empty if unknown.
        prompts: That they were found for; empty if unknown.
        environment: Versions and machine.
        rows: The rows as they were, from `scale_rows_`: weights of shape `(neurons, inputs)`, biases of shape
            `(neurons,)`.
    """

    units: Units
    factor: float
    before: str
    after: str
    thresholds: Mapping[str, Any]
    prompts: Sequence[str]
    environment: Mapping[str, Any]
    rows: Mapping[str, Tensor]

    def write(self, folder: str | Path, number: int) -> Path:
        """Write the record into a folder of records, which is made.

        Args:
            folder: The folder.
            number: Of the edit, from 1.

        Returns:
            The JSON file.

        Raises:
            OutputExists: There is one of that number.
            OutputFailed: The place cannot be written.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{number:03d}.json"
        values = {
            "units": json.loads(self.units.to_json())["units"],
            "factor": self.factor,
            "before": self.before,
            "after": self.after,
            "thresholds": dict(self.thresholds),
            "prompts": list(self.prompts),
            "environment": dict(self.environment),
        }
        rows = {name: value.contiguous() for name, value in self.rows.items()}
        with whole_file(path.with_suffix(".safetensors")) as file:
            file.write(safetensors.torch.save(rows))
        write_record(path, values, version=_VERSION, overwrite=False)
        return path

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record and its rows.

        Args:
            path: The record's file; rows lie beside it.

        Raises:
            CorruptBlob: The files hold none of this version.
            OSError: One cannot be read.
        """
        path = Path(path)

        def made(values: dict[str, Any]) -> Self:
            rows = _rows(path)
            return cls(units=Units(values.pop("units")), rows=rows, **values)

        try:
            return read_record(path, made, version=_VERSION, of="an edit")
        except safetensors.SafetensorError as error:
            raise CorruptBlob(f"The rows beside {path} are damaged: {error}.") from error


def _rows(path: Path) -> dict[str, Tensor]:
    """The rows beside a record, plain or as `netweight compress` stores them."""
    packed = path.with_suffix(".net.safetensors")
    if not packed.is_file():
        return safetensors.torch.load_file(path.with_suffix(".safetensors"))
    with open_store(packed) as store:
        return {name: store.get(name) for name in store.names()}


def read_records(folder: str | Path) -> list[EditRecord]:
    """Read the records of a pipeline's folder, the first edit first; none if it was not edited.

    Args:
        folder: The pipeline's folder.

    Returns:
        The records.

    Raises:
        CorruptBlob: A record is damaged.
    """
    return [EditRecord.read(path) for path in sorted((Path(folder) / FOLDER).glob("[0-9][0-9][0-9].json"))]


def apply_edit_(
    model: TextToImage,
    units: Units,
    *,
    factor: float = 0.0,
    thresholds: Mapping[str, Any] | None = None,
    prompts: Sequence[str] = (),
) -> EditRecord:
    """Scale neurons of a model for good.

    Args:
        model: The model, whose weights are changed.
        units: Neurons of its value layers; at least one.
        factor: What they are multiplied with; 0 switches off.
        thresholds: What they were found with, for the record.
        prompts: That they were found for, for the record.

    Returns:
        The record, to be written beside the saved weights.

    Raises:
        UsageError: There is no neuron, or see `scale_rows_`.
        Unsupported: See `scale_rows_`.
    """
    if not units:
        raise UsageError("There is no neuron to switch off.", cure="Localize memorized prompts first.")
    before = model.digest()
    rows = scale_rows_(model.denoiser, units, factor=factor)
    after = model.digest()
    return EditRecord(units, factor, before, after, dict(thresholds or {}), tuple(prompts), describe(), rows)


def undo_edit_(model: TextToImage, record: EditRecord) -> None:
    """Put back what an edit changed, and check that the model is as it was, bit for bit.

    Args:
        model: The edited model.
        record: Of its last edit.

    Raises:
        UsageError: The model is not the one that the edit left.
        CorruptBlob: The rows are not those that were there before; the model is left as it came.
    """
    if model.digest() != record.after:
        raise UsageError(
            f"This is not the model that the edit left: its digest is {model.digest()}, not {record.after}.",
            cure="Undo edits in reverse order, in the dtype that they were made in.",
        )
    edited = scale_rows_(model.denoiser, record.units, factor=1.0)
    restore_rows_(model.denoiser, record.units, record.rows)
    if model.digest() != record.before:
        restore_rows_(model.denoiser, record.units, edited)
        raise CorruptBlob("The rows of the record are not those that were there before the edit.")
