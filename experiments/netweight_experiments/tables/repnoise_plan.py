"""Tables of RepNoise's that are a grid of defended models and attacks: planned as data, measured alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from netweight_experiments.tables.registry import Measured, Scale, table
from netweight_experiments.tables.repnoise_grid import CORRECTED, Attack, Line, grid, runs_of
from netweight_experiments.tables.repnoise_ground import ground_of
from netweight_experiments.tables.repnoise_models import folder_of
from netweight_experiments.tables.repnoise_run import attacked

NEEDS = ("llm",)
PAPER_NEEDS = ("a chat model as --model, BeaverTails with RepNoise's refusals, a GPU",)
_CORRECTED = "RepNoise, corrected, is this library's loss; RepNoise is the published one at its published weights."


# What was planned, by the table's name.
PLANS: dict[str, Plan] = {}


@final
@dataclass(frozen=True)
class Plan:
    """A table."""

    lines: tuple[Line, ...]  # its rows
    attacks: tuple[Attack, ...]  # its columns
    before: bool = False  # whether harm before any attack has a column
    steps: bool = False  # whether steps to recovery have columns
    differs: tuple[str, ...] = ()  # how it differs from the paper's, besides the ground
    small: tuple[str, ...] = ()  # how it does at the small scale
    shown: Callable[[Measured], Measured] | None = None  # what to make of the grid, if it is to be laid out otherwise


def plan(table_id: str, planned: Plan, *, paper_needs: tuple[str, ...] = PAPER_NEEDS) -> None:
    """Register a table."""
    # Its function takes `only`, a pattern of the attacks' names (`DEFENSE@RATE-SAMPLES-DATA-SEED`; "none" for none);
    # `model`, a folder of transformers, and `judge`, "MODULE:FUNCTION" of a judge of harm, for "paper"; and `share`,
    # another share of the paper's numbers of pairs and samples than the scale's, for a try.

    def run(
        scale: Scale,
        out: Path,
        *,
        only: str | None = None,
        model: str | None = None,
        judge: str | None = None,
        share: float | None = None,
    ) -> Measured:
        ground = ground_of(scale, model, judge)
        runs = runs_of(planned.lines, planned.attacks)
        found = attacked(runs, ground, folder_of(out, scale), only=only, share=share)
        corrected = [_CORRECTED] if any(line.on.defense == CORRECTED.defense for line in planned.lines) else []
        measured = grid(
            found,
            planned.lines,
            planned.attacks,
            ground,
            before=planned.before,
            steps=planned.steps,
            differs=(*planned.differs, *(planned.small if scale == "small" else ())),
            notes=(*corrected, *shares(share)),
        )
        return measured if planned.shown is None else planned.shown(measured)

    PLANS[table_id] = planned
    table(table_id, needs=NEEDS, paper_needs=paper_needs, stand_in=True)(run)


def shares(share: float | None) -> list[str]:
    """Return a note on a try."""
    return [f"A try with {share:g} of the paper's numbers of pairs and samples."] if share else []
