"""Settings of forgetting in pipeline folders: what `netweight forget apply` and `audit` take; torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, final

from pydantic import DirectoryPath, Field, FilePath, create_model

from netweight.attacks.embedding_search.settings import FolderSearch, PredictionKind
from netweight.errors import UsageError
from netweight.hf.pipeline_settings import PipelineSettings
from netweight.methods.forget.edits import EDITS, Edit, Neurons
from netweight.methods.forget.edits.trained import TrainedEdit
from netweight.methods.forget.settings import DetectionConfig, GenerationSettings, LocalizationConfig, Timing
from netweight.settings import Cli, Settings

if TYPE_CHECKING:
    EditMethod = str

    class _EditSettings(Settings):
        neurons: Neurons
else:
    EditMethod = Literal[*EDITS]
    # One field for each edit: its name, with its settings.
    _EditSettings = create_model(
        "_EditSettings",
        __base__=Settings,
        **{
            name.replace("-", "_"): (
                Annotated[edit, Cli(only_with=f"method={name}")],
                Field(edit(), description=f"Settings of {name}."),
            )
            for name, edit in EDITS.items()
        },
    )
_COLUMN: Any = Field(
    "prompt,caption,text",
    description="Column with the prompts; of several names, the first that a file has.",
)


@final
class FolderForgetting(_EditSettings):
    """Settings of an edit after which a pipeline folder no longer generates memorized images."""

    option_groups: ClassVar = {
        "Files": ("targets", "ordinary", "column", "anchors"),
        "Edit": ("method", "undo", "other_weights"),
        "Check of the edit": ("verify", "images", "guidance", "steps"),
        "Pipeline": ("pipeline",),
    }

    method: EditMethod = Field(
        "closed-form",
        description="Edit that is made. closed-form replaces the keys and values of the prompts, in seconds; siss "
        "trains the model to treat the pictures like unknown ones, which takes minutes; neurons switches off "
        "the neurons that NeMo finds; distil and esd are published edits to compare with.",
    )
    targets: FilePath | None = Field(
        None,
        description="Table of memorized pairs, with the columns prompt and image (a file). A prompt may have "
        "several rows.",
    )
    ordinary: FilePath | None = Field(
        None, description="Prompts that are not memorized, 100 or more, whose images must not change. With neurons, "
        "half of them calibrate the threshold and the others are held out.",
    )  # fmt: skip
    column: str = _COLUMN
    anchors: FilePath | None = Field(
        None,
        description="Replacement prompts, one for each memorized prompt. After the edit, a memorized prompt generates "
        "the images of its replacement. By default, the ordinary prompts whose images are least correlated with the "
        "memorized ones. Not with neurons.",
    )
    undo: bool = Field(
        True,
        description="Keep the original weights in the folder, so that the edit can be undone. Anybody who has "
        "them can undo it: publish a folder made with --no-undo.",
    )
    other_weights: Literal["copy", "leave-out"] = Field(
        "copy",
        description="Other files with the unedited weights, such as a .ckpt beside the parts: copy them and "
        "name them in the record, or leave them out.",
    )
    verify: Annotated[bool, Cli(name="--check")] = Field(
        True,
        description="Generate images of every prompt before and after the edit, and count copies of memorized "
        "pictures.",
    )
    images: int = Field(8, ge=1, description="Images that this check and the audits generate for each prompt.")
    guidance: float = Field(7.0, description="Guidance scale of the images of the check and the audits.")
    steps: int = Field(50, ge=1, description="Scheduler steps of the images of the check and the audits.")
    look_seeds: int = Field(
        10,
        ge=2,
        description="Initial noises per prompt that detection compares in audits. With neurons, neurons.seeds counts.",
    )
    pipeline: PipelineSettings = Field(default=PipelineSettings(), description="Settings for opening the pipeline.")

    def check(self) -> None:
        """Require what the edit needs, and refuse settings of another one."""
        chosen = self.edit
        for name, field in _FIELDS.items():
            if name != chosen.name and field in self.given and getattr(self, field).given:
                keys = ", ".join(f"{field}.{key}" for key in getattr(self, field).given)
                raise UsageError(f"{keys} was given, and the method is {chosen.name}.", cure=f"Give method {name!r}.")
        if chosen.name == "neurons" and "look_seeds" in self.given:
            raise UsageError(
                "With neurons, detection compares as many noises in audits as in the search for neurons.",
                cure="Give neurons.seeds in place of look_seeds.",
            )
        if self.anchors is not None and not chosen.anchored:
            raise UsageError(
                f"The method {chosen.name} does not use anchors.", cure="Leave them out, or choose another method."
            )
        missing = [name for name in ("targets", "ordinary") if getattr(self, name) is None]
        if missing and chosen.needs_prompts:
            raise UsageError(
                f"The method {chosen.name} needs {' and '.join(missing)}.",
                cure="Give --targets, a table of memorized prompts with pictures, and --ordinary, a file of other "
                "prompts; in a recipe, the keys targets and ordinary.",
            )

    @property
    def edit(self) -> Edit:
        """The edit that was chosen, with its settings; a file of neurons chooses theirs."""
        if "method" not in self.given and self.neurons.file is not None:
            return self.neurons
        edit: Edit = getattr(self, _FIELDS[self.method])
        return edit

    @property
    def localization(self) -> LocalizationConfig:
        """Settings with which audits score prompts and search for neurons."""
        if self.edit.name == "neurons":
            return self.neurons.localization
        return LocalizationConfig(detection=DetectionConfig(seeds=tuple(range(self.look_seeds))))

    def edit_of(self, prediction: PredictionKind) -> Edit:
        """The edit; one that is trained minimizes what the denoiser predicts, where nothing else was said."""
        chosen = self.edit
        if isinstance(chosen, TrainedEdit) and "error" not in chosen.given:
            return chosen.replace(error=prediction)
        return chosen

    def generation(self, seed: int) -> GenerationSettings:
        """Return the settings of the images."""
        seeds = tuple(range(seed, seed + self.images))
        return GenerationSettings(seeds=seeds, guidance=self.guidance, steps=self.steps)


_FIELDS = {name: name.replace("-", "_") for name in EDITS}


@final
class FolderAudit(Settings):
    """Settings of the audit of an edited pipeline folder."""

    search: FolderSearch = Field(description="Pipeline before its edit, memorized pairs, and settings of the search.")
    ordinary: FilePath = Field(
        description="Prompts that are not memorized, 100 or more. They calibrate detection, and their images "
        "are compared."
    )
    others: FilePath | None = Field(
        None, description="Prompts that the edit did not see, such as neighbors of memorized ones, to count how "
        "many change.",
    )  # fmt: skip
    column: str = _COLUMN
    images: Annotated[int, Cli(name="--per-prompt")] = Field(8, ge=1, description="Images of each prompt.")
    look_seeds: int = Field(
        10, ge=2, description="Number of initial noises that detection compares for each prompt (seeds 0, 1 and so on)."
    )
    timing: Timing = Field(
        "paper",
        description="Timestep of the predictions: the first, as in the paper, or the second, as in the released code.",
    )
    noises: int = Field(24, ge=2, description="Noise levels at which errors on pictures are measured.")
    clip: DirectoryPath | None = Field(
        None, description="Folder of a CLIP model for transformers, to measure how well images follow their prompts."
    )
    searched: Annotated[bool, Cli(name="--search")] = Field(
        True,
        description="Search for embeddings that recover memorized images; without the search the report "
        "states in red that this audit was left out.",
    )

    @property
    def files(self) -> list[Path]:
        """The files that are read."""
        return [*self.search.files, self.ordinary, *([self.others] if self.others else [])]
