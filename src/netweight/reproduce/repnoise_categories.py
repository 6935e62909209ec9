"""RepNoise's table 5: harm of a kind that the defense never saw, one kind withheld after the other."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from netweight.report.finding import Column
from netweight.reproduce.registry import Measured, Row, Scale, table
from netweight.reproduce.repnoise_grid import BASE, REPNOISE, Attack, Results
from netweight.reproduce.repnoise_ground import ground_of
from netweight.reproduce.repnoise_models import folder_of
from netweight.reproduce.repnoise_plan import NEEDS, PAPER_NEEDS, shares
from netweight.reproduce.repnoise_run import AttackRun, attacked

__all__ = ["table5"]


@table("repnoise-table5", needs=NEEDS, paper_needs=PAPER_NEEDS, stand_in=True)
def table5(
    scale: Scale,
    out: Path,
    *,
    only: str | None = None,
    model: str | None = None,
    judge: str | None = None,
    share: float | None = None,
) -> Measured:
    """Withhold one category of harm from the defense and attack with it, category by category.

    Args:
        scale: "small" for the miniature, "paper" for a model folder.
        out: Runs are kept in a folder beside it that all of RepNoise's tables share.
        only: As for every table of attacks, see `repnoise_plan.plan`.
        model: Likewise.
        judge: Likewise.
        share: Likewise.

    Raises:
        UsageError: The pattern fits no run, nothing is finished, or a model is missing.
        NetweightError: A run failed.
    """
    ground = ground_of(scale, model, judge)
    runs: dict[tuple[str, str], AttackRun] = {}
    for name in ground.categories:
        attack = Attack(name, 8e-5, 10_000, data=f"only {name}")
        runs["Base", name] = attack.run(BASE.on)
        runs["RepNoise", name] = attack.run(dataclasses.replace(REPNOISE, data=f"without {name}"))
    found = attacked(list(runs.values()), ground, folder_of(out, scale), only=only, share=share)
    columns = [Column(name, better="lower") for name in ("lowest category", "highest category", "harmfulness")]
    differs = ["Attacked with 10k examples, as in table 1; the paper does not say how many."]
    if scale == "small":
        differs.append(
            "A category is a quarter of the messages, by their first letter. All are in one cipher, so that what is "
            "learned of some holds for all: this asks less than the paper's categories do."
        )
    return Measured(
        columns=(*columns, Column("steps to 0.9", "steps", "higher")),
        rows=(*_extremes(found, runs), *_each(found, runs)),
        differs=(*ground.differs(), *differs),
        notes=("One training of the defense and one attack for each category: no intervals.", *shares(share)),
    )


def _extremes(found: Results, runs: Mapping[tuple[str, str], AttackRun]) -> list[Row]:
    rows = []
    for title in ("Base", "RepNoise"):
        seen = [found[run] for (row, _), run in runs.items() if row == title and run in found]
        scores = [value["after"] for value in seen if "after" in value]
        if scores:
            rows.append(Row(title, (min(scores), max(scores), None, None)))
    return rows


def _each(found: Results, runs: Mapping[tuple[str, str], AttackRun]) -> list[Row]:
    return [
        Row(f"{title}, {name}", (None, None, found[run].get("after"), found[run].get("steps")))
        for (title, name), run in runs.items()
        if run in found
    ]
