"""Attributes of the models of a space, read from a table or from JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import torch
from torch import Tensor

from netweight.core.names import nearest_names
from netweight.data.rows import DataRow, read_rows
from netweight.errors import NameNotFound, UsageError

_WORDS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
_MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}


@final
@dataclass(frozen=True, eq=False)
class LabelColumn:
    """One attribute of every model."""

    name: str
    """Name of the attribute."""
    values: Tensor
    """Shape `(n,)`, fp64, one per model of the space in its order; NaN where unknown."""

    def __post_init__(self) -> None:
        values = torch.as_tensor(self.values, dtype=torch.float64, device="cpu")
        if values.ndim != 1 or values.isinf().any():
            raise UsageError(
                f"The labels {self.name!r} are of shape {tuple(values.shape)} or contain infinity.",
                cure="Give one finite number per model, NaN where it is unknown.",
            )
        object.__setattr__(self, "values", values)

    @property
    def known(self) -> Tensor:
        """Mask of the known values, shape `(n,)`, bool."""
        return ~self.values.isnan()

    @property
    def levels(self) -> list[float]:
        """The different values, rising."""
        return sorted(set(self.values[self.known].tolist()))

    @property
    def kind(self) -> Literal["binary", "continuous"]:
        """Binary where there are two different values or fewer."""
        return "binary" if len(self.levels) <= 2 else "continuous"

    @property
    def positive(self) -> Tensor:
        """True where the value is the larger of the two, shape `(n,)`, bool; False where unknown."""
        self.check()
        if self.kind != "binary":
            raise UsageError(
                f"{self.name!r} has {len(self.levels)} values, not two.", cure="Use `values`: the label is continuous."
            )
        return self.known & (self.values == self.levels[1])

    def check(self, least: int = 2) -> None:
        """Refuse labels from which no direction can be estimated.

        Args:
            least: Models that must be known, of each class if the labels are binary.
        """
        count, levels = int(self.known.sum()), self.levels
        if len(levels) < 2:
            what = "no known value" if not levels else f"one value alone, {levels[0]:g}, in {count} models"
            raise UsageError(
                f"The label {self.name!r} has {what}: no direction can be computed.",
                cure="Label models of both classes.",
            )
        rarest = min(int((self.values == level).sum()) for level in levels) if self.kind == "binary" else count
        if rarest < least:
            what = "of one class" if self.kind == "binary" else "with a known value"
            raise UsageError(
                f"The label {self.name!r} has only {rarest} models {what}, and {least} are needed.",
                cure="Label more models, or cross-validate in fewer folds.",
            )


@final
@dataclass(frozen=True, eq=False)
class Labels:
    """Columns about the models of a space."""

    names: tuple[str, ...]
    """Names of the models, in the space's order."""
    columns: Mapping[str, LabelColumn]
    """Name → column, as many values as models."""

    def __getitem__(self, name: str) -> LabelColumn:
        """Return a column."""
        if name not in self.columns:
            near = ", ".join(map(repr, nearest_names(name, self.columns)))
            raise NameNotFound(f"There is no column {name!r}.", cure=f"The nearest are {near}.")
        return self.columns[name]


def read_labels(
    path: str | Path, names: Sequence[str], *, columns: Sequence[str] | None = None, key: str = "name"
) -> Labels:
    """Read attributes of the models of a space.

    Args:
        path: A table of one row per model: CSV, TSV, JSON, JSON Lines or Parquet; or a JSON object of rows by model.
        names: Names of the models, in the space's order.
        columns: The attributes to read; None for all.
        key: The column that names the model.

    Returns:
        The labels; NaN where the file says nothing of a model.

    Raises:
        NameNotFound: There is no such column, or the file names a model that is not in the space.
        UsageError: The file cannot be read, names a model twice, or holds what is not a number.
    """
    path = Path(path)
    rows = read_rows(path, key=key)
    rows.need(key, *(columns or ()), by="")
    numbers = {name: number for number, name in enumerate(names)}
    labeled: set[str] = set()
    selected = [column for column in rows.columns if column != key] if columns is None else list(columns)
    values_by_column = {column: torch.full((len(names),), torch.nan, dtype=torch.float64) for column in selected}
    for row in rows.rows:
        name = _model(path, row, key, numbers, labeled)
        for column in selected:
            values_by_column[column][numbers[name]] = _number(path, name, column, row.values.get(column))
    if not values_by_column:
        raise UsageError(f"{path} contains no label.", cure=f"Give at least one column beside {key!r}.")
    return Labels(tuple(names), {name: LabelColumn(name, values) for name, values in values_by_column.items()})


def check_columns(path: str | Path, columns: Sequence[str], *, key: str = "name") -> None:
    """Check that a file of labels can be read and has columns, where the models are not known yet."""
    read_rows(path, key=key).need(key, *columns, by="")


def _model(path: Path, row: DataRow, key: str, numbers: Mapping[str, int], labeled: set[str]) -> str:
    """The model that a row is about, checked."""
    if row.values.get(key) is None:
        raise UsageError(f"{path}, {row.where}, does not name a model.", cure=f"Give its name in the column {key!r}.")
    name = str(row.values[key]).strip()
    if name not in numbers:
        near = ", ".join(map(repr, nearest_names(name, numbers)))
        raise NameNotFound(
            f"{path} labels {name!r}, which is not in the space.", cure=f"Leave it out; the nearest names are {near}."
        )
    if name in labeled:
        raise UsageError(f"{path} labels {name!r} twice.", cure="Leave one of the two out.")
    labeled.add(name)
    return name


def _number(path: Path, name: str, column: str, value: object) -> float:
    if value is None or (isinstance(value, str) and value.strip().lower() in _MISSING):
        return float("nan")
    if isinstance(value, bool | int | float):
        return float(value)
    word = str(value).strip().lower()
    try:
        return _WORDS[word] if word in _WORDS else float(word)
    except ValueError:
        raise UsageError(
            f"{path} has the value {value!r} of {name!r} in {column!r}, which is not a number.",
            cure="Write numbers, or 1 and 0 for two classes; leave a cell empty where it is unknown.",
        ) from None
