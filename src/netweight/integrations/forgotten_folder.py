"""Folders of pipelines with neurons switched off: written as ordinary ones, with records that undo every edit."""

from __future__ import annotations

from pathlib import Path

from netweight.errors import UsageError
from netweight.integrations.diffusion_pipeline import PipelineModel, load_text_to_image
from netweight.methods.forget.edit_record import FOLDER, EditRecord, apply_edit_, read_records, undo_edit_
from netweight.methods.forget.layers import value_layers
from netweight.methods.forget.results import read_localizations, read_neurons
from netweight.store.atomic import refuse_existing, whole_folder

__all__ = ["edit_folder", "undo_folder"]


def edit_folder(source: str | Path, destination: str | Path, neurons: str | Path, *, factor: float = 0.0) -> EditRecord:
    """Scale neurons in a pipeline's weights.

    Args:
        source: The pipeline's folder, which stays as it is.
        destination: The folder to write; it must not exist.
        neurons: A file of `read_neurons`.
        factor: What the neurons are multiplied with.

    Returns:
        The record, which lies in the destination's folder `forget`, after those of earlier edits.

    Raises:
        OutputExists: The destination exists.
        UsageError: The neurons were found in another model, or there is none; see `apply_edit_`.
        Unsupported: See `apply_edit_`.
    """
    source, destination = Path(source), Path(destination)
    refuse_existing(destination, overwrite=None)
    model = load_text_to_image(source)
    earlier = read_records(source)
    # A table of the paper's code names no layers: its lists are those of the way down and the middle.
    layers = value_layers(model.denoiser, scope="down+mid" if Path(neurons).suffix == ".csv" else "all")
    units, found_in = read_neurons(neurons, layers)
    # Neurons found before an earlier edit still count: edits of several prompts follow each other.
    known = {model.digest(), *(record.before for record in earlier)}
    if found_in is not None and found_in not in known:
        raise UsageError(
            f"The neurons were found in another model: in {found_in}, not {model.digest()}.",
            cure="Localize on this model: netweight forget localize.",
        )
    found = read_localizations(neurons, layers)
    record = apply_edit_(
        model, units, factor=factor,
        thresholds={"neurons": Path(neurons).name, "found": [each.to_json() for each in found]},
        prompts=[each.prompt for each in found if each.neurons],
    )  # fmt: skip
    _write(model, destination, [*earlier, record])
    return record


def undo_folder(source: str | Path, destination: str | Path) -> EditRecord:
    """Take back the last edit of a pipeline's folder.

    Args:
        source: The edited pipeline's folder, which stays as it is.
        destination: The folder to write; it must not exist.

    Returns:
        The record of the edit that was undone.

    Raises:
        OutputExists: The destination exists.
        UsageError: The folder holds no record, or the weights are not those that the edit left.
        CorruptBlob: A record is damaged.
    """
    source, destination = Path(source), Path(destination)
    refuse_existing(destination, overwrite=None)
    records = read_records(source)
    if not records:
        raise UsageError(
            f"{source} holds no record of an edit in its folder {FOLDER!r}.", cure="Was it made by forget apply?"
        )
    model = load_text_to_image(source)
    undo_edit_(model, records[-1])
    _write(model, destination, records[:-1])
    return records[-1]


def _write(model: PipelineModel, destination: Path, records: list[EditRecord]) -> None:
    with whole_folder(destination) as part:
        model.save(part)
        for number, record in enumerate(records, start=1):
            record.write(part / FOLDER, number)
