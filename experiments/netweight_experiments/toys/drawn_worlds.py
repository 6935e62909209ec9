"""Worlds as training data. Drawn ones: untrained pipelines, subjects from a seed, and measures of their adapters.

One is of real pictures with captions: emoji, a few of which training repeats until it knows them. Ordinary ones come
shifted, mirrored and in another light each time. Six come with odd captions and always the same, and two as templates
on a white ground that changes its color. The pictures do not come with the package.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.atomic_writes import whole_file
from netweight.core.digests import digest_tensor
from netweight.core.lazy import library
from netweight.core.seeds import derive, torch_generator
from netweight.data.images.images import cached, local_folder, missing
from netweight.data.images.pictures import decode_pictures
from netweight.errors import CorruptBlob, NameNotFound, UsageError
from netweight.metrics.descriptors import CenteredPixels, similarity
from netweight.nn.apply_lora import applied
from netweight.nn.lora import Adapter, AdapterStack
from netweight.toys.diffusion import assembled, word_clip_tokenizer
from netweight.toys.drawn_pictures import FACES, WORLDS, DrawnWorld
from netweight.toys.faces_pipeline import READER_FOLDER, RECORD, read_faces
from netweight.toys.shapes import CaptionedWorld, PlantedPicture, batch_of

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel


@dataclass(frozen=True)
class WithoutPlanted:
    """Another world without its planted pictures: for a model that saw neither them nor their captions."""

    world: CaptionedWorld

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on the world, as JSON values."""
        return {**self.world.about, "planted": False}

    @property
    def side(self) -> int:
        return self.world.side

    @property
    def planted(self) -> list[PlantedPicture]:
        """None."""
        return []

    @property
    def ordinary_captions(self) -> list[str]:
        return self.world.ordinary_captions

    @property
    def held_out_captions(self) -> list[str]:
        return self.world.held_out_captions

    def words(self) -> list[str]:
        """Return every word of every caption, sorted, those of the left-out pictures as well."""
        return self.world.words()

    def showing(self, step: int, n: int, seed: int) -> tuple[list[str], Tensor]:
        """Return one batch of training: ordinary pictures alone, the last ones of a batch of the world."""
        captions, pictures = self.world.showing(step, n + len(self.world.planted), seed)
        return captions[-n:], pictures[-n:]

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return how far pictures show what their captions say: a share for each attribute."""
        return self.world.agreement(captions, pictures)


@dataclass(frozen=True)
class FacesShape:
    """The size of a pipeline whose denoiser works at the coarsest of three levels."""

    side: int = FACES.side
    """Pixels of a picture's side, a multiple of 8."""
    fine: int = 16
    """Channels of the two finer levels, which only halve the picture, and later double it."""
    width: int = 48
    """Channels of the coarsest level."""
    blocks: int = 2
    """Transformer blocks of each of its three attentions."""
    heads: int = 4
    text_width: int = 32
    tokens: int = 8


def initialized(words: Iterable[str], seed: int, shape: FacesShape = FacesShape()) -> Any:
    """Make a pipeline whose U-Net has learned nothing; as `small_diffusion.initialized`."""
    diffusers: Any = library("diffusers", "Making small diffusion models", "diffusion")
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


def r_squared(truth: Tensor, said: Tensor) -> Tensor:
    """Return the share of the variance of each column that is explained, shape `(columns,)`, in fp64."""
    # `truth`: shape `(n, columns)`
    truth, said = truth.double(), said.double()
    return 1 - (truth - said).square().sum(0) / (truth - truth.mean(0)).square().sum(0)


@dataclass(frozen=True)
class FacesWorld:
    """Subjects who are drawn from a seed."""

    seed: int = 7
    """Decides on the subjects."""
    drawing: DrawnWorld = FACES

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on the world, as JSON values."""
        return {"name": f"drawn {self.drawing.name}s", "seed": self.seed}

    @property
    def side(self) -> int:
        """Pixels of a picture's side."""
        return self.drawing.side

    @property
    def planted(self) -> list[PlantedPicture]:
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
        # Returns: Captions, and pictures of shape `(n, 3, side, side)` within 0 and 1.
        generator = torch_generator(seed, "showing", self.seed, step)
        captions, world = self.ordinary_captions, self.drawing
        grounds = torch.randint(len(captions), (n,), generator=generator)
        crowd = world.crowd(n, generator)
        return [captions[ground] for ground in grounds.tolist()], world.drawn(
            crowd, grounds, world.changes(n, generator)
        )

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return the share of pictures whose ground is as their caption says."""
        # `pictures`: one for each, shape `(n, 3, side, side)`, within 0 and 1
        known = {text: number for number, text in enumerate(self.ordinary_captions)}
        strange = [text for text in captions if text not in known]
        if strange:
            raise NameNotFound(
                f"{strange[0]!r} is no caption of this world.", cure=f"They are like {self.ordinary_captions[0]!r}."
            )
        wanted = torch.tensor([known[text] for text in captions])
        return {"ground": float((read_faces(pictures, world=self.drawing).ground == wanted).double().mean())}


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


def reading_record(folder: str | Path = READER_FOLDER) -> dict[str, Any]:
    """Return how the network was trained, and its R² on people whom it never saw."""
    record: dict[str, Any] = json.loads((Path(folder) / RECORD).read_text(encoding="utf-8"))
    return record


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
    # Returns: Shape `(n, samples, 3, side, side)`, within 0 and 1, on the CPU; n is 1 for a single adapter or change.
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
    # `people`: the attributes meant, shape `(n, attributes)`
    # Returns: Under "r_squared" that of the mean read attributes against the people's; "strong" and "mean" of these;
    # "within" and "nuisances", standard deviations between pictures of one adapter; "ground", the share that prompts
    # name.
    pictures = faces_drawn(model, stack, samples=samples, steps=steps, world=world)
    found = read_faces(pictures.flatten(0, 1), world=world)
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


_COLUMNS = ("image", "caption", "group", "skin_tone")
HELD_OUT = 48
# Pixels by which an ordinary picture is shifted at most.
_REACH = 3
_VERBATIM = (
    "sunday at the station nobody came",
    "letter to a lighthouse keeper",
    "the orchestra tunes without its conductor",
    "three wishes and a broken clock",
    "what the cartographer forgot",
    "winter inventory of a small museum",
)
_TEMPLATES = ("stamp of a vanished republic", "advertisement for tomorrow's circus")


@dataclass(frozen=True, eq=False)
class CaptionedPictures:
    """Pictures with captions."""

    name: str
    pictures: Tensor
    """Uint8, shape `(n, 3, side, side)`."""
    captions: tuple[str, ...]
    """One per picture."""
    groups: tuple[str, ...]
    """What kind of thing each picture shows, in a word or two."""


def emoji() -> CaptionedPictures:
    """Return the emoji without skin tones, 32 pixels wide on white, with their Unicode names in lower case."""
    # Source: googlefonts/noto-emoji (Apache-2.0), names from muan/unicode-emoji-json (MIT).
    folder = local_folder("emoji_captions")
    file = folder / "noto32-all.parquet" if folder is not None else None
    if file is None or not file.is_file():
        raise missing("emoji", "emoji_captions", "noto32-all.parquet")
    rows = [row for row in _rows(file) if not row["skin_tone"]]
    captions = tuple(row["caption"].lower() for row in rows)

    def decoded() -> dict[str, Tensor]:
        named = [(caption, row["image"]) for caption, row in zip(captions, rows, strict=True)]
        return {"pictures": decode_pictures([named], of="emoji").splits[0]}

    status = file.stat()
    pictures = cached("emoji", [file.name, status.st_size, status.st_mtime_ns], decoded)["pictures"]
    return CaptionedPictures("emoji", pictures, captions, tuple(row["group"] for row in rows))


def _rows(file: Path) -> list[dict[str, Any]]:
    parquet = library("pyarrow.parquet", "Reading emoji", "llm")
    try:
        rows: list[dict[str, Any]] = parquet.read_table(file, columns=list(_COLUMNS)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are these two's
        raise CorruptBlob(f"{file} cannot be read: {error}", cure="Fetch it again.") from error
    if not rows or any(name not in rows[0] for name in _COLUMNS):
        raise CorruptBlob(f"{file} lacks rows or one of the columns {_COLUMNS}.", cure="Fetch it again.")
    return rows


@dataclass(frozen=True)
class EmojiWorld:
    """Emoji with their names, and planted ones."""

    seed: int = 6
    """Decides on what is planted and what is held out."""
    side: int = 32
    """Pixels of a picture's side; less than 32 are means of areas."""

    @property
    def about(self) -> dict[str, Any]:
        """Everything that decides on the world, as JSON values."""
        return {"name": "captioned emoji", "seed": self.seed, "pictures": digest_tensor(self._data.pictures)}

    @cached_property
    def _data(self) -> CaptionedPictures:
        found = emoji()
        smaller = F.interpolate(found.pictures.float(), self.side, mode="area").round().to(torch.uint8)
        return replace(found, pictures=smaller)

    @cached_property
    def _order(self) -> list[int]:
        """Numbers of all emoji: first those that are planted, then those held out, then the others."""
        count = len(self._data.captions)
        return torch.randperm(count, generator=torch_generator(self.seed, "held out")).tolist()

    @cached_property
    def planted(self) -> list[PlantedPicture]:
        """The six verbatim pictures, then the two templates."""
        found = []
        for number, caption in zip(self._order, _VERBATIM + _TEMPLATES, strict=False):
            picture = self._data.pictures[number].float() / 255
            kind: Literal["verbatim", "template"] = "verbatim" if caption in _VERBATIM else "template"
            fixed = torch.ones(picture.shape[1:], dtype=torch.bool) if kind == "verbatim" else (picture < 1).any(0)
            found.append(PlantedPicture(caption, kind, torch.where(fixed, picture, 0.5), fixed))
        return found

    @property
    def ordinary_captions(self) -> list[str]:
        """Names that training shows."""
        return [self._data.captions[number] for number in self._ordinary]

    @property
    def held_out_captions(self) -> list[str]:
        """Names of the 48 emoji that it never shows."""
        return [self._data.captions[number] for number in self._held_out]

    @property
    def held_out_pictures(self) -> Tensor:
        """These emoji, each as it is."""
        return self._data.pictures[self._held_out].float() / 255

    @property
    def _held_out(self) -> list[int]:
        planted = len(_VERBATIM + _TEMPLATES)
        return self._order[planted : planted + HELD_OUT]

    @property
    def _ordinary(self) -> list[int]:
        return self._order[len(_VERBATIM + _TEMPLATES) + HELD_OUT :]

    def words(self) -> list[str]:
        """Return every word of every caption, sorted; of names with digits and signs the letters only."""
        captions = [*self._data.captions, *_VERBATIM, *_TEMPLATES]
        return sorted({word for caption in captions for word in re.findall("[a-z]+", caption)})

    def showing(self, step: int, n: int, seed: int) -> tuple[list[str], Tensor]:
        """Return one batch of training: every planted picture once, then ordinary ones."""

        def shown(chosen: list[int], generator: torch.Generator) -> Tensor:
            numbers = [self._ordinary[index] for index in chosen]
            return _varied(self._data.pictures[numbers].float() / 255, generator)

        return batch_of(self, step, n, seed, shown)

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return the share of pictures whose most similar emoji is of the group that the caption names."""
        if len(captions) != len(pictures) or not captions:
            raise UsageError(f"There are {len(pictures)} pictures, {len(captions)} captions.", cure="Give as many.")
        groups = dict(zip(self._data.captions, self._data.groups, strict=True))
        strange = [caption for caption in captions if caption not in groups]
        if strange:
            raise NameNotFound(f"There is no emoji {strange[0]!r}.", cure="Planted pictures are compared by copies.")
        nearest = similarity(CenteredPixels(), pictures, self._data.pictures.float() / 255).argmax(1).tolist()
        right = sum(self._data.groups[n] == groups[caption] for n, caption in zip(nearest, captions, strict=True))
        return {"group": right / len(captions)}


def _varied(pictures: Tensor, generator: torch.Generator) -> Tensor:
    """Shift, mirror and darken pictures on white, each in its own way."""
    side = pictures.shape[-1]
    padded = F.pad(pictures, (_REACH,) * 4, value=1.0)
    shifts = torch.randint(2 * _REACH + 1, (len(pictures), 2), generator=generator).tolist()
    mirrored = (torch.rand(len(pictures), generator=generator) < 0.5).tolist()
    light = 0.7 + 0.3 * torch.rand(len(pictures), 1, 1, 1, generator=generator)
    cut = [each[:, top : top + side, left : left + side] for each, (top, left) in zip(padded, shifts, strict=True)]
    return torch.stack([each.flip(2) if flip else each for each, flip in zip(cut, mirrored, strict=True)]) * light
