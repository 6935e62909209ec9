"""Where NeMo's tables are measured: a model that has memorized, its prompts, and how images are made and compared.

`nemo_miniature` makes the small ground of what comes with the package, `nemo_files` the paper's size of a recipe of the
user's. All tables of a scale share one folder, so that what one of them has computed the others take.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, final

from netweight.core.digest import of_config, of_tensor
from netweight.errors import UsageError
from netweight.reproduce.registry import Measured, Scale, table

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.attacks.embedding_search.settings import SearchSettings
    from netweight.hf.load_pipeline import PipelineModel
    from netweight.methods.forget.settings import DetectionConfig
    from netweight.metrics.copies import Descriptor, Memorized

__all__ = ["DETECTION_SEEDS", "NEEDS", "PAPER_NEEDS", "Ground", "folder_of", "ground_of", "nemo_table"]

NEEDS = ("diffusion", "evidence")
PAPER_NEEDS = ("a recipe that names Stable Diffusion, its prompts and SSCD (recipes/nemo-tables.yaml), a GPU",)
DETECTION_SEEDS = 10
"""Noises that a prompt is looked at with: the paper's."""

OfImages: TypeAlias = "Callable[[Sequence[str], Tensor], list[float]]"
OfSets: TypeAlias = "Callable[[Tensor], dict[str, float]]"


@final
@dataclass(frozen=True, eq=False)
class Ground:
    """A model and what it is asked.

    Attributes:
        model: The model.
        memorized: Prompts with their training images.
        labelled: Whether it is known which are verbatim; else it is measured, see `nemo_painting.kinds_of`.
        usual: Prompts that usual activations are measured on.
        calibration: Ordinary prompts that the threshold is calibrated on.
        held_out: Ordinary prompts that tell how well it does.
        quality: Ordinary prompts whose images tell what an edit costs.
        statistics: A file of usual activations in place of measured ones.
        descriptor: What compares images; None takes `CenteredPixels`, for a template on the part that stays.
        measure: What it is called.
        alignment: How well each image follows its prompt, planted ones too; None if nothing at hand can tell.
        alignment_name: What that is called.
        faithful: The same for ordinary prompts alone; None takes `alignment`.
        faithful_name: What that is called.
        distances: How far images of `quality` are from what they should look like, by name; None if nothing can tell.
        detection: How prompts are looked at.
        images: Images per memorized prompt.
        guidance: Of generations.
        steps: Of their scheduler.
        search: How an adversary searches.
        small: Whether this is the miniature.
        differs: How this differs from the paper's set-up, one sentence each.
        whole: Whether nothing is left out; a try meets no targets.
    """

    model: PipelineModel
    memorized: tuple[Memorized, ...]
    labelled: bool
    usual: tuple[str, ...]
    calibration: tuple[str, ...]
    held_out: tuple[str, ...]
    quality: tuple[str, ...]
    statistics: Path | None
    descriptor: Descriptor | None
    measure: str
    alignment: OfImages | None
    alignment_name: str
    faithful: OfImages | None
    faithful_name: str
    distances: OfSets | None
    detection: DetectionConfig
    images: int
    guidance: float
    steps: int
    search: SearchSettings
    small: bool
    differs: tuple[str, ...]
    whole: bool = True

    @property
    def prompts(self) -> list[str]:
        """The memorized prompts."""
        return [each.prompt for each in self.memorized]

    @cached_property
    def digest(self) -> str:
        """Digest of everything that decides on images and their numbers, but for what is done to the model."""
        pictures = [[each.prompt, each.kind, of_tensor(each.image)] for each in self.memorized]
        named = [self.measure, self.alignment_name, self.faithful_name, self.images, self.guidance, self.steps]
        return of_config([self.model.digest(), pictures, self.labelled, self.quality, named, self.search])

    def tried(self, prompts: int | None, images: int | None) -> Ground:
        """Return a smaller ground, for a try.

        Args:
            prompts: So many of the memorized prompts, the first and the last among them.
            images: So many images per prompt, and seeds of detection; times 3, ordinary prompts that are painted, and
                steps at most of a generation and of a search.

        Raises:
            UsageError: There are fewer prompts, or a number is below 2.
        """
        ground = replace(self, whole=prompts is None and images is None)
        if prompts is not None:
            if not 2 <= prompts <= len(self.memorized):
                raise UsageError(f"{prompts} of {len(self.memorized)} memorized prompts cannot be tried.")
            places = [round(place * (len(self.memorized) - 1) / (prompts - 1)) for place in range(prompts)]
            ground = replace(ground, memorized=tuple(self.memorized[place] for place in places))
        if images is not None:
            if images < 2:
                raise UsageError(f"{images} images per prompt are too few for a try.", cure="Give 2 or more.")
            detection = self.detection.replace(seeds=tuple(range(images)))
            few = 3 * images
            steps = min(self.steps, few)
            search = self.search.replace(steps=few, images=images, generation_steps=steps)
            ground = replace(
                ground, images=images, steps=steps, detection=detection, search=search, quality=self.quality[:few],
                calibration=self.calibration[: 2 * few], held_out=self.held_out[:few],
            )  # fmt: skip
        return ground


def nemo_table(table_id: str) -> Callable[[Callable[[Ground, Path], Measured]], Callable[..., Measured]]:
    """Register a table of NeMo's: a function of the ground and of the folder that all of these tables share.

    As a table it takes `recipe` (see `recipes/nemo-tables.yaml`), and for a try `prompts` and `images`, see
    `Ground.tried`. It raises `UsageError` if the recipe is missing or wrong, and `NetweightError` if a run failed.

    Args:
        table_id: Its name.
    """

    def register(measure: Callable[[Ground, Path], Measured]) -> Callable[..., Measured]:
        def run(
            scale: Scale,
            out: Path,
            *,
            recipe: Path | None = None,
            prompts: int | None = None,
            images: int | None = None,
        ) -> Measured:
            ground = ground_of(scale, recipe, prompts=prompts, images=images)
            return replace(measure(ground, folder_of(out, scale)), inputs={"model": ground.model.digest()})

        run.__doc__ = measure.__doc__
        return table(table_id, needs=NEEDS, paper_needs=PAPER_NEEDS, stand_in=True)(run)

    return register


def ground_of(
    scale: Scale, recipe: Path | str | None = None, *, prompts: int | None = None, images: int | None = None
) -> Ground:
    """Open the ground of a scale.

    Args:
        scale: "small" for the miniature, "paper" for what a recipe names.
        recipe: The recipe's file, for "paper".
        prompts: See `Ground.tried`.
        images: See `Ground.tried`.

    Raises:
        UsageError: The recipe is missing at "paper" or given at "small", or something in it is wrong.
    """
    if scale == "small":
        if recipe is not None:
            raise UsageError(
                "The small scale of NeMo's tables has a model of its own.",
                cure="Give --recipe together with --scale paper.",
            )
        from netweight.reproduce.nemo_miniature import miniature

        return miniature().tried(prompts, images)
    if recipe is None:
        raise UsageError(
            "NeMo's tables at the paper's scale are measured on a model and prompts that you have.",
            cure="Copy recipes/nemo-tables.yaml, fill it in, and give it with --recipe FILE.",
        )
    from netweight.reproduce.nemo_files import ground_of_recipe

    return ground_of_recipe(Path(recipe)).tried(prompts, images)


def folder_of(out: Path, scale: Scale) -> Path:
    """Return the folder that all of NeMo's tables of a scale share, beside a table's own."""
    return out.parent / f"nemo-runs-{scale}"
