"""Edits of a model in memory, and their undoing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from netweight.core.environment import describe
from netweight.core.names import Units
from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, UsageError
from netweight.job import Job
from netweight.methods.forget.anchors import ranked_anchors
from netweight.methods.forget.edits import ClosedForm, Edit
from netweight.methods.forget.edits.edit import EditTask
from netweight.methods.forget.records import EditRecord
from netweight.methods.forget.scaling import restore_rows_, scale_rows_
from netweight.methods.forget.weights import exchange
from netweight.nn.text_to_image import TextToImage


def forget(
    model: TextToImage,
    prompts: Sequence[str],
    ordinary: Sequence[str],
    *,
    edit: Edit | None = None,
    anchors: Sequence[str] | None = None,
    pictures: Sequence[tuple[str, Tensor]] | None = None,
    earlier: Sequence[EditRecord] = (),
    folder: Job | Path | None = None,
    progress: Progress = QUIET,
) -> EditRecord:
    """Make a model forget memorized prompts and their pictures, by an edit of its weights.

    Args:
        model: The model; changed in place, its dtype stays.
        prompts: Memorized prompts; all are edited together.
        ordinary: Prompts whose answers are to stay, 100 or more; the empty one stays as well.
        edit: The edit with its settings: `ClosedForm()`, which takes seconds and is the default, `Siss()`, after
            which errors and scores reveal least of what was edited, or another one of `netweight.methods.forget.edits`.
        anchors: Prompts whose answers memorized ones get, one for each; None takes those of the last 24 ordinary
            prompts whose images are least like the memorized ones'.
        pictures: Memorized prompts with a picture each, of shape `(3, height, width)`, within 0 and 1; a prompt may
            have several pictures, and a picture several prompts. Edits that unlearn pictures take the model's own
            images of the prompts where none are given.
        earlier: Records of edits that were made before, whose neurons are not scaled again.
        folder: Where checkpoints are kept, to be continued after a kill.
        progress: Reports steps.

    Returns:
        The record, from which `undo` restores the weights.

    Raises:
        UsageError: There is no prompt, a prompt is both memorized and ordinary, anchors are not one for each, or a
            picture has a prompt that is not among the memorized ones.
        Unsupported: The model has no layers that the edit works on, or an adapter is at work in it.
        TrainingStopped: The loss of a training became infinite or NaN.
    """
    edit = edit or ClosedForm()
    prompts = list(dict.fromkeys(prompts))
    _check(edit, prompts, ordinary, anchors, pictures)
    before = model.digest()
    ranked: list[list[str]] = []
    if edit.anchored:
        ranked = [[each] for each in anchors] if anchors is not None else ranked_anchors(model, prompts, ordinary)
    task = EditTask(model, prompts, list(ordinary), ranked, pictures, folder, progress, earlier)
    done = edit.apply(task)
    return EditRecord(
        done.units or Units(), done.factor, before, model.digest(), dict(done.thresholds),
        tuple(prompts if done.prompts is None else done.prompts), describe(), done.rows, edit.name,
        edit.to_json() | dict(done.about),
    )  # fmt: skip


def _check(
    edit: Edit, prompts: Sequence[str], ordinary: Sequence[str], anchors: Sequence[str] | None,
    pictures: Sequence[tuple[str, Tensor]] | None,
) -> None:  # fmt: skip
    if edit.needs_prompts:
        both = sorted(set(prompts) & set(ordinary))
        if both or not prompts or not ordinary:
            what = f"{both[0]!r} is memorized and ordinary" if both else "There are no memorized or no ordinary prompts"
            raise UsageError(f"{what}.", cure="Give prompts to forget, and others that should stay.")
    if anchors is not None and len(anchors) != len(prompts):
        raise UsageError(f"{len(prompts)} prompts came with {len(anchors)} anchors.", cure="Give one for each prompt.")
    given = {prompt for prompt, _ in pictures or ()}
    if foreign := sorted(given - set(prompts)):
        raise UsageError(
            f"A picture has the prompt {foreign[0]!r}, which is not among the prompts to forget.",
            cure="Add the prompt.",
        )
    if pictures is not None and (bare := [prompt for prompt in prompts if prompt not in given]):
        raise UsageError(f"The prompt {bare[0]!r} has no picture.", cure="Give one or more for each prompt.")


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
        NameNotFound: A module is not a value layer of the model.
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
    if not record.rows:
        raise UsageError(
            "The record contains no weights, so the edit cannot be undone.", cure="Keep the pipeline before its edit."
        )
    if model.digest() != record.after:
        raise UsageError(
            f"This is not the model that the edit produced: its digest is {model.digest()}, not {record.after}.",
            cure="Undo edits in reverse order, in the dtype that they were made in.",
        )
    neurons = record.method == "neurons"
    put = partial(restore_rows_, model.denoiser, record.units) if neurons else partial(exchange, model.denoiser)
    edited = put(record.rows)
    if model.digest() != record.before:
        put(edited)
        raise CorruptBlob("The rows of the record do not restore the model before the edit: its digest differs.")
