"""Words of prompts that the tokenizers of a pipeline do not know, found without opening its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from netweight.data.unknown_words import note_on_unknown_words
from netweight.hf.load_tokenizer import load_tokenizer


def tokenizers_of(pipeline: Path) -> list[Any]:
    """Return the tokenizers in a pipeline's folder, in the order of their names.

    Args:
        pipeline: A folder of a diffusers pipeline.
    """
    return [load_tokenizer(folder) for folder in sorted(pipeline.glob("tokenizer*")) if folder.is_dir()]


def notes_on_unknown_prompts(tokenizers: Sequence[Any], prompts: Mapping[str, Sequence[str]]) -> list[str]:
    """Return sentences about prompts with words that a tokenizer does not know, each sentence once.

    Args:
        tokenizers: Those of the pipeline's text encoders.
        prompts: Name of a file → the prompts in it.
    """
    notes = [
        note_on_unknown_words(
            tokenizer, [[prompt] for prompt in texts], [f"prompt {number}" for number in range(1, len(texts) + 1)],
            source=source, rows="prompts",
        )
        for tokenizer in tokenizers
        for source, texts in prompts.items()
    ]  # fmt: skip
    return [note for note in dict.fromkeys(notes) if note]
