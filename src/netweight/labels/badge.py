"""A label as a badge: the file that the endpoint badges of shields.io read."""

from __future__ import annotations

from typing import Any

from netweight.labels.label import Label


def badge(label: Label) -> dict[str, Any]:
    """Return the content of an endpoint file for a badge.

    Args:
        label: The label.

    Returns:
        A JSON object of version 1 of the schema for endpoint badges: label, message and color.
    """
    values = {row.key: row for row in label.rows}
    color = "yellow" if any(row.state == "warning" and row.strong for row in label.rows) else "informational"
    if "net_weight" in values:
        message = f"{values['net_weight'].value} of {values['gross_weight'].value}"
    elif "adapters" in values:
        message = f"{values['adapters'].value} adapters"
    else:
        message = label.kind
    return {"schemaVersion": 1, "label": "net weight", "message": message, "color": color}
