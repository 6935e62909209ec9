"""Names of tensors in LoRA files: the role of a tensor in a module's change, by the ending of its name.

….lora_A.weight  ….lora_A.default.weight  ….lora_down.weight  ….lora.down.weight  ….to_q_lora.down.weight     down
….lora_B.weight  ….lora_up.weight  ….lora_linear_layer.up.weight                                             up
….alpha                                                                                                     alpha
….lora_embedding_A  ….lora_embedding_B                     factors of an embedding, the other way round
….diff_b  ….diff  ….w_norm  ….b_norm  ….diff_m                  changes of vectors and other whole parameters
….lora_B.bias                                                                      a change of a bias, scaled
….lora_a  ….lora_b  ….m                               factors of mlx-lm, the other way round, and its magnitudes
….hada_w1_a  ….lokr_w1  ….dora_scale  …                                          other kinds (`other_kinds`)
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import final

Role = str
"""`down`, `up`, `alpha`, `up_bias`, `embedding_A`, `embedding_B`, or the name that a tensor of another kind has
(`hada_w1_a`, `diff_b`, …)."""

_OTHER = re.compile(
    r"(?P<module>.+)\.(?P<role>hada_w[12]_[ab]|hada_t[12]|lokr_w[12](?:_[ab])?|lokr_t2|lora_mid|dora_scale"
    r"|lora_magnitude_vector|magnitude|diff_b|diff_m|diff|w_norm|b_norm)(?:\.weight|\.[^.]+\.weight|\.default)?"
)
_MLX = re.compile(r"(?P<module>.+)\.(?P<role>lora_[ab]|m)")
_EMBEDDING = re.compile(r"(?P<module>.+)\.lora_(?P<role>embedding_[AB])(?:\.[^.]+)?")
_BIAS = re.compile(r"(?P<module>.+)\.(?:lora_B(?:\.[^.]+)?|lora_up|lora\.up|lora_linear_layer\.up)\.bias")
_FACTOR = re.compile(
    r"(?P<module>.+?)(?:\.lora_(?P<side>[AB])(?:\.(?!weight$)[^.]+)?"
    r"|(?:\.lora|\.lora_linear_layer|(?P<joined>_lora))\.(?P<way>down|up)"
    r"|\.lora_(?P<kohya>down|up))\.weight"
)
_ALPHA = re.compile(
    r"(?P<module>.+?)(?:\.lora|\.lora_linear_layer|(?P<joined>_lora))?(?:\.(?:lora_)?(?:down|up)\.weight)?\.alpha"
)
_XLABS = re.compile(r"(.*(double|single)_blocks\.\d+)\.processor\.(qkv|proj)_lora([12]?)\.(down|up)\.weight")
_SIDES: dict[str, Role] = {"A": "down", "B": "up", "down": "down", "up": "up"}
_DENOISER_NAMES = {"to_out": "to_out.0"}
_TEXT_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}


@final
@dataclass(frozen=True)
class TensorName:
    """A tensor's name, taken apart."""

    module: str
    """The module, as the file writes it."""
    role: Role
    """Role of the tensor in the module's change."""
    kohya: bool = False
    """True if the name ends as kohya writes factors (`lora_down`, `lora_up`)."""


def take_apart(name: str) -> TensorName | None:
    """Take the name of a tensor apart, or return None where it is not a part of an adapter."""
    if match := _XLABS.fullmatch(name):
        head, _, what, stream, way = match.groups()
        stream = {"1": "img_attn", "2": "txt_attn", "": "xlabs"}[stream]
        return TensorName(f"{head}.{stream}.{what}", way)
    name = name.replace(".processor.", ".")
    if match := _OTHER.fullmatch(name):
        role = match["role"]
        return TensorName(match["module"], "lora_magnitude_vector" if role == "magnitude" else role)
    if match := _MLX.fullmatch(name):
        return TensorName(match["module"], "lora_magnitude_vector" if match["role"] == "m" else match["role"])
    if match := _EMBEDDING.fullmatch(name):
        return TensorName(match["module"], match["role"])
    if match := _BIAS.fullmatch(name):
        return TensorName(match["module"], "up_bias")
    if match := _ALPHA.fullmatch(name):
        return TensorName(_current(match["module"]) if match["joined"] else match["module"], "alpha")
    if match := _FACTOR.fullmatch(name):
        side = match["side"] or match["way"] or match["kohya"]
        module = _current(match["module"]) if match["joined"] else match["module"]
        return TensorName(module, _SIDES[side], match["kohya"] is not None)
    return None


def take_all_apart(names: list[str]) -> dict[str, TensorName | None]:
    """Take the names of a file's tensors apart; an alpha belongs to the module whose factors stand beside it."""
    apart = {name: take_apart(name) for name in names}
    owners = {each.module for each in apart.values() if each is not None and each.role != "alpha"}
    for name, each in apart.items():
        if each is not None and each.role == "alpha" and each.module not in owners:
            apart[name] = TensorName(_current(each.module), "alpha")
    return apart


def _current(module: str) -> str:
    """Today's name of a module that older files write as `to_q_lora`."""
    parent, _, last = module.rpartition(".")
    names = _TEXT_NAMES if parent.endswith("self_attn") else _DENOISER_NAMES
    return f"{parent}.{names.get(last, last)}"
