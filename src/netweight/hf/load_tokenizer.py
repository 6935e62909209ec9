"""The tokenizer of a language model's folder.

Whether a folder has a tokenizer is found out by opening it: some, such as those of bytes, need no vocabulary file, and
transformers makes an empty tokenizer for some families where the files are missing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netweight.core.foreign_errors import opening
from netweight.core.lazy import extra
from netweight.core.progress import silent_bars
from netweight.errors import UsageError
from netweight.hf.llama2c_tokenizer import llama2c_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONFIGURATIONS = ("generation_config.json", "tokenizer_config.json", "tokenizer.json")
# Where one of these exists, a `tok*.bin` beside it is never read in its place, even if it cannot be opened.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_CURE = "Copy the tokenizer's files into the folder."


def load_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Open the tokenizer of a model folder with its chat template.

    Args:
        folder: A folder of transformers, or one of llama2.c with one `tok*.bin`.

    Returns:
        The tokenizer.

    Raises:
        UsageError: There is none, it has no vocabulary, or a configuration beside it is not JSON; transformers would
            take its defaults for a damaged generation_config.json.
        UnsafeInput: The tokenizer needs program code that lies beside it.
        Unsupported: A `tok*.bin` is not a tokenizer of llama2.c.
    """
    folder = Path(folder)
    _check_configurations(folder)
    with extra("llm", "Tokenizers need transformers"):
        import transformers
    own = any((folder / name).exists() for name in _VOCABULARIES)
    packed = [] if own else sorted(folder.glob("tok*.bin"))
    try:
        with opening(folder, "a model with its tokenizer", cure=_CURE), silent_bars():
            tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        if not has_vocabulary(tokenizer):
            raise UsageError(f"{folder} has no tokenizer: transformers finds no vocabulary there.", cure=_CURE)
    except UsageError:
        if len(packed) != 1:
            raise
        tokenizer = llama2c_tokenizer(packed[0])
    if not tokenizer.chat_template and (template := _template_beside(folder)):
        tokenizer.chat_template = template
    return tokenizer


def has_vocabulary(tokenizer: Any) -> bool:
    """Return whether a tokenizer has other tokens than special ones.

    Args:
        tokenizer: A tokenizer of transformers.
    """
    return bool(set(tokenizer.get_vocab().values()) - set(tokenizer.all_special_ids))


def _check_configurations(folder: Path) -> None:
    for file in (folder / each for each in _CONFIGURATIONS):
        try:
            whole = not file.is_file() or isinstance(json.loads(file.read_text(encoding="utf-8")), dict)
            reason = "it is not a JSON object"
        except (OSError, ValueError, RecursionError) as error:
            whole, reason = False, str(error)
        if not whole:
            remove = ", or remove it, so that config.json counts alone" * (file.name == _CONFIGURATIONS[0])
            raise UsageError(f"{file} cannot be read: {reason}.", cure=f"Restore it{remove}.")


def _template_beside(folder: Path) -> str:
    """Return the template in chat_template.json, where processors stored it and tokenizers do not look; else ""."""
    file = folder / "chat_template.json"
    if not file.is_file():
        return ""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{file} cannot be read: {error}.", cure="Restore it, or remove it.") from error
    template = content.get("chat_template") if isinstance(content, dict) else None
    return template if isinstance(template, str) else ""
