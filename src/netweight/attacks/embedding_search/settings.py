"""Settings of the search for embeddings: of one search, and in pipeline folders; torch is not imported."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, ClassVar, Literal, final

from pydantic import Field, FilePath

from netweight.errors import UsageError
from netweight.hf.pipeline_settings import PipelineSettings
from netweight.settings import Cli, ModelPath, Settings

# Where a search for embeddings begins: the target's own prompt, one that has nothing to do with it, or noise. Further
# attacks: "timed" searches four embeddings, one for each quarter of the timesteps; "soft" searches what the text
# encoder reads in place of token embeddings; "typed" searches words; "noised" denoises the noised target under its
# prompt, and "inverted" starts from the target's noise by DDIM inversion; "sampled" takes its prompt with other
# guidance and other numbers of steps. Others train: "relearn" on all other memorized pictures, "relearn-few" on two of
# them, "relearn-one" on the target itself, "lora" as "relearn" by low rank, "zeroed" as "relearn" at the places of
# zeroed rows of weights alone.
Start = Literal[
    "original", "unrelated", "noise", "timed", "soft", "typed", "noised", "inverted", "sampled", "relearn",
    "relearn-few", "relearn-one", "lora", "zeroed",
]  # fmt: skip
PredictionKind = Literal["velocity", "noise", "sample"]
Rate = Annotated[float, Field(gt=0)]


class SearchSettings(Settings):
    """One search for embeddings of a target image."""

    # Source: Kowalczuk et al., arXiv 2507.16880, whose search minimizes the denoising loss over the embedding; the
    # starts, the stop at success and the schedule of evaluations are this library's.

    steps: int = Field(400, ge=1, description="Largest number of steps of Adam.")
    # A share, so that it means the same for every text encoder.
    lr: float = Field(0.1, gt=0, description="Learning rate as a share of the embedding's root mean square.")
    rates: Annotated[tuple[Rate, ...], Cli(own=False)] = Field(
        (),
        description="Further learning rates, such as 0.3,1; each gets a search of its own.",
    )
    schedule: Literal["cosine", "constant"] = Field(
        "cosine", description="Schedule of the learning rate: cosine falls from twice the rate to 0; constant keeps it."
    )
    draws: int = Field(8, ge=1, description="Timesteps and noises that are drawn in each step.")
    starts: Annotated[tuple[Start, ...], Cli(own=False)] = Field(
        ("original", "unrelated", "noise"),
        min_length=1,
        description="Starting points of the searches, and further attacks.",
    )
    relearning: Annotated[float, Cli(own=False)] = Field(
        1e-3,
        gt=0,
        description="Learning rate of AdamW for attacks that train weights; for LoRA it is multiplied by ten.",
    )
    restarts: int = Field(
        1,
        ge=1,
        description="Searches from each starting point, with different draws, prompts and noise; the fastest counts.",
    )
    first: Annotated[bool, Cli(own=False)] = Field(
        False, description="Stop a search when one of its trials has succeeded."
    )
    radius: float | None = Field(
        None,
        gt=0,
        description="Largest change of the embedding as a share of its root mean square; by default unbounded.",
    )
    # The error in another kind than the network was trained to predict grows without bound towards pure noise.
    error: Annotated[PredictionKind, Cli(own=False)] = Field(
        "velocity",
        description="Prediction whose error is minimized; by default the one that the network was trained on.",
    )
    looks: Annotated[tuple[int, ...], Cli(own=False)] = Field(
        (), description="Steps at which images are generated and compared; by default 0, 5, 10, 20, 40 and so on."
    )
    images: int = Field(4, ge=1, description="Images of each comparison; every image keeps its seed at all steps.")
    guidance: float = Field(7.0, description="Guidance scale of generated images.")
    further_guidances: Annotated[tuple[float, ...], Cli(own=False)] = Field(
        (1.0,),
        description="Further guidance scales at which images are compared; the best result counts. A search "
        "minimizes the error without guidance, so an image is often recovered first at guidance 1.",
    )
    # Searches draw their timesteps among these.
    generation_steps: int = Field(50, ge=1, description="Scheduler steps of generated images.")
    threshold: float = Field(0.7, description="Similarity from which an image counts as recovered.")
    share: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of the images of a comparison that must reach the threshold; 0 requires one image.",
    )

    def check(self) -> None:
        """Refuse repeated starts, and evaluations out of order or range."""
        if len(set(self.starts)) < len(self.starts):
            raise UsageError(f"Invalid search settings: starts must be given once each, not {self.starts}.")
        if len(set(self.every_rate)) < len(self.every_rate):
            raise UsageError(f"Invalid search settings: learning rates must be given once each, not {self.every_rate}.")
        if list(self.looks) != sorted(set(self.looks)) or any(not 0 <= look <= self.steps for look in self.looks):
            raise UsageError(
                f"Invalid search settings: looks must be ascending numbers from 0 to {self.steps}, not {self.looks}."
            )

    @property
    def every_guidance(self) -> tuple[float, ...]:
        """All guidance scales at which images are compared, that of the pipeline first."""
        return tuple(dict.fromkeys((self.guidance, *self.further_guidances)))

    @property
    def every_rate(self) -> tuple[float, ...]:
        """All learning rates."""
        return (self.lr, *self.rates)

    @property
    def eval_steps(self) -> tuple[int, ...]:
        """The steps at which images are compared with the target; the last step is always among them."""
        if self.looks:
            return tuple(dict.fromkeys((*self.looks, self.steps)))
        doubled = [5 * 2**power for power in range(32) if 5 * 2**power < self.steps]
        return (0, *doubled, self.steps)

    @property
    def needed(self) -> int:
        """Number of images of an evaluation that must reach the threshold."""
        return max(1, math.ceil(self.share * self.images - 1e-9))


@final
class FolderSearch(Settings):
    """Settings of a search for memorized images in an edited pipeline folder."""

    option_groups: ClassVar = {
        "Files": ("targets", "base", "controls", "unrelated", "also"),
        "Search": ("search", "seeds"),
        "Comparison of images": ("sscd", "sscd_sha256", "least_resistance"),
        "Pipeline": ("pipeline",),
    }

    targets: FilePath = Field(description="Table of memorized pairs, with the columns prompt and image (a file).")
    base: ModelPath | None = Field(None, description="Pipeline before its edit.")
    controls: FilePath | None = Field(
        None,
        description="Table of prompts and images outside the training data; by default the targets upside "
        "down with exchanged colors.",
    )
    unrelated: FilePath | None = Field(
        None,
        description="Prompts unrelated to the targets, as starting points; by default prompts that are part "
        "of netweight.",
    )
    also: Mapping[str, ModelPath] = Field(default={}, description="Further edited pipelines, by name.")
    search: SearchSettings = Field(default=SearchSettings(), description="Settings of each search.")
    seeds: int = Field(
        1, ge=1, description="Repetitions of the whole attack with other seeds; each counts as a result of its own."
    )
    sscd: FilePath | None = Field(
        None,
        description="TorchScript file of SSCD, a network that compares images; by default centered pixels are "
        "compared.",
    )
    sscd_sha256: Annotated[str | None, Cli(metavar="HEX")] = Field(None, description="SHA-256 of that file.")
    least_resistance: float | None = Field(
        None, ge=0,
        description="Fewest steps that further pipelines must need, as a multiple of the edited pipeline's; "
        "the finding fails below it.",
    )  # fmt: skip
    pipeline: PipelineSettings = Field(default=PipelineSettings(), description="Settings for opening the pipelines.")

    def check(self) -> None:
        """Refuse what could only fail later."""
        if (self.sscd is None) != (self.sscd_sha256 is None):
            raise UsageError(
                "The file of SSCD and its digest must be given together.",
                cure="Give both --sscd and --sscd-sha256: the file is a program.",
            )
        if {"original", "edited"} & self.also.keys():
            raise UsageError('A further model is called "original" or "edited".', cure="Give it another name.")

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that are read."""
        named = (self.targets, self.controls, self.unrelated, self.sscd)
        return tuple(path for path in named if path is not None)

    @property
    def tables(self) -> list[Path]:
        """The files of rows with images."""
        return [table for table in (self.targets, self.controls) if table is not None]
