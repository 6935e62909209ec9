"""The command of a method that another package brings."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import click

from netweight.cli import FINDING_FAILED, NEW, Output, card_option, output_option, write_card
from netweight.core.files import refuse_existing
from netweight.core.progress import QUIET
from netweight.registry import known_methods
from netweight.report.audit import run_audits
from netweight.settings import options


def command_of(verb: str) -> click.Command:
    """The command of a method that another package brings: SOURCE, DESTINATION, one option per setting, and audits."""
    method = known_methods()[verb]

    @click.command(method.verb, help=inspect.getdoc(method.config))
    @click.argument("source", type=click.Path(path_type=Path, exists=True))
    @click.argument("destination", type=NEW)
    @options(method.config)
    @card_option
    @output_option
    @click.pass_context
    def command(
        context: click.Context, /, source: Path, destination: Path, settings: Any, card: bool, output: Output
    ) -> None:
        refuse_existing(destination, overwrite=None)
        if method.check is not None:
            method.check(source, settings)
        method.apply(source, destination, settings, output.progress)
        findings = [
            finding
            for name in method.runnable
            for section in run_audits(
                method.verb, *method.examine(name, destination, source, settings, QUIET), seed=0, only=[name]
            ).values()
            for finding in section.findings
        ]
        output.findings(findings)
        if card:
            write_card(destination, output)
        output.line(f"Written to {destination}.", bold=True)
        output.result({"path": str(destination), "settings": settings.to_json(),
                       "findings": [finding.to_json() for finding in findings]})  # fmt: skip
        if any(finding.passed is False for finding in findings):
            context.exit(FINDING_FAILED)

    return command
