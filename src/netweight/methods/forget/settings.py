"""Settings of forgetting: of each step, and of the commands on pipeline folders; torch is not imported.

Defaults are those of the paper (arXiv 2406.02366, section 3, and its code) where it is consistent.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, final

import click
from pydantic import BeforeValidator, DirectoryPath, Field, FilePath

from netweight.attacks.embedding_search.settings import FolderSearch, PredictionKind
from netweight.errors import UsageError
from netweight.hf.pipeline_settings import PipelineSettings
from netweight.settings import Cli, Settings

Scope = Literal["down+mid", "all"]
Timing = Literal["paper", "code"]
Fidelity = Literal["corrected", "reference"]
EditMethod = Literal["closed-form", "distil", "esd", "siss", "neurons"]

# Fields that several classes have.
_SEEDS: Any = Field(10, ge=2, description="Initial noises per prompt that detection compares: seeds 0, 1 and so on.")
_TIMING: Any = Field(
    "paper", description="Make predictions at the first timestep, or at the second, as the released code does."
)
_SCOPE: Any = Field("down+mid", description="Value layers of a U-Net: without or with those on the way up.")
_FIDELITY: Any = Field(
    "corrected", description="Without or with the order and quirks of the released code; see docs/differences.md."
)
_COLUMN: Any = Field(
    "prompt", description="Column of prompts in tables; of several, as caption,prompt, the first that a file has."
)
_PIPELINE: Any = Field(default=PipelineSettings(), description="How the pipeline is opened.")


def _numbered(seeds: Any) -> Any:
    """A number of seeds stands for 0, 1 and so on."""
    return tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)


@final
class DetectionConfig(Settings):
    """How first predictions for prompts are made and compared."""

    seeds: Annotated[
        tuple[int, ...],
        BeforeValidator(_numbered, json_schema_input_type=int | tuple[int, ...]),
        Cli(type=click.IntRange(2)),
    ] = Field(10, validate_default=True, description="Initial noises per prompt: seeds, or their number.")
    steps: int = Field(50, ge=2, description="Steps of the schedule.")
    timing: Timing = _TIMING
    rows: int = Field(64, ge=1, description="Most images at a time; halved where memory runs out.")

    def check(self) -> None:
        """Refuse seeds that cannot be compared."""
        if len(set(self.seeds)) < max(2, len(self.seeds)):
            raise UsageError(f"Seeds {self.seeds} cannot be compared.", cure="Give at least 2, each once.")


@final
class LocalizationConfig(Settings):
    """How the neurons of a memorized prompt are searched for."""

    detection: DetectionConfig = Field(default=DetectionConfig(), description="How predictions are made and compared.")
    scope: Scope = _SCOPE
    theta: Annotated[float, Cli(own=False)] = Field(
        5.0, description="Deviations from its mean from which a neuron is out of distribution, at the first stage."
    )
    theta_step: Annotated[float, Cli(own=False)] = Field(0.25, gt=0, description="Decrease of theta at each stage.")
    theta_least: Annotated[float, Cli(own=False)] = Field(1.0, gt=0, description="Theta of the last stage.")
    # "corrected" removes repeated neurons and takes equality as reached; "reference" keeps a neuron as often as both
    # rules chose it, demands less than the threshold in refinement, never selects at theta_least, and takes the range
    # of values of similarities from the seeds compared, as the released code does.
    fidelity: Fidelity = _FIDELITY
    prompts: Annotated[int, Cli(own=False)] = Field(8, ge=1, description="Prompts searched at a time, in one batch.")
    initial: Annotated[float | None, Cli(own=False)] = Field(
        None, ge=0, le=1, description="Similarity that stages must reach, in place of the threshold's."
    )
    refinement: Annotated[float | None, Cli(own=False)] = Field(
        None, ge=0, le=1, description="Similarity that refinement must keep to, in place of that of the stages."
    )

    def check(self) -> None:
        """Refuse a range of theta that is empty."""
        if self.theta < self.theta_least:
            raise UsageError(
                f"theta {self.theta} is below theta_least {self.theta_least}.",
                cure="It falls from theta to theta_least.",
            )

    @property
    def thetas(self) -> tuple[float, ...]:
        """Theta of every stage; the stage's number is its k."""
        count = int((self.theta - self.theta_least) / self.theta_step + 1e-9) + 1
        falling = [self.theta - stage * self.theta_step for stage in range(count)]
        falling = falling if falling[-1] == self.theta_least else [*falling, self.theta_least]
        # The released code lowers theta to the least and leaves before it selects with it.
        return tuple(falling[:-1] if self.fidelity == "reference" and len(falling) > 1 else falling)


class GenerationSettings(Settings):
    """How images of prompts are generated."""

    seeds: tuple[int, ...] = Field(
        tuple(range(8)), min_length=1, description="Seeds, one image each, the same for every prompt and model."
    )
    guidance: float = Field(7.0, description="Scale of classifier-free guidance.")
    steps: int = Field(50, ge=1, description="Steps of the scheduler.")
    rows: int = Field(64, ge=1, description="Most images at a time; halved where memory runs out.")

    def check(self) -> None:
        """Refuse repeated seeds."""
        if len(set(self.seeds)) != len(self.seeds):
            raise UsageError(f"Seeds {self.seeds} are not different.", cure="Give each once.")


@final
class ClosedFormSettings(Settings):
    """How keys and values are led elsewhere by least squares."""

    weight: Annotated[float, Cli(own=False)] = Field(
        0.2, gt=0, description="Weight of memorized tokens against kept ones."
    )
    rounds: Annotated[int, Cli(own=False)] = Field(
        4, ge=1, description="Tries, each with twice the weight and another anchor for prompts whose images remain."
    )
    ridge: Annotated[float, Cli(own=False)] = Field(
        1e-4, gt=0, description="Weight of the difference from the original weights."
    )


@final
class DistilSettings(Settings):
    """How a model learns from the original: all but the answers to memorized prompts."""

    # What is learned under memorized prompts: "anchor", the original's answers to their anchors; "away", the opposite
    # of what they add to the original's answers (ESD); "unlearn", anchors' images and not the given ones (SISS).
    objective: Annotated[Literal["anchor", "away", "unlearn"], Cli(own=False)] = Field(
        "anchor", description="What is learned under memorized prompts."
    )
    noise: float = Field(0.5, ge=0, le=1, description="Share of each weight that is replaced by a fresh one.")
    steps: Annotated[int, Cli(name="--distil-steps")] = Field(600, ge=1, description="Training steps.")
    batch: int = Field(32, ge=2, description="Latents per training step.")
    memorized: Annotated[float, Cli(own=False)] = Field(
        0.16, gt=0, lt=1, description="Share of a batch under memorized prompts."
    )
    empty: Annotated[float, Cli(own=False)] = Field(
        0.1, ge=0, lt=1, description="Share of a batch under the empty prompt."
    )
    lr: float = Field(
        2e-3, gt=0,
        description="Largest learning rate of AdamW; for networks of a million weights, large ones need less.",
    )  # fmt: skip
    weight_decay: Annotated[float, Cli(own=False)] = Field(1e-3, ge=0, description="Weight decay of AdamW.")
    images: Annotated[int, Cli(own=False)] = Field(
        4, ge=1, description="Images of each ordinary prompt that the original makes to learn from."
    )
    guidance: Annotated[float, Cli(own=False)] = Field(3.0, description="Guidance scale of these images.")
    generation_steps: Annotated[int, Cli(own=False)] = Field(20, ge=2, description="Scheduler steps of these images.")
    layers: Annotated[str | None, BeforeValidator(lambda layers: None if layers == "all" else layers)] = Field(
        None, description='Modules that receive noise and are trained, by name with wildcards; "all" trains all.'
    )
    # What a pipeline was trained to predict; in folders it is taken from the scheduler.
    error: Annotated[PredictionKind, Cli(own=False)] = Field(
        "velocity", description="Prediction whose difference is minimized; in folders, what the network predicts."
    )
    seed: int = Field(0, description="Random seed.")

    def check(self) -> None:
        """Refuse batches without room for ordinary prompts."""
        if self.memorized + self.empty > 0.9:
            raise UsageError(
                "Shares of memorized and empty prompts leave less than a tenth of a batch.", cure="Lower them."
            )


# Other methods by the same training; what a command gives of --distil-steps and so on takes the place of theirs.
TRAINED = {
    "distil": DistilSettings(),
    "esd": DistilSettings(objective="away", noise=0, layers="**.attn2", steps=200),
    "siss": DistilSettings(objective="unlearn", noise=0, steps=200),
}


@final
class FolderStatistics(Settings):
    """Usual activity of the neurons of a pipeline folder."""

    prompts: FilePath = Field(description="Ordinary prompts, 1,000 or more.")
    column: str = _COLUMN
    scope: Scope = _SCOPE
    pipeline: PipelineSettings = _PIPELINE


@final
class FolderDetection(Settings):
    """Which prompts a pipeline folder has memorized."""

    prompts: FilePath = Field(description="Prompts to score.")
    ordinary: FilePath | None = Field(
        None, description="Prompts that are not memorized, to calibrate the threshold on."
    )
    held_out: FilePath | None = Field(None, description="Further such prompts: how well are the two told apart?")
    threshold: Annotated[str | None, Cli(metavar="FILE|NUMBER")] = Field(
        None, description="In place of a calibrated one: threshold.json of an earlier call, or a number."
    )
    quantile: float | None = Field(
        None, gt=0, le=1,
        description="Calibrate at this quantile of ordinary prompts, not at mean + 1 standard deviation.",
    )  # fmt: skip
    column: str = _COLUMN
    detection: DetectionConfig = Field(default=DetectionConfig(), description="How prompts are scored.")
    pipeline: PipelineSettings = _PIPELINE

    def check(self) -> None:
        """Require one source of the threshold."""
        if (self.ordinary is None) == (self.threshold is None):
            raise UsageError("A threshold is needed, once.", cure="Give --ordinary to calibrate one, or --threshold.")


@final
class FolderLocalization(Settings):
    """The neurons that prompts are memorized in, in a pipeline folder."""

    prompts: FilePath = Field(description="Memorized prompts.")
    statistics: FilePath = Field(description="From netweight forget statistics, or the .pt file of the paper's code.")
    threshold: Annotated[str, Cli(metavar="FILE|NUMBER")] = Field(
        description="threshold.json of netweight forget detect, or a number."
    )
    column: str = _COLUMN
    localization: LocalizationConfig = Field(default=LocalizationConfig(), description="How neurons are searched for.")
    pipeline: PipelineSettings = _PIPELINE


@final
class FolderForgetting(Settings):
    """Memorized prompts made to forget in a pipeline folder."""

    method: EditMethod = Field(
        "closed-form",
        description="Lead keys and values elsewhere, in seconds; add noise and distil, in minutes or hours, which a "
        "search for embeddings finds hard to undo; train away from the prompts (ESD) or from their images (SISS); or "
        "switch NeMo's neurons off.",
    )
    targets: FilePath | None = Field(None, description="Rows with prompt and image (a file): memorized pairs.")
    ordinary: FilePath | None = Field(
        None, description="Prompts that are not memorized, 100 or more, whose images are to stay. For neurons, every "
        "second one calibrates the threshold, others are held out.",
    )  # fmt: skip
    column: str = _COLUMN
    anchors: FilePath | None = Field(
        None,
        description="Prompts whose answers memorized ones get, one for each; else ordinary prompts whose images are "
        "least correlated with the memorized ones'. Not for neurons.",
    )
    closed_form: ClosedFormSettings = Field(default=ClosedFormSettings(), description="Settings of the closed form.")
    distil: DistilSettings = Field(default=DistilSettings(), description="Settings of training: distil, esd, siss.")
    undo: bool = Field(
        True,
        description="Keep the weights as they were, to undo the edit. Whoever has them can undo it: publish without.",
    )
    other_weights: Literal["copy", "leave-out"] = Field(
        "copy",
        description="Files that hold weights from before the edit and cannot be edited, such as a .ckpt at the top: "
        "copied and named, or left out of the new folder.",
    )
    neurons: FilePath | None = Field(
        None, description="neurons.json or .csv of netweight forget localize: switch these off, and find none."
    )
    look_seeds: int = _SEEDS
    look_steps: int = Field(50, ge=2, description="Steps of the schedule whose first steps detection predicts.")
    timing: Timing = _TIMING
    scope: Scope = _SCOPE
    fidelity: Fidelity = _FIDELITY
    factor: float = Field(0.0, description="Factor that neurons are multiplied with.")
    images: int = Field(8, ge=1, description="Images per prompt that audits generate.")
    guidance: float = Field(7.0, description="Guidance scale of these images.")
    steps: int = Field(50, ge=1, description="Scheduler steps of these images.")
    pipeline: PipelineSettings = _PIPELINE

    def check(self) -> None:
        """Require what the method needs."""
        if self.neurons is not None and "method" in self.given and self.method != "neurons":
            raise UsageError(f"neurons are given, and the method is {self.method}.", cure='Give method "neurons".')
        if self.anchors is not None and self.method == "neurons":
            raise UsageError("The method neurons takes no anchors.", cure="Leave them out, or choose another method.")
        missing = [name for name in ("targets", "ordinary") if getattr(self, name) is None]
        if missing and self.neurons is None:
            raise UsageError(
                f"The method {self.method} needs {' and '.join(missing)}.",
                cure="Give a table of memorized pairs and a file of ordinary prompts.",
            )

    @property
    def localization(self) -> LocalizationConfig:
        """How predictions are made, and neurons searched for."""
        detection = DetectionConfig(seeds=tuple(range(self.look_seeds)), steps=self.look_steps, timing=self.timing)
        return LocalizationConfig(detection=detection, scope=self.scope, fidelity=self.fidelity)

    def training(self, prediction: PredictionKind) -> DistilSettings:
        """How a method trains, with what was given for it."""
        given = {name: getattr(self.distil, name) for name in self.distil.given}
        return TRAINED[self.method].replace(**{"error": prediction, **given})

    def generation(self, seed: int) -> GenerationSettings:
        """How audits generate images."""
        seeds = tuple(range(seed, seed + self.images))
        return GenerationSettings(seeds=seeds, guidance=self.guidance, steps=self.steps)


@final
class FolderAudit(Settings):
    """What an edit of a pipeline folder suppresses and costs."""

    search: FolderSearch = Field(
        description="The pipeline before its edit, memorized pairs, and how they are searched."
    )
    ordinary: FilePath = Field(
        description="Prompts that are not memorized, 100 or more: they calibrate detection, and their images are "
        "compared."
    )
    others: FilePath | None = Field(
        None, description="Prompts given to the edit neither to forget nor to keep, such as neighbours of memorized "
        "ones: how many change.",
    )  # fmt: skip
    column: str = _COLUMN
    images: Annotated[int, Cli(name="--per-prompt")] = Field(8, ge=1, description="Images of every prompt.")
    look_seeds: int = _SEEDS
    timing: Timing = _TIMING
    clip: DirectoryPath | None = Field(
        None, description="A folder of transformers with a CLIP: how well images follow prompts."
    )
    searched: Annotated[bool, Cli(name="--search")] = Field(
        True, description="Search for embeddings; without it the report says in red what was not proved."
    )

    @property
    def files(self) -> list[Path]:
        """The files that are read."""
        return [*self.search.files, self.ordinary, *([self.others] if self.others else [])]
