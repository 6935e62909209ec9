"""A label as text for a terminal: 60 columns, marks in place of color where there is none."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import Any

import click

from netweight.labels.label import Label, Row, RowGroup

WIDTH = 60
_MARKS = {"measured": " ", "warning": "!", "not measured": "?"}


def lines(label: Label, *, width: int = WIDTH) -> Iterator[str]:
    """Yield the lines of a label; what deserves attention begins with "!", what was not measured with "?".

    Args:
        label: The label.
        width: Columns, at least 40.
    """
    yield click.style("Net Weight Facts", bold=True)
    yield click.style(_cut(label.name, width), bold=True)
    yield _cut(label.kind, width)
    for group in label.groups:
        yield "━" * width
        yield from _group(group, width)
    yield "━" * width
    marks = {row.state for row in label.rows}
    notes = [
        *(["! deserves attention"] if "warning" in marks else []),
        *(["? not measured; the options beside it measure it"] if "not measured" in marks else []),
    ]
    for line in textwrap.wrap("; ".join([f"{label.made_with}, {label.created}", *notes]), width):
        yield click.style(line, dim=True)


def _group(group: RowGroup, width: int) -> Iterator[str]:
    yield click.style(group.title, bold=True)
    if group.basis:
        yield from (click.style(line, dim=True) for line in textwrap.wrap(group.basis, width))
    for row in group.rows:
        yield from _row(row, width)


def _row(row: Row, width: int) -> Iterator[str]:
    title = f"{_MARKS[row.state]} {'  ' * row.indent}{row.title}"
    style: dict[str, Any] = {"bold": row.strong, "fg": {"warning": "yellow", "not measured": "cyan"}.get(row.state)}
    room = width - len(title) - 1
    if len(row.value) <= room:
        yield click.style(f"{title} {row.value:>{room}}", **style)
    else:
        yield click.style(title, **style)
        for line in textwrap.wrap(row.value, width - 6):
            yield click.style(f"{line:>{width}}", **style)
    if row.basis and row.state == "warning":
        for line in textwrap.wrap(row.basis, width - 6):
            yield click.style(f"    {line}", dim=True)


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"
