"""Kinds of adapters that are no ΔW = scale · up @ down of matrices, told by the names of their tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from netweight.errors import UnsafeInput, Unsupported

__all__ = ["PICKLES", "refuse_kinds", "refuse_pickle"]

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
"""Endings of files that are pickles."""

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
    """Refuse a file of another kind of adapter.

    Args:
        path: The file, for messages.
        names: Of its tensors.

    Raises:
        Unsupported: A tensor belongs to another kind; it is named.
    """
    names = [name for name in names if _ANY.search(name)]
    for pattern, kind, cure in _KINDS:
        found = [name for name in names if re.search(pattern, name)]
        if found:
            more = f" and {len(found) - 1} more" if len(found) > 1 else ""
            raise Unsupported(f"{path} holds {kind}: tensor {found[0]!r}{more}.", cure=cure)


def refuse_pickle(path: Path) -> None:
    """Refuse a file by its ending.

    Args:
        path: The file; it is not opened.

    Raises:
        UnsafeInput: The ending is that of a pickle.
    """
    if path.suffix.lower() in PICKLES:
        raise UnsafeInput(
            f"{path} is a pickle, which can run code when opened.",
            cure="Load it where you trust it and save it again: peft's model.save_pretrained(folder), or "
            "safetensors.torch.save_file(tensors, path).",
        )
