"""Causal language models from folders of transformers: dense, in the dtype they were saved in, with their tokenizer.

Folders that `netweight compress` made are opened too. Used where a model is to be trained or attacked, so that nothing
of it may be rounded on the way in.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from netweight.errors import MissingExtra, UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["check_folder", "context_of", "load_causal_lm"]


def load_causal_lm(folder: str | Path, *, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a folder.

    Args:
        folder: A folder with a model and its tokenizer.
        device: Where the model goes.

    Returns:
        The model in evaluation mode, with dense weights, and the tokenizer; where that lacks a token for padding, it
        pads with its end of sequence.

    Raises:
        MissingExtra: transformers is not installed.
        UsageError: It is no such folder, or its model or tokenizer cannot be loaded.
    """
    folder = Path(folder)
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra(
            "Language models need transformers, which is not installed.", cure='Run: pip install "netweight[llm]"'
        ) from error
    check_folder(folder)
    importlib.import_module("netweight.integrations.transformers")  # so that compressed folders open too
    logging = importlib.import_module("transformers.utils.logging")
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{folder} cannot be opened as a causal language model with its tokenizer: {error}",
            cure="Check that config, weights and tokenizer files are all there.",
        ) from error
    finally:
        if shown:
            logging.enable_progress_bar()
    _decompress(model)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    torch.nn.Module.to(model, device).train(False)
    return model, tokenizer


def check_folder(folder: str | Path) -> None:
    """Refuse what is no model folder, before anything is loaded.

    Args:
        folder: The model's folder.

    Raises:
        UsageError: It holds no configuration of a model.
    """
    if not (Path(folder) / "config.json").is_file():
        raise UsageError(
            f"{folder} is no model folder: it holds no config.json.", cure="Name a folder of transformers, unpacked."
        )


def positions_of(model: nn.Module) -> int | None:
    """How many tokens the model's configuration allows, that of its text part if it has several; None if unknown.

    Args:
        model: With or without a `config`.
    """
    config: Any = getattr(model, "config", None)
    of_text = getattr(config, "get_text_config", None)
    config = of_text() if callable(of_text) else config
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def context_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens that a model takes, as its configuration and its tokenizer say.

    Args:
        model: The model.
        tokenizer: Its tokenizer.
    """
    longest = int(min(tokenizer.model_max_length, 1 << 30))
    return min(longest, positions_of(model) or longest)


def _decompress(model: PreTrainedModel) -> None:
    import netweight

    netweight.decompress_(model)
