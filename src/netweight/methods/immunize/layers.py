"""A model depth by depth: lens losses, probes and representations on pairs of answers, and how far weights moved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.data.tokens import IGNORED, AnswerPair, Batch, Example, collate
from netweight.errors import UsageError
from netweight.hf.load_language_model import structure_of
from netweight.methods.immunize.losses import Targets, answer_loss, lens_losses
from netweight.methods.immunize.probes import probe_accuracies
from netweight.nn.hooks import evaluating

# The answers of a pair, in the order in which they are shown.
KINDS = ("harmful", "harmless")


# With fewer pairs, a probe cannot be both trained and tested.
LEAST_PAIRS = 8


_MOST_PAIRS = 200


_AT_ONCE = 8


@final
@dataclass(frozen=True)
class LayerAnalysis:
    """A model on pairs of answers, depth by depth: the embeddings first, then after each block."""

    lens: Mapping[str, Sequence[Sequence[float]]]
    """Kind of answer → mean loss per token if the model ended at a given depth: one list per batch of eight pairs,
    each with one number per depth.
    """
    states: Mapping[str, Sequence[Tensor]]
    """Kind of answer → mean hidden state over each answer at every depth, shape `(pairs, hidden)`."""
    probes: Sequence[Sequence[float]]
    """Accuracies, at each depth, of linear probes that separate the kinds of answers; one for each random split."""
    vocabulary: int
    """Size of the vocabulary."""

    @property
    def pairs(self) -> int:
        """Number of pairs that were used."""
        return len(self.states[KINDS[0]][0])


@final
@dataclass(frozen=True)
class WeightChange:
    """Change of a layer's weights."""

    layer: str
    """A block's name, or that of a parameter outside the blocks."""
    distance: float
    """Euclidean norm of the change of all its weights together."""
    relative: float
    """Norm of the change, divided by the norm of the weights before; 0 if both are 0."""
    block: int | None = None
    """The block's number from 0; None for what lies outside the blocks."""


@final
@dataclass(frozen=True)
class DepthAnalysis:
    """A model before and after its defense."""

    changes: Sequence[WeightChange]
    """Change of the weights, layer by layer."""
    before: LayerAnalysis
    """Analysis of the model before its defense."""
    after: LayerAnalysis
    """Analysis of the defended model on the same pairs."""


def analyze_layers(model: nn.Module, pairs: Sequence[AnswerPair], *, pad_id: int = 0, seed: int = 0) -> LayerAnalysis:
    """Analyze a model, which stays as it is."""
    if len(pairs) < LEAST_PAIRS:
        raise UsageError(
            f"{len(pairs)} pairs are too few to analyze the layers of a model.", cure=f"Give at least {LEAST_PAIRS}."
        )
    count = min(len(pairs), _MOST_PAIRS)
    chosen = [pairs[row * len(pairs) // count] for row in range(count)]
    sides = {"harmful": [pair.harmful for pair in chosen], "harmless": [pair.harmless for pair in chosen]}
    device = next(model.parameters()).device
    lens: dict[str, list[list[float]]] = {kind: [] for kind in KINDS}
    with evaluating(model):
        for kind, examples in sides.items():
            for first in range(0, count, _AT_ONCE):
                batch = collate(examples[first : first + _AT_ONCE], pad_id=pad_id).to(device)
                lens[kind].append(lens_by_layer(model, batch))
        states = {
            kind: representations(model, examples, pad_id=pad_id, batch_size=_AT_ONCE)
            for kind, examples in sides.items()
        }
    probes = [probe_accuracies(*both, seed=seed) for both in zip(*(states[kind] for kind in KINDS), strict=True)]
    return LayerAnalysis(lens, states, probes, structure_of(model).vocabulary)


@torch.no_grad()
def lens_by_layer(model: nn.Module, batch: Batch) -> list[float]:
    """The loss on a batch's labeled tokens if the model ended at each depth."""
    parts, targets = structure_of(model), Targets.of_labels(batch.labels)
    result: Any = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
    losses: list[float] = lens_losses(result.hidden_states[:-1], targets, parts).tolist()
    return [*losses, float(answer_loss(result.logits, targets))]


@torch.no_grad()
def representations(
    model: nn.Module, examples: Sequence[Example], *, pad_id: int = 0, batch_size: int = 16
) -> list[Tensor]:
    """The mean hidden state over each answer, at every depth."""
    device = next(model.parameters()).device
    batches: list[list[Tensor]] = []
    for first in range(0, max(1, len(examples)), batch_size):
        batch = collate(examples[first : first + batch_size], pad_id=pad_id).to(device)
        result: Any = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, output_hidden_states=True)
        answers = (batch.labels != IGNORED)[..., None]
        batches.append([((state.float() * answers).sum(1) / answers.sum(1)).cpu() for state in result.hidden_states])
    return [torch.cat(states) for states in zip(*batches, strict=True)]


@torch.no_grad()
def weight_changes(before: nn.Module, after: nn.Module) -> list[WeightChange]:
    """Compare the weights of two models layer by layer."""
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    differ = sorted(name for name in old.keys() | new.keys() if name not in old or name not in new)
    differ += [name for name in old.keys() & new.keys() if old[name].shape != new[name].shape]
    if differ:
        raise UsageError(
            f"The models differ in {len(differ)} parameters, such as {differ[0]!r}.",
            cure="Compare two states of the same model; merge or remove adapters first.",
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


def _change(layer: str, pairs: Sequence[tuple[Tensor, Tensor]], block: int | None) -> WeightChange:
    moved = sum(float((new.double().cpu() - old.double().cpu()).square().sum()) for old, new in pairs) ** 0.5
    size = sum(float(old.double().square().sum()) for old, _ in pairs) ** 0.5
    return WeightChange(layer, moved, moved / size if size else 0.0, block)
