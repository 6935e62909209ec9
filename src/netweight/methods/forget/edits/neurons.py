"""Neurons switched off: those that memorized prompts hang on, in the weights of cross-attention's values.

Source: Hintersdorf et al., arXiv 2406.02366 (NeMo).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, final

from pydantic import Field, FilePath

from netweight.errors import UsageError
from netweight.hf.pipeline_costs import Stage
from netweight.methods.forget.edits.edit import Edit, EditOutcome, EditSizes, EditTask
from netweight.methods.forget.settings import (
    DetectionConfig,
    Fidelity,
    LocalizationConfig,
    Scope,
    Timing,
)
from netweight.settings import Cli

if TYPE_CHECKING:
    from netweight.core.names import Units
    from netweight.job import Job
    from netweight.methods.forget.detect import MemorizationScore, Threshold
    from netweight.methods.forget.localize import Localization
    from netweight.nn.text_to_image import TextToImage


@final
class Neurons(Edit):
    """Neurons that memorized prompts hang on, switched off or scaled."""

    name: ClassVar[str] = "neurons"
    card: ClassVar[str] = "the neurons that store them were switched off in the weights"
    anchored: ClassVar[bool] = False

    file: Annotated[FilePath | None, Cli(name="--neurons")] = Field(
        None, description="neurons.json or .csv of `netweight forget localize`: scale these neurons and do not search."
    )
    factor: Annotated[float, Cli(name="--factor")] = Field(
        0.0, description="Factor by which the outputs of the neurons are multiplied."
    )
    seeds: Annotated[int, Cli(own=False)] = Field(
        10, ge=2, description="Number of initial noises that detection compares for each prompt (seeds 0, 1 and so on)."
    )
    steps: Annotated[int, Cli(own=False)] = Field(
        50, ge=2, description="Number of steps of the schedule; detection predicts the noise at the first one."
    )
    timing: Annotated[Timing, Cli(own=False)] = Field(
        "paper",
        description="Timestep of the predictions: the first, as in the paper, or the second, as in the released code.",
    )
    scope: Annotated[Scope, Cli(own=False)] = Field(
        "down+mid",
        description="Value layers of the U-Net that are searched: those on the way down and in the middle, or all.",
    )
    fidelity: Annotated[Fidelity, Cli(own=False)] = Field(
        "corrected",
        description="`reference` reproduces the order and the defects of the released code; "
        "the page on differences from the papers lists them.",
    )

    @property
    def needs_prompts(self) -> bool:
        """Neurons of a file need none."""
        return self.file is None

    @property
    def localization(self) -> LocalizationConfig:
        """Settings of the predictions and of the search for neurons."""
        detection = DetectionConfig(seeds=tuple(range(self.seeds)), steps=self.steps, timing=self.timing)
        return LocalizationConfig(detection=detection, scope=self.scope, fidelity=self.fidelity)

    def stages(self, sizes: EditSizes) -> list[Stage]:
        """Return detection among ordinary prompts, and the search for neurons; with a file of neurons nothing."""
        if self.file is not None:
            return []
        return [
            Stage("scores of ordinary prompts", predictions=self.seeds * (sizes.ordinary + 1), prompts=sizes.ordinary),
            Stage("statistics of ordinary prompts", prompts=sizes.ordinary),
            self.localization.stage(sizes.memorized),
        ]

    def apply(self, task: EditTask) -> EditOutcome:
        """Scale the neurons of the file, or find those of the prompts first; a second call goes on by prompt."""
        from netweight.methods.forget.localize import union
        from netweight.methods.forget.scaling import scale_rows_

        if self.file is not None:
            units, localizations = neurons_of_file(task, self.file)
        else:
            localizations = neurons_of_prompts(task, self.localization)
            units = union(localizations)
        if not units:
            words = "; ".join(f"{each.prompt!r}: {each.status}" for each in localizations[:3])
            raise UsageError(
                f"No neurons were found for {len(localizations)} prompts ({words}).",
                cure="Score them first: netweight forget detect.",
            )
        rows = scale_rows_(task.model.denoiser, units, factor=self.factor)
        about = {
            "neurons": self.file.name if self.file else "neurons.json",
            "found": [each.to_json() for each in localizations],
        }
        return EditOutcome(
            rows, units=units, factor=self.factor, thresholds=about,
            prompts=[each.prompt for each in localizations if each.neurons],
        )  # fmt: skip


def neurons_of_prompts(task: EditTask, config: LocalizationConfig) -> list[Localization]:
    """Find the neurons of prompts, with statistics and threshold of ordinary ones; a second call goes on by prompt."""
    from netweight.methods.forget.layers import measure_statistics
    from netweight.methods.forget.localize import localize

    # An edit of a folder always has a job.
    assert task.job is not None
    threshold, _ = calibrated(task.model, task.ordinary, config.detection, folder=task.job, progress=task.progress)
    statistics = measure_statistics(task.model, task.ordinary, scope=config.scope, progress=task.progress)
    return localize(
        task.model, list(task.prompts), statistics, threshold, config, folder=task.job, progress=task.progress
    )


def calibrated(
    model: TextToImage, ordinary: Sequence[str], config: DetectionConfig, *, folder: Path | Job, progress: Any
) -> tuple[Threshold, list[MemorizationScore]]:
    """Calibrate a threshold on every second ordinary prompt; return it with the scores of the others."""
    from netweight.methods.forget.detect import calibrate, detect_resumably, detection_settings

    scores = detect_resumably(model, ordinary, config, folder=folder, progress=progress)
    return calibrate(scores[::2], model=model.identity(), detection=detection_settings(model, config)), scores[1::2]


def neurons_of_file(task: EditTask, neurons: Path) -> tuple[Units, list[Localization]]:
    """Read the neurons of a file, without those that earlier edits scaled: each is scaled once."""
    from netweight.methods.forget.layers import value_layers
    from netweight.methods.forget.localize import read_neurons

    # A table of the paper's code names no layers: its lists are those of the way down and the middle.
    layers = value_layers(task.model.denoiser, scope="down+mid" if neurons.suffix == ".csv" else "all")
    units, localizations, model = read_neurons(neurons, layers)
    # Neurons found before an earlier edit still count: edits of several prompts follow each other.
    models = {task.model.digest(), *(record.before for record in task.earlier)}
    if model is not None and model not in models:
        raise UsageError(
            f"The neurons were found in another model: in {model}, not {task.model.digest()}.",
            cure="Localize on this model: netweight forget localize.",
        )
    for record in task.earlier:
        # A factor is applied to a neuron only once.
        left = units - record.units
        if units and not left:
            raise UsageError(
                f"All {len(units)} neurons of {neurons} were edited before.",
                cure="Undo that edit first.",
            )
        units = left
    return units, list(localizations)
