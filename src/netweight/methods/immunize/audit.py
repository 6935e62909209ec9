"""The audits of immunization: how deep it goes, and what fine-tuning attacks find.

Importing this module declares the treatment `immunize` and registers its audits, `depth` and `fine-tuning attack`.
Neither says that a model is safe: the first looks inside, the second counts steps under the attacks that were tried.
"""

from __future__ import annotations

from pathlib import Path

from netweight.attacks.finetuning.findings import ResistanceConfig, resistance_findings
from netweight.attacks.finetuning.sweep import Sweep
from netweight.core.progress import Progress
from netweight.methods.immunize.depth_report import TITLE
from netweight.report.audit import register_audit, register_treatment
from netweight.report.finding import Finding
from netweight.report.report import read_report

__all__ = ["ATTACKED", "DEPTH", "REPORT", "TREATMENT", "attacked", "deep"]

TREATMENT = "immunize"
DEPTH, ATTACKED = "depth", "fine-tuning attack"
"""Names of the audits."""
REPORT = "immunize-report"
"""The folder in a defended model's folder that holds the report of its making."""

register_treatment(TREATMENT, audits=(DEPTH, ATTACKED))


@register_audit(TREATMENT, DEPTH)
def deep(subject: Path, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return what was found inside of a defended model beside the model before.

    Args:
        subject: The folder of a defended model. It was looked at when it was made, while the model before was at hand.
        config: Not looked at.
        seed: Not used: nothing is drawn.
        progress: Not used.

    Raises:
        UsageError: The folder holds no report of its making.
    """
    found = [section for section in read_report(Path(subject) / REPORT).sections if section.title == TITLE]
    if not found:
        return [Finding(DEPTH, None, detail={"reason": "the model was made without a look inside"})]
    return list(found[0].findings)


@register_audit(TREATMENT, ATTACKED)
def attacked(subject: Sweep, config: ResistanceConfig, *, seed: int, progress: Progress) -> list[Finding]:
    """Return what a sweep of fine-tuning attacks found.

    Args:
        subject: Attacks on the undefended model and on defended ones.
        config: Which is which, and what is asked.
        seed: Of the intervals.
        progress: Not used: the attacks have been run.

    Raises:
        UsageError: The sweep has no runs on the undefended subject, or none on a defended one.
        MissingExtra: scipy is not installed.
    """
    return resistance_findings(subject, config, seed=seed)
