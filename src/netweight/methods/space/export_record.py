"""What an exported adapter is a point of, as JSON beside it, for its model card."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, final

from netweight.methods.space.directions import scores_digest
from netweight.methods.space.exporting import Exported
from netweight.methods.space.method import WeightSpace
from netweight.store.record import read_record, write_record

__all__ = ["EXPORTED", "ExportRecord", "recorded"]

EXPORTED = "netweight-space.json"
_VERSION = 1


@final
@dataclass(frozen=True)
class ExportRecord:
    """How an adapter was exported.

    Attributes:
        point: What the point is called.
        space: Digest of the space's scores.
        adapters: How many adapters the space was fitted to.
        components: Of the space.
        ranks: The least and the greatest rank of a module.
        relative_error: Of what the rank left out.
        layout: Whose files.
    """

    point: str
    space: str
    adapters: int
    components: int
    ranks: tuple[int, int]
    relative_error: float
    layout: str

    def write(self, folder: str | Path) -> None:
        """Write the record into the adapter's folder, over one that is there.

        Args:
            folder: The adapter's folder.

        Raises:
            OutputFailed: The place cannot be written.
        """
        write_record(Path(folder) / EXPORTED, asdict(self), version=_VERSION)

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read the record of an adapter's folder.

        Args:
            folder: The adapter's folder.

        Raises:
            CorruptBlob: The file holds none of this version.
            OSError: It cannot be read.
        """

        def made(values: dict[str, Any]) -> Self:
            low, high = values.pop("ranks")
            return cls(ranks=(low, high), **values)

        return read_record(Path(folder) / EXPORTED, made, version=_VERSION, of="an exported adapter")


def recorded(space: WeightSpace, point: str, exported: Exported, layout: str) -> ExportRecord:
    """Return the record of a point of a space that was exported.

    Args:
        space: The space.
        point: What the point is called.
        exported: What was written.
        layout: Whose files.
    """
    return ExportRecord(
        point,
        scores_digest(space.scores),
        space.fitted,
        space.components,
        exported.ranks,
        exported.relative_error,
        layout,
    )
