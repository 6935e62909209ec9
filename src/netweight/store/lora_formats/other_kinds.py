"""Adapters of other kinds, which become low-rank changes: LoHa, LoKr, kernels with a core, DoRA, and full differences.

hada_w1_a (rows, r)  hada_w1_b (r, columns)  and hada_w2_…   ΔW = s · (w1_a w1_b) ∘ (w2_a w2_b)
lokr_w1 (p, q), or lokr_w1_a lokr_w1_b;  lokr_w2 likewise    ΔW = s · w1 ⊗ w2
lora_mid (r, r, sides)                                       ΔW[o, i, ·] = s · Σ up[o, a] mid[a, b, ·] down[b, i]
hada_t1, hada_t2, lokr_t2                                    the same for kernels, within a factor
dora_scale, lora_magnitude_vector                            ΔW = m · (W + Δ) / ‖W + Δ‖ − W, norms by row or column
diff                                                         ΔW itself
"""

# Source: FedPara (arXiv 2108.06098), KronA (2212.10650), LyCORIS (2309.14859) and DoRA (2402.09353).

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, final

from netweight.errors import CorruptBlob, Unsupported, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.nn.lora import LowRank

MAGNITUDES = ("dora_scale", "lora_magnitude_vector")
_KERNELS = re.compile(r".*(resnets\.\d+\.conv[12]|samplers\.0\.conv|\bconv_(in|out))")


@final
@dataclass(frozen=True)
class Conversion:
    """Settings of the conversion of other adapters to LoRAs."""

    rank: int
    """At most, of each module; modules that are LoRAs keep their own."""
    weights: Path | None = None
    """The base model, which DoRA's change depends on."""
    replacements: bool = False
    """True to include weights that replace the model's own; only the model itself has a place for them."""


@final
@dataclass(frozen=True)
class ChangeStructure:
    """Structure of a module by the shapes of its tensors."""

    rank: int | None
    """The divisor of alpha; None if alpha is not divided."""
    shape: tuple[int, int]
    """Rows and columns of the change."""
    kernel: tuple[int, ...]
    """Sides of a kernel; empty for a linear layer."""


def kind_of(roles: Mapping[str, object]) -> str:
    """The kind of adapter that a module's tensors are, without its magnitudes."""
    if "down" in roles and "up" in roles:
        return "lora"
    heads = {role.partition("_")[0] for role in roles} & {"hada", "lokr", "diff"}
    return {"hada": "loha", "lokr": "lokr", "diff": "diff"}[heads.pop()] if len(heads) == 1 else "lora"


def structure(shapes: Mapping[str, tuple[int, ...]], name: str, where: Path) -> ChangeStructure:
    """Find the rank, rows, columns and kernel of LoHa, LoKr or a difference from the shapes of its tensors by role."""
    kind = kind_of(shapes)
    try:
        if kind == "diff":
            rows, *rest = shapes["diff"]
            if not rest:
                raise Unsupported(f"{where}: {name} is a change of a norm or bias, which is not a matrix.", cure=_TRAIN)
            structure, sound = ChangeStructure(None, (rows, math.prod(rest)), tuple(rest[1:])), True
        elif kind == "loha":
            one, two = (_product(shapes, f"hada_w{n}_a", f"hada_w{n}_b", f"hada_t{n}", turned=True) for n in (1, 2))
            structure, sound = one, one.shape == two.shape
        else:
            one = _product(shapes, "lokr_w1_a", "lokr_w1_b", None, whole="lokr_w1")
            two = _product(shapes, "lokr_w2_a", "lokr_w2_b", "lokr_t2", whole="lokr_w2")
            shape = (one.shape[0] * two.shape[0], one.shape[1] * two.shape[1])
            structure, sound = ChangeStructure(one.rank or two.rank, shape, two.kernel), True
    except (KeyError, IndexError, ValueError) as error:
        raise CorruptBlob(f"{where}: {name} lacks a factor, or has one of another shape ({error}).") from error
    if not sound or not all(structure.shape) or structure.rank == 0:
        raise CorruptBlob(f"{where}: the tensors of {name} have shapes that do not fit: {dict(shapes)}.")
    if not structure.kernel and structure.shape[1] % 9 == 0 and _KERNELS.fullmatch(name):
        # It is written as a matrix, which does not state the sides of the kernel.
        structure = ChangeStructure(structure.rank, structure.shape, (3, 3))
    return structure


def _product(
    shapes: Mapping[str, tuple[int, ...]], a: str, b: str, core: str | None, *, whole: str = "", turned: bool = False
) -> ChangeStructure:
    """The structure of a matrix or kernel: whole, a product, or a product with a core, whose first factor is turned."""
    if whole in shapes:
        rows, *rest = shapes[whole]
        return ChangeStructure(None, (rows, math.prod(rest)), tuple(rest[1:]))
    left, right = shapes[a], shapes[b]
    if core is not None and core in shapes:
        ranks, sides = shapes[core][:2], shapes[core][2:]
        if (left[0], right[0]) != ranks:
            raise ValueError(f"{core} of {shapes[core]}")
        return ChangeStructure(right[0], (left[1], right[1] * math.prod(sides)), sides)
    if left[1] != right[0]:
        raise ValueError(f"{a} of {left}, {b} of {right}")
    return ChangeStructure(right[0], (left[0], math.prod(right[1:])), tuple(right[2:]))


def with_core(down: Tensor, core: Tensor) -> Tensor:
    """The down factor of a kernel that is written as a core between two factors, shape `(rank, columns)`.

    Args:
        down: Shape `(rank, channels)`.
        core: Shape `(rank, rank, sides)`.
    """
    import torch

    return torch.einsum("ab...,bi->ai...", core, down.flatten(1)).flatten(1)


def low_rank(tensors: Mapping[str, Tensor], scale: float, rank: int) -> tuple[LowRank, float]:
    """LoHa, LoKr or a difference at most at a rank, and the square of what that leaves out.

    `tensors`: role → tensor.
    """
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


def dense(tensors: Mapping[str, Tensor], scale: float) -> Tensor:
    """The whole change of a module of any kind, without magnitudes; fp64, shape `(rows, columns)`."""
    import torch

    tensors = {role: tensor.double() for role, tensor in tensors.items()}
    kind = kind_of({role: "" for role in tensors})
    if kind == "lokr":
        one = _matrix(tensors, "lokr_w1", "lokr_w1_a", "lokr_w1_b", "")
        return scale * torch.kron(one, _matrix(tensors, "lokr_w2", "lokr_w2_a", "lokr_w2_b", "lokr_t2"))
    if kind == "diff":
        return scale * tensors["diff"].flatten(1)
    if kind == "loha":
        (up, down), (other_up, other_down) = (_loha_factors(tensors, number) for number in (1, 2))
        return scale * (up @ down) * (other_up @ other_down)
    down = tensors["down"].flatten(1)
    down = with_core(down, tensors["lora_mid"]) if "lora_mid" in tensors else down
    return scale * (tensors["up"].flatten(1) @ down)


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
    leading = ordered[: max(1, min(rank, int((values > noise).sum())))]
    first, second = leading // len(parts[1].S), leading % len(parts[1].S)
    root = values[leading].sqrt()
    up = torch.einsum("or,pr->opr", parts[0].U[:, first], parts[1].U[:, second]).flatten(0, 1) * root
    down = torch.einsum("ri,rj->rij", parts[0].Vh[first], parts[1].Vh[second]).flatten(1) * root[:, None]
    return LowRank(down, up, scale), float(values[ordered[len(leading) :]].square().sum()) * scale**2


def with_magnitude(change: Tensor, weight: Tensor, magnitude: Tensor, *, by_row: bool) -> Tensor:
    """Return the change of a weight by DoRA: m · (W + Δ) / ‖W + Δ‖ − W; in fp64, shape `(rows, columns)`.

    `change`, `weight`: shape of the weight. `magnitude`: one number per row, or per column (input channel).
    """
    whole = weight.double() + change.double().reshape(weight.shape)
    axes = [axis for axis in range(whole.ndim) if axis != (0 if by_row else 1)]
    norms = whole.square().sum(axes, keepdim=True).sqrt().clamp_min(1e-30)
    return (whole * (magnitude.double().reshape(norms.shape) / norms) - weight.double()).flatten(1)


def by_row(role: str, shape: tuple[int, ...], rows: int) -> bool:
    """Return whether magnitudes are of rows: peft's always; LyCORIS's where the first side is the rows'."""
    return role != "dora_scale" or (shape[0] == rows and math.prod(shape) == rows)


# Kinds of adapters by their tensors' names, what they are called, and what to do.
CONVERT = "Convert it: netweight space convert FILE NEW --rank 16, or give ingest a rank (--convert 16)."
CONVERT_DORA = f"{CONVERT} And name the base (--weights)."
_TRAIN = "Train LoRA instead, or extract a LoRA from the merged model (netweight space extract)."
BAKE = "Put it into its model: netweight space bake MODEL FILE OUT."
EXTRACT = (
    "Merge it into its model with the library that wrote it (peft: model.merge_and_unload(); diffusers: "
    "pipeline.fuse_lora(); then save_pretrained), and extract a LoRA: netweight space extract BASE MERGED NEW."
)
_MAGNITUDE = r"lora_magnitude_vector|dora_scale|\.magnitude$|\.m$"
_CONVERTIBLE = (
    (_MAGNITUDE, "DoRA, whose change depends on the base's weights", CONVERT_DORA),
    (r"\.hada_[wt]", "LoHa, a product of two low-rank matrices entry by entry", CONVERT),
    (r"\.lokr_[wt]", "LoKr, a Kronecker product", CONVERT),
    (r"\.diff$", "a full change of weights", CONVERT),
)  # fmt: skip
_INVERSION = "a textual inversion (the embedding of a new token)"
_LOAD_INVERSION = (
    "It is not an adapter. Give it to the program as an embedding, such as netweight forget detect with --embedding."
)
_KINDS = (
    (
        r"\.(oft|boft)_|\.oft_blocks|\.vera_lambda|\.ia3_|\.on_input$",
        "an adapter that is not a LoRA (OFT, VeRA or IA³)",
        EXTRACT,
    ),
    (r"\.[ab][12]\.weight$|\.bm\.weight$", "GLoRA, whose change depends on the base's weights", EXTRACT),
    (r"\.set_weight", "weights that replace the model's own", EXTRACT),
    (
        r"^(emb_params|string_to_param\.\*|clip_[lg]|t5xxl|text_encoders_\d|<.*>)$",
        _INVERSION,
        _LOAD_INVERSION,
    ),
    (
        r"(^|\.)lllite_",
        "ControlNet-LLLite, which adds to activations and not to weights",
        "Give it to the program as a ControlNet.",
    ),
    (
        r"\.(qweight|wscales|smooth|proj_down|proj_up)$",
        "a model or LoRA in the packed layout of nunchaku",
        "Fetch the LoRA from which it was made.",
    ),
    (r"^(ip_adapter|image_proj)\.", "an IP-Adapter, which adds layers", "Load it with load_ip_adapter of diffusers."),
)
_ANY = re.compile("|".join(f"(?:{pattern})" for pattern, _, _ in (*_CONVERTIBLE, *_KINDS)))


def refuse_kinds(path: Path, names: Mapping[str, int], conversion: Conversion | None) -> None:
    """Refuse a file of a kind of adapter that is not a LoRA, and is not to be converted.

    Args:
        path: The file, for messages.
        names: Names of tensors → numbers of dimensions.
        conversion: How other kinds become LoRAs; None refuses them.

    Raises:
        Unsupported: A tensor is of another kind; kind and cure are named.
        UsageError: DoRA is to be converted, and its base model was not named.
    """
    # A difference of a vector or of another parameter that is not a matrix is carried along as it is.
    names = {name: sides for name, sides in names.items() if not (name.endswith(".diff") and sides < 2)}
    only = next(iter(names), "")
    if len(names) == 1 and names[only] in (1, 2) and "." not in only and not _ANY.search(only):
        raise Unsupported(f"{path} contains {_INVERSION}: tensor {only!r} alone.", cure=_LOAD_INVERSION)
    matching = [name for name in names if _ANY.search(name)]
    for pattern, kind, cure in (*(() if conversion else _CONVERTIBLE), *_KINDS):
        tensors = [name for name in matching if re.search(pattern, name)]
        if tensors:
            more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
            raise Unsupported(f"{path} contains {kind}: tensor {tensors[0]!r}{more}.", cure=cure)
    if conversion and conversion.weights is None and any(re.search(_MAGNITUDE, name) for name in matching):
        raise UsageError(
            f"{path} contains DoRA, whose change depends on the base's weights.",
            cure="Name the base model (--weights).",
        )
