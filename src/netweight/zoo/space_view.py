"""The page of the space that comes with the package: adapters of drawn faces, walked along their eight attributes.

`netweight space view --out faces.html` writes it. The model, the bank and the reader that measures attributes are all
small, and the people were drawn by this package: nobody lives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.integrations.diffusion_pipeline import text_to_image
from netweight.methods.space.direction_fit import fit_direction
from netweight.methods.space.labels import read_labels
from netweight.methods.space.method import WeightSpace
from netweight.methods.space.view import View
from netweight.methods.space.viewing import Look, Reader, painted_view
from netweight.store.adapter_bank import AdapterBank
from netweight.zoo.drawn_faces import ATTRIBUTES, GROUNDS, caption
from netweight.zoo.face_bank import FACES_BANK, FACES_LABELS
from netweight.zoo.face_reading import read
from netweight.zoo.faces_diffusion import faces_pipeline

__all__ = ["FACES_LOOK", "FACES_READER", "faces_view"]

FACES_LOOK = Look(prompts=tuple(map(caption, GROUNDS)), guidance=1.0, steps=20)
"""One picture on each ground."""


def _read(pictures: Tensor) -> Mapping[str, Tensor]:
    return dict(zip(ATTRIBUTES, read(pictures).attributes.T, strict=True))


FACES_READER = Reader("the reader of drawn faces", _read)
"""Measures the eight attributes, from -1 to 1."""


def faces_view(*, look: Look = FACES_LOOK, command: str | None = None, progress: Progress = QUIET) -> View:
    """Fit the space of the bank in the package, find its directions, and paint the page.

    Args:
        look: How much is painted.
        command: That made the page.
        progress: Where to show it.

    Raises:
        MissingExtra: diffusers is not installed.
    """
    space = WeightSpace.fit(AdapterBank.open(FACES_BANK), progress=progress)
    labels = read_labels(FACES_LABELS, space.names)
    directions = [
        fit_direction(
            space.scores, labels, each, confounders=[other for other in ATTRIBUTES if other != each], seed=look.seed
        )
        for each in ATTRIBUTES
    ]
    return painted_view(
        text_to_image(faces_pipeline(), name="faces-diffusion, a miniature"),
        space,
        title=f"{len(space.names)} models of drawn faces as one space",
        summary="A miniature: each model was taught one drawn person, by an adapter of a small diffusion model. "
        "The space is made of their weights alone.",
        directions=directions,
        pairs=[("beard", "hair_length")],
        labels=labels,
        reader=FACES_READER,
        look=replace(look, components=min(look.components, space.components)),
        command=command,
        progress=progress,
    )
