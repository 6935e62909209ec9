"""A streaming fit at rest, in a folder: what the pass under way works with, and what it has added up so far.

Both are safetensors files, replaced whole; their account is in the header. `streaming_fit.py` and `fan_out.py` call it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import safetensors
import safetensors.torch
from torch import Tensor

from netweight.core.digest import of_config
from netweight.errors import CorruptBlob, UsageError
from netweight.generate.subspace_iteration import Iteration, Plan, Sums
from netweight.store.atomic import naming_failures, part_of, sync

__all__ = ["KeptSums", "read_iteration", "read_tensors", "write_tensors"]


def write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """Write tensors and an account of them, JSON values, over what is there; whole or not at all, without a copy.

    Args:
        path: The file.
        tensors: Tensors of any dtype by name.
        about: JSON values.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    part = part_of(path)
    with naming_failures(path):
        whole = {name: value.contiguous() for name, value in tensors.items()}
        safetensors.torch.save_file(whole, part, metadata={"about": json.dumps(about)})
        sync(part)
        os.replace(part, path)
        sync(path.parent)


def read_tensors(path: Path) -> tuple[Sums, dict[str, Any]]:
    """Read tensors and their account.

    Args:
        path: The file.

    Returns:
        Tensors by name, and the account of them.

    Raises:
        CorruptBlob: The file was not written by `write_tensors`, or is damaged.
    """
    try:
        with safetensors.safe_open(path, "pt") as file:
            about: dict[str, Any] = json.loads((file.metadata() or {})["about"])
            return {name: file.get_tensor(name) for name in file.keys()}, about
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
        raise CorruptBlob(f"{path} is no part of a fit: {error}.", cure="Delete its folder to begin anew.") from error


def read_iteration(path: Path) -> Iteration:
    """Read where a fit stands.

    Args:
        path: The file.

    Returns:
        What the next pass works with.

    Raises:
        CorruptBlob: The file is damaged.
    """
    fixed, about = read_tensors(path)
    return Iteration(about["stage"], about["last"], fixed, tuple(about["captured"]))


@final
class KeptSums:
    """What a worker of a fit keeps.

    Args:
        folder: The worker's own, made if it is not there.
        plan: What is asked for; a folder serves one plan and one set of rows.
        rows: What the rows are, such as a digest; other ones are refused.
        seconds: Least time between two writes of what was added up.
    """

    def __init__(self, folder: Path, plan: Plan, *, rows: str = "", seconds: float = 60.0) -> None:
        self._iteration, self._sums = folder / "iteration.safetensors", folder / "sums.safetensors"
        self._digest = of_config({"plan": plan, "rows": rows})
        self._seconds, self._last = seconds, time.monotonic()

    @property
    def file(self) -> Path:
        """The file with what the pass under way works with."""
        return self._iteration

    def load(self) -> tuple[Iteration | None, Sums | None, int]:
        """Return where the fit stood, what its pass had added up, and the row to go on from.

        Raises:
            UsageError: The folder holds another fit.
            CorruptBlob: A file is damaged.
        """
        if not self._iteration.exists():
            return None, None, 0
        if read_tensors(self._iteration)[1]["digest"] != self._digest:
            raise UsageError(
                f"{self._iteration.parent} holds another fit: of other rows, or with other settings.",
                cure="Choose another folder, or delete it to begin anew.",
            )
        iteration = read_iteration(self._iteration)
        if self._sums.exists():
            sums, about = read_tensors(self._sums)
            if about == {"digest": self._digest, "stage": iteration.stage, "row": about.get("row")}:
                return iteration, sums, about["row"]
        return iteration, None, 0

    def keep_iteration(self, iteration: Iteration) -> None:
        """Write what the next pass works with.

        Args:
            iteration: What a pass begins with.
        """
        about = {
            "digest": self._digest, "stage": iteration.stage, "last": iteration.last, "captured": iteration.captured,
        }  # fmt: skip
        write_tensors(self._iteration, iteration.fixed, about)

    def keep_sums(self, iteration: Iteration, sums: Sums, row: int) -> None:
        """Write what the pass has added up before a row, if the last time was long enough ago.

        Args:
            iteration: What this pass began with.
            sums: What it has added up.
            row: The first row that it has not seen.
        """
        if time.monotonic() - self._last >= self._seconds:
            write_tensors(self._sums, sums, {"digest": self._digest, "stage": iteration.stage, "row": row})
            self._last = time.monotonic()
