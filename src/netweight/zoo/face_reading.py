"""Reads a drawn face back from a picture: its eight attributes, its ground, and the nuisances of the photograph.

Subjects of other drawn worlds are read in the same way, each by a network of their own.

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
from netweight.zoo.drawn_faces import FACES
from netweight.zoo.drawn_world import SIDE, DrawnWorld

__all__ = ["READER_FOLDER", "FaceReader", "Reading", "embed", "r_squared", "read", "reader_folder", "reading_record"]


def reader_folder(world: DrawnWorld) -> Path:
    """Return where the package has a world's network: its weights and the record of its training."""
    return Path(__file__).parent / "checkpoints" / f"{world.name}-reading"


READER_FOLDER = reader_folder(FACES)
"""The network that reads faces."""
WEIGHTS, RECORD = "weights.safetensors", "training.json"


@final
@dataclass(frozen=True, eq=False)
class Reading:
    """What pictures show, as the network sees it.

    Attributes:
        attributes: Shape `(n, attributes)`, columns as in the world's; 8 of faces.
        nuisances: Shape `(n, nuisances)`, columns as in the world's; 4 of faces.
        ground: The likeliest number of the world's grounds, shape `(n,)`.
    """

    attributes: Tensor
    nuisances: Tensor
    ground: Tensor


@final
class FaceReader(nn.Module):
    """Three convolutions and two linear layers, 60,000 weights.

    Returns, for pictures of shape `(n, 3, 16, 16)` within 0 and 1, attributes, nuisances, and the logits of grounds:
    shape `(n, 16)` for faces.

    Args:
        world: Whose subjects it reads.
    """

    def __init__(self, world: DrawnWorld = FACES) -> None:
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
        self.answers = nn.Linear(80, len(world.attributes) + len(world.nuisances) + len(world.grounds))

    def forward(self, pictures: Tensor) -> Tensor:
        """Read pictures."""
        answers: Tensor = self.answers(self.pixels(pictures * 2 - 1))
        return answers


def read(pictures: Tensor, *, folder: str | Path | None = None, world: DrawnWorld = FACES) -> Reading:
    """Return what pictures show.

    Args:
        pictures: Shape `(n, 3, 16, 16)`, within 0 and 1. Gradients flow where they are on.
        folder: Of the network; by default the one that comes with the package.
        world: Whose subjects they show.

    Raises:
        UsageError: The pictures have another shape, or the folder holds no such network.
    """
    said = _network(Path(folder or reader_folder(world)), world)(_checked(pictures, world))
    parts = [len(world.attributes), len(world.nuisances), len(world.grounds)]
    attributes, nuisances, grounds = said.split(parts, dim=1)
    return Reading(attributes, nuisances, grounds.argmax(1))


def embed(pictures: Tensor, *, folder: str | Path | None = None, world: DrawnWorld = FACES) -> Tensor:
    """Return what the network's last layer but one says of pictures, shape `(n, 80)`: an identity embedding's stand-in.

    Args:
        pictures: Shape `(n, 3, 16, 16)`, within 0 and 1.
        folder: Of the network.
        world: Whose subjects they show.

    Raises:
        UsageError: As in `read`.
    """
    found: Tensor = _network(Path(folder or reader_folder(world)), world).pixels(_checked(pictures, world))
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


def _checked(pictures: Tensor, world: DrawnWorld) -> Tensor:
    if pictures.ndim != 4 or pictures.shape[1:] != (3, SIDE, SIDE):
        raise UsageError(
            f"Pictures of shape {tuple(pictures.shape)} are no {world.name}s of this world.",
            cure=f"Give (n, 3, {SIDE}, {SIDE}).",
        )
    return pictures.float()


@functools.cache
def _network(folder: Path, world: DrawnWorld) -> FaceReader:
    """Open a network once."""
    from safetensors.torch import load_file

    file = folder / WEIGHTS
    if not file.is_file():
        raise UsageError(f"{folder} holds no reader of {world.name}s.", cure="Train it first.")
    network = FaceReader(world)
    network.load_state_dict({name: value.float() for name, value in load_file(file).items()})
    return network.requires_grad_(False).eval()
