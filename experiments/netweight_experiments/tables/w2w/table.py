"""How a table of weights2weights' is registered: a function of the setup and of the folder that all tables share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from netweight_experiments.tables.registry import Measured, Scale, table
from netweight_experiments.tables.setups import shared_folder, shared_setup
from netweight_experiments.tables.w2w.setup import Setup

NEEDS = ("diffusion", "evidence")
PAPER_NEEDS = (
    "a recipe that names Stable Diffusion, a bank of the published adapters, labels, photographs and a face "
    "recognition network (tables/w2w/space-tables.yaml), a GPU",
)


def space_table(table_id: str) -> Callable[[Callable[[Setup, Path], Measured]], Callable[..., Measured]]:
    """Register a table of weights2weights: a function of the setup and of the folder that all of them share."""

    def register(measure: Callable[[Setup, Path], Measured]) -> Callable[..., Measured]:
        def run(scale: Scale, out: Path, *, recipe: Path | None = None, people: int | None = None) -> Measured:
            setup: Setup = shared_setup("w2w", scale, recipe).tried(people)
            inputs = {"model": setup.model.digest(), "bank": setup.space.bank_digest}
            return replace(measure(setup, shared_folder("w2w", out, scale)), inputs=inputs)

        run.__doc__ = measure.__doc__
        return table(table_id, needs=NEEDS, paper_needs=PAPER_NEEDS, stand_in=True)(run)

    return register
