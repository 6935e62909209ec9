"""Language models from folders of transformers, dense and with their tokenizer; compressed folders too.

`load_causal_lm` keeps the dtype that a model was saved in: where it is to be trained or attacked, nothing of it may be
rounded on the way in. `language_model` opens encoder-decoders as well, in bf16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from netweight.core.progress import silent_bars
from netweight.data import tokenizer as llama2c
from netweight.errors import MissingExtra, UsageError
from netweight.hf import open_compressed_with

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


def load_causal_lm(folder: str | Path, *, device: str = "cpu") -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a causal language model in evaluation mode, in the dtype it was saved in."""
    model, tokenizer = _opened(Path(folder), "AutoModelForCausalLM", "auto", "a causal language model")
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    nn.Module.to(model, device)
    return model, tokenizer


def load_network(folder: str | Path) -> PreTrainedModel:
    """Open a model of transformers in evaluation mode, compressed weights as they are; no tokenizer is needed."""
    check_folder(folder)
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra(
            "The model needs transformers, which is not installed.", cure='Run: pip install "netweight[llm]"'
        ) from error
    open_compressed_with("transformers")
    try:
        with silent_bars():
            model: Any = transformers.AutoModel.from_pretrained(folder, local_files_only=True, dtype="auto")
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(f"{folder} cannot be opened as a model: {error}", cure="Check config and weights.") from error
    network: PreTrainedModel = model.eval()
    return network


def language_model(
    folder: Path, kind: Literal["decoder", "encoder-decoder"]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Open a language model in evaluation mode, in bf16."""
    if kind == "decoder":
        return _opened(folder, "AutoModelForCausalLM", torch.bfloat16, "a decoder")
    return _opened(folder, "AutoModelForSeq2SeqLM", torch.bfloat16, "an encoder-decoder")


def _opened(
    folder: Path, loader: str, dtype: torch.dtype | str, what: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra(
            "Language models need transformers, which is not installed.", cure='Run: pip install "netweight[llm]"'
        ) from error
    check_folder(folder)
    try:
        compressed = "quantization_config" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
        if compressed:
            open_compressed_with("transformers")
        with silent_bars():
            model = getattr(transformers, loader).from_pretrained(folder, local_files_only=True, dtype=dtype)
            tokens = llama2c.find(folder)
            tokenizer = (
                transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
                if tokens is None
                else llama2c.tokenizer(tokens)
            )
    except (OSError, ValueError, KeyError) as error:
        raise UsageError(
            f"{folder} cannot be opened as {what} with its tokenizer: {error}",
            cure="Check that config, weights and tokenizer files are all there.",
        ) from error
    if compressed:
        import netweight

        netweight.decompress_(model)
    return model.eval(), tokenizer


def check_folder(folder: str | Path) -> None:
    """Refuse what is no model folder, before anything is loaded."""
    if not (Path(folder) / "config.json").is_file():
        raise UsageError(
            f"{folder} is no model folder: it holds no config.json.", cure="Name a folder of transformers, unpacked."
        )


def check_finite(model: nn.Module) -> None:
    """Refuse a model with a weight that is NaN or infinite, by the weight's name."""
    for name, value in model.named_parameters():
        part = value.to_local() if hasattr(value, "to_local") else value  # of a sharded one this process's part
        if not bool(part.isfinite().all()):
            raise UsageError(f"The weight {name!r} holds NaN or infinity.", cure="Take a sound copy of the model.")


def positions_of(model: nn.Module) -> int | None:
    """How many tokens the model's configuration allows, that of its text part if it has several; None if unknown."""
    config: Any = getattr(model, "config", None)
    of_text = getattr(config, "get_text_config", None)
    config = of_text() if callable(of_text) else config
    longest = getattr(config, "max_position_embeddings", None)
    return longest if isinstance(longest, int) and longest > 0 else None


def embedding_of(model: nn.Module) -> nn.Embedding | None:
    """The model's embedding of tokens; None if there is none to be found."""
    get = getattr(model, "get_input_embeddings", None)
    found = [get()] if callable(get) else list(model.modules())
    return next((each for each in found if isinstance(each, nn.Embedding)), None)


def context_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    """Return the most tokens that a model takes, as its configuration and its tokenizer say."""
    longest = int(min(tokenizer.model_max_length, 1 << 30))
    return min(longest, positions_of(model) or longest)


# File in a trained model's folder that says how it was trained and what came of it.
ABOUT = "training.json"
