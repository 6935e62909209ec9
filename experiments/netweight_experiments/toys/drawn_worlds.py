"""Drawn worlds as training data: untrained pipelines, subjects from a seed, and measures of their adapters."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from netweight.core.files import whole_file
from netweight.core.seeds import derive, torch_generator
from netweight.data.images.sources import module
from netweight.errors import NameNotFound
from netweight.nn.apply_lora import applied
from netweight.nn.lora import Adapter, AdapterStack
from netweight.toys.diffusion import assembled, word_clip_tokenizer
from netweight.toys.faces import FACES, SIDE, WORLDS, DrawnWorld
from netweight.toys.faces_pipeline import READER_FOLDER, RECORD, read_faces
from netweight.toys.shapes import Planted

if TYPE_CHECKING:
    from netweight.hf.load_pipeline import PipelineModel


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


def r_squared(truth: Tensor, said: Tensor) -> Tensor:
    """Return the share of the variance of each column that is explained, shape `(columns,)`, in fp64."""
    # `truth`: shape `(n, columns)`
    truth, said = truth.double(), said.double()
    return 1 - (truth - said).square().sum(0) / (truth - truth.mean(0)).square().sum(0)


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
        # Returns: Captions, and pictures of shape `(n, 3, 16, 16)` within 0 and 1.
        generator = torch_generator(seed, "showing", self.seed, step)
        captions, world = self.ordinary_captions, self.drawing
        grounds = torch.randint(len(captions), (n,), generator=generator)
        crowd = world.crowd(n, generator)
        return [captions[ground] for ground in grounds.tolist()], world.drawn(
            crowd, grounds, world.changes(n, generator)
        )

    def agreement(self, captions: Sequence[str], pictures: Tensor) -> dict[str, float]:
        """Return the share of pictures whose ground is as their caption says."""
        # `pictures`: one for each, shape `(n, 3, 16, 16)`, within 0 and 1
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
    # Returns: Shape `(n, samples, 3, 16, 16)`, within 0 and 1, on the CPU; n is 1 for a single adapter or change.
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
