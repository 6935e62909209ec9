"""What commands share: options made of a `Settings` class, the kinds of paths they take, and their output."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, cast, final, get_args, get_origin

import click
import yaml
from click.core import ParameterSource

from netweight.cli import FINDING_FAILED
from netweight.core.names import not_found
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError
from netweight.settings import Leaf, Settings, bounds, element, leaves, path_type, peel, words

if TYPE_CHECKING:
    from netweight.report.finding import Finding
    from netweight.report.report import Report

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


def options(
    kind: type[Settings], *, into: str = "settings", skip: Sequence[str] = (), arguments: Sequence[str] = ()
) -> Callable[[F], F]:
    """Give a command one option per field, and `--set` for all of them; it receives one checked instance.

    Args:
        kind: The class; where it offers presets, the chosen one's class with what was given over its values.
        into: The command's argument for the instance.
        skip: Fields that this command lacks.
        arguments: Fields that are positional, in this order.
    """
    known = {leaf.place: leaf for leaf in leaves(kind) if leaf.path[0] not in skip and leaf.place not in skip}
    named = [leaf for leaf in known.values() if leaf.cli.own and not leaf.extra and leaf.place not in arguments]
    chosen = {_destination(leaf): leaf for leaf in (*(known[name] for name in arguments), *named)}
    rest = [place for place, leaf in known.items() if leaf not in chosen.values()]

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def command(*args: Any, **given: Any) -> Any:
            context = click.get_current_context()
            values: dict[str, Any] = {}
            for name, leaf in chosen.items():
                value = given.pop(name)
                if context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None):
                    _put(values, leaf.path, _value(leaf, value))
            for text in given.pop("set_"):
                _put(values, *_assignment(text, known))
            return function(*args, **given, **{into: kind.of(values)})

        help_ = "Any setting by its name in recipes" + (
            f"; those without an option: {', '.join(rest)}." if rest else "."
        )
        parameters = [*(_parameter(leaf, kind, leaf.place in arguments) for leaf in chosen.values()),
                      click.Option(["--set", "set_"], multiple=True, metavar="KEY=VALUE", help=help_)]  # fmt: skip
        command.__dict__.setdefault("__click_params__", []).extend(reversed(parameters))
        return cast("F", command)

    return decorate


def _destination(leaf: Leaf) -> str:
    return "__".join(leaf.path)


def _parameter(leaf: Leaf, kind: type[Settings], argument: bool) -> click.Parameter:
    cli, (inner, sort) = leaf.cli, element(leaf.kind)
    found: Any = _click_type(leaf.kind, leaf.metadata)
    if sort:
        found = _Pair(inner) if sort == "mapping" else _click_type(*peel(inner))
    if leaf.place == kind.preset_key:
        found = click.Choice(list(kind.presets))
    if cli.comma:
        found, sort = _Comma(found), ""
    if cli.type is not None:
        found, sort = cli.type, ""
    about: dict[str, Any] = {"type": found, "required": leaf.required, "envvar": cli.envvar}
    if argument:
        metavar = cli.metavar or leaf.path[-1].upper()
        return click.Argument([_destination(leaf)], nargs=-1 if sort else 1, metavar=metavar, **about)
    flag = leaf.flag
    if leaf.kind is bool:
        about |= {"type": None, "is_flag": True}
        starts: list[Any] = [kind, *kind.presets.values()]
        flag += "" if all(leaf.default(each) is False for each in starts) else f"/--no-{flag.removeprefix('--')}"
    return _Option(
        [*([cli.short] if cli.short else []), flag, _destination(leaf)], default=None, multiple=bool(sort),
        metavar=cli.metavar, hidden=cli.hidden, help=leaf.field.description, shown=leaf.shown_default(kind), **about,
    )  # fmt: skip


class _Option(click.Option):
    """An option that shows a default without setting it, so that what is not given stays so."""

    def __init__(self, *names: Any, shown: str, **more: Any) -> None:
        super().__init__(*names, **more)
        self.shown = shown

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        return {**extra, "default": self.shown} if self.shown else extra


def _click_type(kind: Any, metadata: Sequence[Any]) -> click.ParamType[Any]:
    if get_origin(kind) is Literal:
        return click.Choice([str(choice) for choice in get_args(kind)])
    if get_origin(kind) is tuple:
        return click.Tuple([_click_type(*peel(each)) for each in get_args(kind)])
    if kind in (int, float):
        ends = bounds(metadata)
        low, high = ends.get("gt", ends.get("ge")), ends.get("lt", ends.get("le"))
        ranged = click.IntRange if kind is int else click.FloatRange
        plain = click.INT if kind is int else click.FLOAT
        return ranged(low, high, "gt" in ends, "lt" in ends) if ends else plain
    if kind is Path:
        what = path_type(metadata)
        return click.Path(what in ("file", "dir"), file_okay=what != "dir", dir_okay=what != "file", path_type=Path)
    return click.STRING


class _Comma(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no argument
    """A list in one text."""

    name = "list"

    def __init__(self, inner: click.ParamType[Any]) -> None:
        self.inner = inner

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return [self.inner.convert(part.strip(), param, ctx) for part in value.split(",") if part.strip()]
        except click.BadParameter as error:
            numbers = isinstance(self.inner, type(click.INT) | type(click.FLOAT))
            self.fail(f"{value!r} is no list of {'numbers' if numbers else 'values'}. {error.message}", param, ctx)


class _Pair(click.ParamType):  # type: ignore[type-arg]
    """NAME=VALUE: an entry of a mapping."""

    name = "name=value"

    def __init__(self, inner: Any) -> None:
        self.inner, self.what = _click_type(*peel(inner)), words(*peel(inner))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"NAME={self.what.upper()}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name, _, text = value.partition("=")
        if not (name and text):
            self.fail(f"{value!r} names no {self.what}. Write it as NAME={self.what.upper()}.", param, ctx)
        return name, self.inner.convert(text, param, ctx)


def _value(leaf: Leaf, given: Any) -> Any:
    """What click gives for a field, as the field takes it."""
    origin = get_origin(leaf.kind)
    if element(leaf.kind)[1] == "mapping":
        return dict(given)
    if origin is Literal:
        return next((choice for choice in get_args(leaf.kind) if str(choice) == given), given)
    return _scalar(given) if isinstance(given, str) and origin in (Union, UnionType) else given


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _assignment(text: str, known: Mapping[str, Leaf]) -> tuple[list[str], Any]:
    """Read KEY=VALUE; a field of text or a path takes the value as it is written, others as YAML."""
    place, equals, value = text.partition("=")
    place = place.strip().replace("-", "_")
    if not equals:
        raise UsageError(f"--set {text!r} has no value.", cure="Write it as KEY=VALUE.")
    if place not in known and not any(each.startswith(f"{place}.") for each in known):
        raise not_found(f"--set {text!r}: there is no setting {place!r}.", place, known)
    as_written = place in known and known[place].kind in (str, Path) and value != "null"
    return place.split("."), value if as_written else _scalar(value)


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    inner = values
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    if not isinstance(inner, dict) or path[-1] in inner:
        raise UsageError(f"The setting {'.'.join(path)} is given twice.", cure="Give it once.")
    inner[path[-1]] = value
