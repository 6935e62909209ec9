"""The two setups of NeMo's tables: the miniature, and the paper's size as a recipe of the user's names it.

The miniature is the shipped pipeline of captioned shapes with eight planted pictures. All that can be known of a recipe
is checked before a model is opened, and all that is wrong is said at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import mean

from torch import Tensor

from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.core.seeds import torch_generator
from netweight.hf.load_pipeline import text_to_image
from netweight.methods.forget.settings import DetectionConfig
from netweight.metrics.descriptors import CenteredPixels
from netweight.metrics.images import kernel_distance
from netweight.toys.diffusion import shapes_pipeline
from netweight.toys.shapes import ShapesWorld, drawn, memorized
from netweight_experiments.tables.nemo.setup import DETECTION_SEEDS, Setup
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
            "is not a CLIP: alignment is the share of color, ground and size read right from images of ordinary "
            "captions.",
        ),
    )
