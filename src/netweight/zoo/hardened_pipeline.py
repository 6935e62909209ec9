"""A pipeline's folder and a table of memorized pairs in, the same pipeline hardened against the search out.

`netweight forget harden` calls it. The record of every round lies in the new folder; a call that was stopped goes on
with the round it was in.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import final

import torch
from pydantic import FilePath

from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.integrations.diffusion_pipeline import load_text_to_image
from netweight.methods.forget.edit_record import FOLDER
from netweight.methods.forget.robust import RECORD, HardenSettings, harden_
from netweight.methods.forget.robust_record import HardenRecord
from netweight.store.atomic import refuse_existing, whole_folder
from netweight.zoo.embedding_attack import predicted_error
from netweight.zoo.forgotten_pipeline import ordinary_prompts, work_folder
from netweight.zoo.memorized_pairs import check_pairs, painted_size, read_pairs

__all__ = ["FolderHardening", "harden_folder"]


@final
@dataclass(frozen=True)
class FolderHardening:
    """How a folder is hardened.

    Attributes:
        targets: Rows with prompt and image: memorized pairs, see `memorized_pairs`.
        ordinary: Prompts whose answers are to stay, a file of `read_prompts`.
        column: Where they are.
        surrogates: Rows with prompt and image: what is to be painted instead, row by row as `targets`; None takes the
            model's own images of ordinary prompts.
        settings: Of the hardening. The error that is descended is chosen by what the model predicts.
        device: Where the model goes.
    """

    targets: FilePath
    ordinary: FilePath
    column: str = "prompt"
    surrogates: FilePath | None = None
    settings: HardenSettings = field(default_factory=HardenSettings)
    device: str = "cpu"


def harden_folder(
    source: str | Path, destination: str | Path, hardening: FolderHardening, *, progress: Progress = QUIET
) -> HardenRecord:
    """Harden a pipeline and write it as a folder of its own, whole or not at all.

    Args:
        source: The pipeline's folder, which stays as it is. It is trained in float32.
        destination: The folder to write; it must not exist.
        hardening: How.
        progress: Told of every round and step.

    Returns:
        The record, which lies in the destination's folder `forget`.

    Raises:
        OutputExists: The destination exists.
        UsageError: A file or folder cannot be used, or unfinished work beside the destination is another hardening's.
        NameNotFound: The layers match no module.
        Unsupported: The model is of a kind that is not known here.
        TrainingStopped: NaN or infinity; the last whole round is kept.
    """
    source, destination = Path(source), Path(destination)
    refuse_existing(destination, overwrite=None)
    prompts = [str(row.values["prompt"]) for row in check_pairs(hardening.targets).rows]
    ordinary = ordinary_prompts(hardening.ordinary, hardening.column, prompts)
    if hardening.surrogates is not None and len(check_pairs(hardening.surrogates).rows) != len(prompts):
        raise UsageError(
            f"{hardening.surrogates} has not as many rows as {hardening.targets}.", cure="Give one surrogate for each."
        )
    model = load_text_to_image(source, dtype=torch.float32, device=hardening.device)
    size = painted_size(model)
    images = torch.stack([pair.image for pair in read_pairs(hardening.targets, size)])
    surrogates = None
    if hardening.surrogates is not None:
        surrogates = torch.stack([pair.image for pair in read_pairs(hardening.surrogates, size)])
    settings = replace(
        hardening.settings, search=replace(hardening.settings.search, error=predicted_error(model))
    )  # fmt: skip
    work = work_folder(destination)
    try:
        record = harden_(
            model, prompts, images, ordinary, settings=settings, surrogates=surrogates, folder=work, progress=progress
        )
    except torch.OutOfMemoryError as error:
        raise UsageError(
            f"Memory ran out in training with batches of {settings.batch}.",
            cure=f"Lower the batch, or train fewer layers; then remove {work}, which holds rounds of these settings.",
        ) from error
    with whole_folder(destination) as part:
        model.save(part)
        record.write(part / FOLDER / RECORD)
    shutil.rmtree(work)
    return record
