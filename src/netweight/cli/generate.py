"""Generation of commands from registrations: arguments and options, and the result as text or JSON.

Every command of a method or an attack is made here, netweight's own and those of other packages alike. What is written
has one form: the command's lines, what was measured, what was written and how large it is, what to do next, and last
the verdict, which decides the exit code.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from netweight.cli import ATTACK, FINDING_FAILED, NEW, Output, command_line, output_option, write_example
from netweight.core import quantities
from netweight.core.work_account import WorkAccount, work_account
from netweight.registry import (
    ATTACKS,
    Argument,
    Attack,
    Command,
    Context,
    Group,
    Method,
    PrintedTable,
    Result,
    commands,
    groups,
    is_own,
    loaded,
    points,
    registered,
)

_KINDS: dict[str, Any] = {
    "file": click.Path(path_type=Path, exists=True, dir_okay=False),
    "folder": click.Path(path_type=Path, exists=True, file_okay=False),
    "path": click.Path(path_type=Path, exists=True),
    "new": NEW,
    "integer": click.INT,
}


def command_of(name: str) -> click.Command | None:
    """Return the command, or the group of commands, of this first word; None if there is none."""
    if name == ATTACK.name:
        return _CommandGroup(ATTACK)
    group = groups().get(name)
    if group is not None:
        return _CommandGroup(group)
    registrations = commands(name)
    if name in registrations:
        return _Generated(registrations[name])
    return _CommandGroup(Group(name, "")) if registrations else None


class _CommandGroup(click.Group):
    """Commands that share their first word."""

    def __init__(self, group: Group) -> None:
        super().__init__(group.name, help=f"{group.summary}\n\n{group.description}".strip())

    def list_commands(self, ctx: click.Context) -> list[str]:
        """List the second words, in the order of registration."""
        return list(self._lines())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import one command."""
        command = commands(self.name).get(f"{self.name} {cmd_name}")
        return None if command is None else _Generated(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command that was asked for; an unknown one is answered with the nearest names."""
        if args and not args[0].startswith("-") and args[0] not in self._lines():
            from netweight.core.names import nearest

            ctx.fail(f"There is no command {f'{self.name} {args[0]}'!r}. {nearest(args[0], self._lines())}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write each command with its line, whole; packages of others are not imported."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self._lines().items()))

    def _lines(self) -> dict[str, str]:
        if self.name == ATTACK.name:
            lines = {}
            for point in points(ATTACKS):
                if is_own(point):
                    lines[point.name] = next(e.line for e in loaded(point) if isinstance(e, Command))
                elif point.dist is not None:
                    lines[point.name] = point.dist.metadata["Summary"]
            return lines | {each.words[1]: each.line for each in registered() if isinstance(each, Attack)}
        return {name.split(maxsplit=1)[1]: each.line for name, each in commands(self.name).items() if " " in name}


class _Generated(click.Command):
    """The command of a registration."""

    def __init__(self, registered: Command[Any]) -> None:
        self.registered = registered

        def run(context: click.Context, /, output: Output, card: bool = False, **given: Any) -> None:
            settings = given.pop("settings", None)
            how = Context(output.progress, command_line())
            if card:
                _check_card(registered, given)
            with work_account(output.progress.note) as account:
                try:
                    result = registered.run_resolving_hub_ids(settings, how, given)
                except KeyboardInterrupt:
                    _interrupted(account, registered, given, output)
                    raise
            # A plan tests nothing.
            if card and not given.get("plan"):
                _write_card(registered, given, result, output)
            show(context, result, output, account)

        function: Any = click.pass_context(run)
        function = output_option(function)
        if _has_card(registered):
            attack, treatment = (
                "the results in the README.md of the model",
                ("the treatment in the README.md of the result"),
            )
            about = attack if isinstance(registered, Attack) else treatment
            function = click.option("--card", is_flag=True, help=f"Describe {about}.")(function)
        if isinstance(registered, Method) and registered.audited is not None and registered.runnable:
            function = click.option(
                "--audit/--no-audit", "audit", default=registered.audited, show_default=True,
                help=f"Audit the result: {', '.join(registered.runnable)}.",
            )(function)  # fmt: skip
        for argument in reversed([each for each in registered.arguments if each.option]):
            function = _option(argument)(function)
        if registered.settings_class is not None:
            # The import is not at the top of the file, because the help of groups would load pydantic.
            from netweight.settings import options

            function = options(registered.settings_class, skip=registered.skip)(function)
        for argument in reversed([each for each in registered.arguments if not each.option]):
            function = _argument(argument)(function)
        made = click.command(registered.words[-1])(function)
        description = registered.description
        super().__init__(
            registered.words[-1], callback=made.callback, params=made.params,
            help=f"{registered.line}\n\n{description}".strip(), short_help=registered.line,
        )  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, and keep them for the help, which describes the variant that they choose."""
        if self.registered.settings_class is not None:
            from netweight.settings import keep_arguments

            keep_arguments(ctx, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write options in groups, where the command has settings."""
        if self.registered.settings_class is None:
            super().format_options(ctx, formatter)
        else:
            from netweight.settings import write_option_groups

            write_option_groups(self, ctx, formatter)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the example."""
        write_example(formatter, self.registered.example)


def _argument(argument: Argument) -> Any:
    return click.argument(
        argument.name, metavar=argument.metavar or None, type=_KINDS.get(argument.kind, click.STRING),
        nargs=-1 if argument.many else 1, required=argument.required,
        **({} if argument.default is None else {"default": argument.default}),
    )  # fmt: skip


def _option(argument: Argument) -> Any:
    kind: dict[str, Any] = {"type": _KINDS.get(argument.kind, click.STRING), "metavar": argument.metavar or None}
    if argument.kind == "flag":
        kind = {"is_flag": True}
    if argument.default is not None:
        kind["default"] = argument.default
    return click.option(
        argument.option, argument.name, required=argument.required, help=argument.help, multiple=argument.many,
        show_default=argument.kind != "flag" and argument.default is not None, **kind,
    )  # fmt: skip


def show(context: click.Context, result: Result, output: Output, account: WorkAccount | None = None) -> None:
    """Write what a command did and what of it an earlier call had done; exits with 1 if the verdict is "failed"."""
    continued = [] if account is None else account.sentences()
    if continued:
        output.line(f"Continued an earlier run: {', '.join(continued)}.")
    for line in result.lines:
        if isinstance(line, PrintedTable):
            output.table(line.headers, line.rows)
        else:
            output.line(line)
    for section in result.sections:
        if len(result.sections) > 1:
            output.line(section.title, bold=True)
        if not result.shown:
            output.findings(section.findings)
    for warning in dict.fromkeys([*result.warnings, *(each for s in result.sections for each in s.warnings)]):
        output.warn(warning)
    verdict = None
    if result.sections:
        from netweight.report.text import conclusion_of
        from netweight.report.verdict import decide

        verdict = decide(result.sections)
        if not result.advises:
            verdict = replace(verdict, publish=verdict.sentence)
        for section in result.sections:
            if conclusion := conclusion_of(section):
                output.line(conclusion)
    if result.report is not None:
        output.line(f"Report: {result.report}")
    if result.written:
        output.line(f"Written: {', '.join(f'{path} ({size_of(path)})' for path in result.written)}.")
    for step in result.next:
        output.line(f"Next: {step}")
    if verdict is not None:
        output.verdict(verdict)
    findings = [finding.to_json() for section in result.sections for finding in section.findings]
    output.result({
        **result.payload,
        **({"findings": findings, "verdict": verdict.to_json()} if verdict is not None else {}),
        **({"report": str(result.report)} if result.report is not None else {}),
        **({"written": [str(path) for path in result.written]} if result.written else {}),
        **({"warnings": list(result.warnings)} if result.warnings else {}),
        **({"continued": continued} if continued else {}),
    })  # fmt: skip
    if verdict is not None and verdict.failed:
        context.exit(FINDING_FAILED)


def size_of(path: Path) -> str:
    """Return the size of a file, or of all files in a folder, for people."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    size = sum(file.stat().st_size for file in files)
    return quantities.size(size) + (f" in {len(files)} files" if path.is_dir() else "")


def _has_card(registered: Command[Any]) -> bool:
    if isinstance(registered, Attack):
        return "model" in registered.takes
    return isinstance(registered, Method) and registered.card is not None


def _places(registered: Command[Any], given: dict[str, Any]) -> tuple[Path, Path | None]:
    """Return the paths that a command reads and writes."""
    values = [given[each.name] for each in registered.arguments]
    new = next((given[each.name] for each in registered.arguments if each.kind == "new"), None)
    return Path(values[0]), new


def _check_card(registered: Command[Any], given: dict[str, Any]) -> None:
    from netweight.errors import UsageError

    source, new = _places(registered, given)
    folder = source if isinstance(registered, Attack) else new
    single = folder is not None and (folder.is_file() or folder.suffix == ".safetensors" or source.is_file())
    if single:
        raise UsageError(
            "A single file cannot have a model card.", cure="Give the model's folder, or leave out --card."
        )
    if folder is source and not source.is_dir():
        raise UsageError(
            f"{source} is not a folder here, so --card cannot write into its README.md.",
            cure="Give a folder of your own with the model, or leave out --card.",
        )


def _write_card(registered: Command[Any], given: dict[str, Any], result: Result, output: Output) -> None:
    from netweight.plugins.model_card import add_evidence, update_card, worse_verdict
    from netweight.report.verdict import decide

    if isinstance(registered, Attack):
        assert result.report is not None
        model = _places(registered, given)[0]
        output.line(f"Card: {add_evidence(model, result.report.parent, output.progress)}")
        if worse := worse_verdict(model, decide(result.sections)):
            output.warn(worse)
        return
    for folder in result.written:
        output.line(f"Card: {update_card(folder, command=command_line())}")


def _interrupted(account: WorkAccount, registered: Command[Any], given: dict[str, Any], output: Output) -> None:
    """Report after Ctrl-C, or another request to stop, what became of the work."""
    from netweight.core.atomic_writes import part_of, work_of

    _, new = _places(registered, given)
    beside = [] if new is None else [place for place in (part_of(new), work_of(new)) if place.exists()]
    if not account.folders and not beside:
        output.warn("Nothing was written.")
        return
    begun = beside or account.folders
    output.warn(
        "The same command continues where this one stopped. To start again from the beginning, delete "
        f"{', '.join(map(str, begun))}."
    )
