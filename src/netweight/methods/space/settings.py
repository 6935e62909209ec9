"""Settings of fits, directions, samples, edits, inversions, exports and pages: for Python, commands and recipes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AliasChoices, DirectoryPath, Field, FilePath

from netweight.errors import UsageError
from netweight.settings import Cli, ModelPath, Settings

# What an adapter is a point of: its change ΔW, or the raw numbers of its factors.
Representation: TypeAlias = Literal["delta", "factors"]
FittedKind: TypeAlias = Literal["encoder", "decoder", "difference"]
Unit: TypeAlias = Literal["deviations", "reach", "raw"]

_NAME_COLUMN = "The column that names the model."


def _always(value: object) -> bool:
    """Leave a setting out of records: it does not change what is made."""
    return True


class FitSettings(Settings):
    """How a space is fitted."""

    components: int | None = Field(
        default=None, ge=1, description="How many; else as many as there are, at most 1,000."
    )
    representation: Representation = Field(default="delta", description="Changes, or raw numbers of the factors.")
    strengths: Literal["kept", "normalized"] = Field(
        default="kept",
        description="Changes as they are, or all scaled to their median norm, as hub adapters differ tenfold.",
    )
    standardize: bool = Field(
        default=True, description="Divide the numbers of factors by their standard deviations first."
    )
    solver: Literal["auto", "dual", "streaming"] = Field(
        default="auto",
        description="Exactly from inner products, or by passes over the bank; auto by the number of adapters.",
    )
    halves: bool = Field(default=True, description="Fit two halves, too, to see what comes back.")
    sketch: int = Field(default=32, ge=1, description="Side of the sketch of a module's change, for streaming.")
    passes: int = Field(default=6, ge=1, description="Passes of streaming iteration at most.")
    tolerance: float = Field(
        default=2e-3, ge=0, description="A pass that adds less than this share to the variance is last."
    )
    seed: int = Field(default=0, description="Random seed.")


class FolderFit(FitSettings):
    """How a space is fitted to a bank of adapters and written."""

    standalone: bool = Field(
        default=False, description="Copy the adapters into the space, so that it opens without its bank."
    )
    work: Path | None = Field(
        default=None, exclude_if=_always,
        description="Where to keep finished parts, to fit a bank again that has grown.",
    )  # fmt: skip
    processes: int | None = Field(default=None, ge=2, exclude_if=_always, description="Processes that share the work.")


class CorrectionSettings(Settings):
    """How an edit of a point is corrected by what it changes in images."""

    effect: Annotated[float, Cli(own=False)] = Field(
        default=0.6, description="Effect that is sought, as a share of the attribute's range; below 0 for less of it."
    )
    rounds: int = Field(default=3, ge=1, description="Rounds of a correction after the first.")
    noises: Annotated[int, Cli(own=False)] = Field(
        default=3, ge=1, description="Noises of the first round, and half of those of each other one."
    )


class DirectionSettings(CorrectionSettings):
    """How the direction of an attribute is found from labels."""

    labels: FilePath = Field(description="Attributes of models: .csv, .tsv, .json or .jsonl with one row per model.")
    column: str = Field(description="The attribute.")
    name_column: str = Field(default="name", description=_NAME_COLUMN)
    confounders: Annotated[tuple[str, ...], Cli(name="--confounder", metavar="COLUMN")] = Field(
        default=(), description="An attribute that should stay as it is."
    )
    kind: FittedKind = Field(
        default="encoder",
        description="How models change with it, how it is predicted from them, or a difference of means.",
    )
    fidelity: Literal["corrected", "reference"] = Field(
        default="corrected", description="The authors' code's numbers, or without its quirks; see docs/differences.md."
    )
    folds: int = Field(default=5, ge=2, description="Folds of the cross-validation.")
    resamples: int = Field(
        default=0, ge=0, description="Also refit to so many resamples of the models, to see how stable it is."
    )
    corrected: bool = Field(
        default=False, description="Correct it for --at, by what the edit changes in images, which --reader reads."
    )
    at: Annotated[str, Cli(metavar="POINT")] = Field(default="mean", description="The point to be edited.")
    pipeline: ModelPath | None = Field(default=None, description="The base model, a pipeline, for --corrected.")
    reader: str | None = Field(
        default=None, description='What measures labeled attributes in images, "module:function".'
    )
    prompts: Annotated[tuple[str, ...], Cli(name="--prompt")] = Field(
        default=("",), description="Prompts of these images, in turn for noises."
    )
    guidance: float = Field(default=1.0, description="Scale of classifier-free guidance.")
    steps: int = Field(default=10, ge=1, description="Steps of the scheduler; gradients go through all of them.")
    device: str = Field(default="cpu", description="Where the pipeline generates.")
    seed: int = Field(default=0, description="Seed of folds, resamples and corrections.")

    def check(self) -> None:
        """A correction has a pipeline and a reader, and is of an encoder."""
        if self.corrected and not (self.pipeline and self.reader and self.kind == "encoder"):
            raise UsageError("A correction generates images and reads them.", cure="Give --pipeline and --reader.")


class PredictSettings(Settings):
    """How attributes are read off adapters' weights."""

    labels: FilePath = Field(description="Attributes of adapters: .csv, .tsv, .json or .jsonl with one row each.")
    columns: Annotated[tuple[str, ...], Cli(name="--column")] = Field(min_length=1, description="What is read.")
    name_column: str = Field(default="name", description=_NAME_COLUMN)
    folds: int = Field(default=5, ge=2, description="Folds of the held-out scores.")
    seed: int = Field(default=0, description="Seed of folds and networks.")


class SampleSettings(Settings):
    """How points are drawn."""

    count: int = Field(default=1, ge=1, description="How many points.")
    sampler: Literal["pairs", "gaussian", "kernel", "conditional"] = Field(
        default="pairs",
        description="Sums of two models, independent per component, around models, or conditional on labels.",
    )
    factor: float | None = Field(
        default=None, gt=0, description="Factor of the deviations of pairs, else 1.2, and of the gaussian, else 1."
    )
    bandwidth: float | None = Field(
        default=None, ge=0, le=1, description="Bandwidth of the kernel, and of conditional's rest; else the likeliest."
    )
    labels: FilePath | None = Field(default=None, description="Attributes of models, for conditional.")
    name_column: str = Field(default="name", description=_NAME_COLUMN)
    emphasis: float = Field(
        default=1.0,
        gt=0,
        description="Factor of attributes, for conditional; images of new combinations show less of them.",
    )
    # Not `given`, which `Settings` has; recipes and the command call it so.
    attributes: Annotated[Mapping[str, float], Cli(name="--given", metavar="COLUMN=VALUE")] = Field(
        default={}, validation_alias=AliasChoices("given", "attributes"),
        description="An attribute that all points have, for conditional.",
    )  # fmt: skip
    seed: int = Field(default=0, description="Seed of the draw.")

    def to_json(self) -> dict[str, Any]:
        """All fields as JSON values, under the names of recipes."""
        return {"given" if name == "attributes" else name: value for name, value in super().to_json().items()}

    def check(self) -> None:
        """Labels and the conditional sampler go together."""
        cure = "Name the sampler conditional and labels together."
        if self.sampler != "conditional" and (self.labels is not None or self.attributes):
            reason = f"Labels and given attributes belong to the conditional sampler, not to {self.sampler}."
            raise UsageError(reason, cure=cure)
        if self.sampler == "conditional" and self.labels is None:
            raise UsageError("The conditional sampler needs labels.", cure=cure)


class EditSettings(Settings):
    """How points are moved along directions."""

    moves: Annotated[Mapping[str, float], Cli(name="--move", metavar="DIRECTION=STRENGTH")] = Field(
        description="Step along a direction; negative goes back. A direction is a file of `netweight space direction`, "
        "or an attribute of the labels, whose direction is fitted. May be repeated; the order does not matter."
    )
    labels: FilePath | None = Field(
        default=None, description="Attributes of the space's models, a file with one row per model."
    )
    unit: Unit = Field(
        default="deviations", description="What that counts: models' deviations, their farthest, or the vector."
    )
    point: str = Field(
        default="mean",
        description="Where to start in a space: a model or mean; points of an earlier step are all moved.",
    )
    kind: FittedKind = Field(default="encoder", description="How directions are found.")
    confounders: Annotated[tuple[str, ...], Cli(name="--confounder", metavar="COLUMN")] = Field(
        default=(), description="Attributes that are to stay as they are."
    )
    name_column: str = Field(default="name", description=_NAME_COLUMN)
    folds: int = Field(default=5, ge=2, description="Folds of the cross-validation of directions.")
    seed: int = Field(default=0, description="Seed of the folds.")

    def check(self) -> None:
        """There is a move."""
        if not self.moves:
            raise UsageError("There is no move.", cure="Give one: DIRECTION=STRENGTH.")
        if self.fitted and self.labels is None:
            raise UsageError(
                f"{self.fitted[0]!r} is not a file, and there are no labels to fit a direction of that name to.",
                cure="Give a file of `netweight space direction`, or labels.",
            )

    @property
    def fitted(self) -> list[str]:
        """The moves along attributes of the labels; the others name files."""
        return [name for name in self.moves if not Path(name).is_file()]


class ExportSettings(Settings):
    """How points are written as adapters."""

    layout: Literal["diffusers", "peft", "kohya", "comfyui"] | None = Field(
        default=None,
        description="Whose files to write; by default the layout of the file that is read, for a folder diffusers' or "
        "peft's.",
    )
    rank: int | None = Field(default=None, ge=1, description="Rank of each module; else as high as is needed.")
    energy: float = Field(
        default=1.0, gt=0, le=1, description="Share of each module's square that is enough, for a lower rank."
    )
    base: str | None = Field(
        default=None, description="Name of the base model, to be said in the files; else the one that is known."
    )


class FileSettings(ExportSettings):
    """How LoRA files are read and written."""

    model: Annotated[str | None, Cli(metavar="NAME")] = Field(
        default=None,
        description="The model that the adapter belongs to: a folder, whose modules are checked, or an architecture "
        "(flux, wan, sdxl, …), where the file does not tell it.",
    )


class ConvertSettings(FileSettings):
    """How an adapter is brought to another layout, rank or kind."""

    weights: Annotated[Path | None, Cli(metavar="BASE")] = Field(
        default=None, description="The base model, which DoRA's change depends on."
    )


class ExtractSettings(FileSettings):
    """How a LoRA is extracted from two models."""

    modules: Annotated[str | None, Cli(metavar="PATTERN")] = Field(
        default=None, description="Only these modules, as in '**.attn.*' or '!**.mlp.**'; by default all that changed."
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        default=None, description="Data type of the factors; by default that of the tuned model."
    )
    alpha: float | None = Field(
        default=None, gt=0, description="Alpha of the file; the change stays the same. By default alpha is the rank."
    )


class MergeSettings(FileSettings):
    """How adapters are merged."""

    method: Literal["linear", "ties", "dare", "dare-ties"] = Field(
        default="linear",
        description="A weighted sum; or after trimming small entries, random ones, and with elected signs.",
    )
    weights: Annotated[tuple[float, ...], Cli(name="--weight")] = Field(
        default=(), description="Weight of each adapter, in order; else 1."
    )
    blocks: Annotated[tuple[tuple[str, str], ...], Cli(name="--block", metavar="PATTERN WEIGHTS")] = Field(
        default=(), description="Weights within some modules, as in 'unet.up_blocks.**' 1,0.5; later ones win."
    )
    density: float = Field(default=0.5, gt=0, le=1, description="Share of entries that ties and dare keep.")
    seed: int = Field(default=0, description="Seed of the entries that dare keeps.")


class FolderExport(ExportSettings):
    """Which points are written as adapters, and how."""

    point: str = Field(
        default="mean",
        description="What to write of a space: a model or mean; of points of an earlier step, each is written.",
    )


class InversionSettings(Settings):
    """How points are sought."""

    steps: int = Field(default=400, ge=1, description="Steps of the descent.")
    learning_rate: float = Field(default=0.05, gt=0, description="In standard deviations of the models, where scaled.")
    components: int | None = Field(default=None, ge=1, description="Leading components that move; else all.")
    # A denoising loss is a mean over pixels, so a prior that a Bayesian would call 1 is tiny here: 1e-4 is too strong
    # in the miniature.
    prior: float = Field(
        default=0.0, ge=0, description="Weight of the Gaussian prior, ½ Σ (score / deviation)², per image loss."
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of the optimizer.")
    scaled: bool = Field(default=True, description="Move components in units of their deviations.")
    averaged: float = Field(
        default=0.25, ge=0, le=1, description="The point is the mean over this last share of the steps; 0 for the last."
    )


# Ours, those of the authors' code, and those that it takes for images that are no photographs of faces.
INVERSIONS: Mapping[str, InversionSettings] = {
    "default": InversionSettings(),
    "reference": InversionSettings(
        learning_rate=0.1, components=10_000, weight_decay=1e-10, scaled=False, averaged=0.0
    ),
    "reference out of distribution": InversionSettings(
        steps=800, learning_rate=1.0, components=1_000, scaled=False, averaged=0.0
    ),
}


class FolderInversion(InversionSettings):
    """How images are inverted; what is not given is taken from the named settings."""

    pipeline: ModelPath = Field(description="The base model: a folder of a diffusers pipeline.")
    prompt: str = Field(description="What the adapters' own prompt was, such as 'sks person'.")
    masks: DirectoryPath | None = Field(
        default=None, description="Folder with masks of the images' names; white is what counts."
    )
    settings: Literal["default", "reference", "reference out of distribution"] = Field(
        default="default",
        description="Our settings, or those of the authors' code, where an option does not replace them.",
    )
    draws: int = Field(default=1, ge=1, description="Timesteps per image and step.")
    schedule: int = Field(default=50, ge=1, description="Steps of the schedule that timesteps are drawn from.")
    together: int = Field(default=8, ge=1, description="Most targets in a batch.")
    device: str = Field(default="cpu", description="Where the pipeline goes, such as cuda.")
    seed: int = Field(default=0, description="Seed of all draws.")

    @property
    def descent(self) -> InversionSettings:
        """The settings of the descent."""
        changed = {name: value for name, value in self.given.items() if name in InversionSettings.model_fields}
        return INVERSIONS[self.settings].replace(**changed)


class RenderSettings(Settings):
    """What a page shows, and how its images are generated."""

    prompts: Annotated[tuple[str, ...], Cli(name="--prompt")] = Field(
        default=("",), description="One for all noises, or one for each."
    )
    seeds: Annotated[tuple[int, ...], Cli(own=False)] = Field(
        default=(0, 1, 2, 3), min_length=1, description="Seeds of the noises; thumbnails and the map take the first."
    )
    guidance: float = Field(default=3.0, description="Scale of classifier-free guidance; the miniature's is 1.")
    steps: int = Field(default=50, ge=1, description="Steps of the scheduler; the miniature's are 8.")
    strengths: Annotated[tuple[float, ...], Cli(own=False)] = Field(
        default=tuple(half / 2 for half in range(-6, 7)), description="Standard deviations along a slider."
    )
    components: int = Field(default=4, ge=0, description="Principal components that get a slider.")
    adapters: int = Field(default=400, ge=1, description="Most adapters on the map; more are thinned out evenly.")
    samples: int = Field(default=12, ge=0, description="Models that are drawn.")
    neighbors: Annotated[int, Cli(own=False)] = Field(default=4, ge=0, description="Nearest models that are named.")
    rows: Annotated[int, Cli(own=False)] = Field(default=64, ge=1, description="Most images at a time.")
    seed: int = Field(default=0, description="Seed of samples and folds.")

    def check(self) -> None:
        """There is one prompt, or one for each noise."""
        if len(self.prompts) not in (1, len(self.seeds)):
            raise UsageError(
                f"There are {len(self.prompts)} prompts and {len(self.seeds)} seeds.",
                cure="Give one prompt, or one per seed, and at least one seed.",
            )


class FolderView(RenderSettings):
    """What a page about a space shows, and the pipeline that generates its images."""

    pipeline: ModelPath | None = Field(
        default=None, description="A diffusers pipeline, of whose adapters the space is made."
    )
    directions: Annotated[tuple[FilePath, ...], Cli(name="--direction")] = Field(
        default=(), description="A file of `netweight space direction`; gets a slider."
    )
    labels: FilePath | None = Field(default=None, description="Attributes of models: the map is colored by them.")
    name_column: str = Field(default="name", description=_NAME_COLUMN)
    attributes: Annotated[tuple[str, ...], Cli(name="--attribute", metavar="COLUMN")] = Field(
        default=(), description="A column of the labels that gets a slider, with the other such columns held."
    )
    start: Annotated[str, Cli(metavar="POINT")] = Field(default="mean", description="Where sliders begin.")
    noises: int | None = Field(default=None, ge=1, description="Pictures of every point, of seeds 0, 1, …; else 4.")
    device: str = Field(default="cpu", description="Where the pipeline generates.")

    def check(self) -> None:
        """Several prompts alternate over the noises, see `rendering`."""

    def rendering(self, usual: RenderSettings) -> RenderSettings:
        """Usual settings with those that were given; several prompts alternate over the noises."""
        given = {name: value for name, value in self.given.items() if name in RenderSettings.model_fields}
        prompts = given.get("prompts", usual.prompts)
        noises = self.noises or len(given.get("seeds", ())) or max(len(prompts), len(usual.seeds))
        several = tuple(prompts[number % len(prompts)] for number in range(noises if len(prompts) > 1 else 1))
        return usual.replace(**{"seeds": tuple(range(noises)), **given, "prompts": several})


class NeighborSettings(Settings):
    """Which neighbors of a point are listed."""

    count: int = Field(default=5, ge=1, description="How many models.")
    measure: Literal["cosine", "distance"] = Field(default="cosine", description="How nearness is measured.")


class SimilarSettings(Settings):
    """How many similar adapters are listed."""

    count: int = Field(default=10, ge=1, description="How many adapters.")


class DuplicateSettings(Settings):
    """When two adapters count as copies of each other."""

    least: float = Field(default=0.98, gt=0, le=1, description="The least cosine of what two adapters change.")


class BakeSettings(Settings):
    """How adapters are added to the weights of a model."""

    architecture: Annotated[str | None, Cli(name="--model", metavar="NAME")] = Field(
        default=None, description="The architecture (flux, wan, sdxl, …), where the files do not tell it."
    )
    compress: bool | None = Field(default=None, description="Whether OUT is compressed; by default it is as MODEL is.")


class InfoSettings(Settings):
    """What is checked of a bank."""

    verify: bool = Field(default=False, description="Compare every shard with its digest.")


class IngestSettings(Settings):
    """Which adapters are collected into a bank, and how."""

    compress: bool = Field(default=False, description="Keep the adapters compressed, bit for bit.")
    skip_bad: bool = Field(default=False, description="Leave out adapters that cannot be used, and list them.")
    select: Annotated[str | None, Cli(name="--modules", metavar="PATTERN")] = Field(
        default=None, description="Keep these modules only, as in unet.**.attn2.*."
    )
    base: str | None = Field(default=None, description="The model that all were trained on, whatever their files say.")
    convert: Annotated[int | None, Cli(metavar="RANK")] = Field(
        default=None, ge=1, description="Make LoRAs of LoHa, LoKr, DoRA and full differences, at most of this rank."
    )
    weights: Annotated[Path | None, Cli(metavar="BASE")] = Field(
        default=None, description="The base model, which DoRA's change depends on."
    )
    stable_diffusion: bool = Field(
        default=False,
        description="SRC is a matrix published by weights2weights without weight_dimensions.pt: take Stable Diffusion "
        "1's order of weights.",
    )


class ImportSettings(Settings):
    """How the published space of weights2weights is read."""

    components: int | None = Field(default=None, ge=1, description="How many; else as many as models have scores of.")
    stable_diffusion: bool = Field(
        default=False, description="Take Stable Diffusion 1's order of weights where weight_dimensions.pt is missing."
    )
