"""Settings of immunization: how a defense is trained, each defense's own, and those of a whole folder.

`ImmunizeSettings` is what `netweight immunize` and recipes take: files, training, and the chosen defense with its own
settings under its name. `immunize` in Python takes a defense's settings and `TrainingSettings`.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

from netweight.data.text_options import RowSource, TextOptions
from netweight.errors import UsageError
from netweight.methods.immunize.defense import DefenseSettings
from netweight.methods.immunize.defenses import DEFENSES
from netweight.settings import Cli, Settings

_BY_SET = Cli(own=False)


class TrainingSettings(Settings):
    """Training by Adam without weight decay, its rate rising linearly and then falling along a cosine to 0.

    Source: RepNoise (arXiv 2405.14577), appendix B.2: 1 epoch, batches of 8, 2e-5, 10 % warmup, seed 42.
    """

    options_group = "Training"

    lr: float = Field(2e-5, gt=0, description="Highest learning rate.")
    epochs: int = Field(1, ge=1, description="Passes over the pairs.")
    batch_size: int = Field(8, ge=1, description="Pairs per step.")
    warmup: Annotated[float, _BY_SET] = Field(
        0.1, ge=0, le=1, description="Share of the steps over which the rate rises."
    )
    clip: Annotated[float | None, _BY_SET] = Field(
        1.0, gt=0, description="Largest norm of the gradient of all weights; null for no bound."
    )
    context: Annotated[int | None, _BY_SET] = Field(
        None,
        ge=1,
        description="Largest number of tokens of a prompt with its answer; by default as many as the model allows.",
    )
    seed: int = Field(42, description="Seed of the order of pairs, of noise and of dropout.")
    measure_every: Annotated[int, _BY_SET] = Field(
        25, ge=1,
        description="Steps between two measurements of each term's gradient norm, by which weights are balanced; such "
        "a step takes one backward pass for each term.",
    )  # fmt: skip
    checkpoint_every: int | None = Field(None, ge=1)
    """Steps between two checkpoints, from which a run that was stopped continues; none by default. A checkpoint
    contains the weights in float32 and the optimizer's states.
    """
    states: Annotated[Literal["full", "compact"] | None, _BY_SET] = None
    """Adam's states: `full` keeps both moments in float32; `compact` keeps the first in bfloat16, the second of a
    matrix by its rows and columns, and the gradients in the weights' dtype, which takes a quarter of the memory. By
    default compact where more than 200 million weights are trained."""
    frozen: Annotated[str | None, Cli(name="--freeze", metavar="LAYERS")] = Field(
        None, description="Layers not to train, such as 0-3,head: for ablations."
    )

    def rate(self, step: int, steps: int) -> float:
        """Return the learning rate at a `step`, counted from 0, of a training of `steps` steps."""
        rising = math.ceil(self.warmup * steps)
        if step < rising:
            return self.lr * (step + 1) / rising
        return self.lr * 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))


class FolderSettings(TextOptions):
    """Settings of the defense of a model folder."""

    options_group = "Files"

    pairs: RowSource
    """Rows with prompt, chosen (harmless answer) and rejected (harmful answer): a file, hub:NAME or hub:NAME:SPLIT."""
    retain: RowSource | None = None
    """Rows with prompt and response, likewise: further abilities that the model must keep."""
    defense: Annotated[DefenseSettings, DEFENSES, Cli(group="Training")] = Field("repnoise", validate_default=True)
    """Defense to train into the model; the page on immunization compares them."""
    withhold: Annotated[tuple[str, ...], Cli(metavar="CATEGORY")] = ()
    """Category of pairs to leave out of the training, so that an attack can test on it."""
    chat: bool = False
    """Put prompts through the tokenizer's chat template."""
    device: str = "cpu"
    """Device of the model, such as cuda."""

    @property
    def applies_template(self) -> bool:
        """Whether prompts go through the tokenizer's chat template; its options ask for that, too."""
        return self.chat or bool(self.template)


class ImmunizeSettings(TrainingSettings, FolderSettings):
    """Train a defense against harmful fine-tuning into a model folder."""

    def check(self) -> None:
        """Refuse defenses that cannot be written into a folder."""
        super().check()
        if DEFENSES.name_of(self.defense) == "security-vectors":
            raise UsageError(
                "A security vector protects only while it is active in a model that others train, so it cannot be "
                "written into a folder.",
                cure="Use netweight.immunize in your own training loop, or another defense.",
            )

    @property
    def training(self) -> TrainingSettings:
        """The settings of the training alone, with the rate that the defense recommends where none was given."""
        return TrainingSettings(**{name: getattr(self, name) for name in TrainingSettings.model_fields})


def recommended_training(defense: DefenseSettings) -> TrainingSettings:
    """Return the settings of training that a defense recommends."""
    return TrainingSettings(**defense.recommended)
