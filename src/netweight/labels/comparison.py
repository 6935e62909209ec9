"""Two labels side by side: common rows, rows of only one label, and the differences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from netweight.labels.label import Label, Row


@final
@dataclass(frozen=True)
class RowPair:
    """One row of two labels."""

    group: str
    """Heading under which it stands."""
    title: str
    """Name for people."""
    first: Row | None
    """The row of the first label; None if it has none."""
    second: Row | None
    """The row of the second label; None if it has none."""

    @property
    def changed(self) -> bool:
        """True if the values differ, or one of the labels lacks the row."""
        return self.first is None or self.second is None or self.first.value != self.second.value


def pairs(first: Label, second: Label) -> list[RowPair]:
    """Return the rows of two labels side by side, in the order of the first; rows of the second alone come after.

    Args:
        first: A label, such as that of a model after a treatment.
        second: Another one, such as that of the model before.
    """
    others = {row.key: (group.title, row) for group in second.groups for row in group.rows}
    result = []
    for group in first.groups:
        for row in group.rows:
            other = others.pop(row.key, None)
            result.append(RowPair(group.title, row.title, row, other[1] if other else None))
    result += [RowPair(title, row.title, None, row) for title, row in others.values()]
    return result


def comparison_lines(first: Label, second: Label, *, width: int = 60) -> list[str]:
    """Return two labels side by side as text; rows that differ begin with an asterisk.

    Args:
        first: A label.
        second: Another one.
        width: Columns of the names of rows and of both values together, at least 40.
    """
    import click

    column = max(10, (width - 24) // 2)
    names = width - 2 * column - 2
    lines = [click.style(f"{'':{names}} {_cut(first.name, column):>{column}} {_cut(second.name, column):>{column}}",
                         bold=True)]  # fmt: skip
    heading = ""
    for pair in pairs(first, second):
        if pair.group != heading:
            heading = pair.group
            lines += ["─" * width, click.style(heading, bold=True)]
        values = [_cut(row.value if row else "–", column) for row in (pair.first, pair.second)]
        mark = "*" if pair.changed else " "
        title = _cut(f"{mark} {pair.title}", names)
        lines.append(click.style(f"{title:{names}} {values[0]:>{column}} {values[1]:>{column}}", bold=pair.changed))
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
