"""The small text-to-image pipelines of drawn worlds that adapters customize: their shape, and those in the package.

    pipeline = faces_pipeline()
    pipeline("a face on a green ground", num_inference_steps=20, guidance_scale=1.0).images[0]

An ordinary `StableDiffusionPipeline` of half a million weights. Nearly all of its work is done by attention at the
coarsest level, 16 places, so that adapters of `to_q`, `to_k`, `to_v` and `to_out.0` reach most of what it draws.
"""

from __future__ import annotations

import csv
import functools
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor, nn

from netweight.core.files import whole_file
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import derive, torch_generator
from netweight.data.images.sources import module
from netweight.errors import NameNotFound, UsageError
from netweight.hf.load_pipeline import text_to_image
from netweight.methods.space.directions import fit_direction, read_labels
from netweight.methods.space.page import View
from netweight.methods.space.page_data import Look, Reader, painted_view
from netweight.methods.space.space import WeightSpace
from netweight.nn.apply_lora import applied
from netweight.nn.lora import Adapter
from netweight.nn.stacked_lora import AdapterStack
from netweight.nn.train_lora import AdapterRecipe
from netweight.store.bank.bank import AdapterBank
from netweight.toys.diffusion import assembled, opened, word_clip_tokenizer
from netweight.toys.faces import ATTRIBUTES, FACES, GROUNDS, SIDE, WORLDS, DrawnWorld, caption
from netweight.toys.shapes import Planted

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel


def pipeline_folder(world: DrawnWorld) -> Path:
    """Return where the package has a world's pipeline, with the record of its training."""
    return Path(__file__).parent / "checkpoints" / f"{world.name}s-diffusion"


# The pipeline that draws faces.
FACES_FOLDER = pipeline_folder(FACES)


@final
@dataclass(frozen=True)
class FacesShape:
    """The size of a pipeline whose denoiser works at the coarsest of three levels."""

    side: int = SIDE  # pixels of a picture's side, a multiple of 8
    fine: int = 16  # channels of the two finer levels, which only halve the picture, and later double it
    width: int = 48  # channels of the coarsest level
    blocks: int = 2  # transformer blocks of each of its three attentions
    heads: int = 4
    text_width: int = 32
    tokens: int = 8


def initialized(words: Iterable[str], seed: int, shape: FacesShape = FacesShape()) -> Any:
    """Make a pipeline whose U-Net has learned nothing; as `small_diffusion.initialized`."""
    diffusers: Any = module("diffusers", "Making small diffusion models", "diffusion")
    tokenizer = word_clip_tokenizer(words, length=shape.tokens)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "denoiser"))
        denoiser = diffusers.UNet2DConditionModel(
            sample_size=shape.side,
            in_channels=3,
            out_channels=3,
            block_out_channels=(shape.fine, shape.fine, shape.width),
            layers_per_block=(0, 0, 1),
            down_block_types=("DownBlock2D", "DownBlock2D", "CrossAttnDownBlock2D"),
            mid_block_type=None,
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
            transformer_layers_per_block=shape.blocks,
            cross_attention_dim=shape.text_width,
            attention_head_dim=shape.heads,  # which diffusers takes for the number of heads
            norm_num_groups=8,
        )
    # Meant for adapters to decide who is drawn, not what shines through the noise that a picture starts from. Whether
    # it helps was not measured clearly.
    complete = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return assembled(denoiser, tokenizer, seed, side=shape.side, text_width=shape.text_width, **complete)


def faces_pipeline(folder: str | Path | None = None, *, world: DrawnWorld = FACES) -> Any:
    """Open a fresh copy of the pipeline that was trained on drawn faces, or on another drawn world."""
    return opened(pipeline_folder(world) if folder is None else folder)


def reader_folder(world: DrawnWorld) -> Path:
    """Return where the package has a world's network: its weights and the record of its training."""
    return Path(__file__).parent / "checkpoints" / f"{world.name}-reading"


# The network that reads faces.
READER_FOLDER = reader_folder(FACES)
WEIGHTS, RECORD = "weights.safetensors", "training.json"


@final
@dataclass(frozen=True, eq=False)
class Reading:
    """What pictures show, as the network sees it."""

    attributes: Tensor  # shape `(n, attributes)`, columns as in the world's; 8 of faces
    nuisances: Tensor  # shape `(n, nuisances)`, columns as in the world's; 4 of faces
    ground: Tensor  # the likeliest number of the world's grounds, shape `(n,)`


@final
class FaceReader(nn.Module):
    """Three convolutions and two linear layers, 60,000 weights."""

    # Returns, for pictures of shape `(n, 3, 16, 16)` within 0 and 1, attributes, nuisances, and the logits of grounds:
    # shape `(n, 16)` for faces.

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
    """Return what pictures show."""
    said = _network(Path(folder or reader_folder(world)), world)(_checked(pictures, world))
    parts = [len(world.attributes), len(world.nuisances), len(world.grounds)]
    attributes, nuisances, grounds = said.split(parts, dim=1)
    return Reading(attributes, nuisances, grounds.argmax(1))


def embed(pictures: Tensor, *, folder: str | Path | None = None, world: DrawnWorld = FACES) -> Tensor:
    """What the network's last layer but one says of pictures, shape `(n, 80)`: an identity embedding's stand-in."""
    found: Tensor = _network(Path(folder or reader_folder(world)), world).pixels(_checked(pictures, world))
    return found


def r_squared(truth: Tensor, said: Tensor) -> Tensor:
    """Return the share of the variance of each column that is explained, shape `(columns,)`, in fp64."""
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


@final
@dataclass(frozen=True)
class FacesWorld:
    """Subjects who are drawn from a seed."""

    seed: int = 7  # decides on the subjects
    drawing: DrawnWorld = FACES

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on the world, as JSON values."""
        return {"name": f"drawn {self.drawing.name}s", "seed": self.seed}

    @property
    def side(self) -> int:
        """16."""
        return SIDE

    @property
    def planted(self) -> list[Planted]:
        """Nobody."""
        return []

    @property
    def ordinary_captions(self) -> list[str]:
        """One for each ground."""
        return [self.drawing.caption(ground) for ground in self.drawing.grounds]

    @property
    def held_out_captions(self) -> list[str]:
        """None: what is held out are subjects."""
        return []

    def words(self) -> list[str]:
        """Return every word of every caption, sorted."""
        return sorted({word for text in self.ordinary_captions for word in text.split()})

    def showing(self, step: int, n: int, seed: int) -> tuple[list[str], Tensor]:
        """Return one batch of training: n subjects who are shown once."""
        generator = torch_generator(seed, "showing", self.seed, step)
        captions, world = self.ordinary_captions, self.drawing
        grounds = torch.randint(len(captions), (n,), generator=generator)
        crowd = world.crowd(n, generator)
        return [captions[ground] for ground in grounds.tolist()], world.drawn(
            crowd, grounds, world.changes(n, generator)
        )

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return the share of pictures whose ground is as their caption says."""
        known = {text: number for number, text in enumerate(self.ordinary_captions)}
        strange = [text for text in captions if text not in known]
        if strange:
            raise NameNotFound(
                f"{strange[0]!r} is no caption of this world.", cure=f"They are like {self.ordinary_captions[0]!r}."
            )
        wanted = torch.tensor([known[text] for text in captions])
        return {"ground": float((read(pictures, world=self.drawing).ground == wanted).double().mean())}


_FOLDER = Path(__file__).parent / "checkpoints" / "faces-bank"
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

    people: int = 1000  # how many
    recipe: AdapterRecipe = AdapterRecipe()  # how each adapter is trained
    images: int = 12  # photographs of each person
    each: int = 4  # noisy photographs of each person at a step
    layers: str = LAYERS  # linear layers of the U-Net, by the grammar of `Select`
    seed: int = 31  # decides on the people and their photographs
    world: str = "face"  # name of the drawn world whose subjects they are; vehicles are "people" here, too

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


@torch.no_grad()
def faces_drawn(
    model: PipelineModel,
    changes: AdapterStack | Adapter | Mapping[str, Tensor],
    *,
    samples: int = 8,
    steps: int = 15,
    world: DrawnWorld = FACES,
) -> Tensor:
    """Draw pictures with each of several adapters, all at once: every ground in turn, the same noise for all."""
    count = _count(changes)
    words = list(world.grounds)
    captions = [world.caption(words[number % len(words)]) for number in range(samples)]
    groups = torch.arange(count, device=model.device).repeat_interleave(samples)
    single = isinstance(changes, Adapter) or (isinstance(changes, Mapping) and _dims(changes) == 2)
    with applied(model.denoiser, changes, None if single else groups, component=model.component):
        text = model.embed(captions).rows(list(range(samples)) * count)
        pictures = model.generate(text, list(range(samples)) * count, guidance=1.0, steps=steps)
    return pictures.view(count, samples, *pictures.shape[1:])


def identity_fidelity(
    model: PipelineModel,
    stack: AdapterStack,
    people: Tensor,
    *,
    samples: int = 8,
    steps: int = 15,
    world: DrawnWorld = FACES,
) -> dict[str, Any]:
    """Measure how far adapters draw the people whom they were trained on."""
    pictures = faces_drawn(model, stack, samples=samples, steps=steps, world=world)
    found = read(pictures.flatten(0, 1), world=world)
    attributes = found.attributes.view(*pictures.shape[:2], -1)
    explained = dict(zip(world.attributes, r_squared(people, attributes.mean(1)).tolist(), strict=True))
    moved = found.nuisances.view(*pictures.shape[:2], -1).std(1).mean(0).tolist()
    grounds = found.ground.view(*pictures.shape[:2]) == torch.arange(samples) % len(world.grounds)
    return {
        "n": len(people),
        "samples": samples,
        "r_squared": {name: round(value, 4) for name, value in explained.items()},
        "strong": round(sum(explained[name] for name in world.strong) / len(world.strong), 4),
        "mean": round(sum(explained.values()) / len(explained), 4),
        "within": round(float(attributes.std(1).mean()), 4),
        "nuisances": {name: round(value, 4) for name, value in zip(world.nuisances, moved, strict=True)},
        "ground": float(grounds.double().mean()),
    }


def _dims(changes: Mapping[str, Tensor]) -> int:
    return next(iter(changes.values())).ndim


def _count(changes: AdapterStack | Adapter | Mapping[str, Tensor]) -> int:
    if isinstance(changes, AdapterStack):
        return len(changes)
    return 1 if isinstance(changes, Adapter) or _dims(changes) == 2 else len(next(iter(changes.values())))


# One picture on each ground.
FACES_LOOK = Look(prompts=tuple(map(caption, GROUNDS)), guidance=1.0, steps=20)


def _read(pictures: Tensor) -> Mapping[str, Tensor]:
    return dict(zip(ATTRIBUTES, read(pictures).attributes.T, strict=True))


# Measures the eight attributes, from -1 to 1.
FACES_READER = Reader("the reader of drawn faces", _read)


def faces_view(*, look: Look = FACES_LOOK, command: str | None = None, progress: Progress = QUIET) -> View:
    """Fit the space of the bank in the package, find its directions, and paint the page."""
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
