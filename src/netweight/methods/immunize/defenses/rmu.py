"""RMU: harmful answers' states are steered to a random direction, all others held in place."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, final

from pydantic import Field

from netweight.core.lazy import lazy_modules
from netweight.core.seeds import torch_generator
from netweight.data.tokens import IGNORED, Batch
from netweight.errors import UsageError
from netweight.methods.immunize.defense import DefenseSettings, Term, TermGroup
from netweight.methods.immunize.defenses.bases import WithOriginal

if TYPE_CHECKING:
    import torch
    from torch import nn

    from netweight.hf import load_language_model as language_model
    from netweight.methods.immunize import losses
    from netweight.methods.immunize.distributed import ProcessGroup
    from netweight.methods.immunize.pairs import PairBatch
    from netweight.nn import hooks
else:
    losses, hooks, language_model, torch, nn = lazy_modules(
        "netweight.methods.immunize.losses",
        "netweight.nn.hooks",
        "netweight.hf.load_language_model",
        "torch",
        "torch.nn",
    )


class RMU(DefenseSettings, recommended={"lr": 5e-5}):
    """Steer the states of harmful answers at one depth to one random direction, and hold all others in place.

    Source: Li et al., RMU (arXiv 2403.03218), section 4: coefficient 6.5 and alpha 1200 at the eighth block of 32.
    """

    coefficient: float = Field(6.5, gt=0, description="Norm of the vector that states are steered to.")
    alpha: float = Field(1200.0, ge=0, description="Weight of the distance of all states that must not move.")
    block: int | None = Field(
        None,
        ge=1,
        description="Block, counted from 1, after which states are steered; a quarter deep by default.",
    )

    def build(self) -> RMUDefense:
        """Return the defense of these settings."""
        return RMUDefense(self)


@final
class RMUDefense(WithOriginal[RMU]):
    """Steers states of harmful answers to a random direction, and holds all others where the original has them."""

    name = "rmu"

    @contextmanager
    def preparation(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        parts = language_model.structure_of(model)
        number = self.settings.block or math.ceil(len(parts.blocks) / 4)
        if number > len(parts.blocks):
            raise UsageError(
                f"There is no block {number}: {type(model).__name__} has {len(parts.blocks)}.",
                cure="Give a lower block (--set rmu.block=).",
            )
        self.place = list(parts.blocks)[number - 1]
        drawn = torch.rand(parts.hidden_size, generator=torch_generator(seed, "direction"))
        self.direction = self.settings.coefficient * drawn / drawn.norm()
        with super().preparation(model, seed=seed):
            yield

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        with hooks.capture(model, [self.place], gradients=True) as outputs:
            model(input_ids=batch.harmful.input_ids, attention_mask=batch.harmful.attention_mask)
        states = outputs[self.place][batch.harmful.labels != IGNORED].float()
        yield {
            "steering": Term(losses.mean_of_all((states - self.direction.to(states)).square().mean(-1), batch.group))
        }
        yield self.retained_terms(model, batch.harmless, batch.group, "harmless")

    def retained_terms(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "retained") -> TermGroup:
        """Squared distance from the original's states at every token."""
        with (
            hooks.capture(model, [self.place], gradients=True) as states,
            hooks.capture(self.original, [self.place]) as originals,
        ):
            self.both(model, batch)
        apart = (
            states[self.place][losses.token_mask(batch)].float()
            - originals[self.place][losses.token_mask(batch)].float()
        )
        return {name: Term(losses.mean_of_all(apart.square().mean(-1), group), self.settings.alpha)}
