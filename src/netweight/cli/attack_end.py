"""How a command that attacks a model ends: its report is written, findings are told, a failed one is the exit code."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netweight.cli import FINDING_FAILED
from netweight.cli.output import Output

if TYPE_CHECKING:
    from netweight.report.finding import Finding
    from netweight.report.report import Report


def new_report(title: str, summary: str, *, seed: int, files: Iterable[Path]) -> Report:
    """Begin a report of this command line."""
    from netweight.core.digest import of_file
    from netweight.report.report import Report

    command = shlex.join(["netweight", *sys.argv[1:]])
    inputs = {path.name: of_file(path) for path in files}
    return Report(title, summary=summary, command=command, seeds=(seed,), inputs=inputs)


def end_attack(
    context: click.Context,
    output: Output,
    report: Report,
    findings: Sequence[Finding],
    *,
    out: Path,
    verdicts: Iterable[str],
    result: Mapping[str, Any],
) -> None:
    """Write the report and tell what was found; exits with 1 if a finding failed."""
    page = report.write(out)
    output.findings(findings)
    for words in verdicts:
        output.line(words, bold=True)
    output.line(f"Report: {page}")
    output.result({**result, "findings": [finding.to_json() for finding in findings], "report": str(page)})
    if any(finding.passed is False for finding in findings):
        context.exit(FINDING_FAILED)
