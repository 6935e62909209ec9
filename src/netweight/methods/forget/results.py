"""What localization found, prompt by prompt: as JSON, and in the format of the paper's code."""

from __future__ import annotations

import ast
import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self, final

from netweight.core.units import Units
from netweight.errors import CorruptBlob, UsageError
from netweight.methods.forget.layers import ValueLayer
from netweight.store.atomic import whole_file

__all__ = [
    "Localization",
    "read_localizations",
    "read_neurons",
    "read_published",
    "write_published",
    "write_results",
]

Status = Literal["resolved", "unresolved", "not memorized", "failed"]

_VERSION = 1
_COLUMNS = ("Caption", "URL", "Initial Neurons", "Initial SSIM", "Refined Neurons", "Refined SSIM")


@final
@dataclass(frozen=True)
class Localization:
    """The neurons of one prompt.

    Attributes:
        prompt: The prompt.
        status: "resolved" if blocking the neurons brings all seeds to the threshold; "unresolved" if even the last
            stage did not; "not memorized" if no neuron was looked for; "failed" if the search ended in an error.
        neurons: The neurons to block.
        initial: For each layer, those chosen before refinement, in order; repeated where both rules chose one and
            fidelity is "reference".
        refined: The same after refinement.
        theta: Of the stage that they were chosen at; None if there was none.
        top: k of that stage.
        seeds: For each seed the greatest similarity to another, nothing blocked.
        kept: How many of them lie above the threshold.
        threshold: The threshold.
        refinement_threshold: What refinement had to keep to: the threshold, or what was reached.
        initial_similarity: Greatest over kept seeds of the similarity to what is predicted with nothing blocked.
        refined_similarity: The same after refinement.
        rows: Rows that went through the denoiser.
        error: What went wrong.
        broken: What similarities had to fall to.
        steps: For "detection", "initial selection" and "refinement", as far as they were gone through: "seconds" and
            "processor seconds" that it took, "rows" and "calls" of the denoiser; of what several prompts shared, the
            share of its rows. Not looked at in comparisons.
    """

    prompt: str
    status: Status
    neurons: Units
    initial: Mapping[str, Sequence[int]]
    refined: Mapping[str, Sequence[int]]
    theta: float | None = None
    top: int | None = None
    seeds: tuple[float, ...] = ()
    kept: int = 0
    threshold: float | None = None
    refinement_threshold: float | None = None
    initial_similarity: float | None = None
    refined_similarity: float | None = None
    rows: int = 0
    error: str | None = None
    broken: float | None = None
    steps: Mapping[str, Mapping[str, float]] = field(default_factory=dict, compare=False)

    @classmethod
    def not_memorized(
        cls,
        prompt: str,
        seeds: Sequence[float],
        threshold: float,
        steps: Mapping[str, Mapping[str, float]] | None = None,
    ) -> Self:
        """Say that a prompt has no neurons.

        Args:
            prompt: The prompt.
            seeds: Its similarity, seed by seed.
            threshold: What it was compared with.
            steps: What the looking cost, by step; None if it was not measured.
        """
        return cls(
            prompt, "not memorized", Units(), {}, {}, seeds=tuple(seeds), threshold=threshold, rows=len(seeds),
            steps=steps or {},
        )  # fmt: skip

    @classmethod
    def failed(cls, prompt: str, error: str) -> Self:
        """Say that a prompt's search ended in an error.

        Args:
            prompt: The prompt.
            error: What went wrong.
        """
        return cls(prompt, "failed", Units(), {}, {}, error=error)

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "neurons"}
        return {**values, "seeds": list(self.seeds), "neurons": json.loads(self.neurons.to_json())}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned.

        Args:
            values: JSON values.

        Raises:
            CorruptBlob: It is something else.
        """
        try:
            neurons = Units.from_json(json.dumps(values["neurons"]))
            return cls(**{**values, "neurons": neurons, "seeds": tuple(values["seeds"])})
        except (KeyError, TypeError, UsageError) as error:
            raise CorruptBlob(f"This is no localization: {error}.", cure="Localize anew.") from None


def write_results(path: str | Path, found: Sequence[Localization], *, model: str) -> None:
    """Write localizations as one JSON file, over one that is there.

    Args:
        path: The file.
        found: The localizations.
        model: Digest of the model's denoiser.

    Raises:
        OutputFailed: The place cannot be written.
    """
    content = {"version": _VERSION, "model": model, "prompts": [each.to_json() for each in found]}
    with whole_file(Path(path), overwrite=True) as file:
        file.write(json.dumps(content, indent=1, ensure_ascii=False).encode())


def read_neurons(path: str | Path, layers: Mapping[str, ValueLayer]) -> tuple[Units, str | None]:
    """Read neurons from any file that holds some: all of its prompts' together.

    Args:
        path: What `write_results` wrote, the JSON of `Units`, or a `.csv` of the paper's code.
        layers: Of the model, for the latter.

    Returns:
        Neurons, and the digest of the model they were found in if the file says it.

    Raises:
        UsageError: The file cannot be read or holds no neurons.
    """
    found, model = _read(Path(path), layers)
    return found if isinstance(found, Units) else _union(found), model


def read_localizations(path: str | Path, layers: Mapping[str, ValueLayer]) -> list[Localization]:
    """Read what a file of `read_neurons` says prompt by prompt; nothing of one that holds neurons alone.

    Args:
        path: The file.
        layers: Of the model that it belongs to.

    Returns:
        What was found, prompt by prompt.

    Raises:
        UsageError: The file cannot be read or holds no neurons.
    """
    found, _ = _read(Path(path), layers)
    return [] if isinstance(found, Units) else found


def _read(path: Path, layers: Mapping[str, ValueLayer]) -> tuple[Units | list[Localization], str | None]:
    if path.suffix == ".csv":
        return read_published(path, layers), None
    try:
        text = path.read_text()
        content = json.loads(text)
        if "prompts" not in content:
            return Units.from_json(text), None
        return [Localization.from_json(each) for each in content["prompts"]], content["model"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            f"The neurons in {path} cannot be read: {error}.", cure="Give a file of netweight forget localize."
        ) from None


def write_published(path: str | Path, found: Sequence[Localization], layers: Mapping[str, ValueLayer]) -> None:
    """Write the table of the paper's code, over one that is there: a row per prompt, neurons as lists of lists.

    Prompts without neurons have empty lists; what the columns cannot say, such as their status, is in the JSON.

    Args:
        path: The file.
        found: What was found, prompt by prompt.
        layers: Of the model, in their order.

    Raises:
        OutputFailed: The place cannot be written.
    """
    rows = io.StringIO()
    writer = csv.writer(rows, delimiter=";", lineterminator="\n")
    writer.writerow(_COLUMNS)
    for each in found:
        lists = [[list(part.get(name, ())) for name in layers] for part in (each.initial, each.refined)]
        writer.writerow([each.prompt, "", lists[0], each.initial_similarity, lists[1], each.refined_similarity])
    with whole_file(Path(path), overwrite=True) as file:
        file.write(rows.getvalue().encode())


def read_published(path: str | Path, layers: Mapping[str, ValueLayer]) -> list[Localization]:
    """Read a table of the paper's code; its lists are read as data, nothing is executed.

    Args:
        path: The file, columns separated by semicolons.
        layers: Of the model that it belongs to, in their order.

    Returns:
        What was found, prompt by prompt.

    Raises:
        UsageError: It cannot be read, lacks a column, or its lists are not of these layers.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"The neurons in {path} cannot be read: {error}.") from None
    csv.field_size_limit(1 << 24)
    rows = csv.DictReader(io.StringIO(text), delimiter=";")
    lacking = sorted({"Caption", "Initial Neurons", "Refined Neurons"} - set(rows.fieldnames or ()))
    if lacking:
        raise UsageError(f"{path} has no column {lacking[0]!r}.", cure=f"Its columns must be {';'.join(_COLUMNS)}.")
    return [_published(path, row, number, layers) for number, row in enumerate(rows, start=2)]


def _published(path: str | Path, row: Mapping[str, Any], number: int, layers: Mapping[str, ValueLayer]) -> Localization:
    lists = []
    for column in ("Initial Neurons", "Refined Neurons"):
        try:
            value = ast.literal_eval(row[column])
            lists.append(dict(zip(layers, [[int(index) for index in part] for part in value], strict=True)))
        except (ValueError, SyntaxError, TypeError) as error:
            raise UsageError(
                f"{column} in row {number} of {path} are no lists of {len(layers)} layers: {error}.",
                cure="Was the table made for another model or scope?",
            ) from None
    initial, refined = lists
    likeness = [_number(row.get(column)) for column in ("Initial SSIM", "Refined SSIM")]
    status: Status = "resolved" if any(refined.values()) else "not memorized"
    return Localization(
        row["Caption"], status, Units(refined), initial, refined,
        initial_similarity=likeness[0], refined_similarity=likeness[1],
    )  # fmt: skip


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text else None
    except ValueError:
        return None


def _union(found: Sequence[Localization]) -> Units:
    together: dict[str, set[int]] = {}
    for each in found:
        for name, index in each.neurons:
            together.setdefault(name, set()).add(index)
    return Units({name: sorted(indices) for name, indices in together.items()})
