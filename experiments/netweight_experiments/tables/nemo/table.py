"""How a table of NeMo's is registered: a function of the setup and of the folder that all of these tables share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from netweight_experiments.tables.nemo.setup import Setup
from netweight_experiments.tables.registry import Measured, Scale, table
from netweight_experiments.tables.setups import shared_folder, shared_setup

NEEDS = ("diffusion", "evidence")
PAPER_NEEDS = ("a recipe that names Stable Diffusion, its prompts and SSCD (tables/nemo/nemo-tables.yaml), a GPU",)


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
            setup: Setup = shared_setup("nemo", scale, recipe).tried(prompts, images)
            return replace(measure(setup, shared_folder("nemo", out, scale)), inputs={"model": setup.model.digest()})

        run.__doc__ = measure.__doc__
        return table(table_id, needs=NEEDS, paper_needs=PAPER_NEEDS, stand_in=True)(run)

    return register
