"""Reports: findings and the sections that audits return, conclusions that follow from findings, figures, and the page.

Built on `core`, `store` and `errors` alone, so that every method and attack can return a section. matplotlib and scipy
are imported by the functions that need them.
"""

from __future__ import annotations

from netweight.report.audit import Audit as Audit
from netweight.report.audit import missing_audits as missing_audits
from netweight.report.audit import run_audits as run_audits
from netweight.report.finding import Column as Column
from netweight.report.finding import Figure as Figure
from netweight.report.finding import Finding as Finding
from netweight.report.finding import Section as Section
from netweight.report.finding import Table as Table
from netweight.report.text import Conclusion as Conclusion
from netweight.report.text import Criterion as Criterion
