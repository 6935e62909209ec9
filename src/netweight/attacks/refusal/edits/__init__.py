"""Ways to remove refusal without training; each is one file with its settings beside its algorithm.

`edit.py` says what an edit is and what it is made of; `streams.py` has what several edits need of a model. An edit is
added by its file and one line in `EDITS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from netweight.attacks.refusal.edits.directions import Directions
from netweight.attacks.refusal.edits.layerwise import LayerwiseDirections
from netweight.attacks.refusal.edits.norm_preserving import NormPreservingDirections
from netweight.attacks.refusal.edits.pruning import Pruning
from netweight.attacks.refusal.edits.subspaces import Subspaces
from netweight.attacks.refusal.edits.unaligned import UnalignedMixture

if TYPE_CHECKING:
    from netweight.attacks.refusal.edits.edit import RefusalEditSettings

EDITS: Mapping[str, RefusalEditSettings] = {
    "directions": Directions(),
    "norm-preserving": NormPreservingDirections(),
    "subspaces": Subspaces(),
    "layerwise": LayerwiseDirections(),
    "pruning": Pruning(),
    "unaligned": UnalignedMixture(),
}
"""Kinds of edits by name, with their default settings, in the order in which they are tried."""
