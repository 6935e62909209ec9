"""One measured fact: a name, a value, how sure we are of it, and what it was supposed to be.

Every audit returns findings and every report is made of them. A finding is plain data: it can be written to JSON
and read back without loss, and it imports nothing beyond the standard library.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Literal, TypeAlias, cast

from netweight.errors import UsageError

__all__ = ["Better", "Finding", "Number", "Target", "decode_json", "encode_json"]

Number: TypeAlias = bool | int | float
Target: TypeAlias = Number | tuple[float, float]
Better: TypeAlias = Literal["higher", "lower"]

_NONFINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class Finding:
    """One measured fact, with its interval, its target and how it came about.

    Args:
        name: What was measured, in words a reader understands ("ratio, MiniLM as bf16").
        value: The measurement: a number, a truth value, or None when it could not be measured (say why in
            `detail["reason"]`). numpy and torch scalars are accepted and become Python numbers. NaN and infinities
            are kept: an attack that diverged is a fact too.
        ci95: Lower and upper end of a 95 % interval, in the unit of the value.
        n: Number of independent samples behind the value; at least 1.
        unit: Unit in plain text ("GB/s", "bits/weight", "%"); empty for ratios, counts and truth values.
        better: Which direction is better, or None when there is none.
        target: What the value should be. A number is a bound, inclusive, in the direction of `better`; without
            `better` it must be equalled. A pair `(low, high)` is an inclusive range, whatever `better` says.
        baseline: The same quantity for the thing compared with, in the same unit.
        seeds: Every random seed that the value depends on.
        detail: Further facts, JSON values only (numbers, texts, truth values, None, lists, dicts with text keys).
        command: The command line that makes this number, when it differs from the report's.

    Raises:
        UsageError: A field has a value that cannot be meant: an empty name, an interval with its ends swapped,
            a target that is NaN, details that JSON cannot hold.
    """

    name: str
    value: Number | None
    _: KW_ONLY
    ci95: tuple[float, float] | None = None
    n: int | None = None
    unit: str = ""
    better: Better | None = None
    target: Target | None = None
    baseline: Number | None = None
    seeds: tuple[int, ...] = ()
    detail: Mapping[str, Any] = field(default_factory=dict, hash=False)
    command: str | None = None

    def __post_init__(self) -> None:
        """Bring every field to its plain Python type and refuse what cannot be meant."""
        if not isinstance(self.name, str) or not self.name.strip():
            raise UsageError("A finding needs a name.", cure="Say in a few words what was measured.")
        if self.better not in (None, "higher", "lower"):
            raise self._refuse("better", self.better, 'use "higher", "lower" or None')
        set_ = object.__setattr__  # the dataclass is frozen for everybody else
        set_(self, "value", self._number("value", self.value))
        set_(self, "baseline", self._number("baseline", self.baseline))
        set_(self, "ci95", self._pair("ci95", self.ci95))
        set_(self, "target", self._target())
        set_(self, "n", self._count())
        set_(self, "seeds", tuple(int(seed) for seed in self.seeds))
        set_(self, "detail", self._details())

    @property
    def passed(self) -> bool | None:
        """Whether the value meets its target; None when there is no target or nothing was measured.

        NaN meets no target.
        """
        if self.target is None or self.value is None:
            return None
        if isinstance(self.target, tuple):
            return self.target[0] <= self.value <= self.target[1]
        if self.better == "higher":
            return self.value >= self.target
        if self.better == "lower":
            return self.value <= self.target
        return self.value == self.target

    def to_json(self) -> dict[str, Any]:
        """Return this finding as a JSON value; NaN and infinities become `{"nonfinite": "NaN"}` and the like."""
        fields = {
            "name": self.name,
            "value": self.value,
            "ci95": self.ci95,
            "n": self.n,
            "unit": self.unit,
            "better": self.better,
            "target": self.target,
            "baseline": self.baseline,
            "seeds": self.seeds,
            "detail": dict(self.detail),
            "command": self.command,
            "passed": self.passed,
        }
        return cast("dict[str, Any]", encode_json(fields))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Finding:
        """Return the finding that `to_json` wrote; `passed` is computed again, never trusted.

        Args:
            data: A JSON object as `to_json` returns it. Fields left out take their defaults.

        Raises:
            UsageError: A field is unknown, `name` or `value` is missing, or a value is refused.
        """
        fields = dict(cast("Mapping[str, Any]", decode_json(dict(data))))
        fields.pop("passed", None)
        unknown = sorted(fields.keys() - cls.__dataclass_fields__.keys())
        if unknown or not {"name", "value"} <= fields.keys():
            what = f"has unknown fields {unknown}" if unknown else "lacks name or value"
            raise UsageError(f"A stored finding {what}.", cure="Was it written by a newer netweight?")
        for key in ("ci95", "target", "seeds"):
            if isinstance(fields.get(key), list):
                fields[key] = tuple(fields[key])
        return cls(**fields)

    def _refuse(self, where: str, value: object, cure: str) -> UsageError:
        return UsageError(f"Finding {self.name!r}: {where} is {value!r}, which cannot be meant;", cure=f"{cure}.")

    def _number(self, where: str, value: Any) -> Number | None:
        plain = _plain(value)
        if plain is not None and not isinstance(plain, (bool, int, float)):
            raise self._refuse(where, value, "give a number, True, False or None")
        return plain

    def _pair(self, where: str, value: Any) -> tuple[float, float] | None:
        if value is None:
            return None
        ends = tuple(_plain(end) for end in value)
        if len(ends) != 2 or not all(isinstance(end, (int, float)) for end in ends) or ends[0] > ends[1]:
            raise self._refuse(where, value, "give (low, high)")
        return float(ends[0]), float(ends[1])

    def _target(self) -> Target | None:
        pair = isinstance(self.target, (tuple, list))
        target = self._pair("target", self.target) if pair else self._number("target", self.target)
        ends = target if isinstance(target, tuple) else (target,)
        if any(end is not None and math.isnan(end) for end in ends):
            raise self._refuse("target", self.target, "no value can meet NaN")
        return target

    def _count(self) -> int | None:
        plain = _plain(self.n)
        if plain is not None and (isinstance(plain, bool) or not isinstance(plain, int) or plain < 1):
            raise self._refuse("n", self.n, "give the number of samples, at least 1")
        return plain

    def _details(self) -> dict[str, Any]:
        try:
            return cast("dict[str, Any]", decode_json(encode_json(dict(self.detail))))
        except TypeError as error:
            raise self._refuse("detail", self.detail, str(error)) from error


def encode_json(value: object) -> object:
    """Return `value` with plain Python types only, tuples as lists and non-finite numbers spelled out.

    Args:
        value: Nested dicts (text keys), lists, tuples, numbers (of numpy and torch too), texts, truth values, None.

    Returns:
        The same, fit for `json.dumps(..., allow_nan=False)`; NaN is `{"nonfinite": "NaN"}`, infinities likewise.

    Raises:
        TypeError: Something in it is not a JSON value, or a dict key is not a text.
    """
    value = _plain(value)
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


def _plain(value: Any) -> Any:
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
