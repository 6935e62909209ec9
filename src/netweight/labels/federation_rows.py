"""Rows of a label about a federation: what a server could reconstruct, the privacy budget, clients that were named."""

from __future__ import annotations

import json
from typing import Any

from netweight.labels.kinds import Subject, canonical
from netweight.labels.label import Group, Row
from netweight.labels.units import many

_REPORT = "report.json"


def federation_group(subject: Subject) -> Group:
    """Return the rows about a federation, from its plan and its report.

    Args:
        subject: The folder of the federation.
    """
    plan = subject.config
    rows = [
        Row(key="method", title="Method", value=canonical(plan.get("method", "not stated"))),
        Row(key="clients", title="Clients", value=canonical(plan.get("clients", "not stated"))),
        Row(key="rounds", title="Rounds asked for", value=canonical(plan.get("rounds", "not stated"))),
        *_audit_rows(_report_of(subject)),
    ]
    return Group(title="What a server sees", anchor="federation", rows=tuple(rows), basis="the run's plan and report")


def _report_of(subject: Subject) -> dict[str, Any] | None:
    file = subject.path / _REPORT
    if not file.is_file():
        return None
    try:
        value = json.loads(file.read_bytes())
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _audit_rows(report: dict[str, Any] | None) -> list[Row]:
    hint = "netweight federate audit"
    if report is None:
        return [
            Row(key="reconstruction", title="Best reconstruction of an image", value=hint, state="not measured"),
            Row(key="privacy", title="Privacy budget", value=hint, state="not measured"),
        ]
    findings = [finding for section in report.get("sections", []) for finding in section.get("findings", [])]
    images = [
        finding for finding in findings
        if str(finding.get("name", "")).startswith("PSNR") and isinstance(finding.get("value"), (int, float))
    ]  # fmt: skip
    budgets = [
        finding for finding in findings
        if "ε" in str(finding.get("name", "")) and isinstance(finding.get("value"), (int, float))
    ]  # fmt: skip
    rows = []
    if images:
        worst = max(images, key=lambda finding: float(finding["value"]))
        rows.append(Row(
            key="reconstruction", title="Best reconstruction of an image", value=f"{float(worst['value']):.1f} dB",
            number=float(worst["value"]), unit="dB", basis=str(worst["name"]), strong=True,
        ))  # fmt: skip
        if isinstance(worst.get("baseline"), (int, float)):
            rows.append(Row(
                key="guess", title="A guess without the update", value=f"{float(worst['baseline']):.1f} dB",
                number=float(worst["baseline"]), unit="dB", indent=1,
            ))  # fmt: skip
    else:
        rows.append(Row(
            key="reconstruction", title="Best reconstruction of an image", value=hint, state="not measured",
        ))  # fmt: skip
    if budgets:
        worst = max(budgets, key=lambda finding: float(finding["value"]))
        rows.append(Row(
            key="privacy", title="Privacy budget ε", value=f"{float(worst['value']):.3g}", number=float(worst["value"]),
            basis=f"{worst['name']}; {many(len(budgets), 'figure')} in the report",
        ))  # fmt: skip
    else:
        rows.append(Row(
            key="privacy", title="Privacy budget ε", value="none: the report states no ε", state="warning",
        ))  # fmt: skip
    return rows
