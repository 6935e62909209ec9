"""A pipeline's folder and a table of memorized prompts in, the same pipeline with their neurons switched off out.

Statistics, threshold, localization and edit in one go, as recipes and the tour do it. What was found lies in the new
folder's record; a call that was stopped goes on prompt by prompt.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, final

from pydantic import Field, FilePath

from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.methods.forget.config import DetectionConfig, LocalizationConfig
from netweight.methods.forget.detection import Score, Threshold, calibrate, look_of
from netweight.methods.forget.edit_record import EditRecord
from netweight.methods.forget.method import detect_resumably, localize
from netweight.methods.forget.prompts import read_prompts
from netweight.methods.forget.results import write_results
from netweight.methods.forget.statistics import measure_statistics
from netweight.probe.diffusion import TextToImage
from netweight.store.atomic import refuse_existing
from netweight.zoo.memorized_pairs import check_pairs

__all__ = [
    "LEAST_ORDINARY",
    "FolderForgetting",
    "calibrated",
    "forget_folder",
    "ordinary_prompts",
    "work_folder",
]

Count = Annotated[int, Field(ge=1)]
LEAST_ORDINARY = 4
"""Ordinary prompts that are needed: half of them calibrate, the others are held out."""


@final
@dataclass(frozen=True)
class FolderForgetting:
    """How prompts are forgotten.

    Attributes:
        targets: Rows with prompt and image: memorized pairs, see `memorized_pairs`. Images are looked at by audits.
        ordinary: Prompts that are not memorized, a file of `read_prompts`; every second one calibrates the threshold,
            the others are held out from it.
        column: Where the latter's prompts are.
        look_seeds: Initial noises per prompt that detection compares.
        look_steps: Of the schedule whose first steps detection looks at.
        timing: Which of them, see `DetectionConfig`.
        scope: Which value layers, see `value_layers`.
        fidelity: See `LocalizationConfig`.
        factor: What neurons are multiplied with.
        images: Images per prompt that audits look at.
        guidance: Of their generation.
        steps: Of their scheduler.
        device: Where the model goes.

    Raises:
        UsageError: A setting cannot be meant.
    """

    targets: FilePath
    ordinary: FilePath
    column: str = "prompt"
    look_seeds: Annotated[int, Field(ge=2)] = 10
    look_steps: Annotated[int, Field(ge=2)] = 50
    timing: Literal["paper", "code"] = "paper"
    scope: Literal["down+mid", "all"] = "down+mid"
    fidelity: Literal["corrected", "reference"] = "corrected"
    factor: float = 0.0
    images: Count = 8
    guidance: float = 7.0
    steps: Count = 50
    device: str = "cpu"

    @property
    def detection(self) -> DetectionConfig:
        """How prompts are looked at."""
        return DetectionConfig(tuple(range(self.look_seeds)), self.look_steps, self.timing)


def forget_folder(
    source: str | Path, destination: str | Path, settings: FolderForgetting, *, progress: Progress = QUIET
) -> EditRecord:
    """Find the neurons of all prompts in a table and switch them off in a folder of its own, whole or not at all.

    Args:
        source: The pipeline's folder, which stays as it is.
        destination: The folder to write; it must not exist.
        settings: How.
        progress: Told of every prompt.

    Returns:
        The record, which lies in the destination's folder `forget`.

    Raises:
        OutputExists: The destination exists.
        UsageError: A file cannot be used, or no prompt has neurons: none is memorized.
        Unsupported: The model is of a kind that is not known here.
        MissingExtra: diffusers is not installed.
    """
    from netweight.integrations.diffusion_pipeline import load_text_to_image
    from netweight.integrations.forgotten_folder import edit_folder

    source, destination = Path(source), Path(destination)
    refuse_existing(destination, overwrite=None)
    prompts = [str(row.values["prompt"]) for row in check_pairs(settings.targets).rows]
    ordinary = ordinary_prompts(settings.ordinary, settings.column, prompts)
    work = work_folder(destination)
    model = load_text_to_image(source, device=settings.device)
    config = LocalizationConfig(settings.detection, scope=settings.scope, fidelity=settings.fidelity)
    threshold, _ = calibrated(model, ordinary, settings.detection, folder=work, progress=progress)
    statistics = measure_statistics(model, ordinary, scope=settings.scope, progress=progress)
    found = localize(
        model, list(dict.fromkeys(prompts)), statistics, threshold, config,
        ledger=work / "neurons.jsonl", progress=progress,
    )  # fmt: skip
    if not any(each.neurons for each in found):
        told = "; ".join(f"{each.prompt!r}: {each.status}" for each in found[:3])
        raise UsageError(
            f"No neurons were found for {len(found)} prompts ({told}).",
            cure="Look at them first: netweight forget detect.",
        )
    write_results(work / "neurons.json", found, model=model.digest())
    record = edit_folder(source, destination, work / "neurons.json", factor=settings.factor)
    shutil.rmtree(work)
    return record


def ordinary_prompts(path: Path, column: str, memorized: Sequence[str]) -> list[str]:
    """Read prompts that are not memorized.

    Raises:
        UsageError: There are too few, or one is memorized as well.
    """
    ordinary = read_prompts(path, column=column)
    both = sorted(set(ordinary) & set(memorized))
    if both:
        raise UsageError(
            f"The prompt {both[0]!r} is among the ordinary and the memorized.", cure="Leave it out of one."
        )
    if len(ordinary) < LEAST_ORDINARY:
        raise UsageError(
            f"{path} holds {len(ordinary)} ordinary prompts; at least {LEAST_ORDINARY} are needed.",
            cure="Half of them calibrate the threshold: give 100 or more.",
        )
    return ordinary


def calibrated(
    model: TextToImage, ordinary: Sequence[str], config: DetectionConfig, *, folder: Path, progress: Progress = QUIET
) -> tuple[Threshold, list[Score]]:
    """Calibrate a threshold on every second ordinary prompt; the scores of the others are returned with it.

    Args:
        model: The model.
        ordinary: At least `LEAST_ORDINARY` prompts.
        config: How they are looked at.
        folder: Where scores are remembered.
        progress: Told of every prompt.
    """
    scores = detect_resumably(model, ordinary, config, ledger=folder / "scores.jsonl", progress=progress)
    return calibrate(scores[::2], model=model.digest(), look=look_of(model, config)), scores[1::2]


def work_folder(destination: Path) -> Path:
    """The folder beside a destination in which unfinished work is kept."""
    return destination.with_name(f".{destination.name}.netweight-work")
