"""Losses on answers: of a model's own logits, and of the logits that each depth would give if the model ended there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional

from netweight.data.tokens import IGNORED, Batch
from netweight.errors import UsageError
from netweight.hf.load_language_model import DecoderStructure
from netweight.methods.immunize.distributed import (
    ALONE,
    ProcessGroup,
    gathered,
    run_gathered,
)

# Tokens whose logits are held at once.
CHUNK = 512


@final
@dataclass(frozen=True)
class Targets:
    """Tokens that a loss predicts, and the positions from which it does."""

    rows: Tensor
    """True where the state of a position predicts the next token; bool, shape `(B, T - 1)`."""
    tokens: Tensor
    """Those next tokens, row by row; int64, shape `(N,)`, without those of `blanked`."""
    blanked: int = 0
    """Number of further tokens that are predicted by logits that are all zero. They cost `log(vocabulary)` each and
    have no gradient; the published loss has such, see `repnoise.py`.
    """
    shared: float | None = None
    """Divisor of means if other processes hold parts of the batch: the number of tokens of all processes, divided by
    the number of processes. The mean of such means over the processes is the mean over all tokens.
    """

    @classmethod
    def of_labels(cls, labels: Tensor, group: ProcessGroup = ALONE) -> Targets:
        """Predict every labeled token."""
        rows = labels[:, 1:] != IGNORED
        targets = cls(rows, labels[:, 1:][rows]).among(group)
        if not targets.count:
            raise UsageError("The batch has no token to predict.", cure="Leave rows without an answer out.")
        return targets

    def among(self, group: ProcessGroup) -> Targets:
        """The same, of a batch that processes share."""
        if group.size == 1:
            return self
        return replace(self, shared=sum(group.counts(len(self.tokens) + self.blanked)) / group.size)

    @property
    def count(self) -> float:
        """Number of predicted tokens, including blanked ones; in a shared batch its part of all of them."""
        return len(self.tokens) + self.blanked if self.shared is None else self.shared

    def mean(self, total: Tensor, vocabulary: int) -> Tensor:
        """The mean over all tokens, from the sum over those that are not blanked."""
        return (total + self.blanked * math.log(vocabulary)) / self.count


def answer_loss(logits: Tensor, targets: Targets) -> Tensor:
    """Mean cross-entropy of a model's own logits."""
    chosen = _wide(logits[:, :-1][targets.rows])
    total = functional.cross_entropy(chosen, targets.tokens, reduction="sum")
    return targets.mean(total, logits.shape[-1])


def response_loss(model: nn.Module, side: Batch, group: ProcessGroup = ALONE) -> Tensor:
    """Mean cross-entropy of a batch's labeled tokens."""
    result: Any = model(input_ids=side.input_ids, attention_mask=side.attention_mask)
    return answer_loss(result.logits, Targets.of_labels(side.labels, group))


def token_mask(batch: Batch) -> Tensor:
    """Return the mask of all tokens, prompts included, without rows in which nothing is predicted."""
    return batch.attention_mask.bool() & (batch.labels != IGNORED).any(1, keepdim=True)


def mean_of_all(values: Tensor, group: ProcessGroup) -> Tensor:
    """The mean over all processes' tokens, see `distributed.py`."""
    return values.sum() / max(1, sum(group.counts(len(values))) / group.size)


@torch.no_grad()
def lens_losses(
    states: Sequence[Tensor], targets: Targets, structure: DecoderStructure, *, chunk: int = CHUNK
) -> Tensor:
    """Mean cross-entropy that each layer's state gives through the final norm and the unembedding.

    Without gradients. What a model does to logits after its unembedding, such as a soft cap, is not done here.

    Source: Nostalgebraist, "interpreting GPT: the logit lens", 2020; RepNoise, section 3.
    """
    losses = []
    with gathered((structure.norm, structure.unembedding), states[0].dtype):
        for state in states:
            pieces = [_of_chunk(*some, structure) for some in _chunks(_rows(state, targets), targets, chunk)]
            losses.append(targets.mean(torch.stack(pieces).sum(), structure.vocabulary))
    return torch.stack(losses)


def mean_lens_loss(
    states: Sequence[Tensor], targets: Targets, structure: DecoderStructure, *, chunk: int = CHUNK
) -> Tensor:
    """The mean of `lens_losses` over the layers, with gradients."""
    if not torch.is_grad_enabled():
        return lens_losses(states, targets, structure, chunk=chunk).mean()
    rows = [_rows(state, targets) for state in states]
    by_rows: list[Tensor] = []
    losses: list[Tensor] = []
    with gathered((structure.norm, structure.unembedding), rows[0].dtype) as (weights, in_graph):
        by_weights = [torch.zeros_like(value) for value in weights]
        for layer in rows:
            pieces: list[Tensor] = []
            for some, tokens in _chunks(layer.detach(), targets, chunk):
                leaf = some.requires_grad_()
                loss = _of_chunk(leaf, tokens, structure)
                gradients = torch.autograd.grad(loss / (targets.count * len(rows)), [leaf, *weights])
                pieces.append(gradients[0])
                losses.append(loss.detach())
                for total, part in zip(by_weights, gradients[1:], strict=True):
                    total += part
            by_rows.append(torch.cat(pieces))
    # All layers have as many tokens, so that the mean of their means is that over all tokens.
    value = targets.mean(torch.stack(losses).sum() / len(rows), structure.vocabulary)
    return with_gradients(value, [*rows, *in_graph], [*by_rows, *by_weights])


def _rows(state: Tensor, targets: Targets) -> Tensor:
    return state[:, :-1][targets.rows]


def _chunks(rows: Tensor, targets: Targets, chunk: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(torch.split(rows, chunk), torch.split(targets.tokens, chunk), strict=True)


def _of_chunk(rows: Tensor, tokens: Tensor, structure: DecoderStructure) -> Tensor:
    logits = run_gathered(structure.unembedding, run_gathered(structure.norm, rows))
    return functional.cross_entropy(_wide(logits), tokens, reduction="sum")


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def sampled_layers(layers: int, count: int | None, generator: torch.Generator | None) -> list[int]:
    """Draw layers without replacement, each as likely as any other, so that their mean is that of all on average."""
    if count is None or count >= layers:
        return list(range(layers))
    device = "cpu" if generator is None else generator.device
    drawn: list[int] = torch.randperm(layers, generator=generator, device=device)[:count].tolist()
    return sorted(drawn)


class _Precomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, count: int, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors[count:])
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        gradients = ctx.saved_tensors
        return None, None, *(grad * value for value in gradients), *(None for _ in gradients)


def with_gradients(value: Tensor, inputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> Tensor:
    """Put a scalar into the graph whose gradients are known, so that nothing else waits for the backward pass."""
    used = [pair for pair in zip(inputs, gradients, strict=True) if pair[0].requires_grad]
    if not used or not torch.is_grad_enabled():
        return value
    leaves = [given for given, _ in used]
    converted = [gradient.to(given.dtype) for given, gradient in used]
    result: Tensor = _Precomputed.apply(value, len(used), *leaves, *converted)  # type: ignore[no-untyped-call]
    return result
