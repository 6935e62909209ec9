"""The two setups of weights2weights' tables: the bank of drawn faces, and the paper's size as a recipe names it.

Of a recipe everything that can be known is checked before a model is opened, and all that is wrong is said at once. The
miniature's Concept Sliders (Gandikota et al., 2024) are trained here from pairs of images: those with an attribute pull
an adapter one way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from netweight.core.names import Select
from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import UsageError
from netweight.hf.adapters import ATTENTION
from netweight.hf.load_pipeline import PipelineModel, text_to_image, trained_prediction
from netweight.methods.space.edits import perceptual_distance
from netweight.methods.space.labels import read_labels
from netweight.methods.space.settings import InversionSettings
from netweight.methods.space.space import WeightSpace
from netweight.nn.apply_lora import linear_layers
from netweight.nn.lora import Adapter
from netweight.nn.train_lora import AdapterRecipe, FittedAdapters, fit_adapters
from netweight.store.bank.bank import AdapterBank
from netweight.toys.drawn_pictures import ATTRIBUTES, FACES, GROUNDS, caption, drawn, nuisances, people, photographs
from netweight.toys.faces_pipeline import FACES_BANK, FACES_LABELS, FaceBank, faces_pipeline, read_faces
from netweight_experiments.tables.w2w.setup import Fitting, Setup, Stranger, Wanted

if TYPE_CHECKING:
    pass


@final
@dataclass(frozen=True, eq=False)
class SliderPairs:
    """What one slider is to learn."""

    name: str
    before: Tensor
    """Images with less of the attribute, shape `(k, 3, height, width)`, within 0 and 1."""
    after: Tensor
    prompts: tuple[str, ...]

    def __post_init__(self) -> None:
        """Refuse what cannot be learned."""
        if self.before.ndim != 4 or self.before.shape != self.after.shape or len(self.before) != len(self.prompts):
            raise UsageError(
                f"The slider {self.name!r} has images {tuple(self.before.shape)} and {tuple(self.after.shape)} and "
                f"{len(self.prompts)} prompts.",
                cure="Give (k, 3, height, width) twice, and k prompts.",
            )
        both = torch.stack([self.before, self.after])
        if not both.numel() or not bool(((both >= 0) & (both <= 1)).all()):  # false for NaN, too
            raise UsageError(f"The images of the slider {self.name!r} are not within 0 and 1, or there are none.")


def train_sliders(
    model: PipelineModel,
    pairs: Sequence[SliderPairs],
    recipe: AdapterRecipe = AdapterRecipe(),
    *,
    layers: Select | str | tuple[str, ...] = ATTENTION,
    each: int = 4,
    progress: Progress = QUIET,
) -> FittedAdapters:
    """Train sliders, all in one forward pass for each side of their pairs."""
    latents = {
        1: [model.to_latents(pair.after) for pair in pairs],
        -1: [model.to_latents(pair.before) for pair in pairs],
    }
    said = sorted({prompt for pair in pairs for prompt in pair.prompts})
    text, rows = model.embed(said), [[said.index(prompt) for prompt in pair.prompts] for pair in pairs]

    def losses(step: int, sign: int) -> Tensor:
        generator = torch_generator(recipe.seed, "slider", step)  # so that both sides see the same
        chosen = [torch.randint(len(pair.prompts), (each,), generator=generator) for pair in pairs]
        noise = torch.randn(each, *model.latent_shape, generator=generator).repeat(len(pairs), 1, 1, 1).to(model.device)
        times = torch.randint(model.levels, (each,), generator=generator).repeat(len(pairs)).to(model.device)
        shown = torch.tensor([rows[place][at] for place, index in enumerate(chosen) for at in index.tolist()])
        clean = torch.cat([one[index.to(one.device)] for one, index in zip(latents[sign], chosen, strict=True)])
        errors = model.training_errors(clean, noise, times, text.rows(shown.to(clean.device)))
        return errors.view(len(pairs), each).mean(1)

    names = [pair.name for pair in pairs]
    wanted = linear_layers(model.denoiser, layers, component=model.component)
    return fit_adapters(
        model.denoiser, names, wanted, losses, recipe, each=each, signs=(1, -1), component=model.component,
        progress=progress,
    )  # fmt: skip


# The paper's edits and what stands for them: one of everything, one of the face's shape, a fine one.
_EDITS = {"Gender": "beard", "Chubby": "width", "Eyes": "eye_spacing"}
_HELD, _PEOPLE, _STRANGERS, _OTHERS = 64, 16, 16, 8
_INVERSION, _DRAWS = InversionSettings(steps=150), 2
_SEED = 977
_STEPS = 15
_SLIDER, _PAIRS = AdapterRecipe(steps=200, learning_rate=0.01), 64


@cache
def miniature(bank: Path = FACES_BANK, labels: Path = FACES_LABELS) -> Setup:
    """Open a bank of drawn faces and fit its space; once, as no table changes it."""
    adapters = AdapterBank.open(bank)
    space = WeightSpace.fit(adapters, halves=False)
    model = text_to_image(faces_pipeline(), name="the miniature")
    count, held = len(space.names), min(_HELD, len(space.names) // 3)
    how = FaceBank()
    return Setup(
        model=model,
        space=space,
        labels=read_labels(labels, space.names),
        wanted=tuple(
            Wanted(title, column, confounders=tuple(name for name in ATTRIBUTES if name != column))
            for title, column in _EDITS.items()
        ),
        held=tuple(range(count - held, count)),
        people=_PEOPLE,
        strangers=tuple(_stranger(number, how.images) for number in range(_STRANGERS)),
        prompts=tuple(caption(ground) for ground in GROUNDS),
        seeds=tuple(range(len(GROUNDS))),
        guidance=1.0,
        steps=_STEPS,
        identity=_Looks,
        identity_name="cosine of read attributes (stand-in for FaceNet)",
        distance=perceptual_distance(),
        match=_shown,
        match_name="attribute read (stand-in for CLIP)",
        effect=0.4,
        read=_attributes,
        attributes=ATTRIBUTES,
        sliders=lambda: _sliders(model, how.layers),
        fitting=Fitting(how.recipe, how.layers, how.each, _DRAWS, _INVERSION, trained_prediction(model)),
        small=True,
        differs=(
            f"A miniature: drawn faces of {FACES.side} × {FACES.side} pixels with eight known attributes, {count} "
            "adapters, and a denoiser of half a million weights; the paper has photographs, 64,974 adapters and Stable "
            "Diffusion. What holds here need not hold there.",
            "Identity is the cosine of the attributes that a small network reads (the edited one left out), not of "
            "FaceNet's embeddings; LPIPS is 1 − SSIM; for CLIP stands how far the attribute that is read has moved, as "
            "a share of its range.",
            "Gender, Chubby and Eyes are beard, width of the face and spacing of the eyes.",
        ),
    )


@final
@dataclass(frozen=True)
class _Looks:
    """Attributes as a vector of identity: of different people their cosine is 0 in the mean."""

    without: str | None
    """The one that is edited, and does not count."""

    @property
    def name(self) -> str:
        return "read attributes"

    def __call__(self, images: Tensor) -> Tensor:
        kept = [place for place, name in enumerate(ATTRIBUTES) if name != self.without]
        return _attributes(images)[:, kept]


def _attributes(images: Tensor) -> Tensor:
    return read_faces(images).attributes


def _shown(wanted: Wanted, images: Tensor) -> Tensor:
    """How much of an attribute images show, as a share of its range from -1 to 1."""
    return _attributes(images)[:, ATTRIBUTES.index(wanted.column)] / 2


def _stranger(number: int, images: int) -> Stranger:
    bank = FaceBank(seed=_SEED, images=images)
    (person,) = bank.faces([number])
    prompts, learned = bank.photographs(number)
    _, others = photographs(person, _OTHERS, torch_generator(_SEED, "others", number))
    return Stranger(f"stranger {number}", learned, tuple(prompts), others, person)


@cache
def _sliders(model: PipelineModel, layers: str) -> Mapping[str, Adapter]:
    """Sliders of pairs that are alike but for the attribute; as other adapters of the miniature, of rank 1."""
    pairs = [face_pairs(title, column) for title, column in _EDITS.items()]
    found = train_sliders(model, pairs, _SLIDER, layers=layers, each=FaceBank.each)
    return {name: found.stack.adapter(place) for place, name in enumerate(found.names)}


def face_pairs(title: str, column: str) -> SliderPairs:
    """Return drawings of the same people, with the least and with the most of an attribute."""
    generator = torch_generator(_SEED, "pairs", column)
    faces, changes = people(_PAIRS, generator), nuisances(_PAIRS, generator)
    grounds = torch.arange(_PAIRS) % len(GROUNDS)
    names: Sequence[str] = list(GROUNDS)
    sides = []
    for value in (-1.0, 1.0):
        side = faces.clone()
        side[:, ATTRIBUTES.index(column)] = value
        sides.append(drawn(side, grounds, changes))
    return SliderPairs(title, sides[0], sides[1], tuple(caption(names[ground]) for ground in grounds.tolist()))
