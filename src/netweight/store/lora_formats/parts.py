"""The parts of an adapter in files: where each module's change lies, found from headers, and how one is read.

A part is one module's change: its tensors by role, its scale, and, where the authors fused several modules of diffusers
into one, the rows of the file's matrix that are its own.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from netweight.core.weight_endings import PICKLES
from netweight.errors import CorruptBlob, UnsafeInput, Unsupported, UsageError
from netweight.store.lora_formats.base_weights import BaseWeights
from netweight.store.lora_formats.naming import Naming
from netweight.store.lora_formats.other_kinds import (
    MAGNITUDES,
    ChangeStructure,
    Conversion,
    by_row,
    dense,
    kind_of,
    low_rank,
    structure,
    with_core,
    with_magnitude,
)
from netweight.store.lora_formats.tensor_names import Role
from netweight.store.reader import Store

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.nn.lora import LowRank

Layout = Literal["diffusers", "peft", "kohya", "comfyui"]
"""Whose files: diffusers', peft's, kohya's flattened names, or the authors' names as ComfyUI reads them."""

_DTYPES = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")
# Factors of mlx-lm, which are transposed → the role of the factor in peft.
_TURNED: Mapping[Role, Role] = {"lora_a": "down", "lora_b": "up"}
RowRanges = tuple[tuple[int, int], ...]
"""Ranges of rows, in order; empty for all as they are."""


@final
@dataclass(frozen=True)
class AdapterPart:
    """One module's change in a file."""

    file: Path
    """File that contains the factors."""
    tensors: Mapping[Role, str]
    """Role of a tensor → its name."""
    scale: float
    """alpha / rank, or alpha / √rank."""
    rank: int
    """Rank of the factors. For adapters of other kinds, the largest rank of the LoRA that approximates them."""
    shape: tuple[int, int]
    """Rows and columns of the change; a convolution's columns are channels × kernel."""
    kernel: tuple[int, ...]
    """Sides of a convolution's kernel; empty for a linear layer."""
    rows: RowRanges = ()
    """Ranges of the file's rows that are this module's, in order; empty for all as they are."""
    expert: tuple[int, int] | None = None
    """For a packed parameter, whose factors are those of all experts: the number of the expert, and the number of
    experts.
    """

    @property
    def converts(self) -> bool:
        """True if the adapter is of another kind than plain LoRA, so that it is converted."""
        return kind_of(self.tensors) != "lora" or any(role in self.tensors for role in MAGNITUDES)


@final
@dataclass(frozen=True)
class VectorPart:
    """The change of a bias, a norm or another parameter that no factors express."""

    file: Path
    """File that contains the vector."""
    tensor: str
    """The tensor's name."""
    scale: float = 1.0
    """Factor of the vector."""
    rows: RowRanges = ()
    """Ranges of its entries that are this parameter's; empty for all."""


@final
@dataclass(frozen=True)
class AdapterPlan:
    """Content of an adapter's files, from their headers."""

    path: Path
    """The file or folder."""
    layout: Layout
    """Layout of the files."""
    parts: Mapping[str, AdapterPart]
    """Module name → where its change lies."""
    base: str | None
    """The model it was trained on, if the files say that."""
    about: Mapping[str, str] = field(default_factory=dict)
    """Record of the files about their origin, shortened."""
    conversion: Conversion | None = None
    """Conversion of adapters of other kinds to LoRA."""
    vectors: Mapping[str, VectorPart] = field(default_factory=dict)
    """Parameter name → where its change lies, for biases, norms and others that are not matrices."""
    replacements: Mapping[str, VectorPart] = field(default_factory=dict)
    """Parameter name → a whole parameter that takes the place of the model's (peft's `modules_to_save`, biases)."""
    naming: Naming | None = None
    """The names of its architecture, if it is a known one."""
    alike: tuple[Naming, ...] = ()
    """Further architectures in which the file's names mean the same modules of diffusers."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The file's own metadata, whole."""
    remarks: tuple[str, ...] = ()
    """Remarks for the reader: the architecture, names that were not translated, tensors that were left out."""
    kohya_ends: bool = False
    """True if factors are called `lora_down` and `lora_up`."""
    has_alphas: bool = False
    """True if alphas are tensors of the file."""
    transposed: bool = False
    """True if the model stores these weights as (inputs, outputs) (`fan_in_fan_out`)."""

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module name → rows and columns, sorted by name."""
        return {name: self.parts[name].shape for name in sorted(self.parts)}

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Names of convolutions → sides of their kernels."""
        return {name: self.parts[name].kernel for name in sorted(self.parts) if self.parts[name].kernel}


def refuse_pickle(path: Path) -> None:
    """Refuse a file by its ending."""
    if path.suffix.lower() in PICKLES:
        raise UnsafeInput(
            f"{path} is a pickle, which can run code when opened.",
            cure="Load it where you trust it and save it again: peft's model.save_pretrained(folder), or "
            "safetensors.torch.save_file(tensors, path).",
        )


def structure_of(file: Path, store: Store, name: str, factors: Mapping[Role, str]) -> ChangeStructure:
    """Find the rank, rows, columns and kernel of one module's change from the header of its file.

    Args:
        file: The file, for messages.
        store: The file, opened.
        name: The module as the file writes it.
        factors: Role of a factor → its tensor's name; an alpha is ignored.

    Returns:
        The structure, of any kind of adapter.

    Raises:
        CorruptBlob: A factor is missing, or shapes contradict each other.
        Unsupported: A dtype or shape is none of a LoRA's.
        UsageError: The rank is 0.
    """
    infos = {role: store.info(tensor) for role, tensor in factors.items() if role != "alpha"}
    for info in infos.values():
        if info.dtype not in _DTYPES:
            raise Unsupported(
                f"{file}: {info.name} has dtype {info.dtype}, which are codes without a scale.",
                cure=f"Save it as {', '.join(_DTYPES)}.",
            )
    shapes = _shapes_turned({role: info.shape for role, info in infos.items()}, name, file)
    return _pair(shapes, name, file) if kind_of(factors) == "lora" else structure(shapes, name, file)


def plan_part(
    file: Path,
    name: str,
    factors: Mapping[Role, str],
    structure: ChangeStructure,
    scale: float,
    conversion: Conversion | None,
) -> AdapterPart:
    """Describe one module's change in a file.

    Args:
        file: The file.
        name: The module as the file writes it, for messages.
        factors: Role of a tensor → its name.
        structure: Rank, shape and kernel of the change (`structure_of`).
        scale: Factor of the change.
        conversion: How other kinds become LoRAs.

    Returns:
        The part. The rank of a kind that is converted is at most the conversion's.

    Raises:
        UsageError: The scale is not a finite number.
    """
    if not math.isfinite(scale):
        raise UsageError(f"{file}: the scale of {name} is {scale}.", cure="Leave the file out, or correct its alpha.")
    part = AdapterPart(file, dict(factors), scale, structure.rank or 0, structure.shape, structure.kernel)
    return replace(part, rank=min(conversion.rank, *structure.shape)) if part.converts and conversion else part


def with_rows(part: AdapterPart, rows: RowRanges) -> AdapterPart:
    """Return the part of some of a fused module's rows."""
    if not rows:
        return part
    count = sum(stop - start for start, stop in rows)
    rank = min(part.rank, count) if part.converts else part.rank
    return replace(part, rows=rows, shape=(count, part.shape[1]), rank=rank)


def take_rows(tensor: Tensor, rows: RowRanges) -> Tensor:
    """Take ranges of a tensor's rows, in their order."""
    import torch

    return torch.cat([tensor[start:stop] for start, stop in rows]) if rows else tensor


def _pair(shapes: Mapping[Role, tuple[int, ...]], name: str, file: Path) -> ChangeStructure:
    """The structure of a LoRA, or of one with Tucker's core."""
    if "embedding_A" in shapes and "embedding_B" in shapes:
        # The shapes are (rank, tokens) and (width, rank).
        tokens, sides = shapes["embedding_A"], shapes["embedding_B"]
        if len(tokens) != 2 or len(sides) != 2 or tokens[0] != sides[1] or not tokens[0]:
            raise CorruptBlob(f"{file}: the factors of the embedding {name} have shapes {tokens} and {sides}.")
        return ChangeStructure(tokens[0], (tokens[1], sides[0]), ())
    if "down" not in shapes or "up" not in shapes:
        lacking = "down (lora_A)" if "down" not in shapes else "up (lora_B)"
        raise CorruptBlob(f"{file}: {name} has no {lacking} factor.", cure="The file is incomplete: fetch it again.")
    down, up, core = shapes["down"], shapes["up"], shapes.get("lora_mid")
    if len(down) < 2 or len(up) < 2 or any(side != 1 for side in up[2:]):
        raise Unsupported(
            f"{file}: the factors of {name} have shapes {down} and {up}, which no LoRA of a linear layer "
            "or of a convolution has.",
            cure="The up factor of a convolution must be 1 × 1.",
        )
    if core is not None and (len(core) < 3 or core[:2] != (up[1], down[0]) or math.prod(down[2:]) != 1):
        raise CorruptBlob(f"{file}: {name} has a core of shape {core} between factors of {up} and {down}.")
    rank, columns = up[1] if core else down[0], math.prod(down[1:]) * math.prod(core[2:] if core else ())
    if rank == 0 or up[1] == 0:
        raise UsageError(f"{file}: {name} has rank 0.", cure="Train it with rank 1 or more, or leave the file out.")
    if up[1] != rank:
        raise CorruptBlob(f"{file}: {name} has a down factor of rank {rank} and an up factor of {up[1]}.")
    return ChangeStructure(rank, (up[0], columns), tuple(core[2:] if core else down[2:]))


def _shapes_turned(shapes: Mapping[Role, tuple[int, ...]], name: str, file: Path) -> Mapping[Role, tuple[int, ...]]:
    """The shapes of factors as peft stores them, of those of mlx-lm, which are the other way round."""
    if "lora_a" not in shapes and "lora_b" not in shapes:
        return shapes
    if re.search(r"(^|\.)(embed_tokens|wte|word_embeddings)$", name) or any(len(s) != 2 for s in shapes.values()
                                                                             if len(s) != 1):  # fmt: skip
        raise Unsupported(
            f"{file}: {name} is an embedding or a set of experts, and factors of mlx-lm are not supported for these.",
            cure="Fuse the adapter into the model (mlx_lm.fuse), and extract a LoRA: netweight space extract BASE "
            "FUSED NEW.",
        )
    return {_TURNED.get(role, role): shape[::-1] for role, shape in shapes.items()}


def _tensors_of(store: Store, part: AdapterPart) -> dict[Role, Tensor]:
    """The tensors of a part by role."""
    return _turned(
        {role: _widened(store.get(name)) for role, name in part.tensors.items() if role not in ("alpha", "up_bias")}
    )


def _turned(tensors: Mapping[Role, Tensor]) -> dict[Role, Tensor]:
    """Factors as peft stores them, of those of mlx-lm."""
    return {_TURNED.get(role, role): tensor.T if role in _TURNED else tensor for role, tensor in tensors.items()}


def load_part(
    store: Store, name: str, part: AdapterPart, weights: BaseWeights | None, *, transposed: bool = False
) -> tuple[LowRank, float]:
    """Read one module's change, factors in the widest of their dtypes; and the square of what its rank leaves out."""
    import torch

    from netweight.nn.lora import LowRank

    tensors = _tensors_of(store, part)
    if tensors.keys() == {"embedding_A", "embedding_B"}:
        tensors = {"down": tensors["embedding_B"].T, "up": tensors["embedding_A"].T}
    if part.expert is not None:
        tensors = _own_expert(tensors, *part.expert)
    if tensors.keys() == {"down", "up"}:
        down, up = tensors["down"].flatten(1), tensors["up"].flatten(1)
        if down.dtype != up.dtype:
            dtype = torch.promote_types(down.dtype, up.dtype)
            down, up = down.to(dtype), up.to(dtype)
        return _own_rows(LowRank(down, up, part.scale), part.rows), 0.0
    magnitude = next(((role, tensors.pop(role)) for role in MAGNITUDES if role in tensors), None)
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors.values()])
    if kind_of(part.tensors) != "lora":
        whole = magnitude is not None or bool(part.rows)
        change, lost = low_rank(tensors, part.scale, (1 << 30) if whole else part.rank)
        dtype = torch.float32 if dtype.itemsize < 4 else dtype
        change = LowRank(change.down.to(dtype), change.up.to(dtype), change.scale)
        if part.rows:
            change = _own_rows(change, part.rows)
            if magnitude is None:
                change, lost = change.truncated(part.rank)
    else:
        down = tensors["down"].flatten(1).to(dtype)
        down = with_core(down, tensors["lora_mid"].to(dtype)) if "lora_mid" in tensors else down
        change, lost = _own_rows(LowRank(down, tensors["up"].flatten(1).to(dtype), part.scale), part.rows), 0.0
    if magnitude is None:
        return change, lost
    # Without weights the file was refused before.
    assert weights is not None
    role, values = magnitude
    weight = weights.weight(name)
    if transposed and weight.ndim == 2:
        weight = weight.T
    if weight.flatten(1).shape != part.shape:
        raise UsageError(
            f"{part.file}: {name} has shape {part.shape}, but shape {tuple(weight.shape)} in the base model.",
            cure="Name the base model that it was trained on (--weights).",
        )
    of_rows = by_row(role, tuple(values.shape), sum(stop - start for start, stop in part.rows) or part.shape[0])
    if part.rows:
        of_rows = values.numel() == store.info(part.tensors["up"]).shape[0] if "up" in part.tensors else of_rows
        if not of_rows:
            raise Unsupported(
                f"{part.file}: the magnitudes of {name} belong to columns of a module that the authors fused.",
                cure="Save it with the names of diffusers, in which the module is split.",
            )
        values = take_rows(values.flatten(), part.rows)
    if values.numel() != weight.shape[0 if of_rows else 1]:
        raise CorruptBlob(f"{part.file}: the magnitude of {name} has shape {tuple(values.shape)}.")
    dense = change.scale * (change.up.double() @ change.down.double())
    change, lost = LowRank.of(with_magnitude(dense, weight, values, by_row=of_rows)).truncated(part.rank)
    return LowRank(change.down.float(), change.up.float()), lost


def dense_change(store: Store, name: str, part: AdapterPart, weight: Tensor) -> Tensor:
    """One module's change as a matrix, of whatever kind the adapter is.

    Args:
        store: The adapter's file.
        name: The module, for messages.
        part: Where its change lies.
        weight: The module's weight, shape `(rows, columns, …)`, which DoRA's change depends on.

    Returns:
        The change in fp64, shape `(rows, columns)`.

    Raises:
        CorruptBlob: The magnitudes do not fit the weight.
    """
    tensors = _tensors_of(store, part)
    magnitude = next(((role, tensors.pop(role)) for role in MAGNITUDES if role in tensors), None)
    change = take_rows(dense(tensors, part.scale), part.rows)
    if magnitude is None:
        return change
    role, values = magnitude
    whole_rows = store.info(part.tensors["up"]).shape[0] if "up" in part.tensors else part.shape[0]
    of_rows = by_row(role, tuple(values.shape), whole_rows)
    if of_rows:
        values = take_rows(values.flatten(), part.rows)
    if values.numel() != weight.shape[0 if of_rows else 1]:
        raise CorruptBlob(f"{part.file}: the magnitude of {name} has shape {tuple(values.shape)}.")
    return with_magnitude(change, weight, values, by_row=of_rows)


def _own_expert(tensors: Mapping[str, Tensor], number: int, count: int) -> dict[str, Tensor]:
    """The factors of one expert; peft puts those of all below each other in `down`, and takes turns in `up`."""
    down, up = tensors["down"], tensors["up"]
    rank = len(down) // count
    return {"down": down[number * rank : (number + 1) * rank], "up": up.reshape(-1, rank, count)[:, :, number]}


def _own_rows(change: LowRank, rows: RowRanges) -> LowRank:
    """The rows of a fused module that are one module's, without components that are zero there."""
    from netweight.nn.lora import LowRank

    if not rows:
        return change
    up = take_rows(change.up, rows)
    used = up.ne(0).any(0)
    if used.all() or not used.any():
        return LowRank(change.down, up, change.scale)
    return LowRank(change.down[used], up[:, used], change.scale)


def _widened(tensor: Tensor) -> Tensor:
    """fp8 has no arithmetic; fp16 holds all its values."""
    return tensor.half() if tensor.itemsize == 1 else tensor
