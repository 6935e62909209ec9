"""Adapters as files for other tools, alone or merged with others, at a chosen rank with what that costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

from netweight.errors import UsageError
from netweight.nn.lora import Adapter, Truncation, combined
from netweight.store.lora_formats.files import write_adapter


@final
@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        path: The file or folder.
        ranks: The least and the greatest rank of a module.
        relative_error: Norm of what the rank left out, divided by the norm of the whole change.
    """

    path: Path
    ranks: tuple[int, int]
    relative_error: float


def merged(
    adapters: Sequence[Adapter], weights: Sequence[float] | None = None, *, rank: int | None = None
) -> Truncation:
    """Return the weighted sum of adapters' changes: exactly, or the nearest of a rank.

    Unlike averages of factors, this has no cross terms, and takes adapters of any ranks, of the same or other modules.

    Args:
        adapters: At least one, of one base model.
        weights: One per adapter; 1 by default.
        rank: Of each module; None keeps the sum as it is, at the sum of the ranks.

    Returns:
        The adapter, and the relative error of the rank (0 for None).

    Raises:
        UsageError: There is no adapter, weights are not as many, shapes differ, or the rank is below 1.
    """
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
    """Write an adapter for other tools.

    Args:
        adapter: The adapter.
        path: See `store.adapter_files.write_adapter`.
        rank: Of each module; None keeps the adapter's own ranks without loss, or less where a change has a lower one.
        layout: Whose files to write.
        base: Name of the base model, to be said in the files.
        overwrite: Whether files may be replaced.

    Returns:
        Where it is, and what the rank cost.

    Raises:
        UsageError: The rank is below 1, or the change is not finite.
        OutputExists: A file exists already.
        OutputFailed: The place cannot be written.
    """
    for name, change in adapter.factors.items():
        if not (change.down.isfinite().all() and change.up.isfinite().all()):
            raise UsageError(f"The change of {name} holds NaN or infinity.", cure="Look at the point's scores.")
    most = rank if rank is not None else max(change.rank for change in adapter.factors.values())
    kept = adapter.truncated(most)
    written = write_adapter(kept.adapter, path, layout=layout, base=base, overwrite=overwrite)
    ranks = [change.rank for change in kept.adapter.factors.values()]
    return Exported(written, (min(ranks), max(ranks)), kept.relative_error)
