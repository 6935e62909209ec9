"""Setups that all tables of a paper share: a miniature at the small scale, at the paper's what the user's recipe names.

Of a recipe everything that can be known is checked before a model is opened, and all that is wrong is said at once.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Self

from netweight.errors import UsageError
from netweight.recipes.recipe import read_mapping, refusal
from netweight.settings import Settings
from netweight_experiments.tables.registry import Measured, Scale, table


def shared_setup(paper: str, scale: Scale, recipe: Path | str | None) -> Any:
    """Open the setup of a scale, by `miniature` or `setup_of_recipe` of the paper's `openers`."""
    if scale == "small" and recipe is not None:
        raise UsageError(
            "The small scale of these tables has a model of its own.", cure="Give --recipe together with --scale paper."
        )
    openers = import_module(f"netweight_experiments.tables.{paper}.openers")
    if scale == "small":
        return openers.miniature()
    if recipe is None:
        raise UsageError(
            "At the paper's scale these tables are measured on models and data that you have.",
            cure=f"Copy {openers.RECIPE.example}, fill it in, and give it with --recipe FILE.",
        )
    return openers.setup_of_recipe(Path(recipe))


# What tables of a setup need besides at the paper's size.
_PAPER_NEEDS = {
    "nemo": "a recipe that names Stable Diffusion, its prompts and SSCD (tables/nemo/nemo-tables.yaml), a GPU",
    "w2w": "a recipe that names Stable Diffusion, a bank of the published adapters, labels, photographs and a face "
    "recognition network (tables/w2w/space-tables.yaml), a GPU",
}


def setup_table(table_id: str) -> Callable[[Callable[[Any, Path], Measured]], Callable[..., Measured]]:
    """Register a function of the paper's setup and of the folder that its tables share; options are a recipe and a try.

    What can be tried on less is told by the arguments of the setup's `tried`.
    """
    paper = table_id.partition("-")[0]

    def register(measure: Callable[[Any, Path], Measured]) -> Callable[..., Measured]:
        def run(scale: Scale, out: Path, *, recipe: Path | None = None, **less: int) -> Measured:
            setup = shared_setup(paper, scale, recipe).tried(**less)
            return replace(measure(setup, shared_folder(paper, out, scale)), inputs=setup.inputs)

        tried = import_module(f"netweight_experiments.tables.{paper}.setup").Setup.tried
        names = ["recipe", *list(inspect.signature(tried).parameters)[1:]]
        taken = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
        run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        run.__doc__ = measure.__doc__
        return table(table_id, needs=("diffusion", "evidence"), paper_needs=(_PAPER_NEEDS[paper],), stand_in=True)(run)

    return register


def shared_folder(paper: str, out: Path, scale: Scale) -> Path:
    """Return the folder of runs that all tables of a paper and scale share, beside a table's own."""
    return out.parent / f"{paper}-runs-{scale}"


class TablesRecipe(Settings):
    """What the paper's scale is measured on. Paths start at the current folder."""

    example: ClassVar[str]  # a recipe to be filled in
    named_files: ClassVar[tuple[str, ...]]  # keys of files
    named_folders: ClassVar[tuple[str, ...]]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a recipe and check everything that can be known before a model is opened."""
        problems: list[str] = []
        recipe = cls.checked(read_mapping(path, f"the keys of {cls.example}"), "", problems)
        if recipe is not None:
            problems += [f"{key}: there is no file {one}." for key, one in recipe.files.items() if not one.exists()]
            folders = {key: one for key in cls.named_folders if (one := getattr(recipe, key)) is not None}
            problems += [f"{key}: there is no folder {one}." for key, one in folders.items() if not one.is_dir()]
            problems += recipe.problems()
        if problems or recipe is None:
            cure = f"{cls.example} says what each key is for and where the files come from."
            raise refusal(path, problems, cure=cure)
        return recipe

    @property
    def files(self) -> dict[str, Path]:
        """The files that it names, by key."""
        return {name: path for name in self.named_files if (path := getattr(self, name)) is not None}

    def problems(self) -> list[str]:
        """What else is wrong, a sentence each."""
        return []

    def below(self, least: int, *keys: str) -> list[str]:
        """Those of the keys whose number is too low, a sentence each."""
        return [f"{key}: must be at least {least}." for key in keys if getattr(self, key) < least]
