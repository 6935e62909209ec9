"""Evidence: findings, the audits that produce them, statistics with intervals, figures and the report.

Built on `core` and `errors` alone, so that every method and attack can speak the same language of evidence.
Nothing heavy is imported here; matplotlib and scipy are imported inside the functions that need them.
"""

from __future__ import annotations

from netweight.report.audit import Audit, missing_audits, register_audit, register_treatment, run_audits
from netweight.report.finding import Finding

__all__ = ["Audit", "Finding", "missing_audits", "register_audit", "register_treatment", "run_audits"]
