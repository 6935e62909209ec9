"""The parts of an adapter in a file, and the refusal of adapters that are not ΔW = scale · up @ down."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from netweight.errors import CorruptBlob, UnsafeInput, Unsupported, UsageError
from netweight.store.lora_formats.other_kinds import (
    MAGNITUDES,
    BaseWeights,
    Conversion,
    Structure,
    by_row,
    kind_of,
    low_rank,
    structure,
    with_core,
    with_magnitude,
)

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.nn.lora import LowRank
    from netweight.store.reader import Store


# Endings of files that are pickles.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


def refuse_pickle(path: Path) -> None:
    """Refuse a file by its ending."""
    if path.suffix.lower() in PICKLES:
        raise UnsafeInput(
            f"{path} is a pickle, which can run code when opened.",
            cure="Load it where you trust it and save it again: peft's model.save_pretrained(folder), or "
            "safetensors.torch.save_file(tensors, path).",
        )


Layout = Literal["diffusers", "peft", "kohya"]
Role = str  # down, up, alpha, or the name that a tensor of another kind has (`other_kinds.TENSOR`)

_DTYPES = ("F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2")


@final
@dataclass(frozen=True)
class Part:
    """One module's change in a file."""

    file: Path
    tensors: Mapping[Role, str]  # what a tensor is → its name
    scale: float  # alpha / rank, or alpha / √rank
    rank: int  # of other kinds, the highest that it is to become
    shape: tuple[int, int]  # rows and columns of the change; a convolution's columns are channels × kernel
    kernel: tuple[int, ...]  # sides of a convolution's kernel; empty for a linear layer

    @property
    def converts(self) -> bool:
        """Whether it is no plain LoRA."""
        return kind_of(self.tensors) != "lora" or any(role in self.tensors for role in MAGNITUDES)


@final
@dataclass(frozen=True)
class AdapterPlan:
    """What an adapter's files hold, from their headers."""

    path: Path  # the file or folder
    layout: Layout  # how it is written
    parts: Mapping[str, Part]  # module name → where its change lies
    base: str | None  # the model it was trained on, if the files say that
    about: Mapping[str, str] = field(default_factory=dict)  # what the files say of where it comes from
    conversion: Conversion | None = None  # how what is no LoRA becomes one

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Module name → rows and columns, sorted by name."""
        return {name: self.parts[name].shape for name in sorted(self.parts)}

    @property
    def kernels(self) -> dict[str, tuple[int, ...]]:
        """Names of convolutions → sides of their kernels."""
        return {name: self.parts[name].kernel for name in sorted(self.parts) if self.parts[name].kernel}


def by_module(found: Iterable[tuple[str, str, Role]], where: Path) -> dict[str, dict[Role, str]]:
    """Gather tensors by the module that they are a part of, from name, module and role; none may come twice."""
    located: dict[str, dict[Role, str]] = {}
    for name, module, role in found:
        roles = located.setdefault(module, {})
        if role in roles:
            raise CorruptBlob(f"{where}: both {roles[role]!r} and {name!r} are the same part of {module}.")
        roles[role] = name
    return located


def assemble(
    file: Path, store: Store, located: Mapping[str, Mapping[Role, str]], scale_of: Callable[[str, int | None], float],
    conversion: Conversion | None,
) -> dict[str, Part]:  # fmt: skip
    """Pair the factors of a file."""
    return {name: _part(file, store, name, roles, scale_of, conversion) for name, roles in located.items()}


def _part(
    file: Path, store: Store, name: str, roles: Mapping[Role, str], scale_of: Callable[[str, int | None], float],
    conversion: Conversion | None,
) -> Part:  # fmt: skip
    infos = {role: store.info(tensor) for role, tensor in roles.items() if role != "alpha"}
    for info in infos.values():
        if info.dtype not in _DTYPES:
            raise Unsupported(f"{file}: {info.name} has dtype {info.dtype}.", cure=f"Save it as {', '.join(_DTYPES)}.")
    shapes = {role: info.shape for role, info in infos.items()}
    found = _pair(shapes, name, file) if kind_of(roles) == "lora" else structure(shapes, name, file)
    scale = scale_of(name, found.rank)
    if not math.isfinite(scale):
        raise UsageError(f"{file}: the scale of {name} is {scale}.", cure="Leave the file out, or mend its alpha.")
    part = Part(file, dict(roles), scale, found.rank or 0, found.shape, found.kernel)
    return replace(part, rank=min(conversion.rank, *found.shape)) if part.converts and conversion else part


def _pair(shapes: Mapping[Role, tuple[int, ...]], name: str, file: Path) -> Structure:
    """The structure of a LoRA, or of one with Tucker's core."""
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
    return Structure(rank, (up[0], columns), tuple(core[2:] if core else down[2:]))


def load_part(store: Store, name: str, part: Part, weights: BaseWeights | None) -> tuple[LowRank, float]:
    """Read one module's change, factors in the widest of their dtypes; and the square of what its rank leaves out."""
    import torch

    from netweight.nn.lora import LowRank

    tensors = {role: _plain(store.get(name)) for role, name in part.tensors.items() if role != "alpha"}
    if tensors.keys() == {"down", "up"}:
        down, up = tensors["down"].flatten(1), tensors["up"].flatten(1)
        if down.dtype != up.dtype:
            dtype = torch.promote_types(down.dtype, up.dtype)
            down, up = down.to(dtype), up.to(dtype)
        return LowRank(down, up, part.scale), 0.0
    magnitude = next(((role, tensors.pop(role)) for role in MAGNITUDES if role in tensors), None)
    dtype = functools.reduce(torch.promote_types, [tensor.dtype for tensor in tensors.values()])
    if kind_of(part.tensors) != "lora":
        change, lost = low_rank(tensors, part.scale, part.rank if magnitude is None else min(part.shape))
        dtype = torch.float32 if dtype.itemsize < 4 else dtype
        change = LowRank(change.down.to(dtype), change.up.to(dtype), change.scale)
    else:
        down = tensors["down"].flatten(1).to(dtype)
        down = with_core(down, tensors["lora_mid"].to(dtype)) if "lora_mid" in tensors else down
        change, lost = LowRank(down, tensors["up"].flatten(1).to(dtype), part.scale), 0.0
    if magnitude is None:
        return change, lost
    assert weights is not None  # else the file was refused
    role, values = magnitude
    weight = weights.weight(name)
    if weight.flatten(1).shape != part.shape:
        raise UsageError(f"{part.file}: {name} has shape {part.shape}, in the base {tuple(weight.shape)}.")
    dense = change.scale * (change.up.double() @ change.down.double())
    whole = with_magnitude(dense, weight, values, by_row=by_row(role, tuple(values.shape), part.shape[0]))
    change, lost = LowRank.of(whole).truncated(part.rank)
    return LowRank(change.down.float(), change.up.float()), lost


def _plain(tensor: Tensor) -> Tensor:
    """fp8 has no arithmetic; fp16 holds all its values."""
    return tensor.half() if tensor.itemsize == 1 else tensor


def alpha_of(scale: float, rank: int) -> float:
    """Return the alpha for which alpha / rank is a scale, or nearest to it where no fp64 number is: a bit beside it."""
    # `rank`: at least 1
    near = scale * rank
    candidates = (float(round(near)), near, math.nextafter(near, math.inf), math.nextafter(near, -math.inf))
    return min(candidates, key=lambda alpha: abs(alpha / rank - scale))


def scaled_up(up: Tensor, factor: float) -> Tensor:
    """Multiply an up factor: in its own dtype where that holds the product exactly, else rounded to fp32 or fp64."""
    # `up`: shape `(rows, rank)`, floating point
    # Returns: A new tensor, shape `(rows, rank)`.
    import torch

    whole = up.double() * factor
    for dtype in (up.dtype, torch.float32):
        if torch.equal(whole.to(dtype).double(), whole):
            return whole.to(dtype)
    rounded = whole.float()
    return whole if up.dtype == torch.float64 or not rounded.isfinite().all() else rounded
