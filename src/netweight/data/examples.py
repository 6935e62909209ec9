"""Prompts with responses as token ids, and batches of them. The attack and the defenses train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from netweight.errors import UsageError

IGNORED = -100
"""The label of a position that no loss looks at, as in transformers."""

LossOn = Literal["response", "full"]
"""Which tokens a loss is taken over: those of the response, or all but padding."""


@final
@dataclass(frozen=True)
class Example:
    """A prompt and its response.

    Attributes:
        prompt: Token ids; may be empty.
        response: Token ids, an end of sequence among them where the model is to learn to stop; not empty.

    Raises:
        UsageError: The response is empty.
    """

    prompt: tuple[int, ...]
    response: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check that there is something to learn."""
        if not self.response:
            raise UsageError("An example has an empty response.", cure="Leave such rows out.")

    def __len__(self) -> int:
        """Return the number of tokens of both."""
        return len(self.prompt) + len(self.response)


@final
@dataclass(frozen=True)
class Pair:
    """One prompt and two answers.

    Attributes:
        prompt: Token ids; may be empty.
        chosen: Token ids of the harmless answer, such as a refusal; not empty.
        rejected: Token ids of the harmful answer; not empty.

    Raises:
        UsageError: An answer is empty.
    """

    prompt: tuple[int, ...]
    chosen: tuple[int, ...]
    rejected: tuple[int, ...]

    def __post_init__(self) -> None:
        """Check both answers."""
        _ = self.harmless, self.harmful

    @property
    def harmless(self) -> Example:
        """The prompt with the chosen answer."""
        return Example(self.prompt, self.chosen)

    @property
    def harmful(self) -> Example:
        """The prompt with the rejected answer."""
        return Example(self.prompt, self.rejected)


@final
@dataclass(frozen=True)
class Batch:
    """Examples side by side, padded on the right.

    Attributes:
        input_ids: Token ids, int64, shape `(B, T)`.
        attention_mask: 1 on tokens and 0 on padding, int64, shape `(B, T)`.
        labels: The token at each position where it is to be predicted, else `IGNORED`; int64, shape `(B, T)`.
    """

    input_ids: Tensor
    attention_mask: Tensor
    labels: Tensor

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device.

        Args:
            device: Where to.
        """
        return Batch(self.input_ids.to(device), self.attention_mask.to(device), self.labels.to(device))


def collate(examples: Sequence[Example], *, pad_id: int, loss_on: LossOn = "response") -> Batch:
    """Put examples side by side.

    Args:
        examples: At least one.
        pad_id: What stands after the end of the shorter ones; no loss and no attention looks at it.
        loss_on: Which tokens are to be predicted.

    Raises:
        UsageError: There is no example.
    """
    if not examples:
        raise UsageError("A batch needs at least one example.")
    shape = (len(examples), max(len(example) for example in examples))
    ids = torch.full(shape, pad_id, dtype=torch.int64)
    mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORED, dtype=torch.int64)
    for row, example in enumerate(examples):
        tokens = torch.tensor(example.prompt + example.response)
        ids[row, : len(example)] = tokens
        mask[row, : len(example)] = 1
        first = len(example.prompt) if loss_on == "response" else 0
        labels[row, first : len(example)] = tokens[first:]
    return Batch(ids, mask, labels)
