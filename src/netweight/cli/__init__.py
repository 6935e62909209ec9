"""The command `netweight`: a table of commands, each imported only when it is called, one place for errors and output.

Commands share the kinds of paths that they take, `--json` and what they write; `settings.options` makes the rest.

Exit codes: 0 done, 1 a finding failed, 2 wrong usage, 3 corrupt or unsafe input, 130 interrupted.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

import click

from netweight.core.environment import netweight_version
from netweight.core.progress import QUIET, Progress
from netweight.errors import MissingExtra, NetweightError, UsageError

if TYPE_CHECKING:
    from netweight.report.finding import Finding
    from netweight.report.report import Report

# Exit code of a command that did its work and found something that failed.
FINDING_FAILED = 1
# Exit code of a command that was stopped with Ctrl-C, as shells have it.
INTERRUPTED = 130

# Each command's home, `"module:attribute"`, and its line in `netweight --help`.
COMMANDS: dict[str, tuple[str, str]] = {
    "label": ("netweight.cli.label:label", "Show what is in a model's files, as a nutrition label."),
    "compress": ("netweight.cli.compress:compress", "Make a model's files smaller, bit for bit."),
    "decompress": ("netweight.cli.compress:decompress", "Restore the original files of a compressed model."),
    "inspect": ("netweight.cli.compress:inspect", "Show what is in weight files, tensor by tensor."),
    "verify": ("netweight.cli.compress:verify", "Prove that a compressed model is intact and identical."),
    "immunize": ("netweight.cli.method:immunize", "Make a language model resist harmful fine-tuning."),
    "attack": ("netweight.cli.attack:attack", "Attack a model or an update, to see what it gives away."),
    "federate": ("netweight.cli.federate:federate", "Train across clients, and audit what a server could see."),
    "forget": ("netweight.cli.forget:forget", "Find what a diffusion model memorized, and switch it off."),
    "space": ("netweight.cli.space:space", "See many customized models as one space."),
    "tour": ("netweight.cli.run:tour", "Show everything at work on a small real model."),
    "init": ("netweight.cli.run:init", "Write recipes and small files to run and to change."),
    "run": ("netweight.cli.run:run", "Run a recipe: treatments and audits from a YAML file."),
    "reproduce": (
        "netweight_experiments.cli:reproduce",
        "Measure a table of a paper again, beside what was published.",
    ),
    "report": ("netweight.cli.run:report", "Show or rewrite the report of a run."),
    "benchmark": ("netweight_experiments.cli:benchmark", "Measure speed and size against peers on this machine."),
    "doctor": ("netweight.cli.doctor:doctor", "Say what is installed, what runs here and what is missing."),
}


def _report(error: NetweightError, as_json: bool) -> None:
    """Write message and kind, a heading of docs/errors.md, to standard error; for machines JSON to standard output."""
    click.secho(f"Error: {error} [{type(error).__name__}]", fg="red", err=True)
    if as_json:
        detail = {"kind": type(error).__name__, "message": error.reason, "cure": error.cure}
        click.echo(json.dumps({"error": detail}, indent=2, ensure_ascii=False))


def _foreign() -> dict[str, str]:
    """The methods that other installed packages bring, and those packages' own summaries; nothing is imported."""
    points = entry_points(group="netweight.methods")
    brought = [(point.name, point.dist) for point in points if point.dist is not None]
    return {name: dist.metadata["Summary"] for name, dist in brought if dist.name != "netweight"}


class _Commands(click.Group):
    """A group that imports a command when it is called or its own help is asked for, and not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List all commands in the table's order."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None for a name that is not in the table."""
        if cmd_name not in COMMANDS:
            if cmd_name not in _foreign():
                return None
            made = importlib.import_module("netweight.cli.method").command_of(cmd_name)
            assert isinstance(made, click.Command)
            return made
        module, attribute = COMMANDS[cmd_name][0].split(":")
        if module.startswith("netweight_experiments.") and importlib.util.find_spec("netweight_experiments") is None:
            raise MissingExtra(
                f"`netweight {cmd_name}` is in the package netweight-experiments, which is not installed.",
                cure="In a clone of netweight's source, run: pip install ./experiments",
            )
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was asked for; an unknown one is answered with the nearest names."""
        if args and args[0] not in COMMANDS and not args[0].startswith("-") and args[0] not in _foreign():
            from netweight.core.names import nearest

            ctx.fail(f"There is no command {args[0]!r}. {nearest(args[0], COMMANDS)}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands from the table, importing none."""
        with formatter.section("Commands"):
            known = {name: summary for name, (_, summary) in COMMANDS.items()}
            formatter.write_dl(list({**_foreign(), **known}.items()))

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors of netweight and refusals of the system become messages and exit codes."""
        failure: NetweightError
        try:
            return super().invoke(ctx)
        except NetweightError as error:
            failure = error
        except OSError as error:
            if error.errno == errno.EPIPE:  # the reader of the output went away; click knows what to do
                raise
            failure = UsageError(f"{error.filename or 'The system'}: {error.strerror or error}.")
        except KeyboardInterrupt:
            click.secho("Interrupted.", fg="yellow", err=True)
            ctx.exit(INTERRUPTED)
        if ctx.params.get("verbose"):
            import traceback

            click.echo("".join(traceback.format_exception(failure)), err=True)
        output = ctx.meta.get("netweight.output")
        _report(failure, as_json=output is not None and output.as_json)
        ctx.exit(failure.exit_code)


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"netweight {netweight_version()}")
        context.exit()


# Click alone wraps at 50 columns and above.
_WIDTH = max(20, min(shutil.get_terminal_size().columns, 80) - 2)


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "terminal_width": _WIDTH})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@click.option("-v", "--verbose", count=True, help="Log to standard error, and say where errors come from; -vv for all.")
def netweight(verbose: int) -> None:
    """Treat model weights before you ship them, and attack the result before somebody else does."""
    if verbose:
        import logging

        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
        logging.getLogger("netweight").setLevel(logging.DEBUG if verbose > 1 else logging.INFO)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    # Torch asks for huge pages, which takes up to two thirds off the time of large tensors on a virtual machine.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    sys.exit(netweight.main(args=None if arguments is None else list(arguments), prog_name="netweight"))


# ---- what commands share ---------------------------------------------------------------------------------------------

# A file that is there.
FILE = click.Path(path_type=Path, exists=True, dir_okay=False)
# A folder that is there.
FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
# What is written.
NEW = click.Path(path_type=Path)
# A folder that results go to; it may be there.
OUTPUT_FOLDER = click.Path(path_type=Path, file_okay=False)

F = TypeVar("F", bound=Callable[..., Any])


@final
class Output:
    """Standard output of one command."""

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def progress(self) -> Progress:
        """Bars for people, none where a machine reads."""
        return QUIET if self.as_json else Progress()

    def line(self, text: str = "", **style: Any) -> None:
        """Write a line for people; `style` as for `click.style`, e.g. `fg="red"`."""
        if not self.as_json:
            click.secho(text, **style)

    def warn(self, text: str) -> None:
        """Write a warning to standard error, in either mode."""
        click.secho(f"Warning: {text}", fg="yellow", err=True)

    def table(self, headers: Sequence[str], rows: Sequence[Sequence[object]], *, indent: int = 0) -> None:
        """Write a table for people: columns aligned, columns of numbers to the right."""
        if not self.as_json:
            from netweight.report.text import aligned

            for number, text in enumerate(aligned(headers, rows, indent=indent)):
                click.secho(text, bold=bool(headers) and number == 0)

    def findings(self, findings: Iterable[Finding], *, indent: int = 2, **words: str) -> None:
        """Write findings as a table; `words` as for `report.text.finding_row`."""
        if not self.as_json:
            from netweight.report.text import finding_row

            self.table((), [finding_row(finding, **words) for finding in findings], indent=indent)

    def result(self, payload: Mapping[str, Any]) -> None:
        """Write the command's result as one JSON object, if a machine reads."""
        if self.as_json:
            click.echo(json.dumps(payload, indent=2, ensure_ascii=False, default=str))


def output_option(command: F) -> F:
    """Give a command the flag `--json` and the argument `output: Output`."""
    return click.option(
        "--json",
        "output",
        is_flag=True,
        help="Write one JSON object for machines instead of text for people.",
        callback=_make_output,
    )(command)


def _make_output(context: click.Context, parameter: click.Parameter, value: bool) -> Output:
    output = Output(as_json=value)
    context.meta["netweight.output"] = output
    return output


def command_line() -> str:
    """The command as it was given, for reports and cards."""
    return shlex.join(["netweight", *sys.argv[1:]])


def card_option(command: F) -> F:
    """Give a command the flag `--card`."""
    return click.option(
        "--card", is_flag=True, help="Say in the folder's README.md what was done; see docs/ecosystem.md."
    )(command)


def write_card(folder: Path, output: Output) -> None:
    """Write or update the card of a folder that a command has just written."""
    from netweight.plugins.model_card import update_card

    card = update_card(folder, command=command_line())
    output.line(f"Card: {card}")


def new_report(title: str, summary: str, *, seed: int, files: Iterable[Path]) -> Report:
    """Begin a report of this command line."""
    from netweight.core.files import digest_file
    from netweight.report.report import Report

    command = command_line()
    inputs = {path.name: digest_file(path) for path in files}
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
    for verdict in verdicts:
        output.line(verdict, bold=True)
    output.line(f"Report: {page}")
    output.result({**result, "findings": [finding.to_json() for finding in findings], "report": str(page)})
    if any(finding.passed is False for finding in findings):
        context.exit(FINDING_FAILED)
