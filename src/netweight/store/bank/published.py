"""The files that weights2weights published, read without executing pickles.

`all_weights.pt` is one matrix with a row per adapter: all factors of a rank-1 LoRA of Stable Diffusion 1.5, flattened
and joined in the order of `weight_dimensions.pt`. `V.pt`, `mean.pt` and `std.pt` are its components and statistics.
"""

# Source: weights2weights (arXiv 2406.09413) and the card of its data.

from __future__ import annotations

import math
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.errors import CorruptBlob, UnsafeInput, UsageError
from netweight.store.bank.shards import MATRIX, BankWriter, ShardRows, find_published
from netweight.store.lora_formats import peft_settings as peft
from netweight.store.lora_formats.tensor_names import take_apart
from netweight.store.torch_archive import refuse_inflated

DIMENSIONS = "weight_dimensions.pt"
_BLOCK_BYTES = 1 << 26


def model_names(count: int) -> list[str]:
    """Return the names of published models, by their rows."""
    return [f"model-{row:0{max(6, len(str(count)))}}" for row in range(count)]


def published_tensor(path: str | Path) -> Tensor:
    """Open a tensor that torch saved, such as `V.pt` or `mean.pt`; it is mapped, so that only used parts are read."""
    value = _load(Path(path))
    if not isinstance(value, Tensor):
        raise UsageError(f"{path} contains a {type(value).__name__}, not a tensor.", cure="Give the file of a matrix.")
    return value


def read_dimensions(path: str | Path) -> dict[str, tuple[int, ...]]:
    """Read `weight_dimensions.pt`: names of tensors, in the order of a row's entries, and their shapes."""
    value = _load(Path(path))
    if not isinstance(value, Mapping) or not value:
        raise UsageError(f"{path} contains no table of shapes.", cure=_OTHERWISE)
    return {str(name): _shape(entry, Path(path), str(name)) for name, entry in value.items()}


def stable_diffusion_dimensions(rank: int = 1) -> dict[str, tuple[int, ...]]:
    """Return what `weight_dimensions.pt` must say for LoRAs of the queries and values of Stable Diffusion 1."""
    # All 16 transformer blocks, self- and cross-attention: 99,648 entries at rank 1, in the order of the sorted names.
    blocks = [(f"down_blocks.{level}", 2, width) for level, width in enumerate((320, 640, 1280))]
    blocks += [("mid_block", 1, 1280)]
    blocks += [(f"up_blocks.{level}", 3, width) for level, width in ((1, 1280), (2, 640), (3, 320))]
    shapes = {}
    for head, attentions, width in blocks:
        for number in range(attentions):
            for attention, last in (("attn1", "to_q"), ("attn1", "to_v"), ("attn2", "to_q"), ("attn2", "to_v")):
                name = f"{peft.PREFIX}{head}.attentions.{number}.transformer_blocks.0.{attention}.{last}"
                # 768 is the text encoder's width.
                columns = 768 if (attention, last) == ("attn2", "to_v") else width
                shapes[f"{name}.lora_A.weight"] = (rank, columns)
                shapes[f"{name}.lora_B.weight"] = (width, rank)
    return dict(sorted(shapes.items()))


_OTHERWISE = (
    "For LoRAs of the queries and values of Stable Diffusion 1 the order is known: import_published(..., "
    "dimensions=stable_diffusion_dimensions()), or netweight space ingest --stable-diffusion."
)


def import_published(
    source: str | Path,
    destination: str | Path,
    *,
    dimensions: Mapping[str, Sequence[int]] | None = None,
    names: Sequence[str] | None = None,
    compress: bool = False,
    skip_bad: bool = False,
    progress: Progress = QUIET,
) -> None:
    """Turn the published matrix of adapters into a bank, some rows at a time.

    Continues where a call was interrupted.

    `dimensions`: names of tensors, in the order of a row's entries → their shapes; by default from
    `weight_dimensions.pt`, beside the matrix or in a folder `files` above it, as it was published. `names`: by default
    "model-000000" and so on. `skip_bad`: whether rows with NaN or infinity are left out.
    """
    path = find_published(Path(source))
    if path is None:
        raise UsageError(f"{source} contains no published matrix.", cure=f"Give a file like {MATRIX}.")
    matrix = published_tensor(path)
    if matrix.ndim != 2 or not matrix.is_floating_point():
        raise UsageError(
            f"{path} has shape {tuple(matrix.shape)} and dtype {matrix.dtype}, so it is not a matrix of adapters."
        )
    shapes = read_dimensions(_companion(path, DIMENSIONS)) if dimensions is None else dimensions
    layout = _layout(path, matrix.shape[1], shapes)
    called = model_names(len(matrix)) if names is None else list(names)
    if len(called) != len(matrix):
        raise UsageError(f"{path} has {len(matrix)} rows, and there are {len(called)} names.")
    block = max(1, _BLOCK_BYTES // (matrix.shape[1] * matrix.element_size()))
    stamp = f"{path.stat().st_size}-{path.stat().st_mtime_ns}"
    with (
        BankWriter(destination, compress=compress, base=layout.base) as writer,
        progress.task("Adding adapters", len(matrix), unit="adapters") as task,
    ):
        other = next((name for name in called if name in writer and writer.stamp(name) != stamp), None)
        if other is not None:
            raise UsageError(
                f"{destination} has an adapter {other!r} that is not of {path}.",
                cure="Choose other names or a new bank.",
            )
        for start in range(0, len(matrix), block):
            rows = [row for row in range(start, min(start + block, len(matrix))) if called[row] not in writer]
            _add(writer, layout, matrix, rows, called, path, stamp, skip_bad)
            task.update(min(block, len(matrix) - start))


@final
@dataclass(frozen=True)
class PublishedModule:
    """Positions of one module's factors in a row."""

    down: slice
    """Columns of the down factor."""
    up: slice
    """Columns of the up factor."""
    rank: int
    """Rank of the factors."""
    shape: tuple[int, int]
    """Rows and columns of the module's change."""
    scale: float
    """Factor of the product up @ down."""


@final
@dataclass(frozen=True)
class PublishedLayout:
    """Positions of all modules' factors in a row."""

    modules: Mapping[str, PublishedModule]
    """Module name → the positions of its factors."""
    base: str | None
    """Name of the base model, if it is stated."""

    def rows(self, block: Tensor) -> ShardRows:
        """Lay rows of the matrix out as a shard holds them."""
        count, names = len(block), sorted(self.modules)
        down, up = {}, {}
        for name in names:
            module = self.modules[name]
            rows, columns = module.shape
            down[name] = block[:, module.down].reshape(count * module.rank, columns).contiguous()
            factor = block[:, module.up].reshape(count, rows, module.rank).transpose(1, 2)
            up[name] = factor.reshape(count * module.rank, rows).contiguous()
        scale = torch.tensor([[self.modules[name].scale for name in names]], dtype=torch.float64)
        rank = torch.tensor([[self.modules[name].rank for name in names]])
        return ShardRows(down, up, scale.repeat(count, 1), rank.repeat(count, 1))


def _add(
    writer: BankWriter,
    layout: PublishedLayout,
    matrix: Tensor,
    rows: list[int],
    called: Sequence[str],
    path: Path,
    stamp: str,
    skip_bad: bool,
) -> None:
    """Add some rows of the matrix."""
    if not rows:
        return
    block = matrix[rows]
    good = block.isfinite().all(1)
    if not good.all():
        bad = [row for row, fine in zip(rows, good.tolist(), strict=True) if not fine]
        if not skip_bad:
            raise UsageError(
                f"{path}: row {bad[0]} ({called[bad[0]]}) contains NaN or infinity.",
                cure="Fetch the file again, or pass skip_bad (--skip-bad) to leave the row out.",
            )
        for row in bad:
            writer.skip(called[row], f"Row {row} of {path} contains NaN or infinity.")
        rows, block = [row for row in rows if row not in bad], block[good]
    if rows:
        shapes = {name: module.shape for name, module in layout.modules.items()}
        writer.add_rows([called[row] for row in rows], layout.rows(block), shapes, stamps=[stamp] * len(rows))


def published_layout(path: Path, width: int, *, stable_diffusion: bool) -> PublishedLayout:
    """Find the factors of each module in a row of a published matrix, from what lies beside it."""
    dimensions = stable_diffusion_dimensions() if stable_diffusion else read_dimensions(_companion(path, DIMENSIONS))
    return _layout(path, width, dimensions)


def _layout(path: Path, width: int, shapes: Mapping[str, Sequence[int]]) -> PublishedLayout:
    settings = peft.LoraSettings.read(_companion(path, peft.CONFIG))
    places, start = {}, 0
    for name, shape in shapes.items():
        places[name] = slice(start, start := start + math.prod(shape))
    if start != width:
        raise UsageError(
            f"{path} has rows of {width:,} entries, but the shapes describe {start:,}.",
            cure="The matrix and the dimensions do not belong together: fetch both again.",
        )
    located: dict[str, dict[str, str]] = {}
    for name in shapes:
        apart = take_apart(name)
        if apart is None:
            raise CorruptBlob(f"{path}: {name!r} is not a factor of a LoRA.", cure="Fetch the dimensions again.")
        located.setdefault(apart.module.removeprefix(peft.PREFIX), {})[apart.role] = name
    modules = {}
    for module, roles in located.items():
        if "down" not in roles or "up" not in roles:
            raise CorruptBlob(f"{path}: {module} has one factor only.", cure="Fetch the dimensions again.")
        down, up = shapes[roles["down"]], shapes[roles["up"]]
        if len(down) != 2 or len(up) != 2 or down[0] != up[1] or down[0] < 1:
            raise CorruptBlob(f"{path}: the factors of {module} have shapes {tuple(down)} and {tuple(up)}.")
        scale = settings.scale(module, down[0], path)
        modules[f"unet.{module}"] = PublishedModule(
            places[roles["down"]], places[roles["up"]], down[0], (up[0], down[1]), scale
        )
    return PublishedLayout(modules, settings.base)


def _companion(path: Path, name: str) -> Path:
    """A file that belongs to the matrix: beside it, or in a folder `files` beside one of the folders it is in."""
    places = [folder / sub / name for folder in list(path.resolve().parents)[:3] for sub in ("", "files")]
    for place in places:
        if place.is_file():
            return place
    what = _OTHERWISE if name == DIMENSIONS else "Fetch this file as well: it contains the scales of the factors."
    raise UsageError(f"There is no {name} beside {path}.", cure=what)


def _load(path: Path) -> Any:
    if not path.is_file():
        raise UsageError(f"There is no file {path}.", cure="Check the path.")
    refuse_inflated(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        cure = _OTHERWISE if path.name == DIMENSIONS else "Only tensors and plain containers of them are read."
        raise UnsafeInput(
            f"{path} contains objects that could only be created by running its code.", cure=cure
        ) from error
    except (RuntimeError, ValueError, EOFError, KeyError, OSError) as error:
        raise CorruptBlob(
            f"{path} cannot be read ({str(error).splitlines()[0]}).", cure="Fetch the file again."
        ) from error


def _shape(entry: Any, path: Path, name: str) -> tuple[int, ...]:
    """A shape from what the table says: the shape, or the number of entries and the shape."""
    given = entry[-1] if isinstance(entry, Sequence) and entry and isinstance(entry[-1], Sequence) else entry
    if not isinstance(given, Sequence) or not all(type(side) is int and side > 0 for side in given):
        raise UsageError(f"{path}: the shape of {name} is {entry!r}.", cure=_OTHERWISE)
    return tuple(given)
