"""Divergence of a training, detected from the terms of its loss."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import final

from torch import nn

from netweight.hf.load_language_model import vocabulary_of
from netweight.methods.immunize.gradients import TermLog

# These terms must not diverge.
_RETAINED_TERMS = ("harmless", "retained")
# This many steps in succession may be far worse than guessing.
_PATIENCE = 5


@final
class DivergenceMonitor:
    """Detect divergence: a term that is not finite, or a loss on what is to be kept that stays far above its start."""

    def __init__(self, model: nn.Module, first: Mapping[str, TermLog] | None = None) -> None:
        self._limit = 2 * math.log(vocabulary_of(model) or math.inf)
        # Terms of the first step, if there was one.
        self._first = first
        # The number of steps in succession that were far worse than guessing.
        self.bad = 0

    def problem(self, terms: Mapping[str, TermLog]) -> str | None:
        """Return the problem of a step, if it has one."""
        for name, term in terms.items():
            if not math.isfinite(term.value):
                return f"the term {name!r} is {term.value}"
        # A model that was never taught to refuse begins far above guessing: that is no divergence.
        first = self._first = self._first or terms
        limits = {name: max(self._limit, 2 * first[name].value) for name in _RETAINED_TERMS if name in terms}
        over = [name for name, limit in limits.items() if terms[name].value > limit]
        self.bad = self.bad + 1 if over else 0
        if self.bad >= _PATIENCE:
            limit = limits[over[0]]
            what = "twice that of guessing" if limit == self._limit else "twice that of the first step"
            return f"the loss on retained rows was above {limit:.1f}, {what}, {_PATIENCE} times"
        return None
