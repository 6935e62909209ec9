"""Concept Sliders on drawn faces: added they make an attribute more, subtracted less; bad pairs are refused."""

from dataclasses import replace

import pytest
import torch

from netweight.errors import UsageError
from netweight.nn import Adapter
from netweight.nn.train_lora import AdapterRecipe

pytest.importorskip("diffusers", reason="pipelines come with the diffusion extra")

from netweight.hf.load_pipeline import text_to_image
from netweight.toys.drawn_pictures import ATTRIBUTES, GROUNDS, caption, drawn, nuisances, people
from netweight.toys.faces_pipeline import LAYERS, faces_pipeline, read_faces
from netweight_experiments.tables.w2w.openers import SliderPairs, train_sliders
from netweight_experiments.toys.drawn_worlds import faces_drawn

SKIN = ATTRIBUTES.index("skin")


def pairs(count=16):
    noise = torch.Generator().manual_seed(0)
    faces, changes = people(count, noise), nuisances(count, noise)
    sides = []
    for value in (-1.0, 1.0):
        side = faces.clone()
        side[:, SKIN] = value
        sides.append(drawn(side, torch.zeros(count, dtype=torch.int64), changes))
    return SliderPairs("skin", *sides, (caption(next(iter(GROUNDS))),) * count)


def test_a_slider_goes_both_ways_and_leaves_the_model_as_it_was():
    model = text_to_image(faces_pipeline())
    before = model.digest()
    found = train_sliders(model, [pairs()], AdapterRecipe(steps=40, learning_rate=0.02), layers=LAYERS)
    assert model.digest() == before
    assert not any(weight.grad is not None for weight in model.denoiser.parameters())
    slider = found.stack.adapter(0)
    negative = Adapter({name: replace(change, scale=-change.scale) for name, change in slider.factors.items()})
    more, less = (
        float(read_faces(faces_drawn(model, each, samples=8, steps=8)[0]).attributes[:, SKIN].mean())
        for each in (slider, negative)
    )
    assert more > less + 0.4


def test_pairs_that_are_none_are_refused():
    good = pairs(2)
    with pytest.raises(UsageError, match="'skin' has images"):
        replace(good, before=good.before[:1])
    with pytest.raises(UsageError, match="not within 0 and 1"):
        replace(good, after=good.after + torch.nan)
