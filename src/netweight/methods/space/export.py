"""Adapters as files for other tools, alone or merged with others, at a chosen rank with what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Self, final

from netweight.errors import UsageError
from netweight.nn.lora import Adapter, Truncation, combined
from netweight.store.checkpoint import read_record, write_record
from netweight.store.lora_formats.files import write_adapter

EXPORTED = "netweight-space.json"
_VERSION = 1


@final
@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: Path  # the file or folder
    ranks: tuple[int, int]  # the least and the greatest rank of a module
    relative_error: float  # norm of what the rank left out, divided by the norm of the whole change


def merged(
    adapters: Sequence[Adapter], weights: Sequence[float] | None = None, *, rank: int | None = None
) -> Truncation:
    """Return the weighted sum of adapters' changes: exactly, or the nearest of a rank."""
    # Unlike averages of factors, this has no cross terms, and takes adapters of any ranks, of the same or other
    # modules.
    # `adapters`: at least one, of one base model
    # `weights`: one per adapter; 1 by default
    # Returns: The adapter, and the relative error of the rank (0 for None).
    whole = combined(adapters, weights)
    return Truncation(whole, 0.0) if rank is None else whole.truncated(rank)


def export_adapter(
    adapter: Adapter,
    path: str | Path,
    *,
    rank: int | None = None,
    layout: Literal["diffusers", "peft", "kohya"] = "diffusers",
    base: str | None = None,
    overwrite: bool = False,
) -> Exported:
    """Write an adapter for other tools."""
    for name, change in adapter.factors.items():
        if not (change.down.isfinite().all() and change.up.isfinite().all()):
            raise UsageError(f"The change of {name} holds NaN or infinity.", cure="Look at the point's scores.")
    most = rank if rank is not None else max(change.rank for change in adapter.factors.values())
    kept = adapter.truncated(most)
    written = write_adapter(kept.adapter, path, layout=layout, base=base, overwrite=overwrite)
    ranks = [change.rank for change in kept.adapter.factors.values()]
    return Exported(written, (min(ranks), max(ranks)), kept.relative_error)


@final
@dataclass(frozen=True)
class ExportRecord:
    """How an adapter was exported."""

    point: str  # what the point is called
    space: str  # digest of the space's scores
    adapters: int  # how many adapters the space was fitted to
    components: int
    ranks: tuple[int, int]  # the least and the greatest rank of a module
    relative_error: float
    layout: str  # whose files

    def write(self, folder: str | Path) -> None:
        """Write the record into the adapter's folder, over one that is there."""
        write_record(Path(folder) / EXPORTED, asdict(self), version=_VERSION)

    @classmethod
    def read(cls, folder: str | Path) -> Self:
        """Read the record of an adapter's folder."""

        def made(values: dict[str, Any]) -> Self:
            low, high = values.pop("ranks")
            return cls(ranks=(low, high), **values)

        return read_record(Path(folder) / EXPORTED, made, version=_VERSION, of="an exported adapter")
