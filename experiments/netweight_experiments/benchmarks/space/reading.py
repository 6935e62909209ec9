"""A reader of drawn faces that no sampler, direction or edit was chosen with; shared by the benchmarks of spaces.

It has another structure than the package's reader (wider kernels, GELU, no layer of the same size) and begins from
another seed. What it says is clipped to the range in which faces are drawn, -1 to 1.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from netweight import AdapterBank, WeightSpace
from netweight.core.progress import Progress
from netweight.hf.load_pipeline import text_to_image
from netweight.methods.space.inversion import generate_images
from netweight.toys.drawn_pictures import FACES, GROUNDS, caption
from netweight.toys.faces_pipeline import faces_pipeline
from netweight_experiments.toys import face_reading
from netweight_experiments.toys.drawn_worlds import r_squared

READER_SEED, STEPS = 90210, 8
CAPTIONS = [caption(ground) for ground in GROUNDS]


class OtherReader(nn.Module):
    """A network unlike the package's that reads attributes off pictures."""

    def __init__(self):
        super().__init__()
        answers = len(FACES.attributes) + len(FACES.nuisances) + len(FACES.grounds)
        self.body = nn.Sequential(
            nn.Conv2d(3, 24, 5, padding=2), nn.GELU(), nn.Conv2d(24, 48, 4, stride=2, padding=1), nn.GELU(),
            nn.Conv2d(48, 64, 4, stride=2, padding=1), nn.GELU(), nn.Flatten(),
            nn.Linear(64 * (FACES.side // 4) ** 2, 192), nn.GELU(),
        )  # fmt: skip
        self.answers = nn.Linear(192, answers)

    def forward(self, pictures: Tensor) -> Tensor:
        said: Tensor = self.answers(self.body(pictures * 2 - 1))
        return said


class Reading:
    """A space of drawn people, its pipeline, and the reader of its images.

    Args:
        folder: The folder of a bank.
        work: Where the reader is kept.
        steps: Steps of the reader's training.
    """

    def __init__(self, folder: Path, work: Path, steps: int) -> None:
        self.space = WeightSpace.fit(AdapterBank.open(folder / "bank"), halves=False)
        self.model = text_to_image(faces_pipeline())
        self.network, self.explained = reader(work, steps)

    def images(self, points: Tensor, noises: list[int], *, space: Any = None) -> Tensor:
        """One image of each point and noise, shape `(points, noises, 3, side, side)`; `space`: in place of its own."""
        captions = [CAPTIONS[number % len(CAPTIONS)] for number in range(len(noises))]
        return generate_images(
            self.model, space or self.space, points.float(), captions, noises, guidance=1.0, steps=STEPS
        )

    def attributes(self, images: Tensor) -> Tensor:
        """Clipped attributes of every image, shape `(points, noises, attributes)`."""
        said: Tensor = self.network(images.flatten(0, 1))[:, : len(FACES.attributes)]
        return said.clamp(-1, 1).double().view(*images.shape[:2], -1)

    def features(self, images: Tensor) -> Tensor:
        """The reader's last hidden layer, of length 1: a stand-in for an identity embedding."""
        found: Tensor = self.network.body(images.flatten(0, 1) * 2 - 1).double()
        return nn.functional.normalize(found - found.mean(0)).view(*images.shape[:2], -1)


def reader(folder: Path, steps: int) -> tuple[OtherReader, dict[str, float]]:
    """The reader, trained once, and its R² on people that it never saw."""
    file, network = folder / f"reader-{steps}.safetensors", OtherReader()
    if not file.is_file():
        face_reading.fit(network, steps, READER_SEED, FACES, Progress())
        folder.mkdir(parents=True, exist_ok=True)
        save_file(network.state_dict(), file)
    network.load_state_dict(load_file(file))
    network.requires_grad_(requires_grad=False)
    pictures, measured, _ = face_reading.pictures(2000, READER_SEED, FACES, first=-1)
    explained = r_squared(measured, network(pictures)[:, : measured.shape[1]])
    return network, dict(zip(FACES.attributes, explained.tolist(), strict=False))


def random_rows(count: int, among: int, seed: int) -> Tensor:
    """Some rows in random order."""
    return torch.randperm(among, generator=torch.Generator().manual_seed(seed))[:count]
