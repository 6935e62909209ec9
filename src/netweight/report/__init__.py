"""Reports: findings and the sections that audits return, conclusions that follow from findings, figures, and the page.

Built on `core`, `store` and `errors` alone, so that every method and attack can return a section. matplotlib, scipy and
jinja2 are imported by the functions that need them.
"""

from __future__ import annotations

from netweight.report.audit import Audit, missing_audits, run_audits
from netweight.report.conclusions import Conclusion, Criterion
from netweight.report.finding import Column, Figure, Finding, Section, Table

__all__ = [
    "Audit",
    "Column",
    "Conclusion",
    "Criterion",
    "Figure",
    "Finding",
    "Section",
    "Table",
    "missing_audits",
    "run_audits",
]
