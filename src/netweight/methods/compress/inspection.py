"""What is in weight files, tensor by tensor: sizes as stored, and how the bits of the values are spread."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from netweight.codec import BlobInfo
from netweight.core.names import Select
from netweight.core.progress import QUIET, Progress
from netweight.errors import Unsupported, UsageError
from netweight.methods.compress.bits import BitStatistics, bit_statistics
from netweight.store.reading import Store, TensorInfo, open_store

__all__ = ["TensorReport", "inspect_tensors", "weight_files"]


@final
@dataclass(frozen=True)
class TensorReport:
    """What was found of one tensor.

    Attributes:
        info: Its name, dtype, shape and sizes.
        bits: How its bits are spread; None if its dtype has no such parts (e.g. complex or sub-byte ones).
        rounding: What rounding did to it; None if it is not rounded.
    """

    info: TensorInfo
    bits: BitStatistics | None
    rounding: BlobInfo | None = None

    @property
    def stored_bits(self) -> float:
        """Bits that the file spends on each weight; 0 if there is none."""
        count = math.prod(self.info.shape)
        return 8 * self.info.stored_nbytes / count if count else 0.0

    def to_json(self, *, histograms: bool = False) -> dict[str, Any]:
        """Return the report as a JSON value.

        Args:
            histograms: Whether to include the histograms of sign, exponent and mantissa.
        """
        info, rounding = self.info, self.rounding
        return {
            "name": info.name,
            "file": str(info.file),
            "dtype": info.dtype,
            "shape": list(info.shape),
            "nbytes": info.nbytes,
            "stored_nbytes": info.stored_nbytes,
            "compressed": info.compressed,
            "stored_bits_per_weight": self.stored_bits,
            "digest": info.digest,
            "rounding": None
            if rounding is None
            else {
                "mantissa_bits": rounding.mantissa_bits,
                "block_size": rounding.block_size,
                "fidelity": rounding.fidelity,
                "bound": rounding.bound,
                "worst_change": rounding.worst_change,
            },
            "bits": None if self.bits is None else self.bits.to_json(histograms=histograms),
        }


def weight_files(path: Path) -> list[Path]:
    """The safetensors files that a path stands for: itself, or all in a folder and its sub-folders.

    Args:
        path: A file or folder.

    Raises:
        UsageError: There are none.
    """
    if path.is_file():
        return [path]
    files = [Path(folder) / leaf for folder, _, leaves in os.walk(path) for leaf in leaves]
    weights = sorted(file for file in files if file.suffix == ".safetensors")
    if not weights:
        raise UsageError(f"{path} holds no safetensors weights.", cure="Check the path.")
    return weights


def inspect_tensors(
    path: str | Path, *, tensor: str | None = None, threads: int = 1, progress: Progress = QUIET
) -> Iterator[TensorReport]:
    """Look at every tensor of a file or folder, compressed or not, holding one at a time.

    Args:
        path: A file, or a folder whose sub-folders are looked at as well.
        tensor: Only tensors whose names match this pattern (the grammar of `Select`); None for all.
        threads: Threads of the decoder.
        progress: Where progress is shown.

    Yields:
        A report per tensor, file by file in the order of the data.

    Raises:
        UsageError: There are no weights.
        NameNotFound: No tensor matches the pattern.
        CorruptBlob: A file is damaged.
    """
    stores = [open_store(file) for file in weight_files(Path(path))]
    try:
        names = {name for store in stores for name in store.names()}
        chosen = names if tensor is None else set(Select(tensor).keys(sorted(names)))
        todo = [(store, name) for store in stores for name in store.names() if name in chosen]
        total = sum(store.info(name).nbytes for store, name in todo)
        with progress.task(f"inspect {Path(path).name}", total) as task:
            for store, name in todo:
                yield TensorReport(store.info(name), _bits(store, name, threads), store.rounding(name))
                task.update(store.info(name).nbytes)
    finally:
        for store in stores:
            store.close()


def _bits(store: Store, name: str, threads: int) -> BitStatistics | None:
    try:
        statistics = bit_statistics(store.get(name, threads=threads))
    except Unsupported:  # torch lacks the dtype, or its numbers have no sign, exponent and mantissa
        return None
    store.release(name)
    return statistics
