"""Labels as pages: one label, two side by side with a plot of the layers, or a sortable table of many."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from markupsafe import Markup

from netweight.core.quantities import percent
from netweight.labels.comparison import pairs
from netweight.labels.label import Label, LayerChange
from netweight.labels.picture import spoken, svg
from netweight.report.page import page_template

_TEMPLATES = "netweight.labels"


def label_page(label: Label, *, against: Label | None = None) -> str:
    """Return a label as an HTML page that needs nothing from elsewhere.

    Args:
        label: The label.
        against: Another label to set beside it.
    """
    return page_template(_TEMPLATES, "label.html").render(
        label=label, against=against, audited=label.audited, pairs=pairs(label, against) if against else [],
        plot=Markup(layer_plot(label.layers)) if label.layers else "",
    )  # fmt: skip


def folder_page(title: str, labels: Sequence[Label], failures: Sequence[tuple[Path, str]]) -> str:
    """Return a table of the labels of a folder, which a click on a heading sorts.

    Args:
        title: Name of the folder.
        labels: The labels.
        failures: What got no label, and why.
    """
    keys = [key for key in COLUMNS if any(row.key == key for label in labels for row in label.rows)]
    script = resources.files(_TEMPLATES).joinpath("folder.js").read_text(encoding="utf-8")
    rows = [[next((row for row in label.rows if row.key == key), None) for key in keys] for label in labels]
    return page_template(_TEMPLATES, "folder.html").render(
        title=title, titles=[COLUMNS[key] for key in keys], labels=list(zip(labels, rows, strict=True)),
        failures=failures, script=Markup(script),
        script_digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )  # fmt: skip


# Rows that stand in the table of a folder, and their headings.
COLUMNS = {
    "gross_weight": "Gross weight",
    "net_weight": "Net weight",
    "tare": "Tare",
    "parameters": "Numbers",
    "dtypes": "Types",
    "quantization": "Quantization",
    "license": "License",
    "code": "Code",
    "not_finite": "NaN, inf",
    "modules": "Modules",
    "rank": "Rank",
    "strength": "Strength",
    "readers": "Programs",
}

_PLOT_WIDTH, _BAR = 640, 14


def layer_plot(layers: Sequence[LayerChange]) -> str:
    """Return a bar for every layer: how much it changed against the base.

    Args:
        layers: The layers, in the order of the file.
    """
    most = max((layer.change for layer in layers), default=0.0) or 1.0
    height = _BAR * len(layers) + 10
    bars = []
    for number, layer in enumerate(layers):
        y = 4 + number * _BAR
        width = 300 * layer.change / most
        bars.append(
            f'<text x="250" y="{y + 10}" text-anchor="end" font-size="10.5" fill="currentColor">'
            f"{Markup.escape(layer.layer[-44:])}</text>"
            f'<rect x="258" y="{y + 1}" width="{width:.1f}" height="{_BAR - 4}" fill="var(--series-1)"/>'
            f'<text x="{262 + width:.0f}" y="{y + 10}" font-size="10.5" fill="currentColor">'
            f"{percent(layer.change)}</text>"
        )
    words = ", ".join(f"{Markup.escape(layer.layer)} {percent(layer.change)}" for layer in layers[:40])
    return (
        f'<svg viewBox="0 0 {_PLOT_WIDTH} {height}" width="{_PLOT_WIDTH}" height="{height}" role="img" '
        f'style="max-width:100%;height:auto" aria-label="Change of each layer: {words}">{"".join(bars)}</svg>'
    )


def pictures_page(title: str, summary: str, entries: Sequence[tuple[str, Label]]) -> str:
    """Return a page of labels as pictures, which need nothing from elsewhere.

    Args:
        title: Heading of the page.
        summary: A sentence below it.
        entries: Captions and labels, in their order.
    """
    pictures = [
        (caption, "data:image/svg+xml;base64," + base64.b64encode(svg(label).encode()).decode(),
         " ".join(spoken(label))) for caption, label in entries
    ]  # fmt: skip
    return page_template(_TEMPLATES, "pictures.html").render(title=title, summary=summary, pictures=pictures)
