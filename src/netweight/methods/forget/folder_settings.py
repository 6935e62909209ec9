"""Settings of forgetting in pipeline folders: what `netweight forget apply` and `audit` take; torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, final

from pydantic import DirectoryPath, Field, FilePath

from netweight.attacks.embedding_search.settings import FolderSearch, PredictionKind
from netweight.errors import UsageError
from netweight.hf.pipeline_settings import PipelineSettings
from netweight.methods.forget.edits import EDITS, ClosedForm, Distil, Edit, Esd, Neurons, Siss
from netweight.methods.forget.edits.trained import TrainedEdit
from netweight.methods.forget.settings import GenerationSettings, Timing
from netweight.settings import Cli, Settings

EditMethod = Literal["closed-form", "siss", "neurons", "distil", "esd"]
_COLUMN: Any = Field(
    "prompt", description="Column of prompts in tables; of several, as caption,prompt, the first that a file has."
)


@final
class FolderForgetting(Settings):
    """Memorized prompts made to forget in a pipeline folder."""

    method: EditMethod = Field(
        "closed-form",
        description="The edit: replace keys and values of the prompts, in seconds; unlearn the pictures by training "
        "(siss), which a search for embeddings finds hard to undo; switch NeMo's neurons off; or, to compare, distil "
        "with noise, or train away from the prompts (esd).",
    )
    targets: FilePath | None = Field(
        None, description="Rows with prompt and image (a file): memorized pairs. A prompt may have several rows."
    )
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
    closed_form: ClosedForm = Field(default=ClosedForm(), description="Settings of the closed form.")
    siss: Siss = Field(default=Siss(), description="Settings of siss.")
    neurons: Neurons = Field(default=Neurons(), description="Settings of neurons.")
    distil: Distil = Field(default=Distil(), description="Settings of distil.")
    esd: Esd = Field(default=Esd(), description="Settings of esd.")
    undo: bool = Field(
        True,
        description="Keep the weights as they were, to undo the edit. Whoever has them can undo it: publish without.",
    )
    other_weights: Literal["copy", "leave-out"] = Field(
        "copy",
        description="Files that hold weights from before the edit and cannot be edited, such as a .ckpt at the top: "
        "copied and named, or left out of the new folder.",
    )
    verify: Annotated[bool, Cli(name="--check")] = Field(
        True, description="Generate images of every prompt before and after the edit, and count copies of pictures."
    )
    images: int = Field(8, ge=1, description="Images per prompt that this check, and audits, generate.")
    guidance: float = Field(7.0, description="Guidance scale of these images.")
    steps: int = Field(50, ge=1, description="Scheduler steps of these images.")
    pipeline: PipelineSettings = Field(default=PipelineSettings(), description="How the pipeline is opened.")

    def check(self) -> None:
        """Require what the edit needs, and refuse settings of another one."""
        chosen = self.edit
        for name, field in _FIELDS.items():
            if name != chosen.name and field in self.given and getattr(self, field).given:
                keys = ", ".join(f"{field}.{key}" for key in getattr(self, field).given)
                raise UsageError(f"{keys} was given, and the method is {chosen.name}.", cure=f"Give method {name!r}.")
        if self.anchors is not None and not chosen.anchored:
            raise UsageError(
                f"The method {chosen.name} takes no anchors.", cure="Leave them out, or choose another method."
            )
        missing = [name for name in ("targets", "ordinary") if getattr(self, name) is None]
        if missing and chosen.needs_prompts:
            raise UsageError(
                f"The method {chosen.name} needs {' and '.join(missing)}.",
                cure="Give a table of memorized pairs and a file of ordinary prompts.",
            )

    @property
    def edit(self) -> Edit:
        """The edit that was chosen, with its settings; a file of neurons chooses theirs."""
        if "method" not in self.given and self.neurons.file is not None:
            return self.neurons
        found: Edit = getattr(self, _FIELDS[self.method])
        return found

    def edit_of(self, prediction: PredictionKind) -> Edit:
        """The edit; one that is trained minimizes what the denoiser predicts, where nothing else was said."""
        chosen = self.edit
        if isinstance(chosen, TrainedEdit) and "error" not in chosen.given:
            return chosen.replace(error=prediction)
        return chosen

    def generation(self, seed: int) -> GenerationSettings:
        """How images are generated."""
        seeds = tuple(range(seed, seed + self.images))
        return GenerationSettings(seeds=seeds, guidance=self.guidance, steps=self.steps)


_FIELDS = {name: name.replace("-", "_") for name in EDITS}


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
    look_seeds: int = Field(
        10, ge=2, description="Initial noises per prompt that detection compares: seeds 0, 1 and so on."
    )
    timing: Timing = Field(
        "paper", description="Make predictions at the first timestep, or at the second, as the released code does."
    )
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
