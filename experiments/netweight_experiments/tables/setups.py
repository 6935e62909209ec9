"""Setups that all tables of a paper share: a miniature that comes with the package."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from netweight.errors import Unsupported
from netweight_experiments.tables.registry import MeasuredTable, Scale, table


def shared_setup(paper: str) -> Any:
    """Open the miniature of a paper's tables, by `miniature` of its `openers`."""
    return import_module(f"netweight_experiments.tables.{paper}.openers").miniature()


def setup_table(table_id: str) -> Callable[[Callable[[Any, Path], MeasuredTable]], Callable[..., MeasuredTable]]:
    """Register a function of the paper's setup and of the folder that its tables share.

    The options are the arguments of the setup's `tried`, which makes a smaller setup to try a table on.
    """
    paper = table_id.partition("-")[0]

    def register(measure: Callable[[Any, Path], MeasuredTable]) -> Callable[..., MeasuredTable]:
        def run(scale: Scale, out: Path, **less: int) -> MeasuredTable:
            if scale != "small":
                raise Unsupported(f"{table_id} is measured on a miniature alone.", cure="Leave out --scale.")
            setup = shared_setup(paper).tried(**less)
            return replace(measure(setup, shared_folder(paper, out, scale)), inputs=setup.inputs)

        tried = import_module(f"netweight_experiments.tables.{paper}.setup").Setup.tried
        names = list(inspect.signature(tried).parameters)[1:]
        taken = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in names]
        run.__signature__ = inspect.Signature(taken)  # type: ignore[attr-defined]
        run.__doc__ = measure.__doc__
        return table(table_id, needs=("diffusion", "evidence"), stand_in=True)(run)

    return register


def shared_folder(paper: str, out: Path, scale: Scale) -> Path:
    """Return the folder of runs that all tables of a paper and scale share, beside a table's own."""
    return out.parent / f"{paper}-runs-{scale}"
