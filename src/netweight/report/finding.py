"""Parts of a report: findings, tables, figures, sections, chapters. Frozen, checked, and JSON both ways.

Every audit returns a section, and every report is made of them. All of it is plain data: JSON holds it without loss,
NaN and infinities included (`{"nonfinite": "NaN"}`), and refuses what does not belong.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY
from typing import Annotated, Any, Literal, Self, TypeAlias, cast

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    PlainValidator,
    TypeAdapter,
    ValidationError,
    WithJsonSchema,
    computed_field,
    model_validator,
)
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from netweight.errors import UsageError

Number: TypeAlias = bool | int | float
Target: TypeAlias = Number | tuple[float, float]
Better: TypeAlias = Literal["higher", "lower"]
Outcome: TypeAlias = Literal["holds", "partly", "broken", "told"]

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode_json(value: object) -> object:
    """Return `value` with plain Python types only, tuples as lists and non-finite numbers spelled out."""
    value = _builtin_scalar(value)
    if isinstance(value, float) and not math.isfinite(value):
        return {"nonfinite": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {_text_key(key): encode_json(item) for key, item in value.items()}
    if isinstance(value, Iterable) and isinstance(value, (list, tuple, range)):
        return [encode_json(item) for item in value]
    raise TypeError(f"a {type(value).__name__} is not a JSON value: {_shorten(repr(value))}")


def decode_json(value: object) -> object:
    """Return `value` with the non-finite numbers that `encode_json` spelled out put back."""
    if isinstance(value, dict):
        if value.keys() == {"nonfinite"} and value["nonfinite"] in _NONFINITE:
            return _NONFINITE[value["nonfinite"]]
        return {key: decode_json(item) for key, item in value.items()}
    if isinstance(value, list):
        return [decode_json(item) for item in value]
    return value


def _builtin_scalar(value: Any) -> Any:
    """Python's own number for a 0-d or one-element array, tensor or numpy scalar; anything else as it is."""
    if isinstance(value, (bool, int, float, str)) and type(value).__module__ == "builtins":
        return value
    if hasattr(value, "item") and hasattr(value, "dtype") and getattr(value, "size", None) is not None:
        count = value.numel() if hasattr(value, "numel") else value.size
        return value.item() if count == 1 else value
    return value


def _text_key(key: object) -> str:
    if not isinstance(key, str):
        raise TypeError(f"dict keys must be texts, not {key!r}")
    return key


def _shorten(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else re.sub(r"\s+", " ", text)[: limit - 1] + "…"


def _number(value: Any) -> Number | None:
    scalar = _builtin_scalar(decode_json(value))
    if scalar is not None and not isinstance(scalar, (bool, int, float)):
        raise ValueError("give a number, True, False or None")
    return scalar


def _interval(value: Any) -> tuple[float, float] | None:
    if value is None:
        return None
    ends = tuple(_builtin_scalar(decode_json(end)) for end in value)
    if len(ends) != 2 or not all(isinstance(end, (int, float)) for end in ends) or ends[0] > ends[1]:
        raise ValueError("give (low, high)")
    return float(ends[0]), float(ends[1])


def _target(value: Any) -> Target | None:
    target = _interval(value) if isinstance(value, (tuple, list)) else _number(value)
    ends = target if isinstance(target, tuple) else (target,)
    if any(end is not None and math.isnan(end) for end in ends):
        raise ValueError("no value can meet NaN")
    return target


def _count(value: Any) -> int | None:
    scalar = _builtin_scalar(value)
    if scalar is not None and (isinstance(scalar, bool) or not isinstance(scalar, int) or scalar < 1):
        raise ValueError("give the number of samples, at least 1")
    return scalar


def _details(value: Any) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", decode_json(encode_json(dict(value))))
    except TypeError as error:
        raise ValueError(str(error)) from error


def _rows(value: Any) -> tuple[tuple[Any, ...], ...]:
    rows = tuple(tuple(_builtin_scalar(decode_json(cell)) for cell in row) for row in value)
    for cell in (cell for row in rows for cell in row):
        if not (cell is None or isinstance(cell, (bool, int, float, str))):
            raise ValueError(f"{_shorten(repr(cell))} is not a number, text or None")
    return rows


def _schema(*kinds: str) -> dict[str, Any]:
    """JSON schema of numbers and of others of these kinds."""
    spelled = {
        "type": "object",
        "properties": {"nonfinite": {"enum": list(_NONFINITE)}},
        "required": ["nonfinite"],
        "additionalProperties": False,
    }
    return {"anyOf": [*({"type": kind} for kind in ("boolean", "number", *kinds)), spelled]}


_JSON = PlainSerializer(encode_json, when_used="json")
_REAL = WithJsonSchema(_schema("null"))
_PAIR = {"type": "array", "items": _schema(), "minItems": 2, "maxItems": 2}
_CELLS = {"type": "array", "items": {"type": "array", "items": _schema("null", "string")}}
_AS_TUPLE = BeforeValidator(lambda values: values if isinstance(values, str) else tuple(values))
_Text: TypeAlias = Annotated[str, Field(min_length=1)]
_PAIRS_OF_TEXT = BeforeValidator(lambda pairs: tuple(tuple(pair) for pair in pairs))
_CONFIG = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_CONFIG)
class _ReportPart:
    """Base class of all parts: a wrong field is a `UsageError` that names the part, the field and the value."""

    @model_validator(mode="wrap")
    @classmethod
    def _checked(cls, data: Any, handler: Any) -> Any:
        try:
            return handler(data)
        except ValidationError as error:
            fault = error.errors()[0]
        names = [field.name for field in dataclasses.fields(cls)]
        given = dict(data) if isinstance(data, Mapping) else {}
        if isinstance(data, ArgsKwargs):
            positional = [field.name for field in dataclasses.fields(cls) if not field.kw_only]
            given = {**dict(zip(positional, data.args, strict=False)), **(data.kwargs or {})}
        first = fault["loc"][0] if fault["loc"] else None
        field = first if not isinstance(first, int) else names[first]
        what = f"{cls.__name__} {given.get('name', given.get('title', ''))!r}"
        reason = fault["msg"].removeprefix("Value error, ")
        if field in given:
            raise UsageError(f"{what}: {field} is {_shorten(repr(given[field]))};", cure=f"{reason}.")
        raise UsageError(f"{what}: {reason}.", cure=f"See {field!r}." if field else None)


@dataclass(frozen=True, config=_CONFIG)
class Finding(_ReportPart):
    """A measured value, with its interval, its target and how it was measured.

    Attributes:
        name: What was measured, in words a reader understands ("ratio, MiniLM as bf16").
        value: The measurement: a number, a truth value, or None when it could not be measured (say why in
            `detail["reason"]`). numpy and torch scalars are accepted and become Python numbers. NaN and infinities
            are kept: an attack that diverged is a fact too.
        ci95: Lower and upper end of a 95 % interval, in the unit of the value. It is not shown where n is 1.
        n: Number of independent samples behind the value; at least 1.
        unit: Unit in plain text ("GB/s", "bits/weight", "%"); empty for ratios, counts and truth values.
        better: Which direction is better, or None when there is none.
        target: What the value should be. A number is a bound, inclusive, in the direction of `better`; without
            `better` it must be equalled. A pair `(low, high)` is an inclusive range, whatever `better` says.
        baseline: The same quantity for the thing compared with, in the same unit.
        control: Whether the same attack broke what it must break to show anything, such as the undefended model:
            "broken" or "held"; None where the measurement needs no control. A target that is met counts only where the
            control is not "held".
        seeds: Every random seed that the value depends on.
        detail: Further facts, JSON values only (numbers, texts, truth values, None, lists, dicts with text keys).
        command: The command line that makes this number, when it differs from the report's.

    Raises:
        UsageError: A field is invalid: an empty name, an interval with its ends swapped, a target that is NaN,
            details that JSON cannot hold.
    """

    name: _Text
    value: Annotated[Number | None, PlainValidator(_number), _JSON, _REAL]
    _: KW_ONLY
    ci95: Annotated[
        tuple[float, float] | None,
        PlainValidator(_interval),
        _JSON,
        WithJsonSchema({"anyOf": [_PAIR, {"type": "null"}]}),
    ] = None
    n: Annotated[
        int | None,
        PlainValidator(_count),
        WithJsonSchema({"anyOf": [{"type": "integer", "minimum": 1}, {"type": "null"}]}),
    ] = None
    unit: str = ""
    better: Better | None = None
    target: Annotated[
        Target | None, PlainValidator(_target), _JSON, WithJsonSchema({"anyOf": [*_schema("null")["anyOf"], _PAIR]})
    ] = None
    baseline: Annotated[Number | None, PlainValidator(_number), _JSON, _REAL] = None
    control: Literal["broken", "held"] | None = None
    seeds: Annotated[tuple[Annotated[int, BeforeValidator(_builtin_scalar)], ...], _AS_TUPLE] = ()
    detail: Annotated[Mapping[str, Any], PlainValidator(_details), _JSON, WithJsonSchema({"type": "object"})] = (
        dataclasses.field(default_factory=dict, hash=False)
    )
    command: str | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _verdict_follows_from_the_numbers(cls, data: Any, handler: Any) -> Any:
        given = dict(data) if isinstance(data, Mapping) else {}
        stated = given.pop("passed", None)
        finding: Finding = handler(given or data)
        if stated is not None and finding.passed != stated:
            raise UsageError(f"Finding {finding.name!r} states passed = {stated}, which contradicts its numbers.")
        return finding

    @model_validator(mode="after")
    def _has_a_name(self) -> Self:
        if not self.name.strip():
            raise UsageError(
                "A finding needs a name.", cure="Give a name of a few words that states what was measured."
            )
        return self

    @computed_field  # type: ignore[prop-decorator]
    @property
    def passed(self) -> bool | None:
        """True if the value meets its target; None without target, measurement, or broken control.

        NaN meets no target. A value that misses its target misses it, whatever the control did.
        """
        if self.target is None or self.value is None:
            return None
        return None if self._meets and self.control == "held" else self._meets

    @property
    def _meets(self) -> bool:
        """True if the value meets the target; both are there."""
        assert self.value is not None
        assert self.target is not None
        if isinstance(self.target, tuple):
            return self.target[0] <= self.value <= self.target[1]
        if self.better == "higher":
            return self.value >= self.target
        if self.better == "lower":
            return self.value <= self.target
        return self.value == self.target

    @property
    def interval(self) -> tuple[float, float] | None:
        """The interval to show: none for a single sample, which has no spread."""
        return self.ci95 if self.n != 1 else None

    def to_json(self) -> dict[str, Any]:
        """Return this finding as a JSON value; NaN and infinities become `{"nonfinite": "NaN"}` and the like."""
        return cast("dict[str, Any]", _FINDING.dump_python(self, mode="json"))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_json` wrote; `passed` is computed again, never trusted.

        Args:
            data: A JSON object as `to_json` returns it. Fields left out take their defaults.

        Raises:
            UsageError: A field is unknown, `name` or `value` is missing, or a value is refused.
        """
        unknown = sorted(data.keys() - cls.__dataclass_fields__.keys() - {"passed"})
        if unknown or not {"name", "value"} <= data.keys():
            what = f"has unknown fields {unknown}" if unknown else "lacks name or value"
            raise UsageError(
                f"A stored finding {what}.", cure="If a newer release of netweight wrote it, install that release."
            )
        return _FINDING.validate_python({key: value for key, value in data.items() if key != "passed"})


_FINDING: TypeAdapter[Finding] = TypeAdapter(Finding)


@dataclass(frozen=True, config=_CONFIG)
class Column(_ReportPart):
    """A column of a table: its heading, the unit of its numbers in plain text, and which direction is better."""

    name: str
    """Heading of the column."""
    unit: str = ""
    """Unit of the numbers, in plain text; empty for none."""
    better: Better | None = None
    """Better direction of the numbers; None where neither is better."""


@dataclass(frozen=True, config=_CONFIG)
class Table(_ReportPart):
    """A table: headings (a text is a column without a unit), rows of numbers, texts or None, notes below."""

    title: str
    """Heading of the table."""
    columns: Annotated[
        Sequence[Column | str],
        BeforeValidator(lambda given: tuple(Column(each) if isinstance(each, str) else each for each in given)),
        Field(min_length=1),
    ]
    """Columns; a text is a column without a unit."""
    rows: Annotated[Sequence[Sequence[Any]], PlainValidator(_rows), _JSON, WithJsonSchema(_CELLS)]
    """Rows of numbers, texts or None, with one cell for each column."""
    notes: Annotated[Sequence[str], _AS_TUPLE] = ()
    """Sentences below the table."""

    @model_validator(mode="after")
    def _rows_fit_columns(self) -> Self:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise UsageError(
                    f"Table {self.title!r}: row {number} has {len(row)} cells for {len(self.columns)} columns.",
                    cure="Give one cell for each column; None is shown as a dash.",
                )
        return self


@dataclass(frozen=True, config=_CONFIG)
class Figure(_ReportPart):
    """A picture, inline: an SVG element as text, or a PNG file in base64.

    `alt` says what it shows to a reader who cannot see it: the message, not "a plot". `caption` is the line below it.
    """

    kind: Literal["svg", "png"]
    """Format of the picture."""
    data: str
    """An SVG element as text, or a PNG file in base64."""
    alt: _Text
    """Message of the picture, for readers who cannot see it."""
    caption: str = ""
    """Text below the picture."""


@dataclass(frozen=True, config=_CONFIG)
class Section(_ReportPart):
    """A question with its findings, as an audit returns it and as page, terminal and model card show it.

    Attributes:
        title: Heading; different from those of the other sections of a report.
        findings: What was measured, in the order to show.
        chapter: Title of the chapter that it belongs to; set when it is added to a report.
        intro: A few plain sentences: what this is about and how to read it. A blank line starts a paragraph.
        question: What was asked, one sentence, for the summary table.
        conclusion: What was found, one sentence in plain words, from a `Conclusion`; without it the findings with
            targets are counted.
        outcome: What the conclusion comes to, from the same `Conclusion`; None where nothing is judged.
        treatment: The treatment that the section is about.
        audits: Names of the audits of the treatment that ran.
        missing_audits: Names of those that did not run; shown in red. `audit.of_treatment` fills in all three.
        tested: What was tested, and how strongly: names and values, such as "attacks" and "12 from 3 seeds". The card
            of a model shows them beside the findings, which cannot be judged without them.
        conditions: What must be done before publishing, whatever was measured, each as the end of the sentence
            "Publish, …, but first …", such as "remove forget, with which anybody can undo the edit".
        warnings: Further sentences to show in red.
        tables: Further tables.
        figures: Pictures, each with a text alternative.
    """

    title: _Text
    chapter: str = dataclasses.field(default="", kw_only=True)
    intro: str = dataclasses.field(default="", kw_only=True)
    question: str = dataclasses.field(default="", kw_only=True)
    conclusion: str = dataclasses.field(default="", kw_only=True)
    outcome: Outcome | None = dataclasses.field(default=None, kw_only=True)
    treatment: str | None = dataclasses.field(default=None, kw_only=True)
    audits: Annotated[Sequence[str], _AS_TUPLE] = dataclasses.field(default=(), kw_only=True)
    missing_audits: Annotated[Sequence[str], _AS_TUPLE] = dataclasses.field(default=(), kw_only=True)
    tested: Annotated[Sequence[tuple[str, str]], _PAIRS_OF_TEXT] = dataclasses.field(default=(), kw_only=True)
    conditions: Annotated[Sequence[str], _AS_TUPLE] = dataclasses.field(default=(), kw_only=True)
    warnings: Annotated[Sequence[str], _AS_TUPLE] = dataclasses.field(default=(), kw_only=True)
    findings: Annotated[Sequence[Finding], _AS_TUPLE] = ()
    tables: Annotated[Sequence[Table], _AS_TUPLE] = dataclasses.field(default=(), kw_only=True)
    figures: Annotated[Sequence[Figure], _AS_TUPLE] = dataclasses.field(default=(), kw_only=True)

    def to_json(self) -> dict[str, Any]:
        """Return this section as a JSON value."""
        return cast("dict[str, Any]", _SECTION.dump_python(self, mode="json"))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Section:
        """Return the section that `to_json` wrote.

        Args:
            data: A JSON object as `to_json` returns it.
        """
        return _SECTION.validate_python(data)


_SECTION: TypeAdapter[Section] = TypeAdapter(Section)


@dataclass(frozen=True, config=_CONFIG, kw_only=True)
class Chapter(_ReportPart):
    """Sections about one thing: what was asked, what was found, and a verdict in plain words.

    `outcome` colors the verdict: "holds", "partly", "broken" where an attack still succeeds or a target is missed, or
    "told" where nothing is judged. `command` makes all numbers of its sections.
    """

    title: _Text
    """Heading of the chapter."""
    question: _Text
    """Question that the chapter answers."""
    conclusion: _Text
    """Answer to the question."""
    verdict: _Text
    """Verdict on the chapter, in plain words."""
    outcome: Outcome
    """Outcome that colors the verdict."""
    intro: str = ""
    """Text before the sections."""
    command: str | None = None
    """Command line that makes the numbers of the sections."""


@dataclass(frozen=True, config=_CONFIG, kw_only=True)
class Provenance(_ReportPart):
    """Origin of a report: time, command line, seeds, digests of inputs by name, versions and machine.

    `weights` has the digest of the weights of each model that was tested, by its name, as `store.weights_digest` makes
    it: the verdict is about these weights, and about no later ones.
    """

    created: str
    """Time at which the report was made."""
    command: str | None = None
    """Command line that made the numbers."""
    seeds: tuple[int, ...] = ()
    """Seeds of the whole run."""
    inputs: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name of each input → its digest."""
    weights: dict[str, str] = dataclasses.field(default_factory=dict)
    """Name of each model that was tested → the digest of its weights."""
    environment: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Versions of libraries, and the machine."""
