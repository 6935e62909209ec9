"""NeMo's image grids: target, original, neurons off, random neurons off, attacked."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from netweight.report.finding import Figure
from netweight.reproduce.kept_pictures import picture
from netweight.reproduce.nemo_attack import Attack
from netweight.reproduce.nemo_painting import shown
from netweight.reproduce.nemo_rows import Line, Painted

if TYPE_CHECKING:
    from netweight.methods.forget.localize import Localization

__all__ = ["image_figure"]

_ROWS = 8


def image_figure(
    painted: Painted,
    lines: Sequence[Line],
    searches: Mapping[Attack, Mapping[str, Any]],
    found: Mapping[str, Localization],
) -> Figure:
    """Draw training images beside what prompts paint, the same seed in every column but the last.

    Args:
        painted: What was painted.
        lines: Columns.
        searches: What an adversary found in the models with neurons off; may be empty.
        found: Neurons, whose numbers are named.
    """
    from netweight.report.plots import image_grid

    memorized = painted.ground.memorized[:_ROWS]
    attacks = {run.prompt: value["picture"] for run, value in searches.items() if run.what == "planted"}
    rows = []
    for each in memorized:
        cells = [_pixels(shown(each.image))]
        for line in lines:
            way = each.prompt in line.ways
            cells.append(_pixels(painted.own(line)[each.prompt]["picture"]) if way else None)
        rows.append([*cells, *([_pixels(attacks.get(each.prompt))] if searches else [])])
    titles = [textwrap.fill(line.title, 14) for line in lines]
    return image_grid(
        rows,
        rows=[textwrap.fill(f"{each.prompt} ({len(found[each.prompt].neurons)})", 22) for each in memorized],
        columns=["target", *titles, *(["neurons off,\nattacked"] if searches else [])],
        alt="Training images beside what their prompts paint, with and without their neurons, and under attack.",
        caption="Training images, and what their prompts paint from the first seed; in parentheses how many neurons "
        "are off. Attacked: the best image that a search for another embedding found in the model without them.",
    )


def _pixels(kept: Mapping[str, Any] | None) -> Any:
    if kept is None:
        return None
    channels, height, width = kept["shape"]
    return picture(kept["pixels"], (channels, height, width))
