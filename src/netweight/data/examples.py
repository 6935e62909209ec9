"""Prompts with responses as token ids, and batches of them. The attack and the defenses train on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from netweight.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# The label of a position that no loss looks at, as in transformers.
IGNORED = -100

# Which tokens a loss is taken over: those of the response, or all but padding.
LossOn = Literal["response", "full"]


@final
@dataclass(frozen=True)
class Example:
    """A prompt and its response."""

    prompt: tuple[int, ...]  # token ids; may be empty
    response: tuple[int, ...]  # token ids, an end of sequence among them where the model is to learn to stop; not empty

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
    """One prompt and two answers."""

    prompt: tuple[int, ...]  # token ids; may be empty
    chosen: tuple[int, ...]  # token ids of the harmless answer, such as a refusal; not empty
    rejected: tuple[int, ...]  # token ids of the harmful answer; not empty

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
    """Examples side by side, padded on the right."""

    input_ids: Tensor  # token ids, int64, shape `(B, T)`
    attention_mask: Tensor  # 1 on tokens and 0 on padding, int64, shape `(B, T)`
    labels: Tensor  # the token at each position where it is to be predicted, else `IGNORED`; int64, shape `(B, T)`

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        return Batch(self.input_ids.to(device), self.attention_mask.to(device), self.labels.to(device))


def collate(examples: Sequence[Example], *, pad_id: int, loss_on: LossOn = "response") -> Batch:
    """Put examples side by side."""
    import torch

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
