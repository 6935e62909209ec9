"""Checks of what is trained on: finite weights, rows within the context and the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from netweight.data.tokens import AnswerPair, Example
from netweight.errors import UsageError
from netweight.hf.load_language_model import check_finite, positions_of, vocabulary_of

# At most so many unusable rows are named.
_NAMED = 5


def check_inputs(
    model: nn.Module, pairs: Sequence[AnswerPair], retain: Sequence[Example], *, context: int | None = None
) -> None:
    """Check that all rows can be trained on."""
    if not pairs:
        raise UsageError("There is no pair to train on.", cure="Give rows of prompt, chosen and rejected.")
    check_finite(model)
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
