"""Records of edits, from which they are undone to the last bit.

A pipeline's folder holds one record per edit in `forget/`: `001.json` and the weights as they were, `001.safetensors`.
A further edit adds the next number; undoing takes the last one away. Whoever has the weights can undo the edit, so a
folder that is published goes without them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

import safetensors

from netweight.core.atomic_writes import whole_file
from netweight.core.names import Units
from netweight.core.records import read_record, write_record
from netweight.errors import CorruptBlob
from netweight.store.reader import open_store

# Commands read the records of a folder without importing torch.
if TYPE_CHECKING:
    from torch import Tensor

# Folder of the records within the folder of a pipeline.
FOLDER = "forget"
_VERSION = 1
_STORED = "stored|"


@final
@dataclass(frozen=True)
class EditedFiles:
    """Changes of an edit to the files of a pipeline's folder; paths are relative to it."""

    digests: Mapping[str, str] = field(default_factory=dict)
    """The digest of every file before the edit."""
    edited: Mapping[str, str] = field(default_factory=dict)
    """The files in which tensors were replaced, with the digest of each after the edit."""
    tensors: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Part of the pipeline → names of its replaced tensors."""
    read: Mapping[str, str] = field(default_factory=dict)
    """The variant that each part was read in, such as `fp16`; empty for the usual files."""
    unedited: Sequence[str] = ()
    """Files that were copied as they are, and hold or may hold the weights from before the edit."""
    left_out: Sequence[str] = ()
    """Files of that kind that were left out of the folder."""
    moved: Sequence[str] = ()
    """Files that lie in the record's folder now: what was merged into the weights, and the README without a card."""


@final
@dataclass(frozen=True)
class EditRecord:
    """One edit."""

    units: Units
    """The neurons that were scaled, by layer; none for other methods."""
    factor: float
    """The factor that they were multiplied with."""
    before: str
    """Digest of the denoiser before the edit."""
    after: str
    """Digest of the denoiser after the edit."""
    thresholds: Mapping[str, Any]
    """Thresholds that the neurons were found with, in words or numbers; empty if unknown."""
    prompts: Sequence[str]
    """The prompts that the edit was made for; empty if unknown."""
    environment: Mapping[str, Any]
    """Versions and machine."""
    rows: Mapping[str, Tensor]
    """The weights as they were before the edit: of neurons the rows from `scale_rows_`, weights of shape
    `(neurons, inputs)` and biases of shape `(neurons,)`; of other methods whole weights by name. Empty if not kept."""
    method: str = "neurons"
    """The name of the edit."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of a method other than neurons, with anchors and what was measured."""
    files: EditedFiles = field(default_factory=EditedFiles)
    """The files of the pipeline's folder, read, edited and left alone; empty for a model in memory."""
    stored: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors as files held them, named `FILE|TENSOR`, where they do not follow from `rows`: in a variant that is not
    a rounding of the one that was edited, and where a LoRA was merged."""
    check: Mapping[str, Any] = field(default_factory=dict)
    """Counts of the check of the edited model: see `check.py`; empty if none was made."""

    remarks: Sequence[str] = ()
    """Remarks on the inputs of the edit, in whole sentences."""

    @property
    def undoable(self) -> bool:
        """True if the record keeps the original weights."""
        return bool(self.rows or self.stored)

    def write(self, folder: str | Path, number: int) -> Path:
        """Write the record into a folder of records, which is made."""
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
            "method": self.method,
            "settings": dict(self.settings),
            "files": asdict(self.files),
            "check": dict(self.check),
            "remarks": list(self.remarks),
        }
        rows = {name: value.contiguous() for name, value in self.rows.items()}
        rows |= {_STORED + name: value.contiguous() for name, value in self.stored.items()}
        with whole_file(path.with_suffix(".safetensors")) as file:
            from safetensors.torch import save

            file.write(save(rows))
        write_record(path, values, version=_VERSION, overwrite=False)
        return path

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record and its rows."""
        path = Path(path)

        def made(values: dict[str, Any]) -> Self:
            tensors = _rows(path)
            stored = {name.removeprefix(_STORED): each for name, each in tensors.items() if name.startswith(_STORED)}
            rows = {name: each for name, each in tensors.items() if not name.startswith(_STORED)}
            files = EditedFiles(**values.pop("files"))
            return cls(units=Units(values.pop("units")), rows=rows, stored=stored, files=files, **values)

        try:
            return read_record(path, made, version=_VERSION, of="an edit")
        except safetensors.SafetensorError as error:
            raise CorruptBlob(f"The rows beside {path} are damaged: {error}.") from error


def _rows(path: Path) -> dict[str, Tensor]:
    """The rows beside a record, plain or as `netweight compress` stores them."""
    packed = path.with_suffix(".net.safetensors")
    if not packed.is_file():
        from safetensors.torch import load_file

        return load_file(path.with_suffix(".safetensors"))
    with open_store(packed) as store:
        return {name: store.get(name) for name in store.names()}


def read_records(folder: str | Path) -> list[EditRecord]:
    """Read the records of a pipeline's folder, the first edit first; none if it was not edited."""
    return [EditRecord.read(path) for path in sorted((Path(folder) / FOLDER).glob("[0-9][0-9][0-9].json"))]


def before_publishing(folder: Path) -> list[str]:
    """Return that the original weights must be removed from a folder; nothing where it does not contain them."""
    if not any(record.undoable for record in read_records(folder)):
        return []
    return [f"remove {folder / FOLDER}, which contains the original weights"]
