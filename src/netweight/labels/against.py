"""Comparison with a base: equal, added and missing tensors, and the size of the difference by layer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from netweight.codec import ChunkEncoder
from netweight.core.progress import QUIET, Progress
from netweight.core.quantities import many, percent, size
from netweight.core.threads import in_order
from netweight.labels.label import LayerChange, Row, RowGroup
from netweight.store.reader import StoredFile

_PIECE = 1 << 20


@final
@dataclass(frozen=True)
class TensorChange:
    """Difference of one tensor from that of the base."""

    name: str
    """Name of the tensor in both files."""
    nbytes: int
    """Size of the tensor in bytes."""
    equal: bool
    """True if every byte is equal."""
    difference: int
    """Bytes of the compressed difference, as `netweight compress --base` would store it."""
    change: float
    """Squared Frobenius norm of the difference; NaN for types that are not numbers here."""
    norm: float
    """Squared Frobenius norm of the base's tensor; NaN likewise."""


@final
@dataclass(frozen=True)
class BaseFacts:
    """Result of a comparison with a base."""

    compared: tuple[TensorChange, ...]
    """The tensors of equal name, type and shape."""
    added: tuple[str, ...]
    """Names that only the model has."""
    missing: tuple[str, ...]
    """Names that only the base has."""
    reshaped: tuple[str, ...]
    """Names that both have, in another type or shape."""

    @property
    def layers(self) -> tuple[LayerChange, ...]:
        """Relative change of every layer, in the order of the file."""
        sums: dict[str, list[float]] = {}
        for tensor in self.compared:
            if not math.isnan(tensor.change):
                entry = sums.setdefault(layer_of(tensor.name), [0.0, 0.0])
                entry[0] += tensor.change
                entry[1] += tensor.norm
        return tuple(
            LayerChange(layer=layer, change=math.sqrt(change / norm) if norm else 0.0)
            for layer, (change, norm) in sums.items()
        )


def layer_of(name: str) -> str:
    """Return the layer that a tensor belongs to: its name up to the last number, else without the last two parts.

    Args:
        name: Name of the tensor, such as `model.layers.3.mlp.up_proj.weight`.
    """
    numbered = re.match(r"(.*?\.\d+)(\.|$)", name)
    if numbered:
        return numbered[1]
    parts = name.split(".")
    return ".".join(parts[:-1]) or name


def compare_with_base(
    files: Sequence[Path], base: Sequence[Path], *, threads: int = 2, progress: Progress = QUIET
) -> BaseFacts:
    """Compare the tensors of two models.

    Args:
        files: safetensors files of the model.
        base: safetensors files of the base.
        threads: Threads that read and encode.
        progress: Where progress is shown.

    Returns:
        What is equal, what differs, and by how much.
    """
    with ExitStack() as stack:
        ours = _places(stack.enter_context(closing(StoredFile(file))) for file in files)
        theirs = _places(stack.enter_context(closing(StoredFile(file))) for file in base)
        both = [name for name in ours if name in theirs]
        alike = [name for name in both if _form(ours, name) == _form(theirs, name)]
        reshaped = [name for name in both if name not in set(alike)]
        total = sum(ours[name].info(name).nbytes for name in alike)
        changes = []
        with progress.task("compare with the base", total) as task:
            work = ((ours[name], theirs[name], name) for name in alike)
            for change in in_order(_compare, work, threads):
                changes.append(change)
                task.update(change.nbytes)
    return BaseFacts(
        tuple(changes), tuple(name for name in ours if name not in theirs),
        tuple(name for name in theirs if name not in ours), tuple(reshaped),
    )  # fmt: skip


def base_group(facts: BaseFacts, name: str) -> RowGroup:
    """Return the rows about what changed against a base.

    Args:
        facts: What the comparison found.
        name: Name of the base.
    """
    compared = facts.compared
    equal = [tensor for tensor in compared if tensor.equal]
    changed = [tensor for tensor in compared if not tensor.equal]
    nbytes = sum(tensor.nbytes for tensor in compared)
    difference = sum(tensor.difference for tensor in changed)
    rows = [
        Row(key="base_equal", title="Tensors equal to the base", value=f"{len(equal):,} of {len(compared):,}",
            number=len(equal), unit="tensors"),
        Row(key="base_changed", title="Tensors that differ", value=f"{len(changed):,}", number=len(changed),
            unit="tensors"),
    ]  # fmt: skip
    comparable = [tensor for tensor in compared if not math.isnan(tensor.change)]
    norm = sum(tensor.norm for tensor in comparable)
    if norm:
        relative = math.sqrt(sum(tensor.change for tensor in comparable) / norm)
        rows.append(Row(
            key="base_distance", title="Size of the change", value=percent(relative), number=100 * relative,
            unit="percent", indent=1, basis="norm of the difference over the norm of the base",
        ))  # fmt: skip
    if nbytes:
        rows.append(Row(
            key="difference_weight", title="Weight of the difference", value=size(difference), number=difference,
            unit="bytes", strong=True, basis=f"{percent(difference / nbytes)} of the compared tensors, lossless",
            state="warning" if changed and difference > 0.6 * nbytes else "measured",
        ))  # fmt: skip
    for key, title, names in (
        ("base_added", "Tensors that the base lacks", facts.added),
        ("base_missing", "Tensors of the base that are missing", facts.missing),
        ("base_reshaped", "Tensors of another type or shape", facts.reshaped),
    ):
        if names:
            rows.append(Row(
                key=key, title=title, value=f"{len(names):,}", number=len(names), unit="tensors", state="warning",
                basis=", ".join(names[:3]), detail={"names": list(names[:100])},
            ))  # fmt: skip
    if not compared:
        rows.insert(0, Row(
            key="base_unrelated", title="Compared with the base", value="nothing in common", state="warning",
            strong=True, basis="no tensor has the name, type and shape of one of the base",
        ))  # fmt: skip
    total = len(compared) + len(facts.added) + len(facts.reshaped)
    return RowGroup(title=f"Against {name}", anchor="against", rows=tuple(rows),
                 basis=f"{len(compared):,} of {many(total, 'tensor')} compared")  # fmt: skip


def _places(files: Iterable[StoredFile]) -> dict[str, StoredFile]:
    return {name: file for file in files for name in file.names()}


def _form(places: dict[str, StoredFile], name: str) -> tuple[str, tuple[int, ...]]:
    info = places[name].info(name)
    return info.dtype, info.shape


def _compare(task: tuple[StoredFile, StoredFile, str]) -> TensorChange:
    """Compare one tensor piece by piece: equality, norm of the difference, size of the encoded difference."""
    ours, theirs, name = task
    info = ours.info(name)
    encoder = ChunkEncoder(info.dtype, info.shape, base=True)
    step = max(_PIECE // encoder.chunk_bytes, 1) * encoder.chunk_bytes
    pieces = [(start, min(start + step, info.nbytes)) for start in range(0, info.nbytes, step)]
    equal = all(np.array_equal(ours.part(name, *piece), theirs.part(name, *piece)) for piece in pieces)
    difference, change, norm = 0 if equal else encoder.header_size, 0.0, 0.0
    for piece in pieces:
        other = theirs.part(name, *piece)
        values = _numbers(other, info.dtype)
        norm = norm + float(np.square(values, dtype=np.float64).sum()) if values is not None else math.nan
        if equal:
            continue
        one = ours.part(name, *piece)
        if values is not None:
            change += float(np.square(_numbers(one, info.dtype) - values, dtype=np.float64).sum())
        for at in range(0, len(one), encoder.chunk_bytes):
            cut = slice(at, at + encoder.chunk_bytes)
            difference += len(encoder.encode(one[cut], other[cut]))
    return TensorChange(name, info.nbytes, equal, difference, change if norm == norm else math.nan, norm)


def _numbers(data: NDArray[np.uint8], dtype: str) -> Any:
    """The bytes as numbers of numpy; None for types without any."""
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    kinds = {"F16": "<f2", "F32": "<f4", "F64": "<f8"}
    if dtype not in kinds:
        return None
    numbers = data.view(kinds[dtype])
    return numbers.astype(np.float32) if dtype == "F16" else numbers
