"""Settings of fits, directions, samples, edits, inversions, exports and pages: for Python, commands and recipes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from pydantic import AliasChoices, DirectoryPath, Field, FilePath

from netweight.errors import UsageError
from netweight.hf.pipeline_settings import parsed_size
from netweight.settings import Cli, ModelPath, Settings

# What an adapter is a point of: its change ΔW, or the raw numbers of its factors.
Representation: TypeAlias = Literal["delta", "factors"]
FittedKind: TypeAlias = Literal["encoder", "decoder", "difference"]
Unit: TypeAlias = Literal["deviations", "reach", "raw"]

_NAME_COLUMN = "Column with the names of the models."


def _always(value: object) -> bool:
    """Leave a setting out of records: it does not change what is made."""
    return True


class FitSettings(Settings):
    """Settings of the fit of a space."""

    option_groups: ClassVar = {
        "Components": ("components", "representation", "strengths", "standardize", "halves"),
        "Solver": ("solver", "sketch", "passes", "tolerance", "seed"),
    }

    components: int | None = Field(
        default=None, ge=1, description="Number of components; by default as many as there are, at most 1,000."
    )
    representation: Representation = Field(
        default="delta",
        description="What is analyzed: delta, the changes of the weights; or factors, the numbers in the "
        "adapter files.",
    )
    strengths: Literal["kept", "normalized"] = Field(
        default="kept",
        description="kept analyzes changes as they are; normalized scales all to their median norm, since "
        "norms of public adapters differ tenfold.",
    )
    standardize: bool = Field(
        default=True,
        description="Divide the numbers of factors by their standard deviations first; with --representation "
        "factors only.",
    )
    solver: Literal["auto", "dual", "streaming"] = Field(
        default="auto",
        description="dual computes exactly from inner products, streaming by passes over the bank; auto "
        "chooses by the number of adapters.",
    )
    halves: bool = Field(
        default=True, description="Also fit two halves of the adapters, to measure which components are reproducible."
    )
    sketch: int = Field(default=32, ge=1, description="Side length of the sketch of a module's change, for streaming.")
    passes: int = Field(default=6, ge=1, description="Largest number of passes of the streaming solver.")
    tolerance: float = Field(
        default=2e-3, ge=0, description="Share of the variance below which a further pass stops the streaming solver."
    )
    seed: int = Field(default=0, description="Random seed.")


class FolderFit(FitSettings):
    """Settings of the fit of a space to a bank of adapters, and of its folder."""

    option_groups: ClassVar = {**FitSettings.option_groups, "Files and processes": ("standalone", "work", "processes")}

    standalone: bool = Field(
        default=False, description="Copy the adapters into the space, so that it can be opened without its bank."
    )
    work: Path | None = Field(
        default=None, exclude_if=_always,
        description="Folder for finished parts, so that a bank that has grown is fitted again quickly.",
    )  # fmt: skip
    processes: int | None = Field(
        default=None, ge=2, exclude_if=_always, description="Number of processes that share the work."
    )


class CorrectionSettings(Settings):
    """Settings of the correction of an edit by the changes that it makes in images."""

    effect: Annotated[float, Cli(own=False)] = Field(
        default=0.6,
        description="Desired effect as a share of the attribute's range; negative for less of the attribute.",
    )
    rounds: int = Field(default=3, ge=1, description="Rounds of a correction after the first.")
    noises: Annotated[int, Cli(own=False)] = Field(
        default=3, ge=1, description="Number of noises in the first round; each further round uses twice as many."
    )


class DirectionSettings(CorrectionSettings):
    """Settings of an attribute's direction, which is fitted to labels."""

    option_groups: ClassVar = {
        "Labels": ("labels", "column", "name_column", "confounders"),
        "Direction": ("kind", "fidelity", "folds", "resamples", "seed"),
        "Correction by images": (
            "corrected", "at", "pipeline", "reader", "prompts", "guidance", "steps", "device", "effect", "rounds",
            "noises",
        ),
    }  # fmt: skip

    labels: FilePath = Field(
        description="Table of the models' attributes: .csv, .tsv, .json or .jsonl with one row for each model."
    )
    column: str = Field(description="Column of the attribute.")
    name_column: str = Field(default="name", description=_NAME_COLUMN)
    confounders: Annotated[tuple[str, ...], Cli(name="--confounder", metavar="COLUMN")] = Field(
        default=(), description="Column of an attribute that must not change; may be given several times."
    )
    kind: FittedKind = Field(
        default="encoder",
        description="encoder: how the models change with the attribute; decoder: how the attribute is "
        "predicted from the models; difference: the difference of two means.",
    )
    fidelity: Literal["corrected", "reference"] = Field(
        default="corrected",
        description="`reference` reproduces the numbers of the authors' code, including its defects; "
        "the page on differences from the papers lists them.",
    )
    folds: int = Field(default=5, ge=2, description="Folds of the cross-validation.")
    resamples: int = Field(
        default=0,
        ge=0,
        description="Number of resamples of the models to which the direction is fitted again, to measure its "
        "stability.",
    )
    corrected: bool = Field(
        default=False,
        description="Correct the direction for the point --at, by what the edit changes in generated images, "
        "as measured by --reader.",
    )
    at: Annotated[str, Cli(metavar="POINT")] = Field(
        default="mean", description="Point for which the direction is corrected."
    )
    pipeline: ModelPath | None = Field(
        default=None, description="Base model of the adapters, a diffusers pipeline; for --corrected."
    )
    reader: str | None = Field(
        default=None, description="Function that measures the labeled attributes in images, as MODULE:FUNCTION."
    )
    prompts: Annotated[tuple[str, ...], Cli(name="--prompt")] = Field(
        default=("",), description="Prompt of the measured images; may be given several times."
    )
    guidance: float = Field(default=1.0, description="Scale of classifier-free guidance.")
    steps: int = Field(default=10, ge=1, description="Steps of the scheduler; gradients go through all of them.")
    device: str = Field(default="cpu", description="Device of the pipeline.")
    seed: int = Field(default=0, description="Seed of folds, resamples and corrections.")

    def check(self) -> None:
        """A correction has a pipeline and a reader, and is of an encoder."""
        if self.corrected and not (self.pipeline and self.reader and self.kind == "encoder"):
            raise UsageError("A correction generates images and reads them.", cure="Give --pipeline and --reader.")


class PredictSettings(Settings):
    """Settings of the prediction of attributes from adapters' weights."""

    labels: FilePath = Field(
        description="Table of the adapters' attributes: .csv, .tsv, .json or .jsonl with one row for each adapter."
    )
    columns: Annotated[tuple[str, ...], Cli(name="--column")] = Field(
        min_length=1, description="Column of an attribute to predict; may be given several times."
    )
    name_column: str = Field(default="name", description=_NAME_COLUMN)
    folds: int = Field(default=5, ge=2, description="Folds of the held-out scores.")
    seed: int = Field(default=0, description="Seed of folds and networks.")


class SampleSettings(Settings):
    """Settings of the sampling of points."""

    count: int = Field(default=1, ge=1, description="Number of points.")
    sampler: Literal["pairs", "gaussian", "kernel", "conditional"] = Field(
        default="pairs",
        description="pairs adds two similar models; gaussian draws each component independently; "
        "kernel draws near models; conditional draws given their labels.",
    )
    factor: float | None = Field(
        default=None, gt=0, description="Factor of the deviations from the mean, for pairs and gaussian; by default 1."
    )
    neighbors: int = Field(
        default=8, ge=1, description="Number of nearest models among which the second model of a pair is drawn."
    )
    bandwidth: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="Bandwidth of kernel and conditional; by default the one with the highest likelihood.",
    )
    labels: FilePath | None = Field(default=None, description="Table of the models' attributes, for conditional.")
    name_column: str = Field(default="name", description=_NAME_COLUMN)
    emphasis: float = Field(
        default=1.0,
        gt=0,
        description="Factor by which attributes are strengthened, for conditional; images of new combinations "
        "show attributes less clearly.",
    )
    # Not `given`, which `Settings` has; recipes and the command call it so.
    attributes: Annotated[Mapping[str, float], Cli(name="--given", metavar="COLUMN=VALUE")] = Field(
        default={}, validation_alias=AliasChoices("given", "attributes"),
        description="Value of an attribute that all points have, for conditional.",
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
    """Settings of the movement of points along directions."""

    moves: Annotated[Mapping[str, float], Cli(name="--move", metavar="DIRECTION=STRENGTH")] = Field(
        description="Step along a direction; negative steps go the opposite way. A direction is a file of "
        "`netweight space direction`, or an attribute of the labels, whose direction is fitted. "
        "May be given several times; the order does not matter."
    )
    labels: FilePath | None = Field(
        default=None, description="Table of the models' attributes, with one row for each model."
    )
    unit: Unit = Field(
        default="deviations",
        description="Unit of the steps: standard deviations of the models, the distance of the farthest "
        "model, or the length of the vector.",
    )
    point: str = Field(
        default="mean",
        description="Starting point in a space: the name of a model, or mean. Points of an earlier step are all moved.",
    )
    kind: FittedKind = Field(
        default="encoder", description="Kind of the fitted directions, as for `netweight space direction --kind`."
    )
    confounders: Annotated[tuple[str, ...], Cli(name="--confounder", metavar="COLUMN")] = Field(
        default=(), description="Column of an attribute that must not change; may be given several times."
    )
    name_column: str = Field(default="name", description=_NAME_COLUMN)
    folds: int = Field(default=5, ge=2, description="Folds of the directions' cross-validation.")
    seed: int = Field(default=0, description="Seed of the folds.")

    def check(self) -> None:
        """There is a move."""
        if not self.moves:
            raise UsageError("No move was given.", cure="Give one: DIRECTION=STRENGTH.")
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
    """Settings of the export of points as adapters."""

    layout: Literal["diffusers", "peft", "kohya", "comfyui"] | None = Field(
        default=None,
        description="Layout of the files; by default that of the file that is read, and for a folder that of "
        "diffusers or peft.",
    )
    rank: int | None = Field(default=None, ge=1, description="Rank of each module; by default as high as needed.")
    energy: float = Field(
        default=1.0, gt=0, le=1, description="Share of each module's squared norm to keep, which allows a lower rank."
    )
    base: str | None = Field(
        default=None, description="Name of the base model to record in the files; by default the recorded one."
    )


class FileSettings(ExportSettings):
    """Settings of reading and writing LoRA files."""

    model: Annotated[str | None, Cli(metavar="NAME")] = Field(
        default=None,
        description="Model of the adapter: a folder, against whose modules the file is checked, or an "
        "architecture (flux, wan, sdxl, …) where the file does not show it.",
    )


class ConvertSettings(FileSettings):
    """Settings of the conversion of an adapter to another layout, rank or kind."""

    weights: Annotated[ModelPath | None, Cli(metavar="BASE")] = Field(
        default=None, description="Base model; the change of a DoRA depends on its weights."
    )


class ResizeSettings(ConvertSettings):
    """Settings of lowering an adapter's rank."""

    def check(self) -> None:
        """A rank or a share is given."""
        if self.rank is None and self.energy == 1:
            raise UsageError(
                "Neither --rank nor --energy was given, so the result would not be smaller.",
                cure="Give --rank 8 or --energy 0.95.",
            )


class ExtractSettings(FileSettings):
    """Settings of the extraction of a LoRA from two models."""

    modules: Annotated[str | None, Cli(metavar="PATTERN")] = Field(
        default=None,
        description="Pattern of the modules, such as '**.attn.*' or '!**.mlp.**'; by default all that changed.",
    )
    dtype: Literal["float32", "float16", "bfloat16"] | None = Field(
        default=None, description="Data type of the factors; by default that of the fine-tuned model."
    )
    alpha: float | None = Field(
        default=None,
        gt=0,
        description="Alpha that the file states; the change of the weights is the same. By default the rank.",
    )


class MergeSettings(FileSettings):
    """Settings of the merging of adapters."""

    method: Literal["linear", "ties", "dare", "dare-ties"] = Field(
        default="linear",
        description="linear: a weighted sum; ties: small entries are trimmed and signs elected; dare: random "
        "entries are dropped; dare-ties: both.",
    )
    weights: Annotated[tuple[float, ...], Cli(name="--weight")] = Field(
        default=(), description="Weight of each adapter, in order; by default 1."
    )
    blocks: Annotated[tuple[tuple[str, str], ...], Cli(name="--block", metavar="PATTERN WEIGHTS")] = Field(
        default=(),
        description="Weights of the adapters in some modules, such as 'unet.up_blocks.**' 1,0.5; the last "
        "pattern that matches counts.",
    )
    density: float = Field(default=0.5, gt=0, le=1, description="Share of the entries that ties and dare keep.")
    seed: int = Field(default=0, description="Seed of the choice of entries in dare.")


class FolderExport(ExportSettings):
    """Settings of the export of points in folders."""

    point: str = Field(
        default="mean",
        description="Point of a space to write: the name of a model, or mean. From a file of points all are written.",
    )


class InversionSettings(Settings):
    """Settings of the search for points."""

    steps: int = Field(default=400, ge=1, description="Steps of the descent.")
    learning_rate: float = Field(
        default=0.05, gt=0, description="Learning rate, in standard deviations of the models where --scaled is given."
    )
    components: int | None = Field(
        default=None, ge=1, description="Number of leading components that are optimized; by default all."
    )
    # A denoising loss is a mean over pixels, so a prior that a Bayesian would call 1 is tiny here: 1e-4 is too strong
    # in the miniature.
    prior: float = Field(
        default=0.0,
        ge=0,
        description="Weight of the Gaussian prior, ½ Σ (score / deviation)², relative to the loss of an image.",
    )
    weight_decay: float = Field(default=0.0, ge=0, description="Weight decay of the optimizer.")
    scaled: bool = Field(default=True, description="Optimize components in units of their standard deviations.")
    averaged: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="Share of the last steps over which the point is averaged; 0 takes the last step.",
    )


# Ours, those of the authors' code, and those that it takes for images that are not photographs of faces.
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
    """Settings of the inversion of images; values that are not given are taken from the named settings."""

    option_groups: ClassVar = {
        "Model and images": ("pipeline", "prompt", "masks", "size", "fit", "device"),
        "Descent": (
            "settings", "steps", "learning_rate", "components", "prior", "weight_decay", "scaled", "averaged", "draws",
            "schedule", "together", "seed",
        ),
    }  # fmt: skip

    pipeline: ModelPath = Field(description="Base model of the adapters: a folder of a diffusers pipeline.")
    prompt: str = Field(description="Prompt with which the adapters were trained, such as 'sks person'.")
    masks: DirectoryPath | None = Field(
        default=None, description="Folder with masks that have the images' names; white pixels count."
    )
    size: Annotated[str | None, Cli(metavar="SIDE|HEIGHTxWIDTH")] = Field(
        default=None,
        description="Size in pixels to which images are brought; by default that of the denoiser's configuration.",
    )
    fit: Literal["crop", "stretch", "pad"] = Field(
        default="crop",
        description="Conversion of images of another shape to that size: crop cuts out the middle; stretch distorts; "
        "pad adds black bars.",
    )
    settings: Literal["default", "reference", "reference out of distribution"] = Field(
        default="default",
        description="Defaults of the other options: netweight's, or those of the authors' code.",
    )
    draws: int = Field(default=1, ge=1, description="Timesteps for each image in each step.")
    schedule: int = Field(default=50, ge=1, description="Steps of the schedule from which timesteps are drawn.")
    together: int = Field(default=8, ge=1, description="Largest number of targets in a batch.")
    device: str = Field(default="cpu", description="Device of the pipeline, such as cuda.")
    seed: int = Field(default=0, description="Seed of all draws.")

    def check(self) -> None:
        """Refuse a size that is none."""
        super().check()
        if self.size is not None:
            parsed_size(self.size)

    @property
    def pixels(self) -> tuple[int, int] | None:
        """Height and width of the images in pixels, or None."""
        return None if self.size is None else parsed_size(self.size)

    @property
    def descent(self) -> InversionSettings:
        """The settings of the descent."""
        changed = {name: value for name, value in self.given.items() if name in InversionSettings.model_fields}
        return INVERSIONS[self.settings].replace(**changed)


class RenderSettings(Settings):
    """Content of a page, and settings of its images."""

    prompts: Annotated[tuple[str, ...], Cli(name="--prompt")] = Field(
        default=("",),
        description="Prompt of the images: one for all noises, or one for each; may be given several times.",
    )
    seeds: Annotated[tuple[int, ...], Cli(own=False)] = Field(
        default=(0, 1, 2, 3), min_length=1, description="Seeds of the noises; thumbnails and the map use the first."
    )
    guidance: float = Field(default=3.0, description="Scale of classifier-free guidance; for the miniature use 1.")
    steps: int = Field(default=50, ge=1, description="Steps of the scheduler; for the miniature use 8.")
    strengths: Annotated[tuple[float, ...], Cli(own=False)] = Field(
        default=tuple(half / 2 for half in range(-6, 7)), description="Positions of a slider, in standard deviations."
    )
    components: int = Field(default=4, ge=0, description="Number of principal components with a slider.")
    adapters: int = Field(
        default=400, ge=1, description="Largest number of adapters on the map; of more, an even selection is shown."
    )
    samples: int = Field(default=12, ge=0, description="Number of sampled models that the page shows.")
    neighbors: Annotated[int, Cli(own=False)] = Field(
        default=4, ge=0, description="Number of nearest models that are named."
    )
    rows: Annotated[int, Cli(own=False)] = Field(default=64, ge=1, description="Largest number of images at a time.")
    seed: int = Field(default=0, description="Seed of samples and folds.")

    def check(self) -> None:
        """There is one prompt, or one for each noise."""
        if len(self.prompts) not in (1, len(self.seeds)):
            raise UsageError(
                f"There are {len(self.prompts)} prompts and {len(self.seeds)} seeds.",
                cure="Give one prompt, or one per seed, and at least one seed.",
            )


class FolderView(RenderSettings):
    """Content of a page about a space, and the pipeline that generates its images."""

    option_groups: ClassVar = {
        "Images": ("pipeline", "prompts", "seeds", "guidance", "steps", "noises", "rows", "device"),
        "Sliders": ("directions", "labels", "name_column", "attributes", "start", "strengths", "components"),
        "Map and samples": ("adapters", "samples", "neighbors", "seed"),
    }

    pipeline: ModelPath | None = Field(default=None, description="Base model of the adapters, a diffusers pipeline.")
    directions: Annotated[tuple[FilePath, ...], Cli(name="--direction")] = Field(
        default=(), description="File of `netweight space direction` that gets a slider; may be given several times."
    )
    labels: FilePath | None = Field(default=None, description="Table of the models' attributes, which color the map.")
    name_column: str = Field(default="name", description=_NAME_COLUMN)
    attributes: Annotated[tuple[str, ...], Cli(name="--attribute", metavar="COLUMN")] = Field(
        default=(), description="Column of the labels that gets a slider; the other columns with sliders stay constant."
    )
    start: Annotated[str, Cli(metavar="POINT")] = Field(default="mean", description="Point at which the sliders start.")
    noises: int | None = Field(
        default=None, ge=1, description="Number of pictures of each point (seeds 0, 1 and so on); by default 4."
    )
    device: str = Field(default="cpu", description="Device of the pipeline.")

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
    """Settings of the list of a point's neighbors."""

    count: int = Field(default=5, ge=1, description="Number of models.")
    measure: Literal["cosine", "distance"] = Field(default="cosine", description="Measure of similarity.")


class SimilarSettings(Settings):
    """Settings of the list of similar adapters."""

    count: int = Field(default=10, ge=1, description="Number of adapters.")


class DuplicateSettings(Settings):
    """Criterion by which two adapters count as copies of each other."""

    least: float = Field(
        default=0.98,
        gt=0,
        le=1,
        description="Smallest cosine between the changes of two adapters that count as copies.",
    )


class BakeSettings(Settings):
    """Settings of adding adapters to the weights of a model."""

    architecture: Annotated[str | None, Cli(name="--model", metavar="NAME")] = Field(
        default=None, description="The architecture (flux, wan, sdxl, …), where it cannot be determined from the files."
    )
    compress: bool | None = Field(default=None, description="Compress OUT; by default it is compressed if MODEL is.")


class InfoSettings(Settings):
    """Settings of the description of a bank."""

    verify: bool = Field(default=False, description="Compare every shard with its digest.")


class IngestSettings(Settings):
    """Settings of the collection of adapters into a bank."""

    compress: bool = Field(default=False, description="Keep the adapters compressed, bit for bit.")
    skip_bad: bool = Field(default=False, description="Leave out adapters that cannot be used, and list them.")
    select: Annotated[str | None, Cli(name="--modules", metavar="PATTERN")] = Field(
        default=None, description="Keep these modules only, as in unet.**.attn2.*."
    )
    base: str | None = Field(
        default=None, description="The model on which all adapters were trained, whatever their files state."
    )
    convert: Annotated[int | None, Cli(metavar="RANK")] = Field(
        default=None, ge=1, description="Convert LoHa, LoKr, DoRA and full differences to LoRAs of at most this rank."
    )
    weights: Annotated[ModelPath | None, Cli(metavar="BASE")] = Field(
        default=None, description="Base model; the change of a DoRA depends on its weights."
    )
    stable_diffusion: bool = Field(
        default=False,
        description="SRC is a matrix published by weights2weights without weight_dimensions.pt: take Stable Diffusion "
        "1's order of weights.",
    )


class ImportSettings(Settings):
    """Settings of the import of weights2weights' published space."""

    components: int | None = Field(
        default=None, ge=1, description="Number of components; by default as many as the models have scores for."
    )
    stable_diffusion: bool = Field(
        default=False, description="Take Stable Diffusion 1's order of weights where weight_dimensions.pt is missing."
    )
