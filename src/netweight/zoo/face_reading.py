"""Reads a drawn face back from a picture: its eight attributes, its ground, and the nuisances of the photograph.

A small convolutional network that was trained on drawn pictures and comes with the package, frozen. Its errors on
people whom it never saw are in the record beside it; what it says of generated pictures is an estimate of that kind.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from torch import Tensor, nn

from netweight.errors import UsageError
from netweight.zoo.drawn_faces import ATTRIBUTES, GROUNDS, NUISANCES, SIDE

__all__ = ["READER_FOLDER", "FaceReader", "Reading", "embed", "r_squared", "read", "reading_record"]

READER_FOLDER = Path(__file__).parent / "checkpoints" / "face-reading"
"""The network's weights and the record of its training."""
WEIGHTS, RECORD = "weights.safetensors", "training.json"


@final
@dataclass(frozen=True, eq=False)
class Reading:
    """What pictures show, as the network sees it.

    Attributes:
        attributes: Shape `(n, 8)`, columns as in `ATTRIBUTES`.
        nuisances: Shape `(n, 4)`, columns as in `NUISANCES`.
        ground: The likeliest number of `GROUNDS`, shape `(n,)`.
    """

    attributes: Tensor
    nuisances: Tensor
    ground: Tensor


@final
class FaceReader(nn.Module):
    """Three convolutions and two linear layers, 60,000 weights.

    Returns, for pictures of shape `(n, 3, 16, 16)` within 0 and 1, shape `(n, 16)`: attributes, nuisances, and the
    logits of grounds.
    """

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(24, 32, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(32 * (SIDE // 4) ** 2, 80),
            nn.SiLU(),
        )
        self.answers = nn.Linear(80, len(ATTRIBUTES) + len(NUISANCES) + len(GROUNDS))

    def forward(self, pictures: Tensor) -> Tensor:
        """Read pictures."""
        answers: Tensor = self.answers(self.pixels(pictures * 2 - 1))
        return answers


def read(pictures: Tensor, *, folder: str | Path = READER_FOLDER) -> Reading:
    """Return what pictures show.

    Args:
        pictures: Shape `(n, 3, 16, 16)`, within 0 and 1. Gradients flow where they are on.
        folder: Of the network; by default the one that comes with the package.

    Raises:
        UsageError: The pictures have another shape, or the folder holds no such network.
    """
    said = _network(Path(folder))(_checked(pictures))
    attributes, nuisances, grounds = said.split([len(ATTRIBUTES), len(NUISANCES), len(GROUNDS)], dim=1)
    return Reading(attributes, nuisances, grounds.argmax(1))


def embed(pictures: Tensor, *, folder: str | Path = READER_FOLDER) -> Tensor:
    """Return what the network's last layer but one says of pictures, shape `(n, 80)`: an identity embedding's stand-in.

    Args:
        pictures: Shape `(n, 3, 16, 16)`, within 0 and 1.
        folder: Of the network.

    Raises:
        UsageError: As in `read`.
    """
    found: Tensor = _network(Path(folder)).pixels(_checked(pictures))
    return found


def r_squared(truth: Tensor, said: Tensor) -> Tensor:
    """Return the share of the variance of each column that is explained, shape `(columns,)`, in fp64.

    Args:
        truth: Shape `(n, columns)`.
        said: Of the same shape.
    """
    truth, said = truth.double(), said.double()
    return 1 - (truth - said).square().sum(0) / (truth - truth.mean(0)).square().sum(0)


def reading_record(folder: str | Path = READER_FOLDER) -> dict[str, Any]:
    """Return how the network was trained, and its R² on people whom it never saw."""
    record: dict[str, Any] = json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))
    return record


def _checked(pictures: Tensor) -> Tensor:
    if pictures.ndim != 4 or pictures.shape[1:] != (3, SIDE, SIDE):
        raise UsageError(
            f"Pictures of shape {tuple(pictures.shape)} are no faces of this world.",
            cure=f"Give (n, 3, {SIDE}, {SIDE}).",
        )
    return pictures.float()


@functools.cache
def _network(folder: Path) -> FaceReader:
    """Open a network once."""
    from safetensors.torch import load_file

    file = folder / WEIGHTS
    if not file.is_file():
        raise UsageError(f"{folder} holds no reader of faces.", cure="Train it first.")
    network = FaceReader()
    network.load_state_dict({name: value.float() for name, value in load_file(file).items()})
    return network.requires_grad_(False).eval()
