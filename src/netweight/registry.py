"""The commands of netweight: each is registered once, and the registration serves every way of calling it.

A registration is one of three kinds. A `Command` takes arguments and settings and returns a `Result`. A `Method` is a
command that treats a model's files, and names the audits that test what it made. An `Attack` is a command that tests a
model. From a registration follow the command with its help, the verb in recipes with its schema, the rows of the tables
in the documentation, and the call in Python:

    netweight.command("attack finetune")("my-model", out="attacks", harmful="rows.jsonl")

A package registers by an entry point: in the group `netweight.methods` its name is the first word of the command, and
it names a registration or a tuple of them; in the group `netweight.attacks` it names an `Attack`. netweight's own
commands are found in the same way.

Modules of registrations import neither torch nor settings: `lazy("module:name")` stands for a function or a class that
is imported when it is used, so that `netweight --help` is quick.
"""

from __future__ import annotations

import inspect
import shlex
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar, final

from netweight.core.declared import declare_audits
from netweight.core.lazy import lazy as lazy
from netweight.core.lazy import value_of
from netweight.core.progress import QUIET, Progress
from netweight.errors import UsageError

if TYPE_CHECKING:
    from netweight.report.audit import Audit
    from netweight.report.finding import Section

S = TypeVar("S")


# ---- what a command takes --------------------------------------------------------------------------------------------

Kind: TypeAlias = Literal["model", "file", "folder", "path", "new", "text", "integer", "flag"]


@final
@dataclass(frozen=True)
class Argument:
    """A positional argument of a command, or an option that is none of its settings, such as where results go."""

    name: str
    """The name by which `run` receives the value."""
    kind: Kind = "model"
    """Kind of the value: a "model" is a folder, a file or the id of a model on the Hugging Face hub; "file",
    "folder" and "path" must exist; "new" is written; "flag" is given or not."""
    help: str = ""
    """Description for the help."""
    option: str = ""
    """The option's name, such as "--out"; without it the argument is positional."""
    metavar: str = ""
    """Placeholder of the value in the help; by default the name in capitals."""
    many: bool = False
    """True if several may be given."""
    required: bool = True
    """True if the command needs it."""
    default: Any = None
    """The value where none is given."""

    def named(self, name: str, **changes: Any) -> Argument:
        """Return this argument under another name, with further changes."""
        return replace(self, name=name, **changes)


MODEL = Argument("model")
SOURCE = Argument("source")
DESTINATION = Argument("destination", "new")
RESULTS = Argument("out", "new", "Folder for the results.", "--out", metavar="FOLDER")
OVERWRITE = Argument("overwrite", "flag", "Replace existing files.", "--overwrite", required=False, default=False)
PLAN = Argument(
    "plan", "flag",
    "Measure one of each kind of work, and report how much time and memory the command will need; write nothing.",
    "--plan", required=False, default=False,
)  # fmt: skip
ATTACK_PLAN = Argument(
    "plan", "flag", "Check the model and the files, and show what would be tested and how strongly; write nothing.",
    "--plan", required=False, default=False,
)  # fmt: skip
SEED = Argument("seed", "integer", "Seed of every random choice.", "--seed", required=False, default=0)


# ---- what a command returns ------------------------------------------------------------------------------------------


def shell_line(*words: object) -> str:
    """Return a command line as a shell takes it: paths with spaces and the like are quoted."""
    return shlex.join(str(word) for word in words)


@final
@dataclass(frozen=True)
class PrintedTable:
    """A table for people."""

    headers: Sequence[str]
    """Headings of the columns; none for a table without a first line."""
    rows: Sequence[Sequence[object]]
    """The cells, as many in every row as there are headings."""


@final
@dataclass(frozen=True)
class Result:
    """Result of a command, for people, for machines and for Python."""

    lines: Sequence[str | PrintedTable] = ()
    """Sentences and tables that are printed, in their order."""
    sections: Sequence[Section] = ()
    """Sections of the report; their findings decide the verdict and the exit code."""
    payload: Mapping[str, Any] = field(default_factory=dict)
    """JSON values that `--json` writes, in addition to findings, verdict and paths."""
    written: Sequence[Path] = ()
    """Files and folders that were made, the most important first."""
    report: Path | None = None
    """The page of a report that was written."""
    warnings: Sequence[str] = ()
    """Sentences that a reader must not miss."""
    next: Sequence[str] = ()
    """Command lines for the next steps, as `shell_line` writes them."""
    shown: bool = False
    """True if the lines show the findings already."""
    advises: bool = True
    """False if nothing was made that could be published, such as a list of neurons: then the last line says which
    targets are met, without advice on publishing."""


@final
@dataclass(frozen=True)
class Context:
    """Context of a command: the display of progress, and the caller."""

    progress: Progress = QUIET
    """Display of the progress."""
    command: str | None = None
    """The command line, for reports and cards."""


# ---- registrations ---------------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Group:
    """Commands that share their first word, such as `netweight space fit` and `netweight space sample`."""

    name: str
    """The first word."""
    summary: str
    """Purpose of the commands, in a line."""
    description: str = ""
    """Further sentences for the group's help."""


@dataclass(frozen=True)
class Command(Generic[S]):
    """A command of netweight: its name, its arguments and settings, and the function that runs it."""

    name: str
    """The words of the command, such as "space neighbors"."""
    settings: type[S] | Any = None
    """The class of its settings, `lazy` or itself; None where it has none."""
    _: KW_ONLY
    run: Callable[..., Result] | None = None
    """Takes `(settings, context, **arguments)`; without settings `(context, **arguments)`. A `Method` without one
    applies itself to the source."""
    summary: str = ""
    """Purpose of the command, in a line; by default the first line of the settings' docstring."""
    description: str = ""
    """Further sentences for its help."""
    example: str = ""
    """A command line that works."""
    arguments: tuple[Argument, ...] = ()
    """Positional arguments in their order, and options that are not settings."""
    skip: tuple[str, ...] = ()
    """Settings that are not options of this command."""

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the command."""
        return tuple(self.name.split())

    @property
    def settings_class(self) -> type[Any] | None:
        """The class of its settings, imported."""
        kind: type[Any] | None = value_of(self.settings)
        return kind

    @property
    def line(self) -> str:
        """Summary in one line."""
        return self.summary or (inspect.getdoc(self.settings_class) or "").partition("\n")[0]

    def run_resolving_hub_ids(self, settings: Any, context: Context, arguments: Mapping[str, Any]) -> Result:
        """Run the command on checked settings, after models that are named by an id on the hub are looked up.

        Args:
            settings: Of the command's class of settings; None without one.
            context: Of the call: progress, the command line, warnings.
            arguments: By name, as `arguments` declares them.

        Returns:
            What the command returned.
        """
        from netweight.core.hub import local_model

        exclude = getattr(settings, "exclude", ())
        models = [each.name for each in self.arguments if each.kind == "model" and arguments.get(each.name)]
        named = () if not isinstance(self, Method) else value_of(self.named)
        parameters = {
            name: Path(text) if text in named else local_model(text, exclude=exclude)
            for name, text in ((name, str(arguments[name])) for name in models)
        }
        return self.run_on_paths(settings, context, {**arguments, **parameters})

    def run_on_paths(self, settings: Any, context: Context, arguments: Mapping[str, Any]) -> Result:
        """Run the command on checked settings and arguments, with what its kind adds: audits, or a report.

        Args:
            settings: Of the command's class of settings; None without one.
            context: Of the call: progress, the command line, warnings.
            arguments: By name; models are paths.

        Returns:
            What `run` returned.

        Raises:
            UsageError: The command was registered without `run`.
        """
        run: Any = self.run
        if run is None:
            raise UsageError(f"The command {self.name!r} has no `run`.", cure="Register it with one.")
        made: Result = run(context, **arguments) if self.settings is None else run(settings, context, **arguments)
        return made

    def __call__(self, *positional: Any, progress: Progress = QUIET, **given: Any) -> Result:
        """Run the command in Python.

        Args:
            positional: The positional arguments, in their order.
            progress: Where progress is shown.
            given: Arguments and settings by name; paths may be texts.

        Returns:
            What the command did.

        Raises:
            UsageError: An argument is missing or unknown, or a setting is refused.
        """
        arguments = self._arguments(positional, given)
        if isinstance(self, Method) and "audit" in given:
            arguments["audit"] = given.pop("audit")
        settings = None if self.settings_class is None else self.settings_class.of(given)
        if self.settings_class is None and given:
            raise UsageError(f"The command {self.name!r} has no argument {sorted(given)[0]!r}.")
        return self.run_resolving_hub_ids(settings, Context(progress), arguments)

    def _arguments(self, positional: Sequence[Any], given: dict[str, Any]) -> dict[str, Any]:
        """Take the arguments out of what was given."""
        places = [each for each in self.arguments if not each.option]
        if len(positional) > len(places):
            raise UsageError(f"The command {self.name!r} takes {len(places)} positional arguments.")
        values = dict(zip([each.name for each in places], positional, strict=False))
        for each in self.arguments:
            value = values.get(each.name, given.pop(each.name, each.default))
            if value is None and each.required:
                raise UsageError(f"The command {self.name!r} needs the argument {each.name!r}.")
            if each.many:
                values[each.name] = tuple(map(Path, value or ())) if each.kind != "text" else tuple(value or ())
            elif value is not None and each.kind in ("file", "folder", "path", "new"):
                values[each.name] = Path(value)
            else:
                values[each.name] = value
        return values


@final
@dataclass(frozen=True)
class CardEntry:
    """Entry of a method in the model's card."""

    title: str
    """Title, in a few words."""
    text: str
    """Sentences that state what was done and what this does not show."""
    facts: tuple[tuple[str, str], ...]
    """Names and values."""
    tags: tuple[str, ...]
    """Tags of the model's page on the hub."""


def _as_it_is(audit: str, destination: Path, source: Path, settings: S, progress: Progress) -> tuple[Any, S]:
    return (destination, source), settings


@final
@dataclass(frozen=True)
class Method(Command[S]):
    """A treatment of a model's files, with the audits that test the result: a command and a step of recipes.

    Its command takes SOURCE and DESTINATION and has the options `--audit` and, where it writes a card, `--card`.

    Raises:
        UsageError: It has no audit.
    """

    apply: Callable[[Path, Path, S, Progress], Any] = lambda *given: None
    """Takes `(source, destination, settings, progress)` and makes `destination`, which does not exist, whole or not at
    all; it never changes `source`. What it returns may be a `Result`, for the command."""
    audits: Mapping[str, Audit | Any] = field(default_factory=dict)
    """Name → the audit; None for one that an attack makes or that needs what only its user has."""
    _: KW_ONLY
    verb: str = ""
    """Key of the method in recipes; by default the command's words, joined by dashes."""
    audited: bool | None = True
    """True if the command runs the audits unless `--audit` or `--no-audit` is given; None where it has no such
    option."""
    audits_itself: bool = False
    """True if `run` takes `audit`, whether to audit, and makes the sections of audits itself."""
    examine: Callable[[str, Path, Path, S, Progress], tuple[Any, Any]] = _as_it_is
    """Takes `(audit, destination, source, settings, progress)` and returns the subject and the settings that the audit
    of that name takes; by default `(destination, source)` and the settings. It may work, such as generate images: the
    section of an audit that ended is kept, and it is not called again for that."""
    by_attack: Mapping[str, str] = field(default_factory=dict)
    """Audits that an attack makes where a recipe has it: the audit's name → the attack's verb."""
    check: Callable[..., object] | None = None
    """Takes `(source, settings)` and raises errors that would otherwise appear only during the work; `source` is None
    where an earlier step makes it. It runs before every call, of the command and of a recipe.
    """
    checked_arguments: tuple[str, ...] = ()
    """Further arguments of the command that `check` takes by name; a recipe, which has none, leaves them out."""
    reads: Callable[[S], Iterable[Path]] | None = None
    """Takes the settings and returns files that they lead to without naming them, such as the images of a table."""
    tested: Callable[[str, S], Iterable[tuple[str, str]]] | None = None
    """Takes the name of an audit and the settings, and returns what is tested and how strongly: names and values."""
    preview: Callable[[Path, S], Iterable[str]] | None = None
    """Takes the model and the settings, and returns sentences about the files that a plan shows, such as how many rows
    contain words that the model's tokenizer does not know."""
    trains_on: Callable[[S], Iterable[Path | str]] | None = None
    """Takes the settings and returns the rows on which the method trains, as files or names of sets. A later attack of
    a recipe with the setting `trained_on` gets them, because a result on such rows does not describe others."""
    takes: tuple[str, ...] = ("model",)
    """Kinds of input that the method can be applied to."""
    makes: str = "model"
    """Kind of the result: "model", "bank", "space", "points", "adapters" or "federation"."""
    named: Container[str] | Any = ()
    """Names of subjects that are not files, such as data sets."""
    card: Callable[[Path], CardEntry | None] | None = None
    """Reads the method's record in a folder and returns an entry for the model's card; None where it left none."""
    before_publishing: Callable[[Path], Iterable[str]] | None = None
    """Reads the method's record in a folder and returns what must be done before the folder is published, each as the
    end of a sentence, such as "remove forget, with which anybody can undo the edit"."""

    def __post_init__(self) -> None:
        """Declare the audits: no treatment without its audit."""
        if not self.verb:
            object.__setattr__(self, "verb", "-".join(self.words))
        if not self.arguments:
            object.__setattr__(self, "arguments", (SOURCE, DESTINATION))
        declare_audits(self.verb, self.audits)

    @property
    def runnable(self) -> tuple[str, ...]:
        """The names of the audits that a recipe or a command can run."""
        return tuple(name for name, audit in self.audits.items() if audit is not None)

    def tested_by(self, audit: str, settings: S) -> list[tuple[str, str]]:
        """Return what an audit tests and how strongly, as its settings determine it; empty where nothing does."""
        return [] if self.tested is None else list(self.tested(audit, settings))

    def _run_apply(self, settings: Any, context: Context, *, source: Path, destination: Path) -> Result:
        """Apply the method as a recipe does: what `run` is by default."""
        from netweight.job import check_destination

        check_destination(destination, overwrite=None)
        made = self.apply(source, destination, settings, context.progress)
        usual = Result(payload={"path": str(destination), "settings": settings.to_json()})
        result = made if isinstance(made, Result) else usual
        return result if result.written else replace(result, written=(destination,))

    def run_on_paths(self, settings: Any, context: Context, arguments: Mapping[str, Any]) -> Result:
        """Check the source, apply the method to it, and run its audits if the call asks for them."""
        values = dict(arguments)
        audited = values.pop("audit", self.audited)
        source = values[self.arguments[0].name]
        if self.check is not None:
            also = {name: values.get(name) for name in self.checked_arguments}
            self.check(None if source is None else Path(source), settings, **also)
        if self.run is not None and self.audits_itself:
            return self.run(settings, context, **values, audit=audited)
        run: Callable[..., Result] = self._run_apply if self.run is None else self.run
        result = run(settings, context, **values)
        sections = list(result.sections)
        if audited and self.runnable:
            from netweight.report.audit import run_audits

            source, destination = (values[each.name] for each in self.arguments[:2])
            for name in self.runnable:
                subject, config = self.examine(name, destination, source, settings, context.progress)
                audited_sections = run_audits(
                    self.verb, subject, config, seed=0, only=[name], progress=context.progress
                ).values()  # fmt: skip
                sections += [with_tested(each, self.tested_by(name, settings)) for each in audited_sections]
        elif self.runnable and self.makes == "model":
            from netweight.report.audit import of_treatment

            # What a treatment says of itself is no verdict on publishing: its audits have not run.
            sections = [of_treatment(each, self.verb, ()) for each in sections]
        for folder in result.written:
            sections = with_conditions(sections, conditions_of(folder))
        return replace(result, sections=tuple(sections))


@final
@dataclass(frozen=True)
class Target:
    """Subject of an attack."""

    model: Path
    """The model that is attacked: in a recipe what the last method made, or the subject where there is none."""
    before: Path | None
    """The recipe's subject, if a method came between."""
    output: Path
    """The folder of results: ledgers go there."""
    seed: int
    """Root of every random choice."""


@final
@dataclass(frozen=True)
class Attack(Command[S]):
    """A test of a model by attacking it: a command, `netweight attack VERB`, and an entry in recipes.

    Its command takes the attacked model and writes a report into `--out`.
    """

    attack: Callable[[Target, S, Progress], Section | Sequence[Section] | Result] = lambda *given: ()
    """Takes `(target, settings, progress)` and returns a section, sections, or a `Result` with sections. It continues
    what was stopped; what an attack that ended returned is kept."""
    _: KW_ONLY
    title: str = ""
    """Heading of the report, before the name of what is attacked."""
    check: Callable[[Path | None, S], object] | None = None
    """Takes `(model, settings)` and raises errors that would otherwise appear only during the work; `model` is None
    where a method makes it.
    """
    reads: Callable[[S], Iterable[Path]] | None = None
    """As the field of `Method`."""
    tested: Callable[[S], Iterable[tuple[str, str]]] | None = None
    """Takes the settings and returns what is tested and how strongly: names and values. What only the attack itself
    finds out, such as a threshold, it states in its sections."""
    preview: Callable[[Path, S], Iterable[str]] | None = None
    """As the field of `Method`."""
    takes: tuple[str, ...] = ("model",)
    """The kinds of results that it can be run on."""

    def __post_init__(self) -> None:
        """Take the usual arguments: what is attacked, the folder of results and the seed."""
        if len(self.words) == 1:
            object.__setattr__(self, "name", f"attack {self.name}")
        if not self.arguments:
            object.__setattr__(self, "arguments", (MODEL, RESULTS, SEED, ATTACK_PLAN))

    @property
    def verb(self) -> str:
        """Its key in recipes."""
        return self.words[-1]

    def on(self, target: Target, settings: S, progress: Progress) -> Result:
        """Attack a target.

        Args:
            target: What to attack, and where its work is kept.
            settings: Of this attack.
            progress: Where the attack reports how far it is.

        Returns:
            Findings as sections, and what was written.
        """
        made: Any = self.attack(target, settings, progress)
        sections = made if isinstance(made, (list, tuple)) else (made,)
        result = made if isinstance(made, Result) else Result(sections=tuple(sections))
        tested = self.tested_by(settings)
        return replace(result, sections=tuple(with_tested(each, tested) for each in result.sections))

    def tested_by(self, settings: S) -> list[tuple[str, str]]:
        """Return what the attack tests and how strongly, as its settings determine it."""
        if self.tested is not None:
            return list(self.tested(settings))
        given = settings.given_json() if hasattr(settings, "given_json") else {}
        words = ", ".join(f"{name}={value}" for name, value in given.items())
        return [("settings", f"{words}; all others have their defaults" if words else "all have their defaults")]

    def _plan(self, model: Path, settings: S) -> Result:
        """Return what a call would test, and what a reader should know of its files; nothing is written."""
        tested = self.tested_by(settings)
        remarks = [] if self.preview is None else list(self.preview(model, settings))
        return Result(
            ["What would be tested, and how strongly:", PrintedTable((), tested)],
            payload={"plan": {"tested": dict(tested), "remarks": remarks}}, warnings=remarks,
        )  # fmt: skip

    def run_on_paths(self, settings: Any, context: Context, arguments: Mapping[str, Any]) -> Result:
        """Attack a model and write the report."""
        from netweight.core.digests import digest_file
        from netweight.report.report import Report
        from netweight.store.weights_digest import weights_digest

        model, out, seed = arguments[self.arguments[0].name], arguments["out"], arguments["seed"]
        if self.check is not None:
            self.check(model, settings)
        if arguments.get("plan"):
            return self._plan(model, settings)
        weights = weights_digest(model, context.progress) if "model" in self.takes else None
        conditions = conditions_of(model)
        result = self.on(Target(model, None, out, seed), settings, context.progress)
        result = replace(result, sections=with_conditions(result.sections, conditions))
        files = [model] if model.is_file() else []
        files += getattr(settings, "files", [value for value in vars(settings).values() if isinstance(value, Path)])
        report = Report(
            f"{self.title or self.line.rstrip('.')}: {model.resolve().name}", command=context.command, seeds=(seed,),
            inputs={path.name: digest_file(path) for path in files if path.is_file()},
            weights={} if weights is None else {model.resolve().name: weights},
        )  # fmt: skip
        for section in result.sections:
            report.add(section)
        return replace(result, report=report.write(out), written=result.written or (out,))


Entry: TypeAlias = "Command[Any] | Group"
METHODS, ATTACKS = "netweight.methods", "netweight.attacks"
_REGISTERED: dict[str, Entry] = {}
_LOADED: dict[EntryPoint, tuple[Entry, ...]] = {}


def register(entry: Entry) -> None:
    """Add an `entry` in this process; packages use entry points.

    Raises:
        UsageError: Another one has its name.
    """
    if entry.name in _REGISTERED:
        raise UsageError(f"The command {entry.name!r} is registered already.", cure="Choose another name.")
    _REGISTERED[entry.name] = entry


def unregister(name: str) -> None:
    """Remove what `register` added in this process, such as before a changed version of it is registered.

    Raises:
        NameNotFound: Nothing of this name was registered in this process.
    """
    if name not in _REGISTERED:
        from netweight.core.names import not_found

        raise not_found(f"No command {name!r} was registered in this process.", name, _REGISTERED)
    del _REGISTERED[name]


def points(group: str) -> list[EntryPoint]:
    """Return the entry points of a group, netweight's own first; nothing is imported."""
    return _points(group, tuple(sys.path))


@cache
def _points(group: str, path: tuple[str, ...]) -> list[EntryPoint]:
    """Return the entry points of a group in the folders of a search path, which takes milliseconds to read."""
    return sorted(entry_points(group=group), key=lambda point: not is_own(point))


def is_own(point: EntryPoint) -> bool:
    """Return whether an entry point is netweight's own, which can be loaded at no cost."""
    # The distribution's name would say so, too, but reading it parses the whole description of the package.
    return point.module.partition(".")[0] == "netweight"


def loaded(point: EntryPoint) -> tuple[Entry, ...]:
    """Return what an entry point registers."""
    if point not in _LOADED:
        made = point.load()
        _LOADED[point] = tuple(made) if isinstance(made, (list, tuple)) else (made,)
    return _LOADED[point]


def registered() -> list[Entry]:
    """Return what `register` added in this process."""
    return list(_REGISTERED.values())


def line_of(entry: Entry) -> str:
    """Return what a command or a group of commands is for, in a line."""
    return entry.summary if isinstance(entry, Group) else entry.line


def commands(word: str | None = None) -> Mapping[str, Command[Any]]:
    """Return all commands by name, or those whose first word this is; others are not imported."""
    entries = [entry for entry in _REGISTERED.values() if word in (None, entry.name.split()[0])]
    for group in (METHODS, ATTACKS):
        for point in points(group):
            first = "attack" if group == ATTACKS else point.name
            if word in (None, first):
                entries += loaded(point)
    return {entry.name: entry for entry in entries if isinstance(entry, Command)}


def groups() -> Mapping[str, Group]:
    """Return the groups of commands by their first word; packages of others are not imported."""
    own = [entry for point in points(METHODS) if is_own(point) for entry in loaded(point)]
    return {entry.name: entry for entry in (*own, *_REGISTERED.values()) if isinstance(entry, Group)}


def command(name: str) -> Command[Any]:
    """Return the command of a name; it can be called.

    Args:
        name: All words of it, such as "attack finetune".

    Raises:
        NameNotFound: There is no such command.
    """
    entries = commands(name.split()[0]) if name.split() else {}
    if name not in entries:
        from netweight.core.names import not_found

        raise not_found(f"There is no command {name!r}.", name, commands())
    return entries[name]


def known_methods() -> Mapping[str, Method[Any]]:
    """Return all methods by their verbs in recipes."""
    return {each.verb: each for each in commands().values() if isinstance(each, Method)}


def conditions_of(folder: Path) -> tuple[str, ...]:
    """Return what must be done before a model's folder is published, by the records that methods left in it."""
    methods = known_methods().values()
    return tuple(text for each in methods if each.before_publishing for text in each.before_publishing(folder))


def with_conditions(sections: Sequence[Section], conditions: Iterable[str]) -> list[Section]:
    """Return sections about a model's folder, the first of them with what must be done before publishing.

    Args:
        sections: Results of audits or attacks on the folder.
        conditions: Of the folder, as of `conditions_of`.
    """
    if not sections:
        return []
    first, *others = sections
    return [replace(first, conditions=tuple(dict.fromkeys([*first.conditions, *conditions]))), *others]


def with_tested(section: Section, tested: Iterable[tuple[str, str]]) -> Section:
    """Return a section that states what was tested and how strongly; one that states it already stays as it is."""
    return section if section.tested else replace(section, tested=tuple(tested))


def known_attacks() -> Mapping[str, Attack[Any]]:
    """Return all attacks by their verbs in recipes."""
    return {each.verb: each for each in commands("attack").values() if isinstance(each, Attack)}
