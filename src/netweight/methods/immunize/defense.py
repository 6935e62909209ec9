"""Base class of defenses: settings, and terms of a loss on pairs of answers.

A defense yields its loss as groups of terms: the graphs of a group may be shared, and it goes backward together.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from netweight.core.lazy import lazy_modules
from netweight.data.tokens import Batch
from netweight.settings import Settings

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from netweight.methods.immunize import losses
    from netweight.methods.immunize.distributed import ProcessGroup
    from netweight.methods.immunize.pairs import PairBatch
else:
    losses, torch, nn = lazy_modules("netweight.methods.immunize.losses", "torch", "torch.nn")


class DefenseSettings(Settings):
    """A defense's own settings."""

    def build(self) -> Defense[Any]:
        """Return the defense that computes the loss of these settings."""
        raise NotImplementedError


S = TypeVar("S", bound=DefenseSettings)


@final
@dataclass(frozen=True)
class Term:
    """A term of a loss."""

    value: Tensor
    """A scalar in the graph."""
    weight: float = 1.0
    """Factor of the value; negative for a value that must grow."""
    share: float | None = None
    """If given, the weight is chosen such that the norm of this term's gradient is that of the other terms times
    this number, and `weight` is not used."""


TermGroup = Mapping[str, Term]
"""Terms by name whose graphs may be shared and that go backward together."""


class Defense(Generic[S]):
    """A way to immunize a model: computes the loss that its settings describe."""

    name: str
    """Name in records and tables."""
    aligned = False
    """True if both sides of a batch must have one width."""
    trains = True
    """True if there is anything to train; if not, `preparation` does all the work."""
    looks_ahead = False
    """True if computing the loss takes gradients itself."""
    needs_retained = False
    """True if rows of abilities to keep are required."""

    def __init__(self, settings: S) -> None:
        self.settings = settings

    @property
    def options(self) -> dict[str, Any]:
        """The settings as records keep them."""
        return self.settings.to_json()

    @contextmanager
    def preparation(self, model: nn.Module, *, seed: int) -> Iterator[None]:
        """Check the model and make it ready; it is trained within the block, and left as a user wants it after."""
        yield

    def term_groups(
        self, model: nn.Module, batch: PairBatch, generator: torch.Generator
    ) -> Generator[TermGroup, None, None]:
        """Compute the loss of a batch, each group when it is asked for, after the one before went backward."""
        raise NotImplementedError

    def retained_terms(self, model: nn.Module, batch: Batch, group: ProcessGroup, name: str = "retained") -> TermGroup:
        """Compute the loss of retained rows: by default the cross-entropy of the answers."""
        return {name: Term(losses.response_loss(model, batch, group))}
