"""Base class of edits that remove refusal, and the material that they are made from."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, final

from netweight.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor, nn

    from netweight.hf.load_language_model import DecoderStructure


@final
@dataclass(frozen=True)
class RefusalEdit:
    """One way to remove refusal from a model."""

    kind: str
    """Name of its kind, a key of `EDITS`."""
    label: str
    """Short description of the edit within its kind."""
    apply: Callable[[nn.Module], AbstractContextManager[None]]
    """Edits a model while a block lasts, and leaves it as it was."""


@final
class EditMaterial:
    """A model and the prompts that edits are made of; what several edits need is computed once.

    Args:
        model: The model, which stays as it is.
        refused: Token ids of prompts that the model refuses.
        ordinary: Token ids of prompts that it answers.
        pad_id: The token that fills shorter prompts.
        unaligned: The model before its alignment, if it is there.
    """

    def __init__(
        self,
        model: nn.Module,
        refused: Sequence[tuple[int, ...]],
        ordinary: Sequence[tuple[int, ...]],
        *,
        pad_id: int,
        unaligned: nn.Module | None = None,
    ) -> None:
        self.model, self.unaligned = model, unaligned
        self.refused, self.ordinary, self.pad_id = refused, ordinary, pad_id

    @cached_property
    def structure(self) -> DecoderStructure:
        """The model's blocks and feed-forward layers."""
        from netweight.hf.load_language_model import structure_of

        return structure_of(self.model)

    @cached_property
    def states(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Each block's output at the last token of refused and of ordinary prompts, float32, shape `(n, width)`."""
        from netweight.attacks.refusal.edits.streams import last_states

        names = list(self.structure.blocks)
        refused = last_states(self.model, names, self.refused, pad_id=self.pad_id)
        return refused, last_states(self.model, names, self.ordinary, pad_id=self.pad_id)

    def gaps(self, block: str) -> Tensor:
        """Return refused prompts' states less the mean of ordinary ones, float32, shape `(n, width)`."""
        refused, ordinary = self.states
        return refused[block] - ordinary[block].mean(0)

    def blocks(self, share: float) -> list[tuple[int, str]]:
        """Return number and name of the blocks up to a share of the depth, at least the first."""
        names = list(self.structure.blocks)
        return list(enumerate(names))[: max(1, round(share * len(names)))]


class RefusalEditSettings(Settings):
    """Settings of one kind of edit, which make its candidates."""

    @abstractmethod
    def candidates(self, material: EditMaterial) -> Iterator[RefusalEdit]:
        """Yield the edits of this kind; none where the model or the prompts do not allow it."""
