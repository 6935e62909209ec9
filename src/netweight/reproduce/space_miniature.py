"""The small ground of weights2weights' tables: the bank of drawn faces that comes with the package. A miniature."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from netweight.core.seeds import torch_generator
from netweight.hf.load_pipeline import PipelineModel, text_to_image, trained_prediction
from netweight.hf.train_adapters import SliderPairs, train_sliders
from netweight.methods.space.edits import perceptual_distance
from netweight.methods.space.labels import read_labels
from netweight.methods.space.settings import InversionSettings
from netweight.methods.space.space import WeightSpace
from netweight.nn.lora import Adapter
from netweight.nn.train_lora import AdapterRecipe
from netweight.reproduce.space_ground import Fitting, Ground, Stranger, Wanted
from netweight.store.bank.bank import AdapterBank
from netweight.toys.faces import ATTRIBUTES, GROUNDS, caption, drawn, nuisances, people, photographs
from netweight.toys.faces_pipeline import FACES_BANK, FACES_LABELS, FaceBank, faces_pipeline, read

__all__ = ["miniature"]

_EDITS = {"Gender": "beard", "Chubby": "width", "Eyes": "eye_spacing"}
"""The paper's edits and what stands for them: one of everything, one of the face's shape, a fine one."""
_HELD, _PEOPLE, _STRANGERS, _OTHERS = 64, 16, 16, 8
_INVERSION, _DRAWS = InversionSettings(steps=150), 2
_SEED = 977
"""Of strangers, who are in no bank, and of pairs for sliders."""
_STEPS = 15
_SLIDER, _PAIRS = AdapterRecipe(steps=200, learning_rate=0.01), 64


@cache
def miniature(bank: Path = FACES_BANK, labels: Path = FACES_LABELS) -> Ground:
    """Open a bank of drawn faces and fit its space; once, as no table changes it.

    Args:
        bank: By default the one that comes with the package.
        labels: Its people's attributes.
    """
    adapters = AdapterBank.open(bank)
    space = WeightSpace.fit(adapters, halves=False)
    model = text_to_image(faces_pipeline(), name="the miniature")
    count, held = len(space.names), min(_HELD, len(space.names) // 3)
    how = FaceBank()
    return Ground(
        model=model,
        space=space,
        labels=read_labels(labels, space.names),
        wanted=tuple(_wanted(title, column) for title, column in _EDITS.items()),
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
            f"A miniature: drawn faces of 16 × 16 pixels with eight known attributes, {count} adapters, and a denoiser "
            "of half a million weights; the paper has photographs, 64,974 adapters and Stable Diffusion. What holds "
            "here need not hold there.",
            "Identity is the cosine of the attributes that a small network reads (the edited one left out), not of "
            "FaceNet's embeddings; LPIPS is 1 − SSIM; for CLIP stands how far the attribute that is read has moved, as "
            "a share of its range.",
            "Gender, Chubby and Eyes are beard, width of the face and spacing of the eyes.",
        ),
    )


@final
@dataclass(frozen=True)
class _Looks:
    """Attributes as a vector of identity: of different people their cosine is 0 in the mean.

    Attributes:
        without: The one that is edited, and does not count.
    """

    without: str | None

    @property
    def name(self) -> str:
        return "read attributes"

    def __call__(self, images: Tensor) -> Tensor:
        kept = [place for place, name in enumerate(ATTRIBUTES) if name != self.without]
        return _attributes(images)[:, kept]


def _attributes(images: Tensor) -> Tensor:
    return read(images).attributes


def _shown(wanted: Wanted, images: Tensor) -> Tensor:
    """How much of an attribute images show, as a share of its range from -1 to 1."""
    return _attributes(images)[:, ATTRIBUTES.index(wanted.column)] / 2


def _wanted(title: str, column: str) -> Wanted:
    return Wanted(title, column, confounders=tuple(name for name in ATTRIBUTES if name != column))


def _stranger(number: int, images: int) -> Stranger:
    bank = FaceBank(seed=_SEED, images=images)
    (person,) = bank.faces([number])
    prompts, learned = bank.photographs(number)
    _, others = photographs(person, _OTHERS, torch_generator(_SEED, "others", number))
    return Stranger(f"stranger {number}", learned, tuple(prompts), others, person)


@cache
def _sliders(model: PipelineModel, layers: str) -> Mapping[str, Adapter]:
    """Sliders of pairs that are alike but for the attribute; as other adapters of the miniature, of rank 1."""
    pairs = [_pairs(title, column) for title, column in _EDITS.items()]
    found = train_sliders(model, pairs, _SLIDER, layers=layers, each=FaceBank.each)
    return {name: found.stack.adapter(place) for place, name in enumerate(found.names)}


def _pairs(title: str, column: str) -> SliderPairs:
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
