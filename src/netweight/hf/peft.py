"""LoRA adapters of peft on models in memory, dense, compressed, or quantized by bitsandbytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from netweight.errors import MissingExtra


def with_lora(model: nn.Module, *, rank: int, targets: Sequence[str], seed: int) -> Any:
    """Put LoRA adapters on layers of a model; only they train afterwards."""
    # Source: Hu et al., LoRA, 2021; on a quantized base Dettmers et al., QLoRA, 2023.
    try:
        import peft
    except ImportError as error:
        raise MissingExtra(
            "Adapters are trained with peft, which is not installed.", cure='Run: pip install "netweight[llm]"'
        ) from error
    marked: Any = model
    kinds = {type(module).__name__ for module in model.modules()}
    for layer, mark in (("Linear8bitLt", "is_loaded_in_8bit"), ("Linear4bit", "is_loaded_in_4bit")):
        if layer in kinds:  # peft looks for the marks that transformers sets when it loads such a model
            setattr(marked, mark, True)
    settings = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(targets), lora_dropout=0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return peft.get_peft_model(marked, settings)
