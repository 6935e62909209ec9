"""Input and result of an edit. torch is not imported, so that settings are read quickly."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, final

from netweight.core.progress import QUIET, Progress
from netweight.hf.pipeline_costs import Stage
from netweight.settings import Settings

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from netweight.core.names import Units
    from netweight.job import Job
    from netweight.methods.forget.records import EditRecord
    from netweight.nn.text_to_image import TextToImage


@final
@dataclass(frozen=True)
class EditTask:
    """Input of an edit."""

    model: TextToImage
    """The model; changed in place."""
    prompts: Sequence[str]
    """Memorized prompts, each once."""
    ordinary: Sequence[str]
    """Prompts that are not memorized, whose images are to stay."""
    anchors: Sequence[Sequence[str]] = ()
    """Replacement prompts for each memorized prompt, the best first."""
    pictures: Sequence[tuple[str, Tensor]] | None = None
    """Memorized prompts with a picture each, of shape `(3, height, width)`, within 0 and 1; a prompt may have several
    pictures, and a picture several prompts. None if no picture is known."""
    job: Job | Path | None = None
    """The job, or its folder, in which work is kept that is continued after a kill."""
    progress: Progress = QUIET
    """Reports steps."""
    earlier: Sequence[EditRecord] = ()
    """Records of edits that were made before."""


@final
@dataclass(frozen=True)
class EditOutcome:
    """Result of an edit."""

    rows: Mapping[str, Tensor]
    """The weights as they were, by name; of neurons, their rows."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """Choices and measurements, as JSON values, for the record."""
    units: Units | None = None
    """The neurons that were scaled, if any."""
    factor: float = 0.0
    """The factor that they were multiplied with."""
    thresholds: Mapping[str, Any] = field(default_factory=dict)
    """Thresholds that they were found with."""
    prompts: Sequence[str] | None = None
    """The prompts that the edit is for, where they are not those of the task."""


@final
@dataclass(frozen=True)
class EditSizes:
    """The size of an edit's inputs, by which its work is planned."""

    memorized: int
    """Memorized prompts."""
    ordinary: int
    """Ordinary prompts."""
    pictures: int
    """Memorized pairs of a prompt and a picture; 0 if no picture is known."""
    anchors: bool
    """True if anchors are given."""


class Edit(Settings):
    """An edit: its settings and its algorithm."""

    name: ClassVar[str]
    """Name in commands and recipes."""
    card: ClassVar[str]
    """Description of its effect on a model, for the model's card."""
    anchored: ClassVar[bool] = True
    """True if the edit gives memorized prompts the predictions for anchors."""

    @property
    def needs_prompts(self) -> bool:
        """True if memorized and ordinary prompts must be given."""
        return True

    @abstractmethod
    def stages(self, sizes: EditSizes) -> list[Stage]:
        """Return the steps of the edit's work, with what each asks of the pipeline's networks."""

    @abstractmethod
    def apply(self, task: EditTask) -> EditOutcome:
        """Edit the model of a task in place."""
