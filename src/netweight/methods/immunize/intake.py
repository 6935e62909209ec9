"""What is checked before any work: every pair and example fits the model. Used by `training.py` and the trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from netweight.attacks.finetuning.examples import Example, Pair
from netweight.errors import UsageError
from netweight.integrations.causal_lm import positions_of

__all__ = ["check_data", "vocabulary_of"]

_NAMED = 5  # of several bad rows so many are named


def vocabulary_of(model: nn.Module) -> int | None:
    """How many tokens the model knows, by its input embedding; None if it has none that can be found.

    Args:
        model: Any module.
    """
    for module in model.modules():
        accessor = getattr(module, "get_input_embeddings", None)
        found: Any = accessor() if callable(accessor) else module if isinstance(module, nn.Embedding) else None
        if getattr(found, "weight", None) is not None:
            return int(found.weight.shape[0])
    return None


def check_data(
    model: nn.Module, pairs: Sequence[Pair], retain: Sequence[Example], *, context: int | None = None
) -> None:
    """Check that all rows can be trained on.

    Args:
        model: Its configuration says the context, its embedding the vocabulary.
        pairs: Pairs.
        retain: Further examples.
        context: Most tokens of a row; the model's own limit holds besides.

    Raises:
        UsageError: There is no pair, or rows are longer than the context or hold tokens that the model lacks; the
            rows are named.
    """
    if not pairs:
        raise UsageError("There is no pair to train on.", cure="Give rows of prompt, chosen and rejected.")
    limits = [limit for limit in (context, positions_of(model)) if limit is not None]
    context = min(limits, default=None)
    vocabulary = vocabulary_of(model)
    rows = [(f"pair {row}, chosen", pair.harmless) for row, pair in enumerate(pairs)]
    rows += [(f"pair {row}, rejected", pair.harmful) for row, pair in enumerate(pairs)]
    rows += [(f"retain {row}", example) for row, example in enumerate(retain)]
    if context is not None:
        long = [f"{name} ({len(example)} tokens)" for name, example in rows if len(example) > context]
        _refuse(long, f"longer than the context of {context} tokens", "Cut or leave out these rows.")
    if vocabulary is not None:
        strange = [
            name
            for name, example in rows
            if not all(0 <= token < vocabulary for token in example.prompt + example.response)
        ]
        _refuse(strange, f"with tokens outside the vocabulary of {vocabulary}", "Use the model's own tokenizer.")


def _refuse(rows: list[str], reason: str, cure: str) -> None:
    if rows:
        more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
        raise UsageError(f"{len(rows)} rows are {reason}: {'; '.join(rows[:_NAMED])}{more}.", cure=cure)
