"""Banks of adapters of the small faces pipeline, one for each of many drawn people with known attributes.

    bank = AdapterBank.open(FACES_BANK)
    labels = read_labels(FACES_LABELS, bank.names)             # methods.space.labels

Person number n of a bank's seed has the adapter `person-n`; its photographs are drawn anew from the seed, so that a
bank needs no pictures beside it. `face_bank_training` makes banks; one of a few hundred people comes with the package.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.generate.adapter_fitting import AdapterRecipe
from netweight.store.atomic import whole_file
from netweight.zoo.drawn_worlds import WORLDS

__all__ = ["FACES_BANK", "FACES_LABELS", "LAYERS", "FaceBank", "person_name", "write_labels"]

_FOLDER = Path(__file__).parent / "checkpoints" / "faces-bank"
FACES_BANK = _FOLDER / "bank"
"""The bank that comes with the package."""
FACES_LABELS = _FOLDER / "labels.csv"
"""The attributes of its people."""


LAYERS = "**.{attn1.{to_q,to_v,to_out.0},attn2.{to_q,to_v,to_out.0},ff.net.{0.proj,2}}"
"""Queries, values and outputs of all attention, and the feed-forward layers, without which adapters of rank 1 do not
keep the noise from deciding on half of the attributes."""


@final
@dataclass(frozen=True)
class FaceBank:
    """Everything that decides on a bank.

    Attributes:
        people: How many.
        recipe: How each adapter is trained.
        images: Photographs of each person.
        each: Noisy photographs of each person at a step.
        layers: Linear layers of the U-Net, by the grammar of `Select`.
        seed: Decides on the people and their photographs.
        world: Name of the drawn world whose subjects they are; vehicles are "people" here, too.
    """

    people: int = 1000
    recipe: AdapterRecipe = AdapterRecipe()
    images: int = 12
    each: int = 4
    layers: str = LAYERS
    seed: int = 31
    world: str = "face"

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on its adapters but the base, whatever its size; of which world, the base says."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "world"} | {"people": 0}

    def faces(self, numbers: Sequence[int]) -> Tensor:
        """Return the attributes of people, shape `(n, attributes)`."""
        return torch.cat([WORLDS[self.world].identities(1, self.seed, first=number) for number in numbers])

    def photographs(self, number: int) -> tuple[list[str], Tensor]:
        """Return prompts and pictures that a person's adapter is trained on, shape `(images, 3, 16, 16)`."""
        noise = torch_generator(self.seed, "photographs", number)
        return WORLDS[self.world].photographs(self.faces([number])[0], self.images, noise)


def person_name(number: int) -> str:
    """Return the name of a person's adapter."""
    return f"person-{number:05d}"


def write_labels(path: Path, names: Sequence[str], values: Tensor, *, world: str = "face") -> None:
    """Write attributes of a drawn world's subjects as CSV: a column "name", then one for each attribute."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", *WORLDS[world].attributes])
    for name, row in zip(names, values.tolist(), strict=True):
        writer.writerow([name, *(f"{value:.6g}" for value in row)])
    with whole_file(path, overwrite=True) as file:
        file.write(text.getvalue().encode())
