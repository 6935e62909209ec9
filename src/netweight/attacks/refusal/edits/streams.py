"""The residual stream of a decoder: who writes into it, and how a subspace is taken out of what they write."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from netweight.data.tokens import Batch, Example, collate
from netweight.hf.load_language_model import DecoderStructure, embedding_of
from netweight.nn.hooks import capture, edit_outputs, evaluating

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

_ROWS = 32  # prompts of a batch


def padded(model: nn.Module, prompts: Sequence[tuple[int, ...]], pad_id: int) -> Iterator[tuple[Batch, Tensor]]:
    """Yield prompts in batches padded on the right, with the place of each one's last token."""
    device = next(model.parameters()).device
    for first in range(0, len(prompts), _ROWS):
        rows = prompts[first : first + _ROWS]
        batch = collate([Example((), prompt) for prompt in rows], pad_id=pad_id).to(device)
        yield batch, torch.tensor([len(prompt) - 1 for prompt in rows], device=device)


def last_states(
    model: nn.Module, names: Sequence[str], prompts: Sequence[tuple[int, ...]], *, pad_id: int
) -> dict[str, Tensor]:
    """Return what modules put out at the last token of each prompt.

    Args:
        model: A causal language model.
        names: Names of modules whose outputs have the shape `(B, T, width)`.
        prompts: Token ids of each prompt.
        pad_id: The token that fills shorter prompts.

    Returns:
        Name → states, float32, shape `(n, width)`.
    """
    states: dict[str, list[Tensor]] = {name: [] for name in names}
    for batch, ends in padded(model, prompts, pad_id):
        rows = torch.arange(len(ends))
        take = partial(_at, rows=rows, ends=ends, shape=tuple(batch.input_ids.shape))
        with evaluating(model), capture(model, names, reduce=take) as outputs:
            logits_of(model, batch)
        for name in names:
            states[name].append(outputs[name])
    return {name: torch.cat(each) for name, each in states.items()}


def _at(output: Tensor, *, rows: Tensor, ends: Tensor, shape: tuple[int, ...]) -> Tensor:
    return output.reshape(*shape, -1)[rows, ends].float()


def logits_of(model: nn.Module, batch: Batch) -> Tensor:
    """Return a batch's logits, shape `(B, T, V)`."""
    logits: Tensor = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    return logits


def stream_writers(model: nn.Module, structure: DecoderStructure) -> list[str]:
    """Return the names of the modules that write into the residual stream.

    These are the embedding, the attention and feed-forward layers of every block, and the blocks themselves.
    """
    embedding = embedding_of(model)
    names = [name for name, module in model.named_modules() if module is embedding]
    names += [
        f"{name}.{child}"
        for name, block in structure.blocks.items()
        for child, _ in block.named_children()
        if "att" in child and "norm" not in child
    ]
    return [*names, *structure.feed_forwards, *structure.blocks]


def mean_direction(gaps: Tensor) -> Tensor:
    """Return the direction of the mean difference as an orthonormal basis, shape `(width, 1)`."""
    basis: Tensor = torch.linalg.qr(gaps.mean(0, keepdim=True).T)[0]
    return basis


def main_directions(gaps: Tensor, rank: int) -> Tensor:
    """Return an orthonormal basis of the first singular directions of differences, shape `(width, rank)`."""
    basis: Tensor = torch.linalg.qr(torch.linalg.svd(gaps, full_matrices=False)[2][:rank].T)[0]
    return basis


def without(output: Tensor, basis: Tensor, strength: float = 1.0) -> Tensor:
    """Return states without their part in a subspace, scaled by `strength`; `basis` has the shape `(width, rank)`."""
    along = basis.to(output)
    return output - strength * ((output @ along) @ along.T)


def removal(
    model: nn.Module, structure: DecoderStructure, basis: Tensor
) -> Callable[[nn.Module], AbstractContextManager[None]]:
    """Return what takes a subspace out of everything that is written into the residual stream."""
    edits = dict.fromkeys(stream_writers(model, structure), partial(without, basis=basis))
    return partial(edit_outputs, edits=edits)
