"""Points of a space and directions in it as files: JSON that says of which space they are, with numbers exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from netweight.errors import UsageError
from netweight.methods.space.directions import Direction, scores_digest
from netweight.methods.space.neighbors import row_of
from netweight.store.record import read_record, write_record

__all__ = ["Points", "read_direction", "read_points", "write_direction", "write_points"]

_VERSION = 1


@final
@dataclass(frozen=True, eq=False)
class Points:
    """Named points of a space.

    Attributes:
        names: One per point.
        scores: Shape `(b, k)`, fp32.
        space: Digest of the space, as `scores_digest` gives it; None if unknown.
        origin: How they were made, JSON values.

    Raises:
        UsageError: There are not as many names as points, or a score is not finite.
    """

    names: tuple[str, ...]
    scores: Tensor
    space: str | None = None
    origin: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse what are no points."""
        if self.scores.ndim != 2 or len(self.names) != len(self.scores) or not self.scores.isfinite().all():
            raise UsageError(
                f"{len(self.names)} names came with scores of shape {tuple(self.scores.shape)}, or some hold NaN.",
                cure="Give one row of finite scores per name.",
            )

    def check(self, scores: Tensor) -> None:
        """Refuse points of another space.

        Args:
            scores: The training scores of the space at hand. Shape `(n, k)`.

        Raises:
            UsageError: They are of another.
        """
        if self.scores.shape[1] != scores.shape[1] or self.space not in (None, scores_digest(scores)):
            raise UsageError(
                f"The points are of another space, of {self.scores.shape[1]} components.",
                cure="Export them with their own space, and project the adapters into this one.",
            )

    def only(self, name: str) -> Points:
        """Return one of the points.

        Args:
            name: Of one of the points.

        Raises:
            NameNotFound: There is none of this name; the nearest are named.
        """
        row = row_of(name, self.names)
        return Points((name,), self.scores[row : row + 1], self.space, self.origin)


def write_points(points: Points, path: str | Path, *, overwrite: bool = False) -> None:
    """Write points, whole or not at all.

    Args:
        points: What to write.
        path: The file.
        overwrite: Whether an existing file may be replaced.

    Raises:
        OutputExists: The file exists already.
        OutputFailed: The place cannot be written.
    """
    values = {
        "names": list(points.names),
        "scores": points.scores.float().tolist(),
        "space": points.space,
        "origin": dict(points.origin),
    }
    write_record(path, {"points": values}, version=_VERSION, overwrite=overwrite)


def read_points(path: str | Path) -> Points:
    """Read points.

    Args:
        path: The file.

    Raises:
        CorruptBlob: The file holds none.
        UsageError: It cannot be read.
    """

    def made(values: dict[str, Any]) -> Points:
        found = values["points"]
        scores = torch.tensor(found["scores"], dtype=torch.float32)
        return Points(tuple(found["names"]), scores, found["space"], found["origin"])

    return read_record(path, made, version=_VERSION, of="points of a space")


def write_direction(direction: Direction, path: str | Path, *, overwrite: bool = False) -> None:
    """Write a direction, whole or not at all; errors as for `write_points`."""
    write_record(path, {"direction": direction.to_json()}, version=_VERSION, overwrite=overwrite)


def read_direction(path: str | Path) -> Direction:
    """Read a direction; errors as for `read_points`."""
    return read_record(
        path, lambda values: Direction.from_json(values["direction"]), version=_VERSION, of="a direction"
    )  # fmt: skip
