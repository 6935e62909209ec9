"""Recognition of checkpoints that another method has quantized.

A quantized checkpoint stores codes (int8, fp8, packed 4-bit) and, beside them, scales. Only the library that the
configuration names can turn codes and scales into weights, so a compressed folder of such a checkpoint must not be
opened directly: a loader would take the codes for weights. `quantization_of` finds out whether a folder is quantized,
by the configuration, by the files that quantizers leave beside it, and by the tensors themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from netweight.autoload import HINT, METHOD
from netweight.core.bounded_json import read_object
from netweight.store.safetensors import Header

# Keys of a configuration, at any depth, that describe a quantization: transformers and diffusers, compressed-tensors
# before it moved there, MLX.
_KEYS = ("quantization_config", "compression_config", "quantization")
# Files in which AutoGPTQ, AutoAWQ and ModelOpt describe a quantization beside a plain configuration.
_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")
_CODES = frozenset({"I8", "U8", "I16", "U16", "I32", "U32"})
_FLOAT_CODES = frozenset({"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"})
# No layer computes in these types.
_ALWAYS_CODES = frozenset({"F4", "F6_E2M3", "F6_E3M2", "F8_E8M0"})
# Names of what belongs to codes: scales, offsets, tables of values.
_COMPANION = re.compile(
    r"scale|absmax|(^|[._])scb($|[._])|quant_map|quant_state|zero_point|zeros|codebook|centroid|min_max|lut$",
    re.IGNORECASE,
)
# Names of integer matrices that are codes whatever lies beside them.
_PACKED = re.compile(r"(^|[._])(weight|qweight|qzeros|qdata|w_q|codes|weight_packed|packed|\w+_blocks)$", re.IGNORECASE)


def quantization_of(folder: Path, headers: Mapping[str, Header]) -> str | None:
    """Say how a model's folder is quantized, by a method other than netweight.

    Args:
        folder: A folder with weights, and perhaps a `config.json`.
        headers: The headers of its weights files, by file name.

    Returns:
        The reason to take it for quantized, as the end of a sentence that begins with the folder's name; None if it is
        not quantized.
    """
    config = _json_object(folder / "config.json")
    if (method := foreign_method(config)) is not None:
        return f"is quantized ({method}, according to its config.json)"
    for name in _FILES:
        if (folder / name).is_file():
            return f"is quantized, according to its {name}"
    for name, header in headers.items():
        if any("quantization" in key for key in header.metadata):
            return f"is quantized, according to the metadata of {name}"
    tensors = {span.name: (span.dtype, len(span.shape)) for header in headers.values() for span in header.spans}
    if (codes := _codes(tensors)) is not None:
        return f"contains quantized weights, such as {codes} ({tensors[codes][0]})"
    return None


def foreign_method(config: Any) -> str | None:
    """Find the method other than netweight by which a configuration says that weights are quantized.

    Args:
        config: The content of a `config.json`: mappings, lists and values. Nested configurations are searched, too.

    Returns:
        The method's name; None if the configuration names none.
    """
    if isinstance(config, list | tuple):
        return next((inner for value in config if (inner := foreign_method(value)) is not None), None)
    if not isinstance(config, Mapping):
        return None
    for key, value in config.items():
        if key in _KEYS and value and (isinstance(value, Mapping) or key == _KEYS[0]):
            method = value.get("quant_method") or value.get("quant_algo") if isinstance(value, Mapping) else value
            if method not in (METHOD, HINT):
                return str(getattr(method, "value", method) or "by a method that is not named")
        elif (inner := foreign_method(value)) is not None:
            return inner
    return None


def _codes(tensors: Mapping[str, tuple[str, int]]) -> str | None:
    """The first tensor, by its name, that holds codes; tensors are given by dtype and number of dimensions."""
    suspects = [
        name
        for name, (dtype, dimensions) in tensors.items()
        if dtype in _ALWAYS_CODES or (dimensions >= 2 and (dtype in _CODES or dtype in _FLOAT_CODES))
    ]
    if not suspects:
        return None
    accompanied = _accompanied(tensors)
    for name in suspects:
        dtype = tensors[name][0]
        module = name.rpartition(".")[0]
        if dtype in _ALWAYS_CODES or (dtype in _CODES and _PACKED.search(name)):
            return name
        if module in accompanied or name in accompanied or "scaled_fp8" in tensors:
            return name
    return None


def _accompanied(names: Iterable[str]) -> set[str]:
    """Modules, and tensors, with scales or the like beside or below them."""
    modules = set()
    for name in names:
        parts = name.split(".")
        # `layer.weight.quant_state.nf4` belongs to `layer.weight` and to `layer`.
        for depth in (1, 2, 3):
            if len(parts) >= depth and _COMPANION.search(".".join(parts[-depth:])):
                modules.add(".".join(parts[:-depth]))
        # `experts.down_proj_scales` belongs to `experts.down_proj_blocks`.
        if _COMPANION.search(parts[-1]):
            modules.add(_COMPANION.split(name)[0].rstrip("._"))
    return modules


def _json_object(path: Path) -> Any:
    try:
        return read_object(path)
    except (OSError, ValueError):
        return None
