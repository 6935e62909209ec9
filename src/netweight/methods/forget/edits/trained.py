"""Settings that edits by training share; torch is not imported."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import BeforeValidator, Field

from netweight.attacks.embedding_search.settings import PredictionKind
from netweight.errors import UsageError
from netweight.hf.pipeline_costs import Stage
from netweight.methods.forget.edits.edit import Edit, EditOutcome, EditSizes, EditTask
from netweight.settings import Cli

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from netweight.methods.forget.edits.training import EditTraining, MemorizedBatch
    from netweight.nn.text_to_image import Prediction

LayerPattern = Annotated[
    str | None, BeforeValidator(lambda layers: None if layers == "all" else layers), Cli(own=False)
]


class TrainedEdit(Edit):
    """An edit that learns from the model before: its answers to ordinary prompts, others to memorized ones."""

    pictured: ClassVar[bool] = False
    """True if it works on memorized pictures."""

    steps: Annotated[int, Cli(own=False)] = Field(200, ge=1, description="Training steps.")
    batch: Annotated[int, Cli(own=False)] = Field(32, ge=2, description="Latents per training step.")
    at_once: Annotated[int | None, Cli(own=False)] = Field(
        None, ge=1, description="Latents that are computed at a time, to save memory; by default the whole batch."
    )
    memorized: Annotated[float, Cli(own=False)] = Field(
        0.16, gt=0, lt=1, description="Share of a batch with memorized prompts."
    )
    empty: Annotated[float, Cli(own=False)] = Field(
        0.1, ge=0, lt=1, description="Share of a batch with the empty prompt."
    )
    lr: Annotated[float, Cli(own=False)] = Field(
        2e-3, gt=0,
        description="Highest learning rate of AdamW. The default suits networks of a million weights; larger "
        "networks need a lower rate, such as 1e-5.",
    )  # fmt: skip
    weight_decay: Annotated[float, Cli(own=False)] = Field(1e-3, ge=0, description="Weight decay of AdamW.")
    images: Annotated[int, Cli(own=False)] = Field(
        4, ge=1, description="Images that the original model generates for each ordinary prompt as training data."
    )
    guidance: Annotated[float, Cli(own=False)] = Field(3.0, description="Guidance scale of the images for training.")
    generation_steps: Annotated[int, Cli(own=False)] = Field(
        20, ge=2, description="Scheduler steps of the images for training."
    )
    layers: LayerPattern = Field(
        None, description='Pattern of the names of modules that are trained; "all" trains all.'
    )
    error: Annotated[PredictionKind, Cli(own=False)] = Field(
        "velocity", description="Prediction whose error is minimized; by default the one that the network makes."
    )
    seed: Annotated[int, Cli(own=False)] = Field(0, description="Random seed.")

    def check(self) -> None:
        """Refuse batches without room for ordinary prompts."""
        if self.memorized + self.empty > 0.9:
            raise UsageError(
                "The shares of memorized and empty prompts leave less than a tenth of a batch to ordinary prompts.",
                cure="Lower them.",
            )

    @property
    def noised(self) -> float:
        """The share of each weight that is replaced by a fresh one before training."""
        return float(getattr(self, "noise", 0.0))

    def stages(self, sizes: EditSizes) -> list[Stage]:
        """Return the training images, the pictures, and the training."""
        how: Any = {"guidance": self.guidance, "steps": self.generation_steps}
        stages = []
        if self.anchored and not sizes.anchors:
            count = sizes.memorized + min(24, sizes.ordinary)
            stages.append(Stage.images("search for anchors", count, guidance=3.0, steps=20))
        taught = self.images * (sizes.ordinary + (sizes.memorized if self.turned_copies else 0))
        made = Stage.images("training images", taught, **how)
        stages.append(replace(made, encoded=taught, prompts=sizes.ordinary + sizes.memorized))
        if self.pictured:
            own = 0 if sizes.pictures else self.images * sizes.memorized
            pictures = (sizes.pictures or own) * (1 + self.turned_copies)
            stages.append(replace(Stage.images("memorized pictures", own, **how), encoded=pictures))
        memorized = max(2, round(self.memorized * self.batch))
        ordinary, logs = self.batch - memorized, min(10, self.steps)
        held = self.images * len(range(0, sizes.ordinary, 10))
        stages.append(Stage(
            "training", gradients=self.steps * (ordinary + memorized),
            predictions=self.steps * (ordinary + memorized + self.further(memorized)) + logs * 2 * held,
        ))  # fmt: skip
        return stages

    @property
    def turned_copies(self) -> int:
        """Turned copies of each picture that it works with."""
        return 0

    def further(self, memorized: int) -> int:
        """Return the predictions of a step beside one of the original and one of the model for every latent."""
        return 0

    @abstractmethod
    def questions(self, training: EditTraining, count: int, generator: Generator) -> MemorizedBatch:
        """Return what is asked under memorized prompts in a training step, and whose answers are learned."""

    def losses(
        self,
        training: EditTraining,
        questions: MemorizedBatch,
        prediction: Prediction,
        losses: Tensor,
        generator: Generator,
    ) -> Tensor:
        """Return the losses under memorized prompts, shape `(n,)`: by default the differences from the answers."""
        return losses

    def apply(self, task: EditTask) -> EditOutcome:
        """Train the model in place; with a job, a second call goes on where the first was killed, to the same bits."""
        from netweight.methods.forget.edits.training import train

        return train(self, task)
