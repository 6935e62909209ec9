"""The parts of an adapter in a file, and the refusal of adapters that are not ΔW = scale · up @ down."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from netweight.errors import CorruptBlob, UnsafeInput, Unsupported, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.nn.lora import LowRank
    from netweight.store.reader import Store


# Endings of files that are pickles.
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_LYCORIS = "Train LoRA instead, or extract a LoRA from the merged model (kohya's extract_lora_from_models.py)."
_KINDS = (
    (r"lora_magnitude_vector|dora_scale", "DoRA, whose change is not linear in its factors", _LYCORIS),
    (r"\.hada_[wt]", "LoHa, a product of two low-rank matrices entry by entry", _LYCORIS),
    (r"\.lokr_[wt]", "LoKr, a Kronecker product", _LYCORIS),
    (r"\.(oft|boft)_|\.oft_blocks|\.vera_lambda|\.ia3_", "no LoRA (OFT, VeRA or IA³)", _LYCORIS),
    (r"\.lora_mid\.", "LoCon with a Tucker decomposition", "Train without conv_dim's use_tucker (use_cp)."),
    (r"\.diff(_b)?$|\.set_weight|\.w_norm$|\.b_norm$", "a full change of weights", "Extract a LoRA of it first."),
    (
        r"lora_embedding_[AB]",
        "a LoRA of an embedding, which is a matrix the other way round",
        "Leave embeddings out of target_modules and train again.",
    ),
    (
        r"lora_(A|B|up|down|linear_layer)\b.*\.bias$|\.(up|down)\.bias$",
        "a LoRA with biases",
        "Train with lora_bias=False.",
    ),
    (r"\.bias$", "a bias that was trained along", 'Train with bias="none".'),
)
_ANY = re.compile("|".join(f"(?:{pattern})" for pattern, _, _ in _KINDS))


def refuse_kinds(path: Path, names: Iterable[str]) -> None:
    """Refuse a file of another kind of adapter."""
    names = [name for name in names if _ANY.search(name)]
    for pattern, kind, cure in _KINDS:
        found = [name for name in names if re.search(pattern, name)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise Unsupported(f"{path} holds {kind}: tensor {found[0]!r}{more}.", cure=cure)


def refuse_pickle(path: Path) -> None:
    """Refuse a file by its ending."""
    if path.suffix.lower() in PICKLES:
        raise UnsafeInput(
            f"{path} is a pickle, which can run code when opened.",
            cure="Load it where you trust it and save it again: peft's model.save_pretrained(folder), or "
            "safetensors.torch.save_file(tensors, path).",
        )


Layout = Literal["diffusers", "peft", "kohya"]
Role = Literal["down", "up", "alpha"]

_DTYPES = ("F16", "BF16", "F32", "F64")


@final
@dataclass(frozen=True)
class Part:
    """One module's change in a file."""

    file: Path
    down: str  # name of the tensor that is the down factor
    up: str
    scale: float  # alpha / rank, or alpha / √rank
    rank: int
    shape: tuple[int, int]  # rows and columns of the change; a convolution's columns are channels × kernel
    kernel: tuple[int, ...]  # sides of a convolution's kernel; empty for a linear layer


@final
@dataclass(frozen=True)
class AdapterPlan:
    """What an adapter's files hold, from their headers."""

    path: Path  # the file or folder
    layout: Layout  # how it is written
    parts: Mapping[str, Part]  # module name → where its change lies
    base: str | None  # the model it was trained on, if the files say that
    about: Mapping[str, str] = field(default_factory=dict)  # what the files say of where it comes from

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
    file: Path, store: Store, located: Mapping[str, Mapping[Role, str]], scale_of: Callable[[str, int], float]
) -> dict[str, Part]:
    """Pair the factors of a file."""
    return {name: _paired(file, store, name, roles, scale_of) for name, roles in located.items()}


def _paired(
    file: Path, store: Store, name: str, roles: Mapping[Role, str], scale_of: Callable[[str, int], float]
) -> Part:
    if "down" not in roles or "up" not in roles:
        lacking = "down (lora_A)" if "down" not in roles else "up (lora_B)"
        raise CorruptBlob(f"{file}: {name} has no {lacking} factor.", cure="The file is incomplete: fetch it again.")
    down, up = store.info(roles["down"]), store.info(roles["up"])
    for info in (down, up):
        if info.dtype not in _DTYPES:
            raise Unsupported(f"{file}: {info.name} has dtype {info.dtype}.", cure=f"Save it as {', '.join(_DTYPES)}.")
    if len(down.shape) < 2 or len(up.shape) < 2 or any(side != 1 for side in up.shape[2:]):
        raise Unsupported(
            f"{file}: the factors of {name} have shapes {down.shape} and {up.shape}, which no LoRA of a linear layer "
            "or of a convolution has.",
            cure="The up factor of a convolution must be 1 × 1.",
        )
    rank, columns = down.shape[0], math.prod(down.shape[1:])
    if rank == 0 or up.shape[1] == 0:
        raise UsageError(f"{file}: {name} has rank 0.", cure="Train it with rank 1 or more, or leave the file out.")
    if up.shape[1] != rank:
        raise CorruptBlob(f"{file}: {name} has a down factor of rank {rank} and an up factor of {up.shape[1]}.")
    scale = scale_of(name, rank)
    if not math.isfinite(scale):
        raise UsageError(f"{file}: the scale of {name} is {scale}.", cure="Leave the file out, or mend its alpha.")
    return Part(file, roles["down"], roles["up"], scale, rank, (up.shape[0], columns), tuple(down.shape[2:]))


def load_part(store: Store, part: Part) -> LowRank:
    """Read one module's change; both factors in the wider of their dtypes."""
    import torch

    from netweight.nn.lora import LowRank

    down, up = store.get(part.down).flatten(1), store.get(part.up).flatten(1)
    dtype = torch.promote_types(down.dtype, up.dtype)
    return LowRank(down.to(dtype), up.to(dtype), part.scale)


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
