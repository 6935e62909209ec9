"""How a table of weights2weights' is registered: a function of the setup and of the folder that all tables share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from netweight.errors import UsageError
from netweight_experiments.tables.registry import Measured, Scale, table
from netweight_experiments.tables.w2w.setup import Setup

NEEDS = ("diffusion", "evidence")
PAPER_NEEDS = (
    "a recipe that names Stable Diffusion, a bank of the published adapters, labels, photographs and a face "
    "recognition network (recipes/space-tables.yaml), a GPU",
)


def space_table(table_id: str) -> Callable[[Callable[[Setup, Path], Measured]], Callable[..., Measured]]:
    """Register a table of weights2weights: a function of the setup and of the folder that all of them share."""

    def register(measure: Callable[[Setup, Path], Measured]) -> Callable[..., Measured]:
        def run(scale: Scale, out: Path, *, recipe: Path | None = None, people: int | None = None) -> Measured:
            setup = setup_of(scale, recipe).tried(people)
            inputs = {"model": setup.model.digest(), "bank": setup.space.bank_digest}
            return replace(measure(setup, folder_of(out, scale)), inputs=inputs)

        run.__doc__ = measure.__doc__
        return table(table_id, needs=NEEDS, paper_needs=PAPER_NEEDS, stand_in=True)(run)

    return register


def setup_of(scale: Scale, recipe: Path | str | None = None) -> Setup:
    """Open the setup of a scale."""
    if scale == "small":
        if recipe is not None:
            raise UsageError(
                "The small scale of these tables has a bank of its own.",
                cure="Give --recipe together with --scale paper.",
            )
        from netweight_experiments.tables.w2w.openers import miniature

        return miniature()
    if recipe is None:
        raise UsageError(
            "These tables at the paper's scale are measured on a pipeline and adapters that you have.",
            cure="Copy recipes/space-tables.yaml, fill it in, and give it with --recipe FILE.",
        )
    from netweight_experiments.tables.w2w.openers import setup_of_recipe

    return setup_of_recipe(Path(recipe))


def folder_of(out: Path, scale: Scale) -> Path:
    """Return the folder that all of these tables of a scale share, beside a table's own."""
    return out.parent / f"w2w-runs-{scale}"
