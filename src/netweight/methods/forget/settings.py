"""Settings of forgetting: of each step, and of the commands on pipeline folders; torch is not imported.

Defaults are those of the paper (arXiv 2406.02366, section 3, and its code) where it is consistent.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, final

import click
from pydantic import BeforeValidator, Field, FilePath

from netweight.errors import UsageError
from netweight.hf.pipeline_costs import Stage
from netweight.hf.pipeline_settings import PipelineSettings
from netweight.settings import Cli, Settings

Scope = Literal["down+mid", "all"]
Timing = Literal["paper", "code"]
Fidelity = Literal["corrected", "reference"]

# Fields that several classes have.
_SEEDS: Any = Field(
    10, ge=2, description="Number of initial noises that detection compares for each prompt (seeds 0, 1 and so on)."
)
_TIMING: Any = Field(
    "paper",
    description="Timestep of the predictions: the first, as in the paper, or the second, as in the released code.",
)
_SCOPE: Any = Field(
    "down+mid",
    description="Value layers of the U-Net that are searched: those on the way down and in the middle, or all.",
)
_FIDELITY: Any = Field(
    "corrected",
    description="`reference` reproduces the order and the defects of the released code; "
    "the page on differences from the papers lists them.",
)
_COLUMN: Any = Field(
    "prompt,caption,text",
    description="Column with the prompts; of several names, the first that a file has.",
)
_PIPELINE: Any = Field(default=PipelineSettings(), description="Settings for opening the pipeline.")


def _numbered(seeds: Any) -> Any:
    """Turn a number of seeds into the seeds 0, 1 and so on."""
    return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)


@final
class DetectionConfig(Settings):
    """Settings of the first predictions for prompts and of their comparison."""

    seeds: Annotated[
        tuple[int, ...],
        BeforeValidator(_numbered, json_schema_input_type=int | tuple[int, ...]),
        Cli(type=click.IntRange(2)),
    ] = Field(10, validate_default=True, description="Initial noises per prompt: seeds, or their number.")
    steps: int = Field(50, ge=2, description="Steps of the schedule.")
    timing: Timing = _TIMING
    rows: int = Field(64, ge=1, description="Largest number of images at a time; halved if memory runs out.")

    def check(self) -> None:
        """Refuse seeds that cannot be compared."""
        if len(set(self.seeds)) < max(2, len(self.seeds)):
            raise UsageError(f"Seeds {self.seeds} cannot be compared.", cure="Give at least 2, each once.")


@final
class LocalizationConfig(Settings):
    """Settings of the search for the neurons of a memorized prompt."""

    detection: DetectionConfig = Field(
        default=DetectionConfig(), description="Settings of the predictions and their comparison."
    )
    scope: Scope = _SCOPE
    theta: Annotated[float, Cli(own=False)] = Field(
        5.0,
        description="Number of standard deviations from its mean at which a neuron counts as out of distribution in "
        "the first stage.",
    )
    theta_step: Annotated[float, Cli(own=False)] = Field(0.25, gt=0, description="Decrease of theta at each stage.")
    theta_least: Annotated[float, Cli(own=False)] = Field(1.0, gt=0, description="Theta of the last stage.")
    # "corrected" removes repeated neurons and takes equality as reached; "reference" keeps a neuron as often as both
    # rules chose it, demands less than the threshold in refinement, never selects at theta_least, and takes the range
    # of values of similarities from the seeds compared, as the released code does.
    fidelity: Fidelity = _FIDELITY
    prompts: Annotated[int, Cli(own=False)] = Field(8, ge=1, description="Prompts searched at a time, in one batch.")
    initial: Annotated[float | None, Cli(own=False)] = Field(
        None, ge=0, le=1, description="Largest similarity at which the stages end; by default the threshold."
    )
    refinement: Annotated[float | None, Cli(own=False)] = Field(
        None, ge=0, le=1, description="Largest similarity that refinement allows; by default that of the stages."
    )

    def check(self) -> None:
        """Refuse a range of theta that is empty."""
        if self.theta < self.theta_least:
            raise UsageError(
                f"theta {self.theta} is below theta_least {self.theta_least}.",
                cure="It falls from theta to theta_least.",
            )

    def stage(self, prompts: int) -> Stage:
        """Return the search for the neurons of prompts: every seed once, and more where a prompt is memorized."""
        least = len(self.detection.seeds) * prompts
        return Stage("search for neurons", predictions=least, prompts=prompts, more=True)

    @property
    def thetas(self) -> tuple[float, ...]:
        """Theta of every stage; the stage's number is its k."""
        count = int((self.theta - self.theta_least) / self.theta_step + 1e-9) + 1
        falling = [self.theta - stage * self.theta_step for stage in range(count)]
        falling = falling if falling[-1] == self.theta_least else [*falling, self.theta_least]
        # The released code lowers theta to the least and leaves before it selects with it.
        return tuple(falling[:-1] if self.fidelity == "reference" and len(falling) > 1 else falling)


class GenerationSettings(Settings):
    """Settings of the images of prompts."""

    seeds: tuple[int, ...] = Field(
        tuple(range(8)), min_length=1, description="Seeds, one image each, the same for every prompt and model."
    )
    guidance: float = Field(7.0, description="Scale of classifier-free guidance.")
    steps: int = Field(50, ge=1, description="Steps of the scheduler.")
    rows: int = Field(64, ge=1, description="Largest number of images at a time; halved if memory runs out.")

    def check(self) -> None:
        """Refuse repeated seeds."""
        if len(set(self.seeds)) != len(self.seeds):
            raise UsageError(f"Seeds {self.seeds} are not different.", cure="Give each once.")


@final
class FolderStatistics(Settings):
    """Settings of the measurement of typical activations in a pipeline folder."""

    prompts: FilePath = Field(description="File of ordinary prompts, 1,000 or more.")
    column: str = _COLUMN
    scope: Scope = _SCOPE
    pipeline: PipelineSettings = _PIPELINE


@final
class FolderDetection(Settings):
    """Settings of the detection of memorized prompts in a pipeline folder."""

    prompts: FilePath = Field(description="File of prompts to score.")
    ordinary: FilePath | None = Field(None, description="Prompts that are not memorized; they calibrate the threshold.")
    held_out: FilePath | None = Field(
        None, description="Further prompts that are not memorized, to measure how well detection separates both kinds."
    )
    threshold: Annotated[str | None, Cli(metavar="FILE|NUMBER")] = Field(
        None, description="Threshold in place of a calibrated one: threshold.json of an earlier call, or a number."
    )
    quantile: float | None = Field(
        None, gt=0, le=1,
        description="Quantile of the ordinary prompts' scores to use as threshold, in place of mean + 1 "
        "standard deviation.",
    )  # fmt: skip
    column: str = _COLUMN
    detection: DetectionConfig = Field(default=DetectionConfig(), description="Settings of the scores of prompts.")
    pipeline: PipelineSettings = _PIPELINE

    def check(self) -> None:
        """Require one source of the threshold."""
        if (self.ordinary is None) == (self.threshold is None):
            raise UsageError(
                "A threshold is needed, from exactly one source.",
                cure="Give --ordinary to calibrate one, or --threshold.",
            )


@final
class FolderLocalization(Settings):
    """Settings of the search for the neurons of memorized prompts in a pipeline folder."""

    prompts: FilePath = Field(description="File of memorized prompts.")
    statistics: FilePath = Field(
        description="Statistics of `netweight forget statistics`, or the .pt file of the paper's code."
    )
    threshold: Annotated[str, Cli(metavar="FILE|NUMBER")] = Field(
        description="threshold.json of netweight forget detect, or a number."
    )
    column: str = _COLUMN
    localization: LocalizationConfig = Field(
        default=LocalizationConfig(), description="Settings of the search for neurons."
    )
    pipeline: PipelineSettings = _PIPELINE
