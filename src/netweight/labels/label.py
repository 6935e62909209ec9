"""The label as data: rows in groups, each measured, a warning, or not measured, and what each row was measured on.

Everything that shows a label (terminal, picture, page, card, badge, comparison) reads this form, and `label.json` holds
it without loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Self, final

import pydantic

from netweight.core.bounded_json import read_json
from netweight.errors import UsageError

State = Literal["measured", "warning", "not measured"]
SCHEMA = "https://json-schema.org/draft/2020-12/schema"
FORMAT = 1  # version of `label.json`


class _LabelPart(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


@final
class Row(_LabelPart):
    """One line of a label."""

    key: str
    """Name for programs, unique within the label, such as `net_weight`."""
    title: str
    """Name for people, such as "Net weight, lossless"."""
    value: str
    """The value in units that people use, such as "0.82 GB"; for a row that was not measured, the options
    that measure it, or the reason."""
    state: State = "measured"
    """State of the row: measured, measured and in need of attention, or not measured."""
    number: float | None = None
    """The same value as a number in the unit of `unit`, where the value is one number."""
    unit: str = ""
    """Unit of `number`: "bytes", "percent", "tensors", "bits per weight", …; empty for a plain count or ratio."""
    basis: str = ""
    """Basis of the measurement, such as "290 of 290 tensors"; empty if the group's basis applies."""
    indent: int = 0
    """Depth in the label: 0 for a main row, 1 for a row below it."""
    strong: bool = False
    """True if the row is set in bold."""
    detail: dict[str, Any] = {}
    """Further facts for programs, JSON values only."""


@final
class RowGroup(_LabelPart):
    """Rows about one subject, such as the weights or the files."""

    title: str
    """Heading, such as "Weight"."""
    anchor: str
    """Heading in the documentation page `label-rows.md` that explains the rows."""
    rows: tuple[Row, ...]
    """The rows, in the order in which they are shown."""
    basis: str = ""
    """Basis of the measurements, if it is the same for all rows."""


@final
class LayerChange(_LabelPart):
    """Change of one layer against the base."""

    layer: str
    """Name of the layer: the tensors' common prefix, such as `model.layers.3`."""
    change: float
    """Frobenius norm of the difference divided by that of the base, over all compared tensors of the layer."""


@final
class Label(_LabelPart):
    """Label of a model's files, in groups of rows; made by `netweight.label`."""

    format: int = FORMAT
    """Version of this form."""
    name: str
    """Name of the model: its folder or file, without the path."""
    kind: str
    """Kind of the files, such as "language model (Qwen2ForCausalLM)"."""
    groups: tuple[RowGroup, ...]
    """The rows, by subject."""
    layers: tuple[LayerChange, ...] = ()
    """Change of every layer against `--base`, in the order of the file; empty without a base."""
    made_with: str = ""
    """Name and version of the program that made the label."""
    created: str = ""
    """Date on which it was made, as YYYY-MM-DD."""
    digest: str = ""
    """Digest of what was read, over names, types, shapes and contents of all tensors."""

    @property
    def rows(self) -> Iterator[Row]:
        """All rows, in order."""
        return (row for group in self.groups for row in group.rows)

    @property
    def audited(self) -> bool:
        """True if audits ran the model for some rows."""
        return any(group.anchor == "behavior" for group in self.groups)

    def row(self, key: str) -> Row:
        """Return the row of a key.

        Args:
            key: Its name for programs.

        Raises:
            KeyError: The label has no such row.
        """
        for row in self.rows:
            if row.key == key:
                return row
        raise KeyError(key)

    def to_json(self) -> dict[str, Any]:
        """Return the label as a JSON value, which `from_json` reads."""
        return self.model_dump(mode="json")

    @classmethod
    def from_json(cls, value: Any) -> Self:
        """Return the label that a JSON value contains.

        Args:
            value: What `to_json` returned.

        Raises:
            UsageError: It is not a label, or one of another version.
        """
        try:
            label = cls.model_validate(value)
        except pydantic.ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(map(str, problem["loc"]))
            raise UsageError(f"This is not a label: {place}: {problem['msg']}.") from None
        if label.format != FORMAT:
            raise UsageError(f"The label has version {label.format}; this release reads version {FORMAT}.")
        return label

    @classmethod
    def read(cls, file: str | Path) -> Self:
        """Read a `label.json`.

        Args:
            file: The file.

        Raises:
            UsageError: It contains no label.
        """
        try:
            value = read_json(Path(file))
        except ValueError as error:
            raise UsageError(f"{file} is not valid JSON: {error}.") from None
        return cls.from_json(value)

    @classmethod
    def json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema (2020-12) of `label.json`."""
        return {"$schema": SCHEMA, **cls.model_json_schema()}
