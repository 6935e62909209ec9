"""Edits: neurons scaled for a block or for good, and undone to the last bit from the edit's record.

A pipeline's folder holds one record per edit in `forget/`: `001.json` and the rows as they were, `001.safetensors`. A
further edit adds the next number; undoing takes the last one away.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from netweight.core.environment import describe
from netweight.core.files import whole_file
from netweight.core.units import Units
from netweight.errors import CorruptBlob, Unsupported, UsageError
from netweight.hf.load_pipeline import PipelineModel, load_text_to_image
from netweight.job import Job, check_destination
from netweight.methods.forget.layers import ValueLayer, check_units, value_layers
from netweight.methods.forget.localize import Localization, read_neurons
from netweight.nn.hooks import edit_outputs
from netweight.nn.text_to_image import TextToImage
from netweight.store.checkpoint import read_record, write_record
from netweight.store.reader import open_store

FOLDER = "forget"  # in a pipeline's folder
_VERSION = 1


@final
@dataclass(frozen=True)
class EditRecord:
    """One edit."""

    units: Units  # the neurons, by layer
    factor: float  # what they were multiplied with
    before: str  # digest of the denoiser before
    after: str
    thresholds: Mapping[str, Any]  # what they were found with, in words or numbers; empty if unknown
    prompts: Sequence[str]  # that they were found for; empty if unknown
    environment: Mapping[str, Any]  # versions and machine
    # The rows as they were, from `scale_rows_`: weights of shape `(neurons, inputs)`, biases of shape `(neurons,)`.
    rows: Mapping[str, Tensor]

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
        }
        rows = {name: value.contiguous() for name, value in self.rows.items()}
        with whole_file(path.with_suffix(".safetensors")) as file:
            file.write(safetensors.torch.save(rows))
        write_record(path, values, version=_VERSION, overwrite=False)
        return path

    @classmethod
    def read(cls, path: str | Path) -> Self:
        """Read a record and its rows."""
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
    """Read the records of a pipeline's folder, the first edit first; none if it was not edited."""
    return [EditRecord.read(path) for path in sorted((Path(folder) / FOLDER).glob("[0-9][0-9][0-9].json"))]


def deactivate(
    model: TextToImage,
    units: Units,
    *,
    factor: float = 0.0,
    thresholds: Mapping[str, Any] | None = None,
    prompts: Sequence[str] = (),
) -> EditRecord:
    """Scale neurons of a model for good; 0 switches them off.

    Args:
        model: The model; changed in place.
        units: Neurons of its value layers.
        factor: Factor that they are multiplied with.
        thresholds: Thresholds that they were found with, in words or numbers, for the record.
        prompts: Prompts that they were found for, for the record.

    Returns:
        The record, from which `undo` restores the weights.

    Raises:
        UsageError: There is no neuron, or one is not among those of the model.
        NameNotFound: A module is no value layer of the model.
        Unsupported: An adapter is at work in a layer, or the model has no cross-attention.
    """
    if not units:
        raise UsageError("There is no neuron to switch off.", cure="Localize memorized prompts first.")
    before = model.digest()
    rows = scale_rows_(model.denoiser, units, factor=factor)
    after = model.digest()
    return EditRecord(units, factor, before, after, dict(thresholds or {}), tuple(prompts), describe(), rows)


def undo(model: TextToImage, record: EditRecord) -> None:
    """Put back what an edit changed, and check that the model is as it was, bit for bit."""
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


@contextmanager
def deactivated(denoiser: nn.Module, units: Units, *, factor: float = 0.0) -> Iterator[None]:
    """Scale neurons while a block lasts; the weights stay as they are."""
    # Source: arXiv 2406.02366, section 3: neurons are set to 0.
    layers = value_layers(denoiser, scope="all")
    check_units(layers, units)
    with edit_outputs(
        denoiser, {name: _scaling(layers[name].width, indices, factor) for name, indices in units.items()}
    ):
        yield


@torch.no_grad()
def scale_rows_(denoiser: nn.Module, units: Units, *, factor: float = 0.0) -> dict[str, Tensor]:
    """Scale neurons for good: their rows of the weights, and their biases."""
    layers = _editable(denoiser, units)
    removed: dict[str, Tensor] = {}
    for name, indices in units.items():
        for part, parameter in layers[name].linear.named_parameters(recurse=False):
            rows = parameter.data[indices.to(parameter.device)]
            removed[f"{name}.{part}"] = rows.cpu().clone()
            # Not a product with 0, which would keep the sign of zero and leave NaN and infinities.
            parameter.data[indices.to(parameter.device)] = torch.zeros_like(rows) if factor == 0 else rows * factor
    return removed


@torch.no_grad()
def restore_rows_(denoiser: nn.Module, units: Units, removed: Mapping[str, Tensor]) -> None:
    """Put rows back, bit for bit."""
    layers = _editable(denoiser, units)
    places = [
        (parameter, indices, f"{name}.{part}")
        for name, indices in units.items()
        for part, parameter in layers[name].linear.named_parameters(recurse=False)
    ]
    for parameter, indices, key in places:
        rows = removed.get(key)
        if rows is None or rows.shape != parameter.data[indices].shape or rows.dtype != parameter.dtype:
            raise UsageError(
                f"The rows of {key} do not fit: the model's are {str(parameter.dtype).removeprefix('torch.')}.",
                cure="Restore the model that was edited, in the dtype it was edited in.",
            )
    for parameter, indices, key in places:
        parameter.data[indices.to(parameter.device)] = removed[key].to(parameter.device)


def _editable(denoiser: nn.Module, units: Units) -> dict[str, ValueLayer]:
    layers = value_layers(denoiser, scope="all")
    check_units(layers, units)
    adapted = [name for name in units.modules if layers[name].adapted]
    if adapted:
        raise Unsupported(
            f"An adapter is at work in {adapted[0]!r}, so that its weights are not all there is to scale.",
            cure="Merge it first: pipeline.fuse_lora(), then pipeline.unload_lora_weights().",
        )
    return layers


def _scaling(width: int, indices: Tensor, factor: float) -> Callable[[Tensor], Tensor]:
    def scale(values: Tensor) -> Tensor:
        factors = torch.ones(width, device=values.device, dtype=values.dtype)
        factors[indices.to(values.device)] = factor
        return values * factors

    return scale


def edit_folder(source: str | Path, destination: str | Path, neurons: str | Path, *, factor: float = 0.0) -> EditRecord:
    """Scale the neurons of a file in a pipeline's weights, and write the pipeline as a folder of its own."""
    source, destination = Path(source), Path(destination)
    check_destination(destination, overwrite=None)
    model, earlier = load_text_to_image(source), read_records(source)
    # A table of the paper's code names no layers: its lists are those of the way down and the middle.
    layers = value_layers(model.denoiser, scope="down+mid" if Path(neurons).suffix == ".csv" else "all")
    units, found, found_in = read_neurons(neurons, layers)
    # Neurons found before an earlier edit still count: edits of several prompts follow each other.
    known = {model.digest(), *(record.before for record in earlier)}
    if found_in is not None and found_in not in known:
        raise UsageError(
            f"The neurons were found in another model: in {found_in}, not {model.digest()}.",
            cure="Localize on this model: netweight forget localize.",
        )
    record = apply_found_(model, units, found, file=Path(neurons).name, factor=factor)
    with Job.beside(destination, overwrite=None) as job:
        publish(job, model, [*earlier, record], destination)
    return record


def undo_folder(source: str | Path, destination: str | Path) -> EditRecord:
    """Take back the last edit of a pipeline's folder, and write the pipeline as a folder of its own."""
    source, destination = Path(source), Path(destination)
    check_destination(destination, overwrite=None)
    records = read_records(source)
    if not records:
        raise UsageError(
            f"{source} holds no record of an edit in its folder {FOLDER!r}.", cure="Was it made by forget apply?"
        )
    model = load_text_to_image(source)
    undo(model, records[-1])
    with Job.beside(destination, overwrite=None) as job:
        publish(job, model, records[:-1], destination)
    return records[-1]


def apply_found_(
    model: TextToImage, units: Units, found: Sequence[Localization], *, file: str, factor: float
) -> EditRecord:
    """Scale the neurons of localizations, which the record holds."""
    return deactivate(
        model, units, factor=factor, thresholds={"neurons": file, "found": [each.to_json() for each in found]},
        prompts=[each.prompt for each in found if each.neurons],
    )  # fmt: skip


def publish(job: Job, model: PipelineModel, records: Sequence[EditRecord], destination: Path) -> None:
    """Write a pipeline with its records as the folder that a job makes."""
    shutil.rmtree(job.tree)  # what a run left that was killed here
    model.save(job.tree)
    for number, record in enumerate(records, start=1):
        record.write(job.tree / FOLDER, number)
    job.publish(destination, overwrite=None)
