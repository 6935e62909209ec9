"""kohya's layout, in which most published adapters are: underscores for dots, and an alpha beside each pair of factors.

lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q.lora_down.weight
lora_unet_mid_block_attentions_0_transformer_blocks_0_attn1_to_q.alpha
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from netweight.errors import NetweightError, Unsupported, UsageError
from netweight.store.lora_formats import other_kinds
from netweight.store.lora_formats.names import DENOISER, PREFIXES, KohyaNames, kohya_name, split_component
from netweight.store.lora_formats.parts import Role, alpha_of, by_module, scaled_up

if TYPE_CHECKING:
    from torch import Tensor

    from netweight.nn.lora import LowRank


_TENSOR = re.compile(r"(?P<module>[^.]+)\.(?P<role>lora_down\.weight|lora_up\.weight|alpha)")
_ROLES: dict[str, Role] = {"lora_down.weight": "down", "lora_up.weight": "up", "alpha": "alpha"}


def is_kohya(names: list[str]) -> bool:
    """Whether tensors have kohya's names."""
    return bool(names) and all(name.startswith((*PREFIXES, DENOISER)) for name in names)


def locate_flattened(names: list[str], where: Path, known: KohyaNames) -> dict[str, dict[Role, str]]:
    """Find the factors and alphas of each module."""
    found: list[tuple[str, str, Role]] = []
    for name in names:
        match = _TENSOR.fullmatch(name) or other_kinds.TENSOR.fullmatch(name)
        if match is None:
            raise Unsupported(f"{where}: tensor {name!r} is no factor of a LoRA.", cure="Train without it.")
        try:
            module = known.module(match["module"])
        except NetweightError as error:
            raise type(error)(f"{where}: {error.reason}", cure=error.cure) from error
        found.append((name, module, _ROLES.get(match["role"], match["role"])))
    return by_module(found, where)


def kohya_tensors(factors: Mapping[str, LowRank], kernels: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Return an adapter's tensors in kohya's layout, all with one alpha."""
    import torch

    components = split_component(factors)
    several = any(module.startswith(("text_encoder_2.", "text_encoder_3.")) for module in factors)
    alphas = {module: alpha_of(change.scale, change.rank) for module, change in factors.items()}
    alpha = Counter(value for value in alphas.values() if value).most_common(1)
    common = alpha[0][0] if alpha else 1.0
    tensors: dict[str, Tensor] = {}
    for module, change in factors.items():
        name = kohya_name(*components[module], several_encoders=several)
        if f"{name}.alpha" in tensors:
            raise UsageError(
                f"Two modules are called {name!r} in kohya's layout; one is {module!r}.", cure="Choose another layout."
            )
        up = change.up if alphas[module] == common else scaled_up(change.up, change.scale * change.rank / common)
        kernel = kernels.get(module, ())
        tensors[f"{name}.lora_down.weight"] = change.down.reshape(change.rank, -1, *kernel)
        tensors[f"{name}.lora_up.weight"] = up.reshape(*up.shape, *(1 for _ in kernel))
        exact = torch.tensor(common)
        tensors[f"{name}.alpha"] = exact if exact.item() == common else torch.tensor(common, dtype=torch.float64)
    return tensors
