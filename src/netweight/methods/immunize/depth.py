"""How deep a defense goes: change of weights by layer, loss by layer, and representations by layer, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.attacks.finetuning.examples import IGNORED, Batch, Example, collate
from netweight.errors import UsageError
from netweight.methods.immunize.lens import Targets, answer_loss, lens_losses
from netweight.methods.immunize.structure import structure_of

__all__ = ["LayerChange", "lens_by_layer", "representations", "weight_changes"]


@final
@dataclass(frozen=True)
class LayerChange:
    """How far a layer's weights moved.

    Attributes:
        layer: A block's name, or that of a parameter outside the blocks.
        distance: Euclidean norm of the change of all its weights together.
        relative: That norm over the norm of the weights before; 0 where both are 0.
        block: The block's number from 0; None for what lies outside the blocks.
    """

    layer: str
    distance: float
    relative: float
    block: int | None = None


@torch.no_grad()
def weight_changes(before: nn.Module, after: nn.Module) -> list[LayerChange]:
    """Compare the weights of two models layer by layer.

    Args:
        before: A decoder.
        after: The same decoder with other weights, on any device and of any float dtype.

    Returns:
        The blocks first to last, then each parameter outside them; a tied one once.

    Raises:
        UsageError: The models do not have the same parameters.
        Unsupported: The model is no decoder.
    """
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    differ = sorted(name for name in old.keys() | new.keys() if name not in old or name not in new)
    differ += [name for name in old.keys() & new.keys() if old[name].shape != new[name].shape]
    if differ:
        raise UsageError(
            f"The models differ in {len(differ)} parameters, such as {differ[0]!r}.",
            cure="Compare a model with its own later self; merge or remove adapters first.",
        )
    blocks = list(structure_of(before).blocks)
    groups: dict[str, list[str]] = {block: [] for block in blocks}
    for name in old:
        inside = next((block for block in blocks if name.startswith(f"{block}.")), name)
        groups.setdefault(inside, []).append(name)
    numbers = {block: number for number, block in enumerate(blocks)}
    return [
        _change(layer, [(old[name], new[name]) for name in names], numbers.get(layer))
        for layer, names in groups.items()
    ]


def _change(layer: str, pairs: Sequence[tuple[Tensor, Tensor]], block: int | None) -> LayerChange:
    moved = sum(float((new.double().cpu() - old.double().cpu()).square().sum()) for old, new in pairs) ** 0.5
    size = sum(float(old.double().square().sum()) for old, _ in pairs) ** 0.5
    return LayerChange(layer, moved, moved / size if size else 0.0, block)


@torch.no_grad()
def lens_by_layer(model: nn.Module, batch: Batch) -> list[float]:
    """The loss on a batch's labeled tokens if the model ended at each depth.

    Args:
        model: A decoder, in the mode that it is to be looked at.
        batch: On the model's device.

    Returns:
        Of the embeddings, after each block but the last, and of the model itself.

    Raises:
        UsageError: No token is labeled.
        Unsupported: The model is no decoder.
    """
    parts, targets = structure_of(model), Targets.of_labels(batch.labels)
    result: Any = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
    losses: list[float] = lens_losses(result.hidden_states[:-1], targets, parts).tolist()
    return [*losses, float(answer_loss(result.logits, targets))]


@torch.no_grad()
def representations(
    model: nn.Module, examples: Sequence[Example], *, pad_id: int = 0, batch_size: int = 16
) -> list[Tensor]:
    """The mean hidden state over each answer, at every depth.

    Args:
        model: A decoder, in the mode that it is to be looked at.
        examples: At least one.
        pad_id: What stands after the end of shorter rows; no state depends on it.
        batch_size: Examples at a time.

    Returns:
        For the embeddings and after each block, the last one normalized: float32 on the CPU, shape
        `(examples, hidden)`.

    Raises:
        UsageError: There is no example.
    """
    device = next(model.parameters()).device
    found: list[list[Tensor]] = []
    for first in range(0, max(1, len(examples)), batch_size):
        batch = collate(examples[first : first + batch_size], pad_id=pad_id).to(device)
        result: Any = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
        answers = (batch.labels != IGNORED)[..., None]
        found.append([((state.float() * answers).sum(1) / answers.sum(1)).cpu() for state in result.hidden_states])
    return [torch.cat(states) for states in zip(*found, strict=True)]
