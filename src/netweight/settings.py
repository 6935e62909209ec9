"""One declaration of every option: a `Settings` class is the Python argument, the command line, YAML, schema and docs.

    class RepNoise(Settings):
        "Turn harmful representations to noise."

        pairs: FilePath = Field(description="Rows with prompt, chosen and rejected.")
        alpha: float = Field(1.0, ge=0, description="Weight of the ascent.")
        lens_layers: Annotated[int | None, Cli(own=False)] = Field(None, ge=0, description="Layers; all by default.")

    @click.command()
    @options(RepNoise, arguments=("pairs",))             # PAIRS --alpha 2 --set lens_layers=8
    def immunize(settings: RepNoise) -> None: ...

Python: `RepNoise(pairs=p)`, `.replace(alpha=2)`, `.given`. YAML: `RepNoise.of({"pairs": "p.jsonl"})`, or `checked` to
collect the problems of a whole file. Further: `json_schema()`, `table()`, `digest()`, `to_json()`, which `of` reads.
A field's default and range are in its `Field`, its type in its annotation, and `Cli` has what only the command line
needs; what several fields must satisfy together is refused in `check`. `Base.offer("defense", {"repnoise":
RepNoise.partial(), ...})` makes presets: the key `defense` then chooses the class, and given values override its own.

`netweight --help` imports no pydantic, so only modules of single commands import this one; a class of settings lives in
a module without torch, so that a command's own help is quick.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, Union, cast, final, get_args, get_origin

import click
import pydantic
import yaml
from click.core import ParameterSource
from pydantic.fields import FieldInfo
from pydantic.types import PathType
from pydantic_core import PydanticCustomError, PydanticUndefined

from netweight.core.files import canonical_json, digest_config
from netweight.core.names import nearest, not_found
from netweight.errors import NetweightError, UsageError

_LISTS = (list, set, frozenset, Sequence, AbstractSet)  # collections of one type; and tuple[T, ...]


@final
@dataclass(frozen=True)
class Cli:
    """What only the command line knows of a field; stands in the field's `Annotated`.

    Args:
        name: The option, in place of the field's name with dashes, such as "--freeze".
        short: A second, short name, such as "-n".
        metavar: What stands for the value in the help.
        envvar: Environment variable that gives the value.
        comma: Whether a list is one text, "a,b", and not the option repeated.
        own: False for a field that `--set` alone reaches.
        hidden: Whether the help leaves the option out.
        type: A click type in place of that of the annotation, such as `click.Path(file_okay=False)`.
    """

    name: str | None = None
    short: str | None = None
    metavar: str | None = None
    envvar: str | None = None
    comma: bool = False
    own: bool = True
    hidden: bool = False
    type: Any = None


class Settings(pydantic.BaseModel):
    """Frozen, checked settings, made of `values` by name. Subclasses declare fields, and `check` for several."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    presets: ClassVar[Mapping[str, Settings]] = {}
    preset_key: ClassVar[str] = ""

    def __init__(self, **values: Any) -> None:
        """Check all values; a UsageError names every bad one."""
        try:
            self.__pydantic_validator__.validate_python(values, self_instance=self)
        except pydantic.ValidationError as error:
            raise _refusal(type(self), error) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested ones are checked with the outer one

    @classmethod
    def __pydantic_init_subclass__(cls, **more: Any) -> None:
        """Presets are those of the class that offers them, and not of its subclasses."""
        super().__pydantic_init_subclass__(**more)
        cls.presets, cls.preset_key = {}, ""

    @pydantic.model_validator(mode="before")
    @classmethod
    def _on_defaults(cls, values: Any) -> Any:
        """Nested settings that are given in part keep the rest of the field's default."""
        if not isinstance(values, Mapping):
            return values
        usual = {name: field.get_default(call_default_factory=True) for name, field in cls.model_fields.items()}
        return _merged(usual, values, keep=False)

    @pydantic.model_validator(mode="after")
    def _checked(self) -> Self:
        try:
            self.check()
        except NetweightError as error:
            raise PydanticCustomError("check", "{message}", {"message": str(error), "error": error}) from error
        return self

    @pydantic.model_serializer(mode="plain")
    def _dumped(self) -> dict[str, Any]:
        return self.to_json()

    def check(self) -> None:
        """Raise a UsageError for what no field alone can refuse."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given and not left at their defaults."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def replace(self, **changes: Any) -> Self:
        """Return settings with these `changes`, checked; a mapping changes a part of nested ones."""
        return type(self)(**_merged(self.given, changes))

    def __hash__(self) -> int:
        """Hash the values, mappings and lists among them too."""
        return hash((type(self), _hashable(self.__dict__)))

    @classmethod
    def partial(cls, **given: Any) -> Self:
        """Return a preset: `given` fields are checked; what is required may be missing until `replace` or `of`."""
        try:
            return cls.model_validate(given)
        except pydantic.ValidationError as error:
            if any(problem["type"] != "missing" for problem in error.errors()):
                raise _refusal(cls, error) from None
        return cast("Self", cls.model_construct(_fields_set=set(given), **given))

    @classmethod
    def offer(cls, key: str, presets: Mapping[str, Settings]) -> None:
        """Let the field `key` of this class choose among presets, instances of its subclasses."""
        cls.preset_key, cls.presets = (
            key,
            {name: each.partial(**{**each.given, key: name}) for name, each in presets.items()},
        )

    @classmethod
    def of(cls, values: Any, *, where: str = "") -> Self:
        """Return settings from `values` of YAML or JSON; a UsageError lists all problems by place, after `where`."""
        problems: list[str] = []
        found = cls.checked(values, f"{where}." if where else "", problems)
        if found is None:
            raise _listed(problems)
        return found

    @classmethod
    def checked(cls, values: Any, where: str, problems: list[str]) -> Self | None:
        """Return settings from `values`, or None: then `problems` gets a line for each, after `where` and its dot."""
        kind: type[Settings] = cls
        if cls.presets and isinstance(values, Mapping):
            name = values.get(cls.preset_key, cls.model_fields[cls.preset_key].default)
            if not isinstance(name, str) or name not in cls.presets:
                near = nearest(str(name), cls.presets)
                problems.append(f"{where}{cls.preset_key}: there is no {cls.preset_key} {name!r}. {near}")
                return None
            kind, values = type(cls.presets[name]), _merged(cls.presets[name].given, values)
        try:
            return cast("Self", kind.model_validate(values))
        except pydantic.ValidationError as error:
            problems += _lines(kind, error, where)
            return None

    def to_json(self) -> dict[str, Any]:
        """All fields in their order as JSON values, paths as text, but those that `exclude_if` omits; `of` reads it."""
        values = {
            name: getattr(self, name)
            for name, field in type(self).model_fields.items()
            if not (field.exclude_if and field.exclude_if(getattr(self, name)))
        }
        plain = json.loads(canonical_json(values, allow_nan=True))
        return {name: plain[name] for name in values}

    def digest(self) -> str:
        """Digest the fields, as `core.files.digest_config` does for a dataclass of the same fields."""
        return digest_config(self)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """The JSON schema (2020-12) of what `of` reads; fields of all presets stand side by side."""
        schema = cls.model_json_schema(ref_template="#/$defs/{model}")
        schema["description"] = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
        for preset in cls.presets.values():
            more = type(preset).model_json_schema(ref_template="#/$defs/{model}")
            schema["properties"] = more["properties"] | schema["properties"]
            if "$defs" in more:
                schema.setdefault("$defs", {}).update(more["$defs"])
        if cls.presets:
            schema["properties"][cls.preset_key] |= {"enum": list(cls.presets)}
        return schema

    @classmethod
    def table(cls) -> str:
        """The docs' table in Markdown: option, type, default, meaning."""
        rows = []
        for leaf in leaves(cls):
            option = leaf.flag if leaf.cli.own and not leaf.extra else f"--set {leaf.place}="
            default = leaf.shown_default(cls) or ("required" if leaf.required else "")
            meaning = " ".join((leaf.field.description or "").split())
            cells = (f"`{option}`", words(leaf.kind, leaf.metadata), default, meaning)
            rows.append(" | ".join(cell.replace("|", "\\|") for cell in cells))
        return "\n".join(f"| {row} |" for row in ("option | type | default | meaning", "--- | --- | --- | ---", *rows))


def _hashable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return frozenset((key, _hashable(each)) for key, each in value.items())
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any], *, keep: bool = True) -> dict[str, Any]:
    """Changes over a base, in nested settings too; `keep` says whether what is unchanged comes along."""
    merged = dict(base) if keep else {}
    for name, value in changes.items():
        old = base.get(name)
        part = isinstance(old, Settings) and isinstance(value, Mapping)
        merged[name] = _merged(cast("Settings", old).given, value) if part else value
    return merged


def _lines(kind: type[Settings], error: pydantic.ValidationError, where: str = "") -> list[str]:
    """One line for each of pydantic's complaints."""
    lines = []
    for problem in error.errors(include_url=False):
        place = where + _place(kind, problem["loc"])
        value = str(problem["input"]) if isinstance(problem["input"], Path) else problem["input"]
        if problem["type"] == "extra_forbidden":
            owner = functools.reduce(_nested, problem["loc"][:-1], kind)
            near = nearest(str(problem["loc"][-1]), owner.model_fields, 2)
            lines.append(f"{place}: there is no such key. {near}")
        elif problem["type"] == "missing":
            lines.append(f"{place}: is missing.")
        elif problem["type"] == "check":
            lines.append(f"{place.rstrip('.')}: {problem['msg']}".removeprefix(": "))
        else:
            lines.append(f"{place.rstrip('.')}: {problem['msg']}, not {value!r}.".removeprefix(": "))
    return lines


def _place(kind: Any, location: Sequence[Any]) -> str:
    """A field's place, without pydantic's names for the members of a union."""
    parts = []
    for part in location:
        parts.append(str(part))
        kind = peel(kind.model_fields[part].annotation)[0] if part in getattr(kind, "model_fields", {}) else None
        if get_origin(kind) in (Union, UnionType):
            break
    return ".".join(parts)


def _nested(kind: Any, name: Any) -> Any:
    """The class of nested settings at a field; a preset's field may be unknown to the base."""
    return peel(kind.model_fields[name].annotation)[0] if name in getattr(kind, "model_fields", {}) else kind


def _refusal(kind: type[Settings], error: pydantic.ValidationError) -> NetweightError:
    for problem in error.errors(include_url=False):
        if problem["type"] == "check" and not problem["loc"]:
            return cast("NetweightError", problem["ctx"]["error"])
    return _listed(_lines(kind, error))


def _listed(problems: Sequence[str]) -> UsageError:
    if len(problems) == 1:
        return UsageError(problems[0])
    return UsageError(f"{len(problems)} settings are wrong:\n" + "\n".join(f"  {line}" for line in problems))


def peel(annotation: Any, metadata: Sequence[Any] = ()) -> tuple[Any, tuple[Any, ...]]:
    """A type without `Annotated` and None, and all that stood in `Annotated`."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        return peel(inner, (*more, *metadata))
    if get_origin(annotation) in (Union, UnionType):
        kinds = [each for each in get_args(annotation) if each is not NoneType]
        if len(kinds) == 1:
            return peel(kinds[0], metadata)
    flat = [part for each in metadata for part in (each.metadata if isinstance(each, FieldInfo) else [each])]
    return annotation, tuple(flat)


@final
@dataclass(frozen=True)
class Leaf:
    """A field that holds no settings itself, and where it lies; `extra` if only the class of some preset has it."""

    path: tuple[str, ...]
    field: FieldInfo
    kind: Any
    metadata: tuple[Any, ...]
    required: bool
    extra: bool = False
    shared: bool = False  # whether a field further out has its name

    @property
    def cli(self) -> Cli:
        """What only the command line knows of it."""
        return next((part for part in self.metadata if isinstance(part, Cli)), Cli())

    @property
    def place(self) -> str:
        """Its name, with dots where settings are nested."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """Its option."""
        return self.cli.name or "--" + "-".join(self.path[-1 - self.shared :]).replace("_", "-")

    def default(self, start: Settings | type[Settings]) -> Any:
        """The default in a class or preset; None where there is none."""
        value: Any = start
        for name in self.path:
            kind = type(value) if isinstance(value, Settings) else value
            if isinstance(value, Settings) and name in value.model_fields_set:
                value = getattr(value, name)
            elif name in getattr(kind, "model_fields", {}):
                field = kind.model_fields[name]
                value = field.get_default(call_default_factory=True)
                value = peel(field.annotation)[0] if value is PydanticUndefined else value
        return None if self.required else value

    def shown_default(self, kind: type[Settings]) -> str:
        """The default as text, and those of presets where they differ."""
        known = {name: each for name, each in kind.presets.items() if self.path[0] in type(each).model_fields}
        usual = type(next(iter(known.values()))) if self.extra else kind
        text = self._text(self.default(usual))
        own = {name: self._text(self.default(each)) for name, each in known.items() if self.place != kind.preset_key}
        parts = [text] if text else []
        return "; ".join(parts + [f"{other or 'none'} for {name}" for name, other in own.items() if other != text])

    def _text(self, value: Any) -> str:
        if value is True:
            return self.flag.removeprefix("--")
        if isinstance(value, list | tuple):
            return ",".join(map(str, value))
        return "" if value is None or value is False or value == {} else str(value)


def leaves(kind: type[Settings]) -> Iterator[Leaf]:
    """All fields of a class, of nested settings, and after them those that only classes of presets have."""
    found = list(_leaves(kind))
    depths: dict[str, int] = {}
    for leaf in found:
        if leaf.cli.own:
            depths[leaf.flag] = min(len(leaf.path), depths.get(leaf.flag, len(leaf.path)))
    for leaf in found:
        outer = depths.get(leaf.flag, len(leaf.path)) < len(leaf.path)
        yield replace(leaf, shared=True) if outer and leaf.cli.name is None else leaf


def _leaves(kind: type[Settings], path: tuple[str, ...] = (), *, needed: bool = True) -> Iterator[Leaf]:
    fields = dict(kind.model_fields)
    for preset in kind.presets.values():
        fields |= {name: field for name, field in type(preset).model_fields.items() if name not in fields}
    for name, field in fields.items():
        bare, metadata = peel(field.annotation, field.metadata)
        required, extra = needed and field.is_required(), name not in kind.model_fields
        if isinstance(bare, type) and issubclass(bare, Settings):
            inner = _leaves(bare, (*path, name), needed=required)
            yield from (replace(leaf, extra=True) for leaf in inner) if extra else inner
        else:
            yield Leaf((*path, name), field, bare, metadata, required, extra)


def element(kind: Any) -> tuple[Any, Literal["list", "mapping", ""]]:
    """What a collection holds, and what sort of collection it is, if one."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in _LISTS or (origin is tuple and inside[-1] is ...):
        return inside[0], "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return inside[1], "mapping"
    return kind, ""


def bounds(metadata: Sequence[Any]) -> dict[str, Any]:
    """The range of a number, by `ge`, `gt`, `le` and `lt`."""
    sides = ((side, getattr(part, side, None)) for part in metadata for side in ("ge", "gt", "le", "lt"))
    return {side: bound for side, bound in sides if bound is not None}


def path_type(metadata: Sequence[Any]) -> str:
    """What a path must be: "file", "dir", "new", or "" for anything."""
    return next((part.path_type for part in metadata if isinstance(part, PathType)), "")


def words(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """A field's type for the docs."""
    inner, sort = element(kind)
    if sort:
        return f"{'NAME=' if sort == 'mapping' else ''}{words(*peel(inner))}, …"
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    if kind is Path:
        return {"file": "file", "dir": "folder"}.get(path_type(metadata), "path")
    signs = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
    limits = " and ".join(f"{signs[side]} {bound}" for side, bound in bounds(metadata).items())
    return f"{ {bool: 'flag', str: 'text', int: 'integer', float: 'number'}.get(kind, 'value') } {limits}".rstrip()


# ---- options of a command, made of a class ---------------------------------------------------------------------------

F = TypeVar("F", bound=Callable[..., Any])


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
