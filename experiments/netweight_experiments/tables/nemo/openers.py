"""The two setups of NeMo's tables: the miniature, and the paper's size as a recipe of the user's names it.

The miniature is the shipped pipeline of captioned shapes with eight planted pictures. All that can be known of a recipe
is checked before a model is opened, and all that is wrong is said at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core.files import digest_tensor
from netweight.core.seeds import torch_generator
from netweight.data.text import check_pairs, image_size, read_pairs, read_prompts
from netweight.errors import UsageError
from netweight.hf.load_pipeline import load_text_to_image, text_to_image, trained_prediction
from netweight.methods.forget.settings import DetectionConfig
from netweight.metrics.copies import CenteredPixels, Clip, Descriptor, Memorized, TorchScriptDescriptor, sscd
from netweight.metrics.images import frechet_distance, kernel_distance
from netweight.toys.diffusion import shapes_pipeline
from netweight.toys.shapes import ShapesWorld, drawn, memorized
from netweight_experiments.tables.nemo.setup import DETECTION_SEEDS, OfImages, OfSets, Setup
from netweight_experiments.tables.setups import TablesRecipe
from netweight_experiments.toys.small_diffusion import GUIDANCE, STEPS

# Attributes that the model has learned to draw; shapes it has not.
_READ = ("color", "ground", "size")
_CALIBRATION, _QUALITY = 48, 16


@cache
def miniature() -> Setup:
    """Open the pipeline that comes with the package, and its world; once, as no table changes it."""
    world = ShapesWorld()
    model = text_to_image(shapes_pipeline(), name="the miniature")
    quality = tuple(world.held_out_captions[:_QUALITY])

    def faithful(captions: Sequence[str], images: Tensor) -> list[float]:
        found = [world.agreement([caption], image[None]) for caption, image in zip(captions, images, strict=True)]
        return [mean(each[name] for name in _READ) for each in found]

    def distances(images: Tensor) -> dict[str, float]:
        pictures = drawn(world.held_out[: len(images)], torch_generator(0, "pictures"))
        features = CenteredPixels()
        # No Fréchet distance: of so few pictures with so many pixels it would say nothing.
        return {"kernel distance of pixels": kernel_distance(features(images), features(pictures)).estimate}

    return Setup(
        model=model,
        memorized=tuple(memorized(world)),
        labelled=True,
        usual=tuple(world.ordinary_captions),
        calibration=tuple(world.ordinary_captions[:_CALIBRATION]),
        held_out=tuple(world.held_out_captions),
        quality=quality,
        statistics=None,
        descriptor=None,
        measure="NCC",
        alignment=None,
        alignment_name="",
        faithful=faithful,
        faithful_name="ordinary captions: attributes right",
        distances=distances,
        detection=DetectionConfig(seeds=tuple(range(DETECTION_SEEDS))),
        images=8,
        guidance=GUIDANCE,
        steps=STEPS,
        search=SearchSettings(
            steps=30, restarts=1, starts=("original",), draws=4, images=4, guidance=GUIDANCE, generation_steps=10
        ),
        small=True,
        differs=(
            f"A miniature: {model.name} has 16 × 16 pixels, six verbatim pictures and two templates are planted in it, "
            "and it has learned a few hundred captions; the paper has Stable Diffusion 1.4 and 500 prompts. What holds "
            "here need not hold there.",
            "Similarity is NCC, the centered correlation of pixels (of templates without their field), not SSCD; there "
            "is no CLIP: alignment is the share of color, ground and size read right from images of ordinary captions.",
        ),
    )


_INCEPTION_SIDE = 299


class NemoRecipe(TablesRecipe):
    """What the paper's scale is measured on. Paths start at the current folder."""

    example = "netweight_experiments/tables/nemo/nemo-tables.yaml"
    named_files = (
        "memorized", "calibration", "held_out", "quality", "sscd", "usual", "statistics", "inception", "references",
    )  # fmt: skip
    named_folders = ("model", "clip")

    model: Path  # folder of the pipeline: Stable Diffusion 1.4, or another one
    # Table of memorized prompts and the files of their training images, columns prompt and image; a column kind says
    # "verbatim" or "template", else that is measured by the paper's rule.
    memorized: Path
    calibration: Path  # prompts that are not memorized, for the threshold
    held_out: Path  # further such prompts, for detection
    quality: Path  # ordinary prompts, whose images tell what an edit costs
    sscd: Path  # SSCD's TorchScript file
    sscd_sha256: str  # its SHA-256: the file is a program
    usual: Path | None = None  # prompts for usual activations; the paper takes 50,000
    # Usual activations in place of these: a file of `netweight forget statistics`, or the .pt file of the paper's code.
    statistics: Path | None = None
    # A folder of transformers with a CLIP, for alignment and CLIP-FID; without it neither is measured.
    clip: Path | None = None
    inception: Path | None = None  # an Inception in TorchScript, for FID and KID
    inception_sha256: str | None = None
    references: Path | None = None  # table of real images for these distances, columns prompt and image
    column: str = "prompt"  # column of prompts in the files that hold prompts alone
    device: str = "cpu"  # where the model goes
    images: int = 10  # images per memorized prompt
    guidance: float = 7.0
    steps: int = 50
    search_steps: int = 200  # most steps of an adversary's search
    rows: int = 20  # most images at a time; halved where memory runs out

    def problems(self) -> list[str]:
        found = self.below(2, "images", "steps", "search_steps", "rows")
        if (self.usual is None) == (self.statistics is None):
            found.append("usual, statistics: give one of the two.")
        if (self.inception is None) != (self.inception_sha256 is None):
            found.append("inception, inception_sha256: they go together, as the file is a program.")
        if self.inception is not None and self.references is None:
            found.append("references: FID and KID need real images to compare with.")
        return found


RECIPE = NemoRecipe


def setup_of_recipe(path: Path) -> Setup:
    """Open what a recipe names."""
    recipe = NemoRecipe.read(path)
    prompts = {key: tuple(read_prompts(getattr(recipe, key), column=recipe.column))
               for key in ("calibration", "held_out", "quality")}  # fmt: skip
    usual = () if recipe.usual is None else tuple(read_prompts(recipe.usual, column=recipe.column))
    both = sorted(set(prompts["calibration"]) & set(prompts["held_out"]))
    if both:
        raise UsageError(f"The prompt {both[0]!r} is in calibration and in held_out.", cure="Leave it out of one.")
    descriptor = _Remembering(sscd(recipe.sscd, recipe.sscd_sha256))
    inception = _inception(recipe)
    clip = None if recipe.clip is None else Clip(recipe.clip)
    model = load_text_to_image(recipe.model, device=recipe.device)
    memorized, labelled = _memorized(recipe.memorized, image_size(model))
    return Setup(
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
        key = digest_tensor(images)
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
