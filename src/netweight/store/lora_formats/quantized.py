"""Weights that are stored as codes: fp8 with scales is read as the values that it means, everything else is refused.

layer.weight (F8)   layer.scale_weight        ComfyUI       W = code · scale
layer.weight_scale        modelopt, compressed-tensors, ComfyUI: one scale, or one per row
layer.weight_scale_inv    DeepSeek: one scale per block
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.errors import CorruptBlob, Unsupported
from netweight.store.reader import Store

if TYPE_CHECKING:
    from torch import Tensor

_FP8 = ("F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ")
_SCALES = ("scale_weight", "weight_scale_inv", "weight_scale")
_CODES = re.compile(
    r"(.*\.)?(qweight|qzeros|weight_packed|SCB|absmax|quant_map|nested_absmax|weight\.quant_state\..*|comfy_quant"
    r"|weight_scale_2|weight_format|.*_blocks|.*_scales)"
)
_NOT_WEIGHTS = ("I8", "U8", "I16", "I32", "I64", "U16", "U32", "U64", "F8_E8M0", "F4", "BOOL")
_CURE = (
    "Name the model in bf16, fp16 or fp32: load it with transformers or diffusers, call dequantize(), and save it "
    "(save_pretrained)."
)


def refuse_codes(path: Path, store: Store) -> None:
    """Refuse weights that are stored as codes other than fp8 with scales.

    Raises:
        Unsupported: A tensor holds codes; it is named.
    """
    names = set(store.names())
    for name in store.names():
        info = store.info(name)
        blocks = name.endswith(("_blocks", "_scales")) and not (info.dtype == "U8")
        if _CODES.fullmatch(name) and not blocks:
            raise Unsupported(f"{path} is quantized: {name} belongs to codes and not to weights.", cure=_CURE)
        if name.endswith(".weight") and len(info.shape) >= 2 and info.dtype in _NOT_WEIGHTS:
            raise Unsupported(
                f"{path} is quantized: {name} contains codes of type {info.dtype} and not weights.", cure=_CURE
            )
    scaled = "scaled_fp8" in names or any(name.endswith(f".{scale}") for scale in _SCALES for name in names)
    for name in store.names():
        info = store.info(name)
        if scaled and info.dtype in _FP8 and len(info.shape) >= 2 and scale_of(name, names) is None:
            others = next(each for each in sorted(names) if each == "scaled_fp8" or each.endswith(_SCALES))
            raise CorruptBlob(
                f"{path}: {name} contains fp8 codes without a scale, although {others} states that codes are scaled.",
                cure="Fetch the file again, or name the model in bf16.",
            )


def scale_of(name: str, names: set[str]) -> str | None:
    """The tensor that scales a weight's codes, if there is one."""
    head = name.removesuffix("weight")
    return next((scale for kind in _SCALES if (scale := f"{head}{kind}") in names), None)


def is_scale(name: str) -> bool:
    """Return whether a tensor belongs to the codes of another and is not a parameter of the model."""
    return name == "scaled_fp8" or name.endswith((*_SCALES, "scale_input", "input_scale"))


def dequantized(store: Store, name: str, names: set[str]) -> Tensor:
    """Read a weight as the values that it means.

    Args:
        store: The file.
        name: The weight.
        names: All names of the file.

    Returns:
        The weight; in fp32 where it was stored in fp8.

    Raises:
        CorruptBlob: The scales do not fit the weight.
    """
    weight = store.get(name)
    if weight.itemsize != 1 or not weight.is_floating_point():
        return weight
    scale = scale_of(name, names)
    values = weight.float()
    if scale is None:
        return values
    factors = store.get(scale).float()
    try:
        return values * _spread(factors, tuple(values.shape))
    except (RuntimeError, ValueError) as error:
        raise CorruptBlob(
            f"{store.info(name).file}: {scale} has shape {tuple(factors.shape)}, which does not fit {name} of shape "
            f"{tuple(values.shape)}.",
            cure="Fetch the file again.",
        ) from error


def _spread(factors: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Scales in a shape that multiplies a weight: one for all, one per row, or one per block."""
    if factors.numel() == 1:
        return factors.reshape(())
    if factors.ndim == 1 or (factors.ndim == 2 and factors.shape == (shape[0], 1)):
        if factors.shape[0] != shape[0]:
            raise ValueError
        return factors.reshape(shape[0], *(1 for _ in shape[1:]))
    rows, columns = (-(-side // count) for side, count in zip(shape, factors.shape, strict=True))
    rows, columns = (1 << (side - 1).bit_length() for side in (rows, columns))
    if (-(-shape[0] // rows), -(-shape[1] // columns)) != tuple(factors.shape):
        raise ValueError
    spread = factors.repeat_interleave(rows, 0)[: shape[0]]
    return spread.repeat_interleave(columns, 1)[:, : shape[1]]
