"""Declaration of options: one `Settings` class gives the Python argument, the command line, YAML, schema and docs.

    class RMU(DefenseSettings, recommended={"lr": 5e-5}):
        "Steer the hidden states of harmful answers to one random direction."

        alpha: float = Field(1200.0, ge=0)
        '''Weight of the distance of all states that must not move.'''

    DEFENSES = Variants("defense", {"repnoise": "package.repnoise:RepNoise", "rmu": "package.rmu:RMU"})

    class Immunize(Settings):
        "Train a defense into a model."

        options_group = "Training"

        pairs: Annotated[FilePath, Cli(group="Files")]
        '''Rows with prompt, chosen and rejected.'''
        lr: float = Field(2e-5, gt=0)
        '''Highest learning rate.'''
        defense: Annotated[DefenseSettings, DEFENSES] = Field("repnoise", validate_default=True)
        '''Defense to train.'''

    @click.command(cls=SettingsCommand)
    @options(Immunize, arguments=("pairs",))             # PAIRS --defense rmu --lr 1e-4 --set rmu.alpha=800
    def immunize(settings: Immunize) -> None: ...

Python: `Immunize(pairs=path, defense=RMU(alpha=800))`, `.replace(rmu={"alpha": 900})`, `.given`. YAML:
`Immunize.of({"pairs": "p.jsonl", "defense": "rmu", "rmu": {"alpha": 800}})`, or `checked` to collect the problems of a
whole file. Further: `json_schema()`, `table()`, `digest()`, and `to_json()`, whose result `of` reads.

A field's default and range are in its `Field`, its type in its annotation, its description in the docstring under it
(or in `Field(description=...)`), and `Cli` holds what only the command line needs. What several fields must satisfy
together is refused in `check`. A field that is annotated with `Variants` chooses one of several settings classes; the
settings of the chosen variant are nested under its name, and a key of a variant that is not chosen is refused.

`netweight --help` imports no pydantic, so only modules of single commands import this one. A class of settings lives in
a module that does not import torch when it is loaded, so that a command's own help is quick.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, Self, TypeAlias, TypeVar, Union, cast, final, get_args, get_origin

import click
import pydantic
import yaml
from click.core import ParameterSource
from click.shell_completion import CompletionItem
from pydantic.fields import FieldInfo
from pydantic.types import PathType
from pydantic_core import PydanticCustomError, PydanticUndefined, core_schema

from netweight.core.digests import canonical_json, digest_config
from netweight.core.hub import local_model
from netweight.core.names import nearest, not_found
from netweight.errors import NameNotFound, NetweightError, UsageError


def _model(value: Any) -> Path:
    """The file or folder of a model, which may be given by its id on the hub."""
    try:
        return local_model(str(value))
    except NetweightError as error:
        raise PydanticCustomError("check", "{message}", {"message": str(error), "error": error}) from error


# A model as an option: a folder, a file, or the id of a model on the Hugging Face hub, which is fetched or found there.
ModelPath: TypeAlias = Annotated[Path, pydantic.BeforeValidator(_model)]

# Collections of one type; `tuple[T, ...]` is one, too.
_LISTS = (list, set, frozenset, Sequence, AbstractSet)


@final
@dataclass(frozen=True)
class Cli:
    """Properties of a field that only the command line uses; an entry of the field's `Annotated`."""

    name: str | None = None
    """Name of the option in place of the field's name with dashes, such as "--freeze"."""
    short: str | None = None
    """A second, short name, such as "-n"."""
    metavar: str | None = None
    """Placeholder of the value in the help."""
    envvar: str | None = None
    """Environment variable that gives the value."""
    comma: bool = False
    """True if a list is written as one text, "a,b", rather than by repeating the option."""
    own: bool = True
    """True if the field has an option of its own; if not, only `--set` reaches it."""
    hidden: bool = False
    """True if the help leaves the option out."""
    type: Any = None
    """A click type in place of the annotation's, such as `click.Path(file_okay=False)`."""
    group: str = ""
    """Heading in the help, in place of the `options_group` of the field's class."""
    only_with: str = ""
    """For nested settings: the choice that they belong to, such as "method=siss"; the help shows them with it alone."""


class Settings(pydantic.BaseModel):
    """Frozen, checked settings. Subclasses declare fields, and `check` for conditions on several fields.

    A subclass may change defaults of inherited fields, which keep their type, range and description:
    `class TVaccine(Vaccine, defaults={"rho": 3.0}): ...`.
    """

    model_config = pydantic.ConfigDict(
        allow_inf_nan=False, frozen=True, extra="forbid", arbitrary_types_allowed=True, use_attribute_docstrings=True
    )

    options_group: ClassVar[str] = ""
    """Heading of these fields in a command's help; empty for that of the settings around them, or "Options"."""
    option_groups: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Headings of single fields in a command's help, each with the names of its fields, nested settings included."""
    recommended: ClassVar[Mapping[str, Any]] = {}
    """Defaults that a variant gives to the settings that contain it, by name, such as `{"lr": 5e-5}`.

    A class statement gives them: `class RMU(DefenseSettings, recommended={"lr": 5e-5})`.
    """

    def __init__(self, **values: Any) -> None:
        """Check all `values`, given by field name; a UsageError names every bad one."""
        try:
            self.__pydantic_validator__.validate_python(values, self_instance=self)
        except pydantic.ValidationError as error:
            raise _refusal(type(self), error) from None

    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]  # nested ones are checked with the outer one

    def __init_subclass__(
        cls, *, defaults: Mapping[str, Any] | None = None, recommended: Mapping[str, Any] | None = None, **config: Any
    ) -> None:
        """Take the arguments of a class statement; `__pydantic_init_subclass__` uses them."""
        super().__init_subclass__(**config)

    @classmethod
    def __pydantic_init_subclass__(
        cls, *, defaults: Mapping[str, Any] | None = None, recommended: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        """Change the defaults of inherited fields, and note those of the settings around these."""
        super().__pydantic_init_subclass__(**more)
        cls.recommended = cls.recommended if recommended is None else recommended
        for name, value in (defaults or {}).items():
            field = copy(cls.model_fields[name])
            field.default = value
            cls.__pydantic_fields__[name] = field
        if defaults:
            cls.model_rebuild(force=True)
        taken = [f"{name!r} is the name of a field and of a variant"
                 for field in _variants(cls).values() for name in field
                 if name in cls.model_fields]  # fmt: skip
        if taken:
            raise TypeError(f"{cls.__name__}: {'; '.join(taken)}")

    @pydantic.model_validator(mode="before")
    @classmethod
    def _on_defaults(cls, values: Any) -> Any:
        """Nested settings that are given in part keep the rest of the field's default."""
        if not isinstance(values, Mapping):
            return values
        usual = {name: field.get_default(call_default_factory=True) for name, field in cls.model_fields.items()}
        values = _merged(usual, values, keep=False)
        for field, variants in _variants(cls).items():
            nested = {name: values.pop(key) for key in list(values) if (name := variants.canonical(key))}
            if nested:
                values[field] = _Choice(values.get(field, usual[field]), nested)
        return values

    @pydantic.model_validator(mode="after")
    def _checked(self) -> Self:
        for field in _variants(type(self)):
            chosen = getattr(self, field)
            for name, value in (chosen.recommended if chosen is not None else {}).items():
                if name in type(self).model_fields and name not in self.model_fields_set:
                    # The value is not set by setattr, because it is a default and was not given.
                    self.__dict__[name] = value
        try:
            self.check()
        except NetweightError as error:
            raise PydanticCustomError("check", "{message}", {"message": str(error), "error": error}) from error
        return self

    @pydantic.model_serializer(mode="plain")
    def _dumped(self) -> dict[str, Any]:
        return self.to_json()

    def check(self) -> None:
        """Check conditions that concern several fields; subclasses override it.

        Raises:
            UsageError: Several fields contradict each other.
        """

    @property
    def given(self) -> dict[str, Any]:
        """The fields that were given, by name, and not left at their defaults."""
        return {name: getattr(self, name) for name in type(self).model_fields if name in self.model_fields_set}

    def given_json(self) -> dict[str, Any]:
        """Return the given fields alone, those of nested settings included, as JSON values that `of` reads."""
        plain, variants = self.to_json(), _variants(type(self))
        values: dict[str, Any] = {}
        for name, value in self.given.items():
            if isinstance(value, Settings) and name in variants:
                values[name] = plain[name]
                if own := value.given_json():
                    values[plain[name]] = own
            elif name in plain:
                values[name] = value.given_json() if isinstance(value, Settings) else plain[name]
        return values

    def replace(self, **changes: Any) -> Self:
        """Return checked settings with `changes`; a mapping changes a part of nested settings."""
        return type(self)(**_merged(self.given, changes))

    def __hash__(self) -> int:
        """Hash the values, mappings and lists among them too."""
        return hash((type(self), _hashable(self.__dict__)))

    @classmethod
    def of(cls, values: Any, *, where: str = "") -> Self:
        """Return settings from values of YAML or JSON.

        Args:
            values: A mapping by field name.
            where: The place of the values in their file, such as "treatments.0.immunize"; errors begin with it.

        Raises:
            UsageError: All problems, each with its place.
        """
        problems: list[str] = []
        settings = cls.checked(values, f"{where}." if where else "", problems)
        if settings is None:
            raise _listed(problems)
        return settings

    @classmethod
    def checked(cls, values: Any, where: str, problems: list[str]) -> Self | None:
        """Return settings from `values`, or None: then `problems` gets a line for each, after `where` and its dot."""
        try:
            return cls.model_validate(values)
        except pydantic.ValidationError as error:
            problems += _lines(cls, error, where)
            return None

    def to_json(self) -> dict[str, Any]:
        """Return all fields in order as JSON values that `of` reads: paths as text, a variant's settings by its name.

        Fields that their `exclude_if` omits are left out.
        """
        values: dict[str, Any] = {}
        variants = _variants(type(self))
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if field.exclude_if and field.exclude_if(value):
                continue
            if name in variants and value is not None:
                values[name] = variants[name].name_of(value)
                if type(value).model_fields:
                    values[values[name]] = value
            else:
                values[name] = value
        plain = json.loads(canonical_json(values, allow_nan=True))
        return {name: plain[name] for name in values}

    def digest(self) -> str:
        """Digest the fields, as `core.digests.digest_config` does for a dataclass of the same fields."""
        return digest_config(self)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core: core_schema.CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Add the settings of variants under their names, each allowed only where its variant is chosen."""
        schema = handler(core)
        whole = handler.resolve_ref_schema(schema)
        for field, variants in _variants(cls).items():
            for name in variants:
                if not variants[name].model_fields:
                    continue
                whole["properties"][name] = handler(variants[name].__pydantic_core_schema__)
                chosen: dict[str, Any] = {"properties": {field: {"const": name}}}
                if name != cls.model_fields[field].default:
                    chosen["required"] = [field]
                whole.setdefault("allOf", []).append({"if": {"required": [name]}, "then": chosen})
        return schema

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema (2020-12) of what `of` reads."""
        schema = cls.model_json_schema(ref_template="#/$defs/{model}")
        schema["description"] = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
        return schema

    @classmethod
    def table(cls) -> str:
        """Return the documentation's table in Markdown: option, type, default, meaning; variants after the rest."""
        rows = []
        for leaf in leaves(cls):
            option = leaf.flag if leaf.cli.own and not leaf.variant else f"--set {leaf.place}="
            default = leaf.text(leaf.default) or ("required" if leaf.required else "")
            meaning = " ".join((leaf.field.description or "").split())
            cells = (f"`{option}`", words(leaf.kind, leaf.metadata), default, meaning)
            rows.append(" | ".join(cell.replace("|", "\\|") for cell in cells))
        return "\n".join(f"| {row} |" for row in ("option | type | default | meaning", "--- | --- | --- | ---", *rows))


# ---- variants: one of several settings classes, chosen by name -------------------------------------------------------


@final
class Variants(Mapping[str, type[Settings]]):
    """The variants of a method by name, such as the defenses of `immunize`; an entry of a field's `Annotated`.

    The field's value is an instance of the chosen settings class. Its name can be given in place of the instance; then
    the key of that name, beside the field, holds the variant's settings. A class is imported when it is first needed,
    so that a help text can list names without importing all variants.

    Args:
        noun: What one of them is called, such as "defense".
        homes: Name → `module:Class`, one line for each variant.
    """

    def __init__(self, noun: str, homes: Mapping[str, str]) -> None:
        self.noun = noun
        self._homes: dict[str, str | type[Settings]] = dict(homes)

    def register(self, name: str, home: str | type[Settings]) -> None:
        """Add a variant, such as one of another package.

        Args:
            name: A new name.
            home: The settings class, or `module:Class`.

        Raises:
            UsageError: The name is taken.
        """
        if name in self._homes:
            raise UsageError(f"There is a {self.noun} {name!r} already.", cure="Register it under another name.")
        self._homes[name] = home

    def __getitem__(self, name: str) -> type[Settings]:
        """Return the settings class of a variant.

        Raises:
            NameNotFound: There is no such variant; the error names the nearest.
        """
        if name not in self._homes:
            raise not_found(f"There is no {self.noun} {name!r}.", name, self._homes)
        home = self._homes[name]
        if isinstance(home, str):
            module, _, attribute = home.partition(":")
            home = self._homes[name] = getattr(importlib.import_module(module), attribute)
        return cast("type[Settings]", home)

    def __contains__(self, name: object) -> bool:
        """Say whether there is a variant of this name, without importing it."""
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        """Iterate over names in the order of registration."""
        return iter(self._homes)

    def __len__(self) -> int:
        """Count the variants."""
        return len(self._homes)

    def canonical(self, key: str) -> str | None:
        """Return the variant's name for a key that may hold underscores in place of dashes; None for other keys."""
        return next((name for name in (key, key.replace("_", "-")) if name in self._homes), None)

    def name_of(self, settings: Settings) -> str:
        """Return the name under which the class of `settings` is registered.

        Raises:
            UsageError: It is not registered.
        """
        where = f"{type(settings).__module__}:{type(settings).__qualname__}"
        for name, home in self._homes.items():
            if home is type(settings) or home == where:
                return name
        raise UsageError(
            f"{type(settings).__name__} is not a registered {self.noun}.",
            cure=f"Register its class under a name, or use one of: {', '.join(self)}.",
        )

    def __get_pydantic_core_schema__(
        self, source: Any, handler: pydantic.GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        """Validate a name, an instance, or a name with nested settings."""
        optional = NoneType in get_args(source)
        return core_schema.no_info_plain_validator_function(functools.partial(self._validated, optional=optional))

    def __get_pydantic_json_schema__(
        self, core: core_schema.CoreSchema, handler: pydantic.GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe the name alone; `Settings` describes the settings beside it."""
        return {"type": "string", "enum": list(self)}

    def _validated(self, value: Any, *, optional: bool) -> Settings | None:
        choice = value if isinstance(value, _Choice) else _Choice(value, {})
        if choice.value is None and optional and not choice.nested:
            return None
        if isinstance(choice.value, Settings):
            try:
                name = self.name_of(choice.value)
            except UsageError as error:
                raise PydanticCustomError("check", "{message}", {"message": str(error), "error": error}) from error
        elif isinstance(choice.value, str) and choice.value in self:
            name = choice.value
        else:
            near = nearest(str(choice.value), self)
            said = f"there is no {self.noun} {choice.value!r}. {near}"
            raise PydanticCustomError("check", "{message}", {"message": said})
        lines = [
            f"{other}: belongs to the {self.noun} {other!r}, and the {self.noun} is {name!r}. Choose {other!r} or "
            "leave this key out."
            for other in choice.nested
            if other != name
        ]
        kind, own = self[name], choice.nested.get(name, {})
        try:
            if isinstance(choice.value, Settings):
                settings = kind.model_validate(_merged(choice.value.given, own)) if own else choice.value
            else:
                settings = kind.model_validate(own)
        except pydantic.ValidationError as error:
            lines += _lines(kind, error, f"{name}.")
        if lines:
            raise PydanticCustomError("variant", "wrong settings of a variant", {"lines": lines})
        return settings


@final
@dataclass(frozen=True)
class _Choice:
    """A choice among variants as it was given, with the settings beside it."""

    value: Any
    nested: Mapping[str, Any]


def _variants(kind: type[Settings]) -> dict[str, Variants]:
    """The fields of a class that choose among variants."""
    return {
        name: part
        for name, field in kind.model_fields.items()
        for part in peel(field.annotation, field.metadata)[1]
        if isinstance(part, Variants)
    }


# ---- messages --------------------------------------------------------------------------------------------------------


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


# How a complaint of pydantic reads, by its type; `{limit}` and the like are of its context.
_COMPLAINTS = {
    "path_not_file": "{value} is not an existing file.",
    "path_not_directory": "{value} is not an existing folder.",
    "path_exists": "{value} exists already.",
    "int_type": "must be an integer, not {value}.",
    "int_parsing": "must be an integer, not {value}.",
    "int_from_float": "must be an integer, not {value}.",
    "float_type": "must be a number, not {value}.",
    "float_parsing": "must be a number, not {value}.",
    "finite_number": "must be a finite number, not {value}.",
    "bool_type": "must be true or false, not {value}.",
    "bool_parsing": "must be true or false, not {value}.",
    "string_type": "must be text, not {value}.",
    "path_type": "must be a path, not {value}.",
    "list_type": "must be a list, not {value}.",
    "tuple_type": "must be a list, not {value}.",
    "dict_type": "must be a mapping of names to values, not {value}.",
    "model_type": "must be a mapping of names to values, not {value}.",
    "model_attributes_type": "must be a mapping of names to values, not {value}.",
    "too_short": "must have at least {min_length} entry, not {value}.",
    "literal_error": "must be {expected}, not {value}.",
    "greater_than": "must be greater than {gt}, not {value}.",
    "greater_than_equal": "must be at least {ge}, not {value}.",
    "less_than": "must be less than {lt}, not {value}.",
    "less_than_equal": "must be at most {le}, not {value}.",
}


def _lines(kind: type[Settings], error: pydantic.ValidationError, where: str = "") -> list[str]:
    """One line for each of pydantic's complaints."""
    lines = []
    for problem in error.errors(include_url=False):
        location, context = problem["loc"], problem.get("ctx", {})
        place = where + _field_path(kind, location)
        value = str(problem["input"]) if isinstance(problem["input"], Path) else problem["input"]
        if problem["type"] == "variant":
            inner = where + "".join(f"{part}." for part in location[:-1])
            lines += [inner + line for line in context["lines"]]
        elif problem["type"] == "extra_forbidden":
            owner = functools.reduce(_nested, location[:-1], kind)
            fields = [*owner.model_fields, *(name for each in _variants(owner).values() for name in each)]
            lines.append(f"{place}: there is no such key. {nearest(str(location[-1]), fields, 2)}")
        elif problem["type"] == "missing":
            lines.append(f"{place}: is missing.")
        elif problem["type"] == "check":
            lines.append(f"{place.rstrip('.')}: {problem['msg']}".removeprefix(": "))
        else:
            said = _COMPLAINTS.get(problem["type"], f"{problem['msg']}, not {{value}}.")
            said = said.format_map({**context, **_short(context), "value": repr(value)}) if "{" in said else said
            lines.append(f"{place.rstrip('.')}: {said}".removeprefix(": "))
    return lines


def _short(context: Mapping[str, Any]) -> dict[str, str]:
    """The bounds of a number without zeros that say nothing."""
    return {side: f"{bound:g}" for side, bound in context.items() if isinstance(bound, float)}


def _field_path(kind: Any, location: Sequence[Any]) -> str:
    """A field's place, without pydantic's names for the members of a union."""
    parts = []
    for part in location:
        parts.append(str(part))
        kind = peel(kind.model_fields[part].annotation)[0] if part in getattr(kind, "model_fields", {}) else None
        if get_origin(kind) in (Union, UnionType):
            break
    return ".".join(parts)


def _nested(kind: Any, name: Any) -> Any:
    """The class of nested settings at a field."""
    return peel(kind.model_fields[name].annotation)[0]


def _refusal(kind: type[Settings], error: pydantic.ValidationError) -> NetweightError:
    problems = error.errors(include_url=False)
    for problem in problems:
        if problem["type"] == "check" and not problem["loc"]:
            return cast("NetweightError", problem["ctx"]["error"])
    if len(problems) == 1 and isinstance(own := problems[0].get("ctx", {}).get("error"), NetweightError):
        reason = str(own).removesuffix(f" {own.cure}") if own.cure else str(own)
        return UsageError(f"{_field_path(kind, problems[0]['loc'])}: {reason}", cure=own.cure)
    return _listed(_lines(kind, error))


def _listed(problems: Sequence[str]) -> UsageError:
    if len(problems) == 1:
        return UsageError(problems[0])
    return UsageError(f"{len(problems)} settings are wrong:\n" + "\n".join(f"  {line}" for line in problems))


# ---- fields, nested ones included ------------------------------------------------------------------------------------


def peel(annotation: Any, metadata: Sequence[Any] = ()) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without `Annotated` and None, and all entries of `Annotated`."""
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
    """A field whose value is not settings itself, or that chooses among variants, and where it lies."""

    path: tuple[str, ...]
    """Names from the outermost settings inwards; a variant's name for fields of a variant."""
    field: FieldInfo
    """Pydantic's description of the field."""
    kind: Any
    """Type of the setting without None."""
    metadata: tuple[Any, ...]
    """Entries of its `Annotated`, bounds included."""
    required: bool
    """True if it must be given."""
    default: Any
    """Default of the setting; None if there is none."""
    group: str
    """Heading in a command's help."""
    variant: str = ""
    """Name of the variant that it belongs to; empty for fields that all variants share."""
    shared: bool = False
    """True if a field further out has its name."""
    only_with: str = ""
    """The choice that it belongs to, such as "method=siss"; empty for fields that always count."""

    @property
    def cli(self) -> Cli:
        """Properties that only the command line uses."""
        return next((part for part in self.metadata if isinstance(part, Cli)), Cli())

    @property
    def variants(self) -> Variants | None:
        """The variants that it chooses from, if it does."""
        return next((part for part in self.metadata if isinstance(part, Variants)), None)

    @property
    def place(self) -> str:
        """Its name, with dots where settings are nested."""
        return ".".join(self.path)

    @property
    def flag(self) -> str:
        """Its option."""
        return self.cli.name or "--" + "-".join(self.path[-1 - self.shared :]).replace("_", "-")

    def text(self, value: Any) -> str:
        """Return a value of it as a default reads in help and tables."""
        if value is True:
            return self.flag.removeprefix("--")
        if isinstance(value, list | tuple):
            return ",".join(map(str, value))
        return "" if value is None or value is False or value == {} else str(value)


def leaves(kind: type[Settings], *, variants: bool = True) -> Iterator[Leaf]:
    """Yield all fields of a class and of nested settings.

    Args:
        kind: The class.
        variants: Whether the fields of all variants come, too, after the others; this imports them.
    """
    fields = list(_leaves(kind, variants=variants))
    depths: dict[str, int] = {}
    for leaf in fields:
        if leaf.cli.own and not leaf.variant:
            depths[leaf.flag] = min(len(leaf.path), depths.get(leaf.flag, len(leaf.path)))
    for leaf in fields:
        outer = not leaf.variant and depths.get(leaf.flag, len(leaf.path)) < len(leaf.path)
        yield replace(leaf, shared=True) if outer and leaf.cli.name is None else leaf


def _leaves(
    kind: type[Settings],
    path: tuple[str, ...] = (),
    *,
    variants: bool,
    needed: bool = True,
    start: Any = PydanticUndefined,
    group: str = "",
    only_with: str = "",
) -> Iterator[Leaf]:
    headings = {name: heading for heading, names in kind.option_groups.items() for name in names}
    choices: list[tuple[str, Variants]] = []
    for name, field in kind.model_fields.items():
        bare, metadata = peel(field.annotation, field.metadata)
        required = needed and field.is_required()
        default = field.get_default(call_default_factory=True)
        if isinstance(start, Settings) and name in start.model_fields_set:
            default = getattr(start, name)
        elif start is None or (default is PydanticUndefined and not _is_settings(bare)):
            default = None
        home = [each for each in kind.__mro__ if name in getattr(each, "model_fields", {})][-1]
        cli = next((part for part in metadata if isinstance(part, Cli)), Cli())
        own = cli.group or headings.get(name) or cast("type[Settings]", home).options_group or group
        chosen = next((part for part in metadata if isinstance(part, Variants)), None)
        if chosen is not None:
            choices.append((own, chosen))
            yield Leaf((*path, name), field, bare, metadata, required, default, own or "Options")
        elif _is_settings(bare):
            inner = only_with or cli.only_with
            heading = f"With --{cli.only_with.replace('=', ' ')}" if cli.only_with else ""
            yield from _leaves(
                bare, (*path, name), variants=variants, needed=required, start=default, only_with=inner,
                group=heading or cli.group or headings.get(name) or group,
            )  # fmt: skip
        else:
            yield Leaf(
                (*path, name), field, bare, metadata, required, default, own or "Options", only_with=only_with
            )  # fmt: skip
    for _, chosen in choices if variants else ():
        for name in chosen:
            yield from variant_leaves(chosen, name, path)


def _is_settings(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Settings)


def variant_leaves(variants: Variants, name: str, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """Yield the fields of one variant, which lie under its name at `path`."""
    for leaf in _leaves(variants[name], (*path, name), variants=False, needed=False, group=_own_group(variants)):
        yield replace(leaf, variant=name, group=_own_group(variants))


def _own_group(variants: Variants) -> str:
    return f"This {variants.noun}"


def element(kind: Any) -> tuple[Any, Literal["list", "mapping", ""]]:
    """Return what a collection holds, and which sort of collection it is, if one."""
    origin, inside = get_origin(kind), get_args(kind)
    if origin in _LISTS or (origin is tuple and inside[-1] is ...):
        return inside[0], "list"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return inside[1], "mapping"
    return kind, ""


def bounds(metadata: Sequence[Any]) -> dict[str, Any]:
    """Return the range of a number, by `ge`, `gt`, `le` and `lt`."""
    sides = ((side, getattr(part, side, None)) for part in metadata for side in ("ge", "gt", "le", "lt"))
    return {side: bound for side, bound in sides if bound is not None}


def path_type(metadata: Sequence[Any]) -> str:
    """Return what a path must be: "file", "dir", "new", or "" for anything."""
    return next((part.path_type for part in metadata if isinstance(part, PathType)), "")


def words(kind: Any, metadata: Sequence[Any] = ()) -> str:
    """Return a field's type for the docs."""
    if chosen := next((part for part in metadata if isinstance(part, Variants)), None):
        return ", ".join(f"`{name}`" for name in chosen)
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
_ARGUMENTS = "netweight.arguments"


class SettingsCommand(click.Command):
    """A command whose help shows options in groups, with the settings of the chosen variant."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse, and keep the arguments for the help, which comes before any option has a value."""
        keep_arguments(ctx, args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups of options."""
        write_option_groups(self, ctx, formatter)


def keep_arguments(ctx: click.Context, args: Sequence[str]) -> None:
    """Keep the arguments of a command before it parses them: its help is of the variant that they choose."""
    ctx.meta[_ARGUMENTS] = tuple(args)


def write_option_groups(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    """Write each group of options under its heading; options that are not settings come last, under "Output"."""
    groups: dict[str, list[tuple[str, str]]] = {}
    rest: list[tuple[str, str]] = []
    for parameter in command.get_params(ctx):
        for group, record in parameter.records(ctx) if isinstance(parameter, _SetOption) else ():
            groups.setdefault(group, []).append(record)
        other = None if isinstance(parameter, _SetOption) else parameter.get_help_record(ctx)
        if other is not None and (other[1] or isinstance(parameter, click.Option)):
            group = getattr(parameter, "group", "")
            (groups.setdefault(group, []) if group else rest).append(other)
    for heading, records in {**groups, "Output": [*groups.get("Output", ()), *rest]}.items():
        with formatter.section(heading):
            formatter.write_dl(records)


def options(
    kind: type[Settings], *, into: str = "settings", skip: Sequence[str] = (), arguments: Sequence[str] = ()
) -> Callable[[F], F]:
    """Give a command one option per field, and `--set` for all of them; it receives one checked instance.

    Use it on a `SettingsCommand` for a help in groups.

    Args:
        kind: The class.
        into: The command's argument for the instance.
        skip: Fields that this command lacks.
        arguments: Fields that are positional, in this order.
    """
    fields = {
        leaf.place: leaf for leaf in leaves(kind, variants=False) if leaf.path[0] not in skip and leaf.place not in skip
    }
    named = [leaf for leaf in fields.values() if leaf.cli.own and leaf.place not in arguments]
    chosen = {_destination(leaf): leaf for leaf in (*(fields[name] for name in arguments), *named)}

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
                _put(values, *_assignment(text, fields, values))
            return function(*args, **given, **{into: kind.of(values)})

        parameters = [*(_parameter(leaf, leaf.place in arguments) for leaf in chosen.values()),
                      _SetOption(fields)]  # fmt: skip
        command.__dict__.setdefault("__click_params__", []).extend(reversed(parameters))
        return cast("F", command)

    return decorate


def _destination(leaf: Leaf) -> str:
    return "__".join(leaf.path)


def _parameter(leaf: Leaf, argument: bool) -> click.Parameter:
    cli, (inner, sort) = leaf.cli, element(leaf.kind)
    shape: Any = _click_type(leaf.kind, leaf.metadata)
    if sort:
        shape = _MappingEntry(inner) if sort == "mapping" else _click_type(*peel(inner))
    if leaf.variants is not None:
        shape = _VariantName(leaf.variants)
    if cli.comma:
        shape, sort = _Comma(shape), ""
    if cli.type is not None:
        shape, sort = cli.type, ""
    about: dict[str, Any] = {"type": shape, "required": leaf.required, "envvar": cli.envvar}
    if argument:
        metavar = cli.metavar or leaf.path[-1].upper()
        return click.Argument([_destination(leaf)], nargs=-1 if sort else 1, metavar=metavar, **about)
    flag = leaf.flag
    if leaf.kind is bool:
        about |= {"type": None, "is_flag": True}
        flag += "" if leaf.default is False else f"/--no-{flag.removeprefix('--')}"
    return _SettingOption(
        [*([cli.short] if cli.short else []), flag, _destination(leaf)], default=None, multiple=bool(sort),
        metavar=cli.metavar, hidden=cli.hidden, help=leaf.field.description, leaf=leaf, **about,
    )  # fmt: skip


class _SettingOption(click.Option):
    """An option that shows a default without setting it, so that what is not given stays so."""

    def __init__(self, *names: Any, leaf: Leaf, **more: Any) -> None:
        super().__init__(*names, **more)
        self.leaf, self.group = leaf, leaf.group

    def get_help_extra(self, ctx: click.Context) -> Any:
        extra = super().get_help_extra(ctx)
        shown = self.leaf.text(_default_here(self.leaf, ctx))
        return {**extra, "default": shown} if shown else extra


class _SetOption(click.Option):
    """`--set KEY=VALUE`: any setting by its place, for those without an option of their own the only way."""

    def __init__(self, fields: Mapping[str, Leaf]) -> None:
        super().__init__(
            ["--set", "set_"], multiple=True, metavar="KEY=VALUE", help="Any setting, by its key in recipes."
        )
        self.fields = fields

    def records(self, ctx: click.Context) -> Iterator[tuple[str, tuple[str, str]]]:
        """Yield rows of the help, each with its heading: settings without an option of their own, and `--set`."""
        own = [leaf for leaf in self.fields.values()
               if not leaf.cli.own and not leaf.cli.hidden and _is_chosen(leaf, ctx, self.fields)]  # fmt: skip
        chosen = [leaf for variants, name in _chosen_names(ctx, self.fields) for leaf in variant_leaves(variants, name)]
        for leaf in own:
            yield leaf.group, self._row(leaf, ctx)
        general = [leaf.group for leaf in own if not leaf.only_with]
        yield (general[-1] if general else "Output"), cast("tuple[str, str]", self.get_help_record(ctx))
        names = {name: variants.noun for variants, name in _chosen_names(ctx, self.fields)}
        for leaf in chosen:
            yield f"This {names[leaf.variant]}: {leaf.variant}", self._row(leaf, ctx)

    def _row(self, leaf: Leaf, ctx: click.Context) -> tuple[str, str]:
        limits = bounds(leaf.metadata)
        extra = [f"default: {shown}"] if (shown := leaf.text(_default_here(leaf, ctx))) else []
        extra += [click.FloatRange(low, high, "gt" in limits, "lt" in limits)._describe_range()
                  for low, high in [(limits.get("gt", limits.get("ge")), limits.get("lt", limits.get("le")))]
                  if limits]  # fmt: skip
        extra += ["required"] * leaf.required
        metavar = leaf.cli.metavar or {int: "INTEGER", float: "NUMBER", bool: "true|false", str: "TEXT"}.get(leaf.kind)
        if get_origin(leaf.kind) is Literal:
            metavar = "|".join(map(str, get_args(leaf.kind)))
        text = " ".join((leaf.field.description or "").split())
        more = f"  [{'; '.join(extra)}]" if extra else ""
        return f"--set {leaf.place}={metavar or 'VALUE'}", f"{text}{more}"

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Offer the keys, those of the chosen variants included, and after `KEY=` the values of a choice."""
        leaves = {leaf.place: leaf for leaf in self.fields.values()}
        for variants, name in _chosen_names(ctx, self.fields):
            leaves |= {leaf.place: leaf for leaf in variant_leaves(variants, name)}
        key, equals, start = incomplete.partition("=")
        if not equals:
            return [CompletionItem(f"{place}=", help=leaf.field.description) for place, leaf in leaves.items()
                    if place.startswith(key)]  # fmt: skip
        choices: Sequence[Any] = ()
        if key in leaves:
            leaf = leaves[key]
            choices = (leaf.variants and list(leaf.variants)) or (
                get_args(leaf.kind) if get_origin(leaf.kind) is Literal else ("true", "false") * (leaf.kind is bool)
            )
        return [CompletionItem(f"{key}={choice}") for choice in choices if str(choice).startswith(start)]


def _given(ctx: click.Context) -> dict[str, Any]:
    """Return the options of a command line by parameter; the line may be incomplete."""
    given = dict(ctx.params)
    if _ARGUMENTS in ctx.meta:
        try:
            given |= ctx.command.make_parser(ctx).parse_args(list(ctx.meta[_ARGUMENTS]))[0]
        except click.UsageError:
            # The help is still shown, with the defaults.
            pass
    return given


def _is_chosen(leaf: Leaf, ctx: click.Context, fields: Mapping[str, Leaf]) -> bool:
    """Return whether the choice that a setting belongs to is the one of the command line."""
    if not leaf.only_with:
        return True
    place, _, name = leaf.only_with.partition("=")
    chooser = fields[place]
    value = _given(ctx).get(_destination(chooser))
    chosen = chooser.default if value is None else value
    return name in (chosen.split(",") if isinstance(chosen, str) else chosen)


def _chosen_names(ctx: click.Context, fields: Mapping[str, Leaf]) -> Iterator[tuple[Variants, str]]:
    """The variants that a command line chooses, which may be incomplete, or those of the defaults."""
    given = _given(ctx)
    for leaf in fields.values():
        if leaf.variants is not None:
            name = given.get(_destination(leaf)) or leaf.default
            if isinstance(name, Settings):
                name = leaf.variants.name_of(name)
            if isinstance(name, str) and name in leaf.variants:
                yield leaf.variants, name


def _default_here(leaf: Leaf, ctx: click.Context) -> Any:
    """The default under the variants that a command line chooses."""
    if leaf.variant or isinstance(leaf.default, Settings):
        return leaf.default
    fields = {each.leaf.place: each.leaf for each in ctx.command.params if isinstance(each, _SettingOption)}
    for variants, name in _chosen_names(ctx, fields):
        if len(leaf.path) == 1 and leaf.place in variants[name].recommended:
            return variants[name].recommended[leaf.place]
    return leaf.default


class _VariantName(click.Choice[str]):
    """The name of a variant; a wrong one is answered with the nearest."""

    def __init__(self, variants: Variants) -> None:
        super().__init__(list(variants))
        self.variants = variants

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if value not in self.variants:
            self.fail(f"there is no {self.variants.noun} {value!r}. {nearest(str(value), self.variants)}", param, ctx)
        return value


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
            self.fail(f"{value!r} is not a list of {'numbers' if numbers else 'values'}. {error.message}", param, ctx)


class _MappingEntry(click.ParamType):  # type: ignore[type-arg]
    """NAME=VALUE: an entry of a mapping."""

    name = "name=value"

    def __init__(self, inner: Any) -> None:
        self.inner, self.what = _click_type(*peel(inner)), words(*peel(inner))

    def get_metavar(self, param: click.Parameter, ctx: click.Context | None = None) -> str:
        return f"NAME={self.what.upper()}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        name, _, text = value.partition("=")
        if not (name and text):
            self.fail(f"{value!r} does not name a {self.what}. Write it as NAME={self.what.upper()}.", param, ctx)
        return name, self.inner.convert(text, param, ctx)


def _value(leaf: Leaf, given: Any) -> Any:
    """Return click's value of a field in the form that the field takes."""
    origin = get_origin(leaf.kind)
    if element(leaf.kind)[1] == "mapping":
        return dict(given)
    if origin is Literal:
        return next((choice for choice in get_args(leaf.kind) if str(choice) == given), given)
    read = isinstance(given, str) and origin in (Union, UnionType) and not _is_text(leaf.kind)
    return _scalar(given) if read else given


def _is_text(kind: Any) -> bool:
    """Return whether a field takes any text as it is written: strings, paths, or both."""
    return kind in (str, Path) or (
        get_origin(kind) in (Union, UnionType) and {*get_args(kind)} <= {str, Path, NoneType}
    )


def _scalar(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError:
        return text


def _assignment(text: str, fields: Mapping[str, Leaf], values: Mapping[str, Any]) -> tuple[tuple[str, ...], Any]:
    """Read KEY=VALUE; a field of text or a path takes the value as it is written, others as YAML."""
    key, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--set {text!r} has no value.", cure="Write it as KEY=VALUE.")
    place = _underscored(key.strip())
    leaves = {_underscored(leaf.place): leaf for leaf in fields.values()}
    for leaf in fields.values():
        if leaf.variants is None:
            continue
        name = place.removeprefix(_underscored("".join(f"{part}." for part in leaf.path[:-1]))).partition(".")[0]
        if variant := leaf.variants.canonical(name):
            leaves |= {
                _underscored(each.place): each for each in variant_leaves(leaf.variants, variant, leaf.path[:-1])
            }
    if place not in leaves:
        outer = next((leaf for each, leaf in leaves.items() if each.startswith(f"{place}.")), None)
        if outer is None:
            raise _no_such_setting(text, place, fields, values)
        return outer.path[: place.count(".") + 1], _scalar(value)
    as_written = _is_text(leaves[place].kind) and value != "null"
    return leaves[place].path, value if as_written or leaves[place].variants else _scalar(value)


def _underscored(place: str) -> str:
    return place.replace("-", "_")


def _no_such_setting(text: str, place: str, fields: Mapping[str, Leaf], values: Mapping[str, Any]) -> NetweightError:
    """The error for an unknown key, which names the settings of the chosen variants, too."""
    places = list(fields)
    for leaf in fields.values():
        name = values.get(leaf.place, leaf.default) if leaf.variants is not None else None
        if leaf.variants is not None and isinstance(name, str) and name in leaf.variants:
            places += [each.place for each in variant_leaves(leaf.variants, name, leaf.path[:-1])]
    same = [each for each in places if _underscored(each).rpartition(".")[2] == place]
    if same:
        return NameNotFound(f"--set {text!r}: there is no setting {place!r}.", cure=f"Write it as {same[0]}.")
    return not_found(f"--set {text!r}: there is no setting {place!r}.", place, places)


def _put(values: dict[str, Any], path: Sequence[str], value: Any) -> None:
    inner = values
    for name in path[:-1]:
        inner = inner.setdefault(name, {})
    if not isinstance(inner, dict) or path[-1] in inner:
        raise UsageError(f"The setting {'.'.join(path)} was given twice.", cure="Give it once.")
    inner[path[-1]] = value
