"""The check of an edit right after it: how many prompts still reproduce their pictures, in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, final

from torch import Tensor

from netweight.data.images.pairs import MemorizedPair
from netweight.metrics.copies import COPY, MemorizedImage, copies_of_prompt

FEW = 30
"""Ordinary prompts below which statistics over them mean little."""


@final
@dataclass(frozen=True)
class EditCheck:
    """Copies of memorized pictures, in images of their prompts from the same seeds, before and after an edit."""

    before: Mapping[str, int]
    """By pair, images that copied its picture before the edit."""
    after: Mapping[str, int]
    """By pair, images that copy its picture after the edit."""
    any: Mapping[str, int]
    """Pair → number of images that copy any memorized picture after the edit."""
    images: int
    """Images of each prompt."""

    @property
    def returning(self) -> list[str]:
        """The pairs whose picture still comes back."""
        return [name for name, count in self.after.items() if count]

    @property
    def diverted(self) -> list[str]:
        """The pairs whose prompt generates another memorized picture, and not its own."""
        return [name for name, count in self.any.items() if count and not self.after[name]]

    @property
    def passed(self) -> bool:
        """True if no image copies any memorized picture."""
        return not self.returning and not self.diverted

    @property
    def verdict(self) -> str:
        """Result of the check in whole sentences."""
        count = len(self.after)
        never = [name for name, copies in self.before.items() if not copies]
        if self.returning:
            first = f"{len(self.returning)} of {count} pictures are still reproduced: {'; '.join(self.returning)}."
        else:
            first = f"0 of {count} pictures are reproduced in {self.images} images of each prompt."
        more = ""
        if self.diverted:
            more = (
                f" {len(self.diverted)} prompts generate another memorized picture instead: {'; '.join(self.diverted)}."
            )
        if never:
            more += (
                f" {len(never)} of {count} were not reproduced before the edit either, so the check does not show "
                "anything about them."
            )
        return first + more

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Read what `to_json` returned."""
        return cls(values["before"], values["after"], values["any"], values["images"])

    def to_json(self) -> dict[str, Any]:
        """Return all of it as JSON values."""
        return {**asdict(self), "passed": self.passed, "verdict": self.verdict}


def check_edit(
    pairs: Sequence[MemorizedPair],
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    *,
    threshold: float = COPY,
) -> EditCheck:
    """Count copies in the images of memorized prompts.

    Args:
        pairs: Memorized pairs.
        before: By prompt its images by the model before the edit, shape `(seeds, 3, height, width)`, within 0 and 1.
        after: The same by the edited model.
        threshold: Correlation of centered pixels from which an image is a copy.

    Returns:
        The counts.
    """
    memorized = [MemorizedImage(pair.prompt, pair.kind, pair.image, name=pair.name) for pair in pairs]
    old = {each.label: copies_of_prompt(each, before[each.prompt], memorized) for each in memorized}
    new = {each.label: copies_of_prompt(each, after[each.prompt], memorized) for each in memorized}
    return EditCheck(
        {name: row.copies(threshold) for name, row in old.items()},
        {name: row.copies(threshold) for name, row in new.items()},
        {name: row.any_match(threshold) for name, row in new.items()},
        len(next(iter(after.values()))),
    )
