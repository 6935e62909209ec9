"""How a table of NeMo's is registered: a function of the setup and of the folder that all of these tables share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from netweight.errors import UsageError
from netweight_experiments.tables.nemo.setup import Setup
from netweight_experiments.tables.registry import Measured, Scale, table

NEEDS = ("diffusion", "evidence")
PAPER_NEEDS = ("a recipe that names Stable Diffusion, its prompts and SSCD (recipes/nemo-tables.yaml), a GPU",)


def nemo_table(table_id: str) -> Callable[[Callable[[Setup, Path], Measured]], Callable[..., Measured]]:
    """Register a table of NeMo's: a function of the setup and of the folder that all of these tables share."""

    def register(measure: Callable[[Setup, Path], Measured]) -> Callable[..., Measured]:
        def run(
            scale: Scale,
            out: Path,
            *,
            recipe: Path | None = None,
            prompts: int | None = None,
            images: int | None = None,
        ) -> Measured:
            setup = setup_of(scale, recipe, prompts=prompts, images=images)
            return replace(measure(setup, folder_of(out, scale)), inputs={"model": setup.model.digest()})

        run.__doc__ = measure.__doc__
        return table(table_id, needs=NEEDS, paper_needs=PAPER_NEEDS, stand_in=True)(run)

    return register


def setup_of(
    scale: Scale, recipe: Path | str | None = None, *, prompts: int | None = None, images: int | None = None
) -> Setup:
    """Open the setup of a scale."""
    if scale == "small":
        if recipe is not None:
            raise UsageError(
                "The small scale of NeMo's tables has a model of its own.",
                cure="Give --recipe together with --scale paper.",
            )
        from netweight_experiments.tables.nemo.openers import miniature

        return miniature().tried(prompts, images)
    if recipe is None:
        raise UsageError(
            "NeMo's tables at the paper's scale are measured on a model and prompts that you have.",
            cure="Copy recipes/nemo-tables.yaml, fill it in, and give it with --recipe FILE.",
        )
    from netweight_experiments.tables.nemo.openers import setup_of_recipe

    return setup_of_recipe(Path(recipe)).tried(prompts, images)


def folder_of(out: Path, scale: Scale) -> Path:
    """Return the folder that all of NeMo's tables of a scale share, beside a table's own."""
    return out.parent / f"nemo-runs-{scale}"
