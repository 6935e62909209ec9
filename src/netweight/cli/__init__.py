"""The command `netweight`: its list of commands, each imported only when it is called, its errors and its output.

Commands of methods and attacks are generated from their registrations (`generate.py`); the others are in this package.

Exit codes: 0 done, 1 a finding failed, 2 wrong usage, 3 corrupt or unsafe input, 130 interrupted, and 128 plus the
number of a signal that asks for an end (143 for SIGTERM).
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, final

import click

from netweight.core.environment import netweight_version
from netweight.core.progress import QUIET, Progress
from netweight.errors import MissingExtra, NetweightError
from netweight.registry import METHODS, Group, is_own, line_of, loaded, points, registered

if TYPE_CHECKING:
    from netweight.report.finding import Finding
    from netweight.report.verdict import Verdict

# Exit code of a command that did its work and found something that failed.
FINDING_FAILED = 1
# Exit code of a command that was stopped with Ctrl-C, as shells have it.
INTERRUPTED = 130
# Signals that ask a process to end, as a batch system or a closed terminal sends them.
_ENDING = ("SIGTERM", "SIGHUP")
# The home of the documentation on the web, for help and messages; empty until there is one.
DOCUMENTATION = ""

# Commands that treat and attack nothing themselves: home, `"module:attribute"`, and line in `netweight --help`.
OWN: dict[str, tuple[str, str]] = {
    "label": ("netweight.cli.label:label", "Show what is in a model's files, as a nutrition label."),
    "init": ("netweight.cli.init:init", "Write recipes, with small models or for a model of yours."),
    "run": ("netweight.cli.run:run", "Run a recipe: treatments and audits from a YAML file."),
    "report": ("netweight.cli.run:report", "Show the verdict and findings of a run, and write its report again."),
    "tour": ("netweight.cli.run:tour", "Run every method once on small models, and write a report."),
    "doctor": (
        "netweight.cli.doctor:doctor",
        "Report what is installed, what works on this machine and what is missing.",
    ),
    "reproduce": (
        "netweight_experiments.cli:reproduce",
        "Measure a table of a paper again.",
    ),
    "benchmark": (
        "netweight_experiments.cli:benchmark",
        "Measure speed and size on this machine, in comparison with other programs.",
    ),
}
# Commands that are listed only where another package is installed: the package's module, and how it is installed.
NEEDS = {
    "tour": ("netweight_toys", 'pip install "netweight[tour]"'),
    "reproduce": ("netweight_experiments", "pip install ./experiments (in a clone of netweight's source)"),
    "benchmark": ("netweight_experiments", "pip install ./experiments (in a clone of netweight's source)"),
}
# The order of `netweight --help`; what other packages bring comes after these.
SECTIONS = {
    "Inspect": ("label", "inspect"),
    "Compress": ("compress", "decompress", "verify"),
    "Train, protect and edit": ("immunize", "forget", "federate", "space"),
    "Attack": ("attack",),
    "Recipes and publishing": ("init", "run", "report", "publish"),
    "This installation": ("doctor", "tour", "reproduce", "benchmark"),
}
EXAMPLE = "netweight compress my-model my-model-compressed"


def _report(error: NetweightError, as_json: bool) -> None:
    """Write message and kind, a heading of docs/errors.md, to standard error; for machines JSON to standard output."""
    click.secho(f"Error: {error} [{type(error).__name__}]", fg="red", err=True)
    if as_json:
        _report_json(type(error).__name__, error.reason, error.cure)


def _report_json(kind: str, message: str, cure: str | None = None) -> None:
    """Write an error for machines to standard output."""
    detail = {"kind": kind, "message": message, "cure": cure}
    click.echo(json.dumps({"error": detail}, indent=2, ensure_ascii=False))


def _foreign() -> dict[str, str]:
    """The commands that other installed packages bring, and those packages' own summaries; nothing is imported."""
    brought = [(point.name, point.dist) for point in points(METHODS) if not is_own(point) and point.dist is not None]
    return {name: dist.metadata["Summary"] for name, dist in brought}


def _lines() -> dict[str, str]:
    """Purpose of the commands by their first word; packages of others are not imported."""
    own = {name: line for name, (_, line) in OWN.items() if name not in NEEDS or _installed(name)}
    for point in points(METHODS):
        if is_own(point):
            own[point.name] = line_of(loaded(point)[0])
    own["attack"] = ATTACK.summary
    return {**_foreign(), **{entry.name.split()[0]: line_of(entry) for entry in registered()}, **own}


def _words() -> set[str]:
    """Every first word of a command; nothing is imported."""
    brought = {point.name for point in points(METHODS)} | {entry.name.split()[0] for entry in registered()}
    return {*OWN, ATTACK.name, *brought}


def _installed(name: str) -> bool:
    return importlib.util.find_spec(NEEDS[name][0]) is not None


ATTACK = Group(
    "attack",
    "Attack a model or an update, to measure what it reveals.",
    "An attack reports what it measured and does not write the attacked model. It writes a "
    "report into --out, and exits with 1 "
    "if a target is missed or could not be measured.",
)


class Commands(click.Group):
    """The group `netweight`: a command is imported when it is called or its own help is asked for, and not before."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List all commands, in the order of the help."""
        lines = _lines()
        ordered = [name for names in SECTIONS.values() for name in names if name in lines]
        return ordered + [name for name in lines if name not in ordered]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command; None for a name that there is not."""
        if cmd_name not in OWN:
            made = importlib.import_module("netweight.cli.generate").command_of(cmd_name)
            assert made is None or isinstance(made, click.Command)
            return made
        if cmd_name in NEEDS and not _installed(cmd_name):
            package, how = NEEDS[cmd_name]
            raise MissingExtra(
                f"`netweight {cmd_name}` needs the package {package.replace('_', '-')}, which is not installed.",
                cure=f"Run: {how}",
            )
        module, attribute = OWN[cmd_name][0].split(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was asked for; an unknown one is answered with the nearest names."""
        if args and not args[0].startswith("-") and args[0] not in _words():
            from netweight.core.names import nearest

            ctx.fail(f"There is no command {args[0]!r}. {nearest(args[0], _lines())}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands in sections, importing none."""
        lines = _lines()
        for title, names in SECTIONS.items():
            shown = [(name, lines.pop(name)) for name in names if name in lines]
            if shown:
                with formatter.section(title):
                    formatter.write_dl(shown)
        if lines:
            with formatter.section("From other packages"):
                formatter.write_dl(list(lines.items()))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write an example, and where the documentation is if it has a home."""
        write_example(formatter, EXAMPLE)
        if DOCUMENTATION:
            formatter.write(f"\nDocumentation: {DOCUMENTATION}\n")

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the first words, and note whether a machine reads: errors of usage come before the command knows."""
        ctx.meta["netweight.json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; errors of netweight and refusals of the system become messages and exit codes."""
        failure: NetweightError
        as_json = bool(ctx.meta["netweight.json"])
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            # Click writes this error to standard error.
            if as_json:
                _report_json("UsageError", error.format_message())
            raise
        except NetweightError as error:
            failure = error
        except OSError as error:
            # The program that reads the output has ended; click handles this.
            if error.errno == errno.EPIPE:
                raise
            # The import is not at the top of the file, because the help would load numpy.
            from netweight.core.atomic_writes import refusal_of_system

            failure = refusal_of_system(error)
        except Terminated as end:
            text = f"Terminated by {end.signal.name}."
            click.secho(text, fg="yellow", err=True)
            if as_json:
                _report_json("Interrupted", text)
            ctx.exit(128 + end.signal)
        except KeyboardInterrupt:
            click.secho("Interrupted.", fg="yellow", err=True)
            if as_json:
                _report_json("Interrupted", "The command was interrupted.")
            ctx.exit(INTERRUPTED)
        if ctx.params.get("verbose"):
            import traceback

            click.echo("".join(traceback.format_exception(failure)), err=True)
        _report(failure, as_json=as_json)
        ctx.exit(failure.exit_code)


def _show_version(context: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value:
        click.echo(f"netweight {netweight_version()}")
        context.exit()


# Click alone wraps at 50 columns and above.
_WIDTH = max(20, min(shutil.get_terminal_size().columns, 80) - 2)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"], "terminal_width": _WIDTH})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version, help="Show the version."
)
@click.option(
    "-v",
    "--verbose",
    count=True,
    help="Print a log, and where in the code errors were raised, to standard error; -vv prints more.",
)
def netweight(verbose: int) -> None:
    """Compress, protect and edit the weights of PyTorch models, and attack the result before somebody else does."""
    import logging

    if not verbose:
        from netweight.core.quiet import quiet_libraries

        quiet_libraries()
    else:
        logging.basicConfig(format="%(asctime)s %(name)s: %(message)s")
        logging.getLogger("netweight").setLevel(logging.DEBUG if verbose > 1 else logging.INFO)


@final
class Terminated(KeyboardInterrupt):
    """A signal asked this process to end; work is put in order as after Ctrl-C."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.signal = signal.Signals(number)


def _end_orderly() -> None:
    """Let signals that ask for an end raise `Terminated`, unless whoever started this process has them ignored."""

    def terminate(number: int, frame: object) -> NoReturn:
        # A second signal ends the process at once.
        signal.signal(number, signal.SIG_DFL)
        raise Terminated(number)

    if threading.current_thread() is threading.main_thread():
        for name in _ENDING:
            # Windows does not have SIGHUP.
            number = getattr(signal, name, None)
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, terminate)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit."""
    _end_orderly()
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

    def findings(self, findings: Iterable[Finding], *, indent: int = 2) -> None:
        """Write findings as a table."""
        if not self.as_json:
            from netweight.report.text import finding_row

            self.table((), [finding_row(finding) for finding in findings], indent=indent)

    def verdict(self, verdict: Verdict) -> None:
        """Write the verdict in the words of reports and cards."""
        color = {"passed": "green", "failed": "red", "none": "yellow"}[verdict.outcome]
        self.line(verdict.publish, fg=color, bold=True)

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
        help="Print one JSON object instead of text.",
        callback=_make_output,
    )(command)


def _make_output(context: click.Context, parameter: click.Parameter, value: bool) -> Output:
    return Output(as_json=value)


def command_line() -> str:
    """The command as it was given, for reports and cards."""
    return shlex.join(["netweight", *sys.argv[1:]])


class GroupedCommand(click.Command):
    """A command whose help shows its options in groups, and an example.

    Args:
        groups: Headings, and the names of their options as the command's function receives them; the others follow.
        example: A command line that works.
        given: What `click.Command` takes.
    """

    def __init__(
        self, *given: Any, groups: Mapping[str, Sequence[str]] | None = None, example: str = "", **named: Any
    ) -> None:
        super().__init__(*given, **named)
        self.groups = dict(groups or {})
        self.example = example

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, group by group."""
        chosen = {name for names in self.groups.values() for name in names}
        rest = [each.name for each in self.get_params(ctx) if each.name not in chosen]
        for title, names in {**self.groups, "Options": rest}.items():
            options = [each for each in self.get_params(ctx) if isinstance(each, click.Option) and each.name in names]
            records = [each.get_help_record(ctx) for each in options]
            if lines := [record for record in records if record is not None]:
                with formatter.section(title):
                    formatter.write_dl(lines)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example."""
        write_example(formatter, self.example)


def write_example(formatter: click.HelpFormatter, example: str) -> None:
    """Write an example below a command's options; one that is longer than a line is broken as shells take it."""
    if example:
        formatter.write("\nExample:\n")
        width = max(20, formatter.width - 4)
        lines = [""]
        for word in example.split(" "):
            if lines[-1] and len(lines[-1]) + len(word) + 3 > width:
                lines.append("    ")
            lines[-1] += f" {word}" if lines[-1].strip() else word
        formatter.write(" \\\n".join(f"  {line}" for line in lines) + "\n")
