"""A label as a picture: SVG of 480 pixels, which follows the reader's light or dark setting and can be read aloud."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from html import escape

from netweight.core.quantities import percent
from netweight.labels.label import Label, Row, RowGroup

WIDTH = 480
_MARGIN = 18
_INNER = WIDTH - 2 * _MARGIN
_STYLE = """
.sheet { fill: #ffffff; stroke: #111111; } .rule { fill: #111111; } .hair { fill: #c9c9c9; }
text { fill: #111111; font-family: "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif; }
.small { fill: #555555; } .attention { fill: #9a3b00; } .missing { fill: #00558c; }
.net { fill: #1f6f54; } .tare { fill: #dfe8e4; }
@media (prefers-color-scheme: dark) {
  .sheet { fill: #16181b; stroke: #e8e8e8; } .rule { fill: #e8e8e8; } .hair { fill: #3d4146; }
  text { fill: #f2f2f2; } .small { fill: #a9afb6; } .attention { fill: #ffb07a; } .missing { fill: #8cc8ff; }
  .net { fill: #4fb591; } .tare { fill: #33413c; }
}
"""


class _Sheet:
    """Collects shapes from top to bottom."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = float(_MARGIN)

    def rule(self, height: float, kind: str = "rule", *, above: float = 4, below: float = 0) -> None:
        self.y += above
        self.parts.append(f'<rect class="{kind}" x="{_MARGIN}" y="{self.y:g}" width="{_INNER}" height="{height:g}"/>')
        self.y += height + below

    def text(
        self, text: str, *, size: float, bold: bool = False, kind: str = "", x: float = _MARGIN, end: bool = False
    ) -> None:
        attributes = f' class="{kind}"' if kind else ""
        attributes += ' font-weight="700"' if bold else ""
        attributes += ' text-anchor="end"' if end else ""
        self.parts.append(f'<text x="{x:g}" y="{self.y:g}" font-size="{size:g}"{attributes}>{escape(text)}</text>')

    def paragraph(self, text: str, *, size: float, kind: str = "", bold: bool = False, indent: float = 0) -> None:
        for line in wrap(text, size, _INNER - indent, bold=bold):
            self.y += size * 1.25
            self.text(line, size=size, kind=kind, bold=bold, x=_MARGIN + indent)


def wrap(text: str, size: float, width: float, *, bold: bool = False) -> list[str]:
    """Break a text into lines that fit a width; a sans-serif letter is taken as 0.56 of its size wide, bold 0.6.

    Args:
        text: The text.
        size: Size of its letters, pixels.
        width: The width, pixels.
        bold: Whether the letters are bold.
    """
    return textwrap.wrap(text, max(8, int(width / (size * (0.6 if bold else 0.56))))) or [""]


def svg(label: Label) -> str:
    """Return a label as an SVG document of 480 pixels in width.

    Args:
        label: The label.
    """
    sheet = _Sheet()
    sheet.y += 26
    sheet.text("Net Weight Facts", size=34, bold=True)
    sheet.y += 4
    sheet.rule(1)
    sheet.paragraph(label.name, size=17, bold=True)
    sheet.paragraph(label.kind, size=13)
    for number, group in enumerate(label.groups):
        _draw_group(sheet, group, first=number == 0)
    sheet.rule(4, above=8, below=2)
    sheet.paragraph(_footer(label), size=10.5, kind="small")
    height = round(sheet.y + _MARGIN)
    words = escape(" ".join(spoken(label)))
    frame = f'<rect class="sheet" x="4" y="4" width="{WIDTH - 8}" height="{height - 8}" stroke-width="3"/>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'role="img" aria-labelledby="label-title label-words"><title id="label-title">Net weight facts of '
        f'{escape(label.name)}</title><desc id="label-words">{words}</desc><style>{_STYLE}</style>{frame}'
        f"{''.join(sheet.parts)}</svg>\n"
    )


def spoken(label: Label) -> Iterator[str]:
    """Yield a label as sentences, for screen readers.

    Args:
        label: The label.
    """
    yield f"{label.name}, {label.kind}."
    for group in label.groups:
        yield f"{group.title}:"
        for row in group.rows:
            mark = {"measured": "", "warning": " (deserves attention)", "not measured": " (not measured)"}[row.state]
            yield f"{row.title}: {row.value}{mark}."


def _footer(label: Label) -> str:
    marks = {row.state for row in label.rows}
    how = "the files and by audits, which ran the model" if label.audited else "the files alone; the model was not run"
    text = f"Made with {label.made_with} on {label.created} from {how}."
    text += " An exclamation mark means that a value deserves attention." if "warning" in marks else ""
    text += " A question mark means that nothing was measured." if "not measured" in marks else ""
    return text


def _draw_group(sheet: _Sheet, group: RowGroup, *, first: bool) -> None:
    sheet.rule(9 if first else 4, above=7)
    if not first:
        sheet.paragraph(group.title, size=14, bold=True)
    if group.basis and not first:
        sheet.paragraph(group.basis, size=10.5, kind="small")
    for number, row in enumerate(group.rows):
        if number or not first:
            sheet.rule(1, "hair", above=5)
        _draw_row(sheet, row, large=first and row.strong)
    if first:
        _draw_scale(sheet, group)
        if group.basis:
            sheet.paragraph(f"Measured on {group.basis}.", size=10.5, kind="small")


def _draw_row(sheet: _Sheet, row: Row, *, large: bool) -> None:
    size = 19.0 if large else 13.0
    kind = {"warning": "attention", "not measured": "missing"}.get(row.state, "")
    indent = 14 * row.indent
    title = {"warning": "! ", "not measured": "? "}.get(row.state, "") + row.title
    bold = row.strong or not row.indent
    wide = (len(title) * (0.6 if bold else 0.56) + len(row.value) * (0.6 if row.strong else 0.56) + 2) * size
    sheet.y += size * 1.25
    if wide + indent <= _INNER:
        sheet.text(title, size=size, bold=bold, kind=kind, x=_MARGIN + indent)
        sheet.text(row.value, size=size, bold=row.strong, kind=kind, x=WIDTH - _MARGIN, end=True)
    else:
        sheet.text(title, size=size, bold=bold, kind=kind, x=_MARGIN + indent)
        for line in wrap(row.value, size, _INNER - 28):
            sheet.y += size * 1.25
            sheet.text(line, size=size, bold=row.strong, kind=kind, x=WIDTH - _MARGIN, end=True)
    if row.basis and row.state == "warning":
        sheet.paragraph(row.basis, size=10.5, kind="small", indent=indent + 10)


def _draw_scale(sheet: _Sheet, group: RowGroup) -> None:
    """A bar as long as the gross weight, of which the part of the net weight is filled, and its key."""
    weights = {row.key: row.number for row in group.rows}
    gross, net = weights.get("gross_weight"), weights.get("net_weight")
    if not gross or net is None:
        return
    share = min(max(net / gross, 0.0), 1.0)
    sheet.y += 9
    for kind, width in (("tare", float(_INNER)), ("net", share * _INNER)):
        sheet.parts.append(
            f'<rect class="{kind}" x="{_MARGIN}" y="{sheet.y:g}" width="{width:.1f}" height="12" rx="2"/>'
        )
    sheet.y += 27
    for kind, words, x in (
        ("net", f"net weight, {percent(share)}", _MARGIN),
        ("tare", f"tare, {percent(1 - share)}", 200),
    ):
        if kind == "net" or share < 1:
            sheet.parts.append(f'<rect class="{kind}" x="{x}" y="{sheet.y - 9:g}" width="10" height="10" rx="2"/>')
            sheet.text(words, size=10.5, kind="small", x=x + 16)
    sheet.y += 4
