"""Folders of language models: those trained here, once per recipe, and those that users name.

`finished` and `keep` are for the former: such a folder is whole when its training.json is there. `language_model` opens
either kind, dense and in bf16, with its tokenizer. Used by tables and by the makers of small models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from netweight.core.digest import canonical_json, of_config
from netweight.errors import UsageError
from netweight.integrations.quiet import silent_bars
from netweight.store.atomic import whole_file
from netweight.zoo import llama2c

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["ABOUT", "finished", "keep", "language_model"]

ABOUT = "training.json"
"""File in a trained model's folder that says how it was trained and what came of it."""
_ARTICLE = {"decoder": "a", "encoder-decoder": "an"}


def finished(folder: Path, about: Any) -> dict[str, Any] | None:
    """Return what came of a training that is finished, or None.

    Args:
        folder: The model's folder; it need not exist.
        about: Everything that decides on the trained model, as for `keep`.

    Raises:
        UsageError: Another training was finished there.
    """
    file = folder / ABOUT
    if not file.exists():
        return None
    known = json.loads(file.read_text(encoding="utf-8"))
    if known["of"] != of_config(about):
        raise UsageError(
            f"{folder} holds a model that was trained otherwise.", cure="Remove it, or use another folder."
        )
    outcome: dict[str, Any] = known["outcome"]
    return outcome


def keep(
    folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, about: Any, outcome: dict[str, Any]
) -> dict[str, Any]:
    """Write a trained model as a folder that transformers loads, then drop the checkpoints of its training.

    Args:
        folder: Where to; it exists.
        model: The model, written in the dtype it has.
        tokenizer: Its tokenizer.
        about: Everything that decides on the trained model: dataclasses and JSON values.
        outcome: What came of it; JSON values.

    Returns:
        `outcome`.
    """
    with silent_bars():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    with whole_file(folder / ABOUT) as file:
        file.write(canonical_json({"of": of_config(about), "about": about, "outcome": outcome}).encode())
    for checkpoint in ("training.safetensors", "best.safetensors"):
        (folder / checkpoint).unlink(missing_ok=True)
    return outcome


def language_model(
    folder: Path, kind: Literal["decoder", "encoder-decoder"]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a language model folder: dense, in bf16, in evaluation mode, with its tokenizer.

    Args:
        folder: A folder of transformers, or one that `netweight compress` made. A tokenizer in the format of llama2.c
            (`tok*.bin`) is read too.
        kind: What the model must be.

    Raises:
        UsageError: It is no such folder, or its model or tokenizer cannot be loaded.
    """
    import torch
    import transformers

    import netweight
    import netweight.integrations.transformers

    if not (folder / "config.json").is_file():
        raise UsageError(
            f"{folder} is no model folder: it holds no config.json.", cure="Name a folder of transformers, unpacked."
        )
    make = transformers.AutoModelForCausalLM if kind == "decoder" else transformers.AutoModelForSeq2SeqLM
    try:
        with silent_bars():
            model = make.from_pretrained(folder, local_files_only=True, dtype=torch.bfloat16)
            tokens = llama2c.find(folder)
            tokenizer = (
                llama2c.tokenizer(tokens)
                if tokens is not None
                else transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
            )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{folder} cannot be opened as {_ARTICLE[kind]} {kind} with its tokenizer: {error}",
            cure="Check that config, weights and tokenizer files are all there.",
        ) from error
    netweight.decompress_(model)
    return model.eval(), tokenizer
