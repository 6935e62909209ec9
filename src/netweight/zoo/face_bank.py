"""Banks of adapters of the small faces pipeline, one for each of many drawn people with known attributes.

    bank, labels = AdapterBank.open(FACES_BANK), read_labels(FACES_LABELS)

Person number n of a bank's seed has the adapter `person-n`; its photographs are drawn anew from the seed, so that a
bank needs no pictures beside it. `face_bank_training` makes banks; one of a few hundred people comes with the package.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.generate.adapter_fitting import AdapterRecipe
from netweight.zoo.drawn_faces import ATTRIBUTES, identities, photographs

__all__ = ["FACES_BANK", "FACES_LABELS", "LAYERS", "FaceBank", "Labels", "person_name", "read_labels", "write_labels"]

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
    """

    people: int = 1000
    recipe: AdapterRecipe = AdapterRecipe()
    images: int = 12
    each: int = 4
    layers: str = LAYERS
    seed: int = 31

    def faces(self, numbers: Sequence[int]) -> Tensor:
        """Return the attributes of people, shape `(n, 8)`."""
        return torch.cat([identities(1, self.seed, first=number) for number in numbers])

    def photographs(self, number: int) -> tuple[list[str], Tensor]:
        """Return prompts and pictures that a person's adapter is trained on, shape `(images, 3, 16, 16)`."""
        return photographs(self.faces([number])[0], self.images, torch_generator(self.seed, "photographs", number))


@final
@dataclass(frozen=True, eq=False)
class Labels:
    """Attributes by adapter.

    Attributes:
        names: Of the adapters.
        columns: Names of the attributes.
        values: Shape `(n, columns)`, fp32.
    """

    names: tuple[str, ...]
    columns: tuple[str, ...]
    values: Tensor

    def of(self, names: Sequence[str]) -> Tensor:
        """Return the attributes of some adapters, in their order.

        Raises:
            UsageError: One has none.
        """
        rows: Mapping[str, int] = {name: row for row, name in enumerate(self.names)}
        missing = [name for name in names if name not in rows]
        if missing:
            raise UsageError(f"{missing[0]!r} has no labels.", cure="Use the table that belongs to the bank.")
        return self.values[[rows[name] for name in names]]


def person_name(number: int) -> str:
    """Return the name of a person's adapter."""
    return f"person-{number:05d}"


def write_labels(path: Path, names: Sequence[str], values: Tensor) -> None:
    """Write attributes as CSV: a column "name", then one for each attribute."""
    from netweight.store.atomic import whole_file

    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["name", *ATTRIBUTES])
    for name, row in zip(names, values.tolist(), strict=True):
        writer.writerow([name, *(f"{value:.6g}" for value in row)])
    with whole_file(path, overwrite=True) as file:
        file.write(text.getvalue().encode())


def read_labels(path: Path = FACES_LABELS) -> Labels:
    """Read what `write_labels` wrote.

    Raises:
        UsageError: There is no such table, or a cell is no number.
    """
    if not path.is_file():
        raise UsageError(f"There is no table of labels at {path}.", cure="Name the one that was written with the bank.")
    with open(path, encoding="utf-8", newline="") as file:
        header, *rows = list(csv.reader(file))
    try:
        values = torch.tensor([[float(cell) for cell in row[1:]] for row in rows])
    except ValueError as error:
        raise UsageError(
            f"{path} holds a cell that is no number: {error}.", cure="Give names first, then numbers."
        ) from error
    return Labels(tuple(row[0] for row in rows), tuple(header[1:]), values)
