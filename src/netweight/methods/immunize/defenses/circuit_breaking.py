"""Circuit breaking: harmful answers' states are turned away from the original's."""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.data.tokens import IGNORED, Batch
from netweight.methods.immunize.defense import DefenseSettings, Term, TermGroup
from netweight.methods.immunize.defenses.bases import WithOriginal

if TYPE_CHECKING:
    import torch
    from torch import nn
    from torch.nn import functional

    from netweight.methods.immunize import losses
    from netweight.methods.immunize.defenses import steps
    from netweight.methods.immunize.distributed import ProcessGroup
    from netweight.methods.immunize.pairs import PairBatch
    from netweight.nn import hooks
else:
    losses, hooks, steps, torch, nn, functional = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.nn.hooks",
        "netweight.methods.immunize.defenses.steps",
        "torch",
        "torch.nn",
        "torch.nn.functional",
    )


class CircuitBreaking(DefenseSettings, recommended={"lr": 1e-4}):
    """Turn the states of harmful answers away from the original's, and keep all other states in place.

    Source: Zou et al., circuit breakers (arXiv 2406.04313), algorithm 1, at the tenth and twentieth block of 32. In the
    paper, a weight of 10 shifts from one term to the other until each has half of it; here each term has the mean of
    its weights over that time.
    """

    rerouting: float = Field(7.5, ge=0, description="Weight of the similarity of harmful states to the original's.")
    retention: float = Field(2.5, ge=0, description="Weight of the distance of all other states from the original's.")

    def build(self) -> CircuitBreakingDefense:
        """Return the defense of these settings."""
        return CircuitBreakingDefense(self)


@final
class CircuitBreakingDefense(WithOriginal[CircuitBreaking]):
    """Lowers how alike states of harmful answers and the original's are, and holds all others."""

    name = "circuit-breaking"

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        places, answers = steps.blocks_at(model, 10, 20), batch.harmful.labels != IGNORED
        with hooks.capture(model, places, gradients=True) as states, hooks.capture(self.original, places) as originals:
            self.both(model, batch.harmful)
        alike = [
            functional.cosine_similarity(
                states[place][answers].float(), originals[place][answers].float(), dim=-1
            ).relu()
            for place in places
        ]
        yield {
            "rerouting": Term(losses.mean_of_all(torch.stack(alike, -1).mean(-1), batch.group), self.settings.rerouting)
        }
        yield self.retained_terms(model, batch.harmless, batch.group, "harmless")

    def retained_terms(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "retained") -> TermGroup:
        """Return how far states moved at every depth."""
        return {name: Term(self.moved(model, batch, group)[1], self.settings.retention)}
