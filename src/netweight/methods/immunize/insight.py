"""What a defense did inside of a model, as plain data: one look at each of the two models, and their distance.

A look can be kept while its model is trained further, so that two models are never needed at once except for the
distance of their weights. `depth_report.py` draws it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor, nn

from netweight.attacks.finetuning.examples import Example, Pair, collate
from netweight.attacks.finetuning.scores import evaluating
from netweight.errors import UsageError
from netweight.methods.immunize.depth import LayerChange, lens_by_layer, representations
from netweight.methods.immunize.probing import probe_accuracies
from netweight.methods.immunize.structure import structure_of

__all__ = ["KINDS", "LEAST_PAIRS", "Insight", "Look", "look_inside"]

KINDS = ("harmful", "harmless")
"""The answers of a pair, in the order in which they are shown."""
LEAST_PAIRS = 8
"""Fewer pairs are not looked at: there would be nothing to train and to test a probe on."""
_MOST_PAIRS = 200
_AT_ONCE = 8


@final
@dataclass(frozen=True)
class Look:
    """What a model makes of pairs of answers, depth by depth: the embeddings first, then after each block.

    Attributes:
        lens: For each kind of answer the mean loss per token if the model ended at a depth: one list per batch of
            eight pairs, each with one number per depth.
        states: For each kind the mean hidden state over each answer at every depth, shape `(pairs, hidden)`.
        probes: For each depth the accuracies of linear probes that tell the kinds apart, one for each random split.
        vocabulary: How many tokens the model chooses from.
    """

    lens: Mapping[str, Sequence[Sequence[float]]]
    states: Mapping[str, Sequence[Tensor]]
    probes: Sequence[Sequence[float]]
    vocabulary: int

    @property
    def pairs(self) -> int:
        """How many pairs were looked at."""
        return len(self.states[KINDS[0]][0])


@final
@dataclass(frozen=True)
class Insight:
    """A model before and after its defense.

    Attributes:
        changes: How far each layer's weights moved.
        before: A look at the model before.
        after: A look at the model after, at the same pairs.
    """

    changes: Sequence[LayerChange]
    before: Look
    after: Look


def look_inside(model: nn.Module, pairs: Sequence[Pair], *, pad_id: int = 0, seed: int = 0) -> Look:
    """Look at a model, which stays as it is.

    Args:
        model: A decoder.
        pairs: At least `LEAST_PAIRS`; of more than 200, so many spread evenly are looked at.
        pad_id: What stands after the end of shorter rows; nothing depends on it.
        seed: Of the probes' splits.

    Raises:
        UsageError: There are too few pairs.
        Unsupported: The model is no decoder.
    """
    if len(pairs) < LEAST_PAIRS:
        raise UsageError(
            f"{len(pairs)} pairs are too few to look inside of a model.", cure=f"Give at least {LEAST_PAIRS}."
        )
    wanted = min(len(pairs), _MOST_PAIRS)
    chosen = [pairs[row * len(pairs) // wanted] for row in range(wanted)]
    sides = dict(zip(KINDS, ([pair.harmful for pair in chosen], [pair.harmless for pair in chosen]), strict=True))
    with evaluating(model):
        lens = {kind: list(_lens(model, examples, pad_id)) for kind, examples in sides.items()}
        states = {
            kind: representations(model, examples, pad_id=pad_id, batch_size=_AT_ONCE)
            for kind, examples in sides.items()
        }
    probes = [probe_accuracies(*sides, seed=seed) for sides in zip(*(states[kind] for kind in KINDS), strict=True)]
    return Look(lens, states, probes, structure_of(model).vocabulary)


def _lens(model: nn.Module, examples: Sequence[Example], pad_id: int) -> Iterator[list[float]]:
    device = next(model.parameters()).device
    for first in range(0, len(examples), _AT_ONCE):
        yield lens_by_layer(model, collate(examples[first : first + _AT_ONCE], pad_id=pad_id).to(device))
