"""Decoder language models by their shapes alone, with random weights: the ones NeuZip pre-trains, and a miniature."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["MINIATURE", "SHAPES", "made", "parameters_of"]

MINIATURE = "miniature"
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    MINIATURE: (
        "llama",
        {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_hidden_layers": 6,
            "num_attention_heads": 12,
            "vocab_size": 2048,
        },
    ),
    "GPT-Neo-XL 2.7B": (
        "gpt_neo",
        {
            "hidden_size": 2560,
            "num_layers": 32,
            "num_heads": 20,
            "vocab_size": 50257,
            "attention_types": [[["global", "local"], 16]],
        },
    ),
    "Llama-3 8B": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
    ),
    "Llama-2 13B": (
        "llama",
        {
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "vocab_size": 32000,
        },
    ),
}
"""Models by the names of the paper's columns: transformers' type, and what its configuration is told."""


def made(shape: str, **changes: Any) -> PreTrainedModel:
    """Make a model with random weights, in torch's default dtype and on its default device.

    Args:
        shape: A key of `SHAPES`.
        changes: Fields of its configuration to be otherwise.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, fields = SHAPES[shape]
    config = AutoConfig.for_model(kind, **fields | changes)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model


def parameters_of(shape: str) -> tuple[int, int]:
    """Return the numbers of a model: all its weights, and those of the largest one; nothing is allocated."""
    import torch

    with torch.device("meta"):
        sizes = [parameter.numel() for parameter in made(shape).parameters()]
    return sum(sizes), max(sizes)
