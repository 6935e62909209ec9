"""The paper's size of NeMo's tables: a recipe names a pipeline, its prompts, SSCD, and what else the user has.

Everything that can be known is checked before a model is opened, and all that is wrong is said at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core.digest import of_tensor
from netweight.data.memorized_pairs import check_pairs, image_size, read_pairs
from netweight.data.prompts import read_prompts
from netweight.errors import UsageError
from netweight.hf.load_pipeline import load_text_to_image, trained_prediction
from netweight.methods.forget.settings import DetectionConfig
from netweight.metrics.copies import Descriptor, Memorized, TorchScriptDescriptor, sscd
from netweight.metrics.images import frechet_distance, kernel_distance
from netweight.recipes.entries import configured
from netweight.recipes.recipe import read_mapping, refusal
from netweight.reproduce.nemo_ground import DETECTION_SEEDS, Ground

if TYPE_CHECKING:
    from netweight.reproduce.nemo_ground import OfImages, OfSets

__all__ = ["NemoRecipe", "ground_of_recipe", "read_nemo_recipe"]

_INCEPTION_SIDE = 299


@final
@dataclass(frozen=True)
class NemoRecipe:
    """What the paper's scale is measured on. Paths start at the current folder.

    Attributes:
        model: Folder of the pipeline: Stable Diffusion 1.4, or another one.
        memorized: Table of memorized prompts and the files of their training images, columns prompt and image; a
            column kind says "verbatim" or "template", else that is measured by the paper's rule.
        calibration: Prompts that are not memorized, for the threshold.
        held_out: Further such prompts, for detection.
        quality: Ordinary prompts, whose images tell what an edit costs.
        sscd: SSCD's TorchScript file.
        sscd_sha256: Its SHA-256: the file is a program.
        usual: Prompts for usual activations; the paper takes 50,000.
        statistics: Usual activations in place of these: a file of `netweight forget statistics`, or the .pt file of the
            paper's code.
        clip: A folder of transformers with a CLIP, for alignment and CLIP-FID; without it neither is measured.
        inception: An Inception in TorchScript, for FID and KID.
        inception_sha256: Its SHA-256.
        references: Table of real images for these distances, columns prompt and image.
        column: Column of prompts in the files that hold prompts alone.
        device: Where the model goes.
        images: Images per memorized prompt.
        guidance: Of generations.
        steps: Of their scheduler.
        search_steps: Most steps of an adversary's search.
        rows: Most images at a time; halved where memory runs out.
    """

    model: Path
    memorized: Path
    calibration: Path
    held_out: Path
    quality: Path
    sscd: Path
    sscd_sha256: str
    usual: Path | None = None
    statistics: Path | None = None
    clip: Path | None = None
    inception: Path | None = None
    inception_sha256: str | None = None
    references: Path | None = None
    column: str = "prompt"
    device: str = "cpu"
    images: int = 10
    guidance: float = 7.0
    steps: int = 50
    search_steps: int = 200
    rows: int = 20

    @property
    def files(self) -> dict[str, Path]:
        """The files that it names, by key."""
        names = ("memorized", "calibration", "held_out", "quality", "sscd", "usual", "statistics", "inception",
                 "references")  # fmt: skip
        return {name: path for name in names if (path := getattr(self, name)) is not None}

    @property
    def folders(self) -> dict[str, Path]:
        """The folders that it names, by key."""
        return {"model": self.model, **({} if self.clip is None else {"clip": self.clip})}


def read_nemo_recipe(path: Path) -> NemoRecipe:
    """Read a recipe and check everything that can be known before a model is opened.

    Raises:
        UsageError: It cannot be read, or something in it is wrong or missing; the message lists every problem.
    """
    problems: list[str] = []
    recipe = configured(NemoRecipe, read_mapping(path, "the keys of recipes/nemo-tables.yaml"), "", problems)
    if recipe is not None:
        problems += [f"{key}: there is no file {file}." for key, file in recipe.files.items() if not file.is_file()]
        problems += [f"{key}: there is no folder {one}." for key, one in recipe.folders.items() if not one.is_dir()]
        if (recipe.usual is None) == (recipe.statistics is None):
            problems.append("usual, statistics: give one of the two.")
        if (recipe.inception is None) != (recipe.inception_sha256 is None):
            problems.append("inception, inception_sha256: they go together, as the file is a program.")
        if recipe.inception is not None and recipe.references is None:
            problems.append("references: FID and KID need real images to compare with.")
        counts = ("images", "steps", "search_steps", "rows")
        problems += [f"{key}: must be at least 2." for key in counts if getattr(recipe, key) < 2]
    if problems or recipe is None:
        raise refusal(
            path,
            problems,
            cure="recipes/nemo-tables.yaml says what each key is for and where the files come from.",
        )
    return recipe


def ground_of_recipe(path: Path) -> Ground:
    """Open what a recipe names.

    Raises:
        UsageError: Something in it is wrong.
        Unsupported: The pipeline is of a kind that is not known.
        UnsafeInput: A TorchScript file has another digest.
        MissingExtra: Pillow is not installed.
    """
    recipe = read_nemo_recipe(path)
    prompts = {key: tuple(read_prompts(getattr(recipe, key), column=recipe.column))
               for key in ("calibration", "held_out", "quality")}  # fmt: skip
    usual = () if recipe.usual is None else tuple(read_prompts(recipe.usual, column=recipe.column))
    both = sorted(set(prompts["calibration"]) & set(prompts["held_out"]))
    if both:
        raise UsageError(f"The prompt {both[0]!r} is in calibration and in held_out.", cure="Leave it out of one.")
    descriptor = _Remembering(sscd(recipe.sscd, recipe.sscd_sha256))
    inception = _inception(recipe)
    clip = None if recipe.clip is None else _clip(recipe.clip)
    model = load_text_to_image(recipe.model, device=recipe.device)
    memorized, labelled = _memorized(recipe.memorized, image_size(model))
    return Ground(
        model=model,
        memorized=memorized,
        labelled=labelled,
        usual=usual,
        statistics=recipe.statistics,
        descriptor=descriptor,
        measure=descriptor.name,
        alignment=None if clip is None else _alignment(clip),
        alignment_name="" if clip is None else f"alignment by {clip.name}",
        faithful=None,
        faithful_name="",
        distances=_distances(recipe, model, inception, clip),
        detection=DetectionConfig(seeds=tuple(range(DETECTION_SEEDS)), rows=recipe.rows),
        images=recipe.images,
        guidance=recipe.guidance,
        steps=recipe.steps,
        search=SearchSettings(
            steps=recipe.search_steps, restarts=1, images=4, guidance=recipe.guidance, generation_steps=recipe.steps,
            error=trained_prediction(model),
        ),
        small=False,
        differs=(
            f"The model is {model.name}, {len(memorized)} memorized prompts; the paper's is Stable Diffusion 1.4 "
            "with 500.",
            "Thresholds are calibrated on this model by one protocol, without guidance; the paper's 0.428 is not used.",
        ),
        calibration=prompts["calibration"],
        held_out=prompts["held_out"],
        quality=prompts["quality"],
    )  # fmt: skip


@final
class _Remembering:
    """A descriptor that remembers single images, as training images are compared with again and again."""

    def __init__(self, inner: Descriptor) -> None:
        self.name = inner.name
        self._inner = inner
        self._known: dict[str, Tensor] = {}

    def __call__(self, images: Tensor) -> Tensor:
        """Return the inner one's vectors."""
        if len(images) > 1:
            return self._inner(images)
        key = of_tensor(images)
        if key not in self._known:
            self._known[key] = self._inner(images)
        return self._known[key]


def _memorized(path: Path, size: tuple[int, int]) -> tuple[tuple[Memorized, ...], bool]:
    """Memorized pairs, and whether the table says of each how it is memorized."""
    pairs = read_pairs(path, size)
    known: set[str] = set()
    for pair in pairs:
        if pair.prompt in known:
            raise UsageError(f"{path.name}: the prompt {pair.prompt!r} comes again.", cure="Leave one of them out.")
        known.add(pair.prompt)
    labelled = all(row.values.get("kind") for row in check_pairs(path).rows)
    return tuple(Memorized(pair.prompt, pair.kind, pair.image) for pair in pairs), labelled


def _inception(recipe: NemoRecipe) -> TorchScriptDescriptor | None:
    if recipe.inception is None:
        return None
    return TorchScriptDescriptor(
        recipe.inception, str(recipe.inception_sha256), name="Inception", side=_INCEPTION_SIDE
    )  # fmt: skip


def _clip(folder: Path) -> Any:
    from netweight.hf.clip import Clip

    return Clip(folder)


def _alignment(clip: Any) -> OfImages:
    def alignment(prompts: Sequence[str], images: Tensor) -> list[float]:
        found: list[float] = clip.alignment(images, prompts).tolist()
        return found

    return alignment


def _distances(recipe: NemoRecipe, model: Any, inception: TorchScriptDescriptor | None, clip: Any) -> OfSets | None:
    """Distances to real images, whose features are computed when they are first asked for."""
    if recipe.references is None or (inception is None and clip is None):
        return None
    references = recipe.references
    size = image_size(model)

    def features(descriptor: Descriptor, images: Tensor) -> Tensor:
        return torch.cat([descriptor(part) for part in torch.split(images, recipe.rows)])

    @cache
    def real(descriptor: Descriptor) -> Tensor:
        return features(descriptor, torch.stack([row.image for row in read_pairs(references, size)]))

    def distances(images: Tensor) -> dict[str, float]:
        found: dict[str, float] = {}
        if inception is not None:
            made = features(inception, images)
            found |= {"FID": frechet_distance(made, real(inception)),
                      "KID": kernel_distance(made, real(inception)).estimate}  # fmt: skip
        if clip is not None:
            found["CLIP-FID"] = frechet_distance(features(clip, images), real(clip))
        return found

    return distances
