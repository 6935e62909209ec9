"""Choose the edits whose answers are generated: those that remove most of refusal and leave ordinary answers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from netweight.attacks.refusal.edits.edit import RefusalEdit
    from netweight.attacks.refusal.measurement import EditScore, Refusal
    from netweight.attacks.refusal.settings import RefusalSettings


@final
@dataclass(eq=False)
class ScoredEdit:
    """An edit with its score, and with its measurement if it was among the best."""

    edit: RefusalEdit
    """The edit that was scored."""
    score: EditScore
    """Score on the prompts that edits are chosen with."""
    measured: Refusal | None = field(default=None)
    """Refusals on the held-out prompts; None if answers were not generated."""

    def counts(self, settings: RefusalSettings) -> bool:
        """Return whether ordinary prompts are answered nearly as before."""
        return self.score.divergence <= settings.most_divergence


def best_edits(scored: Sequence[ScoredEdit], settings: RefusalSettings) -> list[ScoredEdit]:
    """Return the best edits of all and the best of each kind, in their order."""
    ranked = sorted(scored, key=lambda each: rank(each, settings))
    leaders = {each.edit.kind: each for each in reversed(ranked)}
    chosen = {id(each) for each in (*ranked[: settings.finalists], *leaders.values())}
    return [each for each in scored if id(each) in chosen]


def rank(edit: ScoredEdit, settings: RefusalSettings) -> tuple[bool, float, float]:
    """Return the place of an edit among others, the strongest first.

    Edits that count are ranked by the percent that they leave of refusal, then by how well they answer what was
    refused, where answers are known; the others by their divergence.

    Args:
        edit: The edit with its score.
        settings: What was asked for.
    """
    if not edit.counts(settings):
        return True, edit.score.divergence, 0.0
    return False, round(edit.score.first_token, 2), -(edit.score.answer_accuracy or 0.0)
