"""Tables as grids, and the runs that fill them: rows × columns → measure, each run remembered in a ledger."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from netweight.core.engines import in_process
from netweight.core.runs import Ledger, Result, map_runs
from netweight.errors import NetweightError, UsageError

# Name of the ledger in a folder of runs.
LEDGER = "runs.jsonl"


class Named(Protocol):
    """A run's settings, with a name that tells it from others."""

    @property
    def name(self) -> str: ...


R = TypeVar("R", bound=Named)


def run_each(run: Callable[[R], Any], settings: Sequence[R], *, ledger: Path) -> list[Result[R]]:
    """Run one after another what the ledger does not remember."""
    results = []
    for result in map_runs(run, settings, ledger=ledger, engine=in_process, ordered=True):
        if not result.ok:
            last = (result.error or "").strip().splitlines()[-1]
            raise NetweightError(f"{result.config.name} failed: {last}", cure="Run it again to continue.")
        results.append(result)
    return results


def chosen(runs: Sequence[R], only: str | None) -> list[R]:
    """Return the runs whose name fits a pattern."""
    if only == "none":
        return []
    found = [run for run in runs if only is None or fnmatch(run.name, only)]
    if not found:
        raise UsageError(
            f"The pattern {only!r} fits no run.", cure=f"Names are like {runs[0].name!r}; * fits any part."
        )
    return found


def finished(folder: Path, kind: Callable[..., R]) -> dict[R, dict[str, Any]]:
    """Return every run in a folder's ledger that ended well, with what it returned."""
    if not (folder / LEDGER).exists():
        return {}
    with Ledger(folder / LEDGER) as ledger:
        records = ledger.records.values()
        return {kind(**record["config"]): record["value"] for record in records if record["error"] is None}


def as_text(image: Tensor) -> str:
    """Return an image within 0 and 1, of any shape, in 256 shades as text."""
    return base64.b64encode((image * 255).round().byte().numpy().tobytes()).decode()


def picture(text: str, like: tuple[int, int, int]) -> Tensor:
    """Return a picture that `as_text` wrote, within 0 and 1, shape `(h, w, c)`."""
    pixels = torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
    return pixels.view(like).permute(1, 2, 0) / 255
