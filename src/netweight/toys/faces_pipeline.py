"""The small text-to-image pipelines of drawn worlds that adapters customize: their shape, and those in the package.

    pipeline = faces_pipeline()
    pipeline("a face on a green ground", num_inference_steps=8, guidance_scale=1.0).images[0]

An ordinary `StableDiffusionPipeline` of half a million weights. Nearly all of its work is done by attention at the
coarsest level, 8 × 8 places, so that adapters of `to_q`, `to_k`, `to_v` and `to_out.0` reach most of what it draws.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.hf.load_pipeline import text_to_image
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.labels import read_labels
from netweight.methods.space.settings import RenderSettings
from netweight.methods.space.space import WeightSpace
from netweight.methods.space.view.build import Reader, build_view
from netweight.methods.space.view.page import View
from netweight.nn.train_lora import AdapterRecipe
from netweight.store.bank.bank import AdapterBank
from netweight.toys import checkpoint
from netweight.toys.diffusion import opened
from netweight.toys.drawn_pictures import ATTRIBUTES, FACES, GROUNDS, WORLDS, DrawnWorld, caption


def pipeline_folder(world: DrawnWorld) -> Path:
    """Return where the package has a world's pipeline, with the record of its training."""
    return checkpoint(f"{world.name}s-diffusion")


# The pipeline that draws faces.
FACES_FOLDER = pipeline_folder(FACES)


def faces_pipeline(folder: str | Path | None = None, *, world: DrawnWorld = FACES) -> Any:
    """Open a fresh copy of the pipeline that was trained on drawn faces, or on another drawn world."""
    return opened(pipeline_folder(world) if folder is None else folder)


def reader_folder(world: DrawnWorld) -> Path:
    """Return where the package has a world's network: its weights and the record of its training."""
    return checkpoint(f"{world.name}-reading")


# The network that reads faces.
READER_FOLDER = reader_folder(FACES)
WEIGHTS, RECORD = "weights.safetensors", "training.json"
# Means along a picture's side that the network looks at.
_SEEN = 16


@final
@dataclass(frozen=True, eq=False)
class Reading:
    """The network's reading of pictures."""

    attributes: Tensor
    """Shape `(n, attributes)`, columns as in the world's; 8 of faces."""
    nuisances: Tensor
    """Shape `(n, nuisances)`, columns as in the world's; 4 of faces."""
    ground: Tensor
    """The likeliest number of the world's grounds, shape `(n,)`."""


@final
class FaceReader(nn.Module):
    """Three convolutions and two linear layers, 60,000 weights."""

    # Returns, for pictures of shape `(n, 3, side, side)` within 0 and 1, attributes, nuisances, and logits of grounds:
    # shape `(n, 16)` for faces.

    def __init__(self, world: DrawnWorld = FACES) -> None:
        super().__init__()
        self.means = nn.AvgPool2d(world.side // _SEEN)
        self.pixels = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(24, 32, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(32 * (_SEEN // 4) ** 2, 80),
            nn.SiLU(),
        )
        self.answers = nn.Linear(80, len(world.attributes) + len(world.nuisances) + len(world.grounds))

    @property
    def layers(self) -> nn.Sequential:
        """All layers, of pictures within -1 and 1."""
        return nn.Sequential(self.means, *self.pixels, self.answers)

    def forward(self, pictures: Tensor) -> Tensor:
        """Read pictures."""
        answers: Tensor = self.layers(pictures * 2 - 1)
        return answers


def read_faces(pictures: Tensor, *, folder: str | Path | None = None, world: DrawnWorld = FACES) -> Reading:
    """Return what pictures show.

    `pictures`: shape `(n, 3, side, side)`, within 0 and 1; gradients flow where they are on.
    """
    outputs = _network(Path(folder or reader_folder(world)), world)(_checked(pictures, world))
    parts = [len(world.attributes), len(world.nuisances), len(world.grounds)]
    attributes, nuisances, grounds = outputs.split(parts, dim=1)
    return Reading(attributes, nuisances, grounds.argmax(1))


def read_attributes(pictures: Tensor) -> dict[str, Tensor]:
    """Measure the eight attributes of drawn faces, from -1 to 1, as commands ask a reader."""
    return dict(zip(ATTRIBUTES, read_faces(pictures).attributes.T, strict=True))


def embed(pictures: Tensor, *, folder: str | Path | None = None, world: DrawnWorld = FACES) -> Tensor:
    """The network's last hidden layer, shape `(n, 80)`: a stand-in for an identity embedding.

    `pictures`: shape `(n, 3, side, side)`, within 0 and 1.
    """
    network = _network(Path(folder or reader_folder(world)), world)
    features: Tensor = network.layers[:-1](_checked(pictures, world))
    return features


def _checked(pictures: Tensor, world: DrawnWorld) -> Tensor:
    if pictures.ndim != 4 or pictures.shape[1:] != (3, world.side, world.side):
        raise UsageError(
            f"Pictures of shape {tuple(pictures.shape)} are not images of {world.name}s of this world.",
            cure=f"Give (n, 3, {world.side}, {world.side}).",
        )
    return pictures.float()


@functools.cache
def _network(folder: Path, world: DrawnWorld) -> FaceReader:
    """Open a network once."""
    from safetensors.torch import load_file

    file = folder / WEIGHTS
    if not file.is_file():
        raise UsageError(f"{folder} contains no reader of {world.name}s.", cure="Train it first.")
    network = FaceReader(world)
    network.load_state_dict({name: value.float() for name, value in load_file(file).items()})
    return network.requires_grad_(False).eval()


_FOLDER = checkpoint("faces-bank")
# The bank that comes with the package.
FACES_BANK = _FOLDER / "bank"
# The attributes of its people.
FACES_LABELS = _FOLDER / "labels.csv"


# Queries, values and outputs of all attention, and the feed-forward layers, without which adapters of rank 1 do not
# keep the noise from deciding on half of the attributes.
LAYERS = "**.{attn1.{to_q,to_v,to_out.0},attn2.{to_q,to_v,to_out.0},ff.net.{0.proj,2}}"


@final
@dataclass(frozen=True)
class FaceBank:
    """Everything that decides on a bank."""

    people: int = 1000
    """Number of people."""
    recipe: AdapterRecipe = AdapterRecipe()
    """Training of each adapter."""
    images: int = 12
    """Photographs of each person."""
    each: int = 4
    """Noisy photographs of each person at a step."""
    layers: str = LAYERS
    """Linear layers of the U-Net, by the grammar of `Select`."""
    seed: int = 31
    """Decides on the people and their photographs."""
    world: str = "face"
    """Name of the drawn world whose subjects they are; vehicles are "people" here, too."""

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on its adapters but the base, whatever its size; of which world, the base says."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name != "world"} | {"people": 0}

    def faces(self, numbers: Sequence[int]) -> Tensor:
        """Return the attributes of people, shape `(n, attributes)`."""
        return torch.cat([WORLDS[self.world].identities(1, self.seed, first=number) for number in numbers])

    def photographs(self, number: int) -> tuple[list[str], Tensor]:
        """Return prompts and pictures that a person's adapter is trained on, shape `(images, 3, side, side)`."""
        noise = torch_generator(self.seed, "photographs", number)
        return WORLDS[self.world].photographs(self.faces([number])[0], self.images, noise)


# One picture on each ground.
FACES_SETTINGS = RenderSettings(prompts=tuple(map(caption, GROUNDS)), guidance=1.0, steps=8, adapters=100)


def faces_view(
    *, settings: RenderSettings = FACES_SETTINGS, command: str | None = None, progress: Progress = QUIET
) -> View:
    """Fit the space of the bank in the package, find its directions, and make its page."""
    space = WeightSpace.fit(AdapterBank.open(FACES_BANK), progress=progress)
    labels, network = read_labels(FACES_LABELS, space.names), _network(READER_FOLDER, FACES)
    directions = [
        fit_direction(
            space.scores, labels, each, confounders=[other for other in ATTRIBUTES if other != each], seed=settings.seed
        )
        for each in ATTRIBUTES
    ]
    return build_view(
        text_to_image(faces_pipeline(), name="faces-diffusion, a miniature"),
        space,
        title=f"{len(space.names)} models of drawn faces as one space",
        summary="A miniature: each model was taught one drawn person, by an adapter of a small diffusion model. "
        "The space is made of their weights alone.",
        directions=directions,
        labels=labels,
        reader=Reader("the reader of drawn faces", network.layers, ATTRIBUTES),
        settings=settings.replace(components=min(settings.components, space.components)),
        command=command,
        progress=progress,
    )
