"""The parts of an adapter in a file: plain LoRA, and what else becomes low-rank changes or is refused.

lora_down (r, columns)  lora_up (rows, r)                    ΔW = s · up down
hada_w1_a (rows, r)  hada_w1_b (r, columns)  and hada_w2_…   ΔW = s · (w1_a w1_b) ∘ (w2_a w2_b)
lokr_w1 (p, q), or lokr_w1_a lokr_w1_b;  lokr_w2 likewise    ΔW = s · w1 ⊗ w2
lora_mid (r, r, sides)                                       ΔW[o, i, ·] = s · Σ up[o, a] mid[a, b, ·] down[b, i]
hada_t1, hada_t2, lokr_t2                                    the same for kernels, within a factor
dora_scale, lora_magnitude_vector                            ΔW = m · (W + Δ) / ‖W + Δ‖ − W, norms by row or column
diff                                                         ΔW itself
"""

# Source: FedPara (arXiv 2108.06098), KronA (2212.10650), LyCORIS (2309.14859) and DoRA (2402.09353).

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, final

from netweight.errors import CorruptBlob, NameNotFound, UnsafeInput, Unsupported, UsageError
from netweight.store.reader import Store, open_store

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.nn.lora import LowRank

# Names of tensors after their module's, and what is behind them in some files.
TENSOR = re.compile(
    r"(?P<module>.+)\.(?P<role>hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2|lora_mid|dora_scale"
    r"|lora_magnitude_vector|diff)(?:\.weight|\.[^.]+\.weight|\.default)?"
)
MAGNITUDES = ("dora_scale", "lora_magnitude_vector")
_KERNELS = re.compile(r".*(resnets\.\d+\.conv[12]|samplers\.0\.conv|\bconv_(in|out))")


@final
@dataclass(frozen=True)
class Conversion:
    """How adapters of other kinds become LoRAs."""

    rank: int  # at most, of each module; modules that are LoRAs keep their own
    weights: Path | None = None  # the base model, which DoRA's change depends on


@final
@dataclass(frozen=True)
class Structure:
    """What the shapes of a module's tensors tell."""

    rank: int | None  # what alpha is divided by; None where nothing is
    shape: tuple[int, int]  # rows and columns of the change
    kernel: tuple[int, ...]  # sides of a kernel; empty for a linear layer


def kind_of(roles: Mapping[str, object]) -> str:
    """The kind of adapter that a module's tensors are, without its magnitudes."""
    if "down" in roles and "up" in roles:
        return "lora"
    heads = {role.partition("_")[0] for role in roles} & {"hada", "lokr", "diff"}
    return {"hada": "loha", "lokr": "lokr", "diff": "diff"}[heads.pop()] if len(heads) == 1 else "lora"


def structure(shapes: Mapping[str, tuple[int, ...]], name: str, where: Path) -> Structure:
    """Tell rank, rows, columns and kernel of LoHa, LoKr or a difference."""
    # `shapes`: role → shape
    kind = kind_of(shapes)
    try:
        if kind == "diff":
            rows, *rest = shapes["diff"]
            if not rest:
                raise Unsupported(f"{where}: {name} is a change of a norm or bias, which is no matrix.", cure=_TRAIN)
            found, sound = Structure(None, (rows, math.prod(rest)), tuple(rest[1:])), True
        elif kind == "loha":
            one, two = (_product(shapes, f"hada_w{n}_a", f"hada_w{n}_b", f"hada_t{n}", turned=True) for n in (1, 2))
            found, sound = one, one.shape == two.shape
        else:
            one = _product(shapes, "lokr_w1_a", "lokr_w1_b", None, whole="lokr_w1")
            two = _product(shapes, "lokr_w2_a", "lokr_w2_b", "lokr_t2", whole="lokr_w2")
            shape = (one.shape[0] * two.shape[0], one.shape[1] * two.shape[1])
            found, sound = Structure(one.rank or two.rank, shape, two.kernel), True
    except (KeyError, IndexError, ValueError) as error:
        raise CorruptBlob(f"{where}: {name} lacks a factor, or has one of another shape ({error}).") from error
    if not sound or not all(found.shape) or found.rank == 0:
        raise CorruptBlob(f"{where}: the tensors of {name} have shapes that do not fit: {dict(shapes)}.")
    if not found.kernel and found.shape[1] % 9 == 0 and _KERNELS.fullmatch(name):
        found = Structure(found.rank, found.shape, (3, 3))  # written as a matrix, which does not say its sides
    return found


def _product(
    shapes: Mapping[str, tuple[int, ...]], a: str, b: str, core: str | None, *, whole: str = "", turned: bool = False
) -> Structure:
    """The structure of a matrix or kernel: whole, a product, or a product with a core, whose first factor is turned."""
    if whole in shapes:
        rows, *rest = shapes[whole]
        return Structure(None, (rows, math.prod(rest)), tuple(rest[1:]))
    left, right = shapes[a], shapes[b]
    if core is not None and core in shapes:
        ranks, sides = shapes[core][:2], shapes[core][2:]
        if (left[0], right[0]) != ranks:
            raise ValueError(f"{core} of {shapes[core]}")
        return Structure(right[0], (left[1], right[1] * math.prod(sides)), sides)
    if left[1] != right[0]:
        raise ValueError(f"{a} of {left}, {b} of {right}")
    return Structure(right[0], (left[0], math.prod(right[1:])), tuple(right[2:]))


def with_core(down: Tensor, core: Tensor) -> Tensor:
    """The down factor of a kernel that is written as a core between two factors, shape `(rank, columns)`."""
    # `down`: shape `(rank, channels)`; `core`: shape `(rank, rank, sides)`
    import torch

    return torch.einsum("ab...,bi->ai...", core, down.flatten(1)).flatten(1)


def low_rank(tensors: Mapping[str, Tensor], scale: float, rank: int) -> tuple[LowRank, float]:
    """LoHa, LoKr or a difference at most at a rank, and the square of what that leaves out."""
    # `tensors`: role → tensor
    import torch

    from netweight.nn.lora import LowRank

    tensors = {role: tensor.double() for role, tensor in tensors.items()}
    kind = kind_of({role: "" for role in tensors})
    if kind == "lokr":
        return _kronecker(_matrix(tensors, "lokr_w1", "lokr_w1_a", "lokr_w1_b", ""),
                          _matrix(tensors, "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"), scale, rank)  # fmt: skip
    if kind == "diff":
        return LowRank.of(scale * tensors["diff"].flatten(1)).truncated(rank)
    (up, down), (other_up, other_down) = (_loha_factors(tensors, number) for number in (1, 2))
    # (BA) ∘ (B'A') has rank r r': rows of products of entries.
    ups = torch.einsum("oa,ob->oab", up, other_up).flatten(1)
    downs = torch.einsum("ai,bi->abi", down, other_down).flatten(0, 1)
    return LowRank(downs, ups, scale).truncated(rank)


def _loha_factors(tensors: Mapping[str, Tensor], number: int) -> tuple[Tensor, Tensor]:
    up, down = tensors[f"hada_w{number}_a"], tensors[f"hada_w{number}_b"]
    if (core := tensors.get(f"hada_t{number}")) is not None:
        return up.T, with_core(down, core)
    return up, down.flatten(1)


def _matrix(tensors: Mapping[str, Tensor], whole: str, a: str, b: str, core: str) -> Tensor:
    if whole in tensors:
        return tensors[whole].flatten(1)
    if core in tensors:
        return tensors[a].T @ with_core(tensors[b], tensors[core])
    return tensors[a] @ tensors[b].flatten(1)


def _kronecker(one: Tensor, other: Tensor, scale: float, rank: int) -> tuple[LowRank, float]:
    """The leading components of s · one ⊗ other, whose singular values are products of those of the two."""
    import torch

    from netweight.nn.lora import LowRank

    parts = [torch.linalg.svd(matrix, full_matrices=False) for matrix in (one, other)]
    values = torch.outer(parts[0].S, parts[1].S).flatten()
    ordered = values.argsort(descending=True)
    noise = float(values.max()) * torch.finfo(torch.float64).eps * max(one.numel(), other.numel())
    kept = ordered[: max(1, min(rank, int((values > noise).sum())))]
    first, second = kept // len(parts[1].S), kept % len(parts[1].S)
    root = values[kept].sqrt()
    up = torch.einsum("or,pr->opr", parts[0].U[:, first], parts[1].U[:, second]).flatten(0, 1) * root
    down = torch.einsum("ri,rj->rij", parts[0].Vh[first], parts[1].Vh[second]).flatten(1) * root[:, None]
    return LowRank(down, up, scale), float(values[ordered[len(kept) :]].square().sum()) * scale**2


def with_magnitude(change: Tensor, weight: Tensor, magnitude: Tensor, *, by_row: bool) -> Tensor:
    """What DoRA changes of a weight: m · (W + Δ) / ‖W + Δ‖ − W; in fp64, shape `(rows, columns)`."""
    # `change`, `weight`: shape of the weight; `magnitude`: one number per row, or per column (input channel)
    whole = weight.double() + change.double().reshape(weight.shape)
    axes = [axis for axis in range(whole.ndim) if axis != (0 if by_row else 1)]
    norms = whole.square().sum(axes, keepdim=True).sqrt().clamp_min(1e-30)
    return (whole * (magnitude.double().reshape(norms.shape) / norms) - weight.double()).flatten(1)


def by_row(role: str, shape: tuple[int, ...], rows: int) -> bool:
    """Whether magnitudes are of rows: peft's always; LyCORIS's where the first side is the rows'."""
    return role != "dora_scale" or (shape[0] == rows and math.prod(shape) == rows)


@final
class BaseWeights:
    """The weights of a base model: a file, a model's folder, or a pipeline with a folder for each component."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._stores: dict[str, tuple[Store, list[str]]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> BaseWeights:
        """Files are opened when they are asked for."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close them."""
        self._stack.close()

    def weight(self, module: str) -> Tensor:
        """Return a module's weight."""
        component, _, rest = module.partition(".")
        inside = (self._path / component).is_dir()
        store, names = self._store(component if inside else "")
        wanted = rest if inside else module
        found = [name for name in names if name == f"{wanted}.weight"]
        ends = [f".{wanted}.weight", *([] if inside else [f".{rest}.weight"])]
        found = found or [name for name in names if any(f".{name}".endswith(end) for end in ends)]
        if len(found) != 1:
            raise NameNotFound(
                f"{self._path} holds {len(found) or 'no'} weight{'s' if found else ''} of {module}.",
                cure="Name the base model as diffusers or transformers keep it (--weights).",
            )
        return store.get(found[0])

    def _store(self, component: str) -> tuple[Store, list[str]]:
        if component not in self._stores:
            store = self._stack.enter_context(open_store(self._path / component if component else self._path))
            self._stores[component] = store, store.names()
        return self._stores[component]


# Kinds of adapters by their tensors' names, what they are called, and what to do.
CONVERT = "Convert it: netweight space convert FILE NEW --rank 16, or give ingest a rank (--convert 16)."
CONVERT_DORA = f"{CONVERT} And name the base (--weights)."
_TRAIN = "Train LoRA instead, or extract a LoRA from the merged model (netweight space extract)."
_CONVERTIBLE = (
    (r"lora_magnitude_vector|dora_scale", "DoRA, whose change depends on the base's weights", CONVERT_DORA),
    (r"\.hada_[wt]", "LoHa, a product of two low-rank matrices entry by entry", CONVERT),
    (r"\.lokr_[wt]", "LoKr, a Kronecker product", CONVERT),
    (r"\.diff$", "a full change of weights", CONVERT),
)  # fmt: skip
_KINDS = (
    (r"\.(oft|boft)_|\.oft_blocks|\.vera_lambda|\.ia3_", "no LoRA (OFT, VeRA or IA³)", _TRAIN),
    (r"\.diff_b$|\.set_weight|\.w_norm$|\.b_norm$", "a full change of weights", _TRAIN),
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
_ANY = re.compile("|".join(f"(?:{pattern})" for pattern, _, _ in (*_CONVERTIBLE, *_KINDS)))


def refuse_kinds(path: Path, names: list[str], conversion: Conversion | None) -> None:
    """Refuse a file of a kind of adapter that is no LoRA, and is not to be converted."""
    names = [name for name in names if _ANY.search(name)]
    for pattern, kind, cure in (*(() if conversion else _CONVERTIBLE), *_KINDS):
        found = [name for name in names if re.search(pattern, name)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise Unsupported(f"{path} holds {kind}: tensor {found[0]!r}{more}.", cure=cure)
    if conversion and conversion.weights is None and any(role in name for role in MAGNITUDES for name in names):
        raise UsageError(
            f"{path} holds DoRA, whose change depends on the base's weights.", cure="Name the base model (--weights)."
        )


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
    if values.numel() != weight.shape[0 if (rows := by_row(role, tuple(values.shape), part.shape[0])) else 1]:
        raise CorruptBlob(f"{part.file}: the magnitude of {name} has shape {tuple(values.shape)}.")
    dense = change.scale * (change.up.double() @ change.down.double())
    whole = with_magnitude(dense, weight, values, by_row=rows)
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
