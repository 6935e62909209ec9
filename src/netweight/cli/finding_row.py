"""A finding as a row of a table in the terminal: its name, its value, its interval and whether it is as wanted."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from netweight.report.finding import Finding


def finding_row(finding: Finding) -> tuple[str, str, str]:
    """Return a finding's cells; where it has no value the last one holds the reason."""
    if finding.value is None:
        return finding.name, "–", str(finding.detail.get("reason", ""))
    ends = ""
    if finding.ci95 is not None:
        low, high = finding.ci95
        ends = f"{low:.4g} to {'no bound' if math.isinf(high) else f'{high:.4g}'}"
    verdict = {True: "as wanted", False: "NOT AS WANTED", None: ""}[finding.passed]
    return finding.name, f"{finding.value:.4g} {finding.unit}".rstrip(), f"{ends} {verdict}".strip()
