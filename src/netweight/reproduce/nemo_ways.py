"""Mitigations as plain data, so that a ledger can remember what was painted under each: NeMo's and those beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, final

from netweight.core.digest import of_config
from netweight.errors import UsageError
from netweight.reproduce.nemo_ground import Ground

if TYPE_CHECKING:
    from netweight.core.units import Units
    from netweight.methods.forget.mitigations import Mitigation

__all__ = ["ATTENTION", "EMBEDDING", "NONE", "PRUNING", "Way", "mitigation", "off", "random_off", "tokens", "whole"]

Kind = Literal["none", "neurons", "embedding", "attention", "tokens", "pruning"]
_PRUNED, _PRUNED_STEPS = 6, 5
"""Ordinary prompts that pruning compares a memorized one with, and steps of their generations."""


@final
@dataclass(frozen=True)
class Way:
    """A way of generating.

    Attributes:
        kind: Which mitigation.
        units: Neurons, as JSON, for "neurons".
        factor: What their outputs are multiplied by.
        count: Tokens, for "tokens".
    """

    kind: Kind
    units: str = ""
    factor: float = 0.0
    count: int = 0

    @property
    def name(self) -> str:
        """For messages."""
        digest = of_config(self.units).rpartition(":")[2][:8]
        return f"neurons-{digest}x{self.factor:g}" if self.kind == "neurons" else self.kind + str(self.count or "")

    @property
    def knows_prompts(self) -> bool:
        """Whether what it does depends on which prompts it is told are memorized."""
        return self.kind in ("embedding", "attention", "pruning")


NONE, EMBEDDING, ATTENTION, PRUNING = Way("none"), Way("embedding"), Way("attention"), Way("pruning")


def tokens(count: int) -> Way:
    """Return the way of so many random tokens."""
    return Way("tokens", count=count)


def off(units: Units, factor: float = 0.0) -> Way:
    """Return the way of switching neurons off, or of scaling them."""
    return Way("neurons", units.to_json(), factor)


def whole(ground: Ground, layer: str | None = None) -> Way:
    """Return the way of switching off all neurons of the down and middle blocks, or of one layer."""
    from netweight.core.units import Units
    from netweight.methods.forget.mitigations import neuron_counts

    counts = neuron_counts(ground.model.denoiser)
    return off(Units({name: range(count) for name, count in counts.items() if layer in (None, name)}))


def random_off(ground: Ground, like: Units, *, layer_matched: bool, seed: int) -> Way | None:
    """Return the way of switching off as many other neurons; None where there are not so many."""
    from netweight.methods.forget.mitigations import neuron_counts, random_units

    try:
        counts = neuron_counts(ground.model.denoiser)
        return off(random_units(like, counts, layer_matched=layer_matched, seed=seed))
    except UsageError:
        return None


def mitigation(way: Way, ground: Ground) -> Mitigation:
    """Return what a way does, on a ground.

    Raises:
        Unsupported: The tokenizer has no words of one token, for "tokens".
    """
    from netweight.core.units import Units
    from netweight.hf.load_pipeline import one_token_words, padding_masks
    from netweight.methods.forget.mitigations import (
        AllActive,
        AttentionScaling,
        Deactivated,
        EmbeddingAdjustment,
        RandomTokens,
        WeightPruning,
    )

    if way.kind == "neurons":
        return Deactivated(Units.from_json(way.units), factor=way.factor)
    if way.kind == "embedding":
        return EmbeddingAdjustment(steps=ground.detection.steps)
    if way.kind == "attention":
        return AttentionScaling(padding_masks(ground.model))
    if way.kind == "tokens":
        return RandomTokens(way.count, one_token_words(ground.model))
    if way.kind == "pruning":
        return WeightPruning(ground.calibration[:_PRUNED], steps=_PRUNED_STEPS)
    return AllActive()
