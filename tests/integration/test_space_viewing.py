"""Pages painted by a model: every picture is that of the model with the weights of just its point."""

import copy

import numpy as np
import pytest
import torch
from tiny_diffusion import ORDINARY, trained

from netweight.errors import UsageError
from netweight.methods.space.directions import fit_direction
from netweight.methods.space.gram import StackBank
from netweight.methods.space.labels import LabelColumn, Labels
from netweight.methods.space.settings import RenderSettings
from netweight.methods.space.space import WeightSpace
from netweight.methods.space.view.build import build_view
from netweight.methods.space.view.page import render_view
from netweight.nn.apply_lora import merge_
from netweight.nn.lora import Adapter, AdapterStack, LowRank

N = 7
LAYERS = ["blocks.0.attn2.to_v", "blocks.1.attn2.to_v"]
PROMPTS = tuple(ORDINARY[:2])
STRENGTHS = (-2.0, 0.0, 1.5)


@pytest.fixture(scope="module")
def model():
    return trained()


@pytest.fixture(scope="module")
def space(model):
    torch.manual_seed(0)
    shapes = {name: model.denoiser.get_submodule(name).weight.shape for name in LAYERS}
    adapters = [
        Adapter({name: LowRank(torch.randn(1, columns) / 4, torch.randn(rows, 1), 0.5) for name, (rows, columns)
                 in shapes.items()})
        for _ in range(N)
    ]  # fmt: skip
    return WeightSpace.fit(StackBank([f"model {n}" for n in range(N)], AdapterStack.of(adapters)))


@pytest.fixture(scope="module")
def labels(space):
    age = torch.tensor([1.0, 2.0, 3.0, 4.0, torch.nan, 6.0, 7.0])
    return Labels(tuple(space.names), {"age": LabelColumn("age", age)})


@pytest.fixture(scope="module")
def age(space, labels):
    return fit_direction(space.scores, labels, "age", folds=3)


@pytest.fixture(scope="module")
def view(model, space, labels, age):
    before = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
    settings = RenderSettings(
        prompts=PROMPTS, seeds=(3, 8), guidance=2.0, steps=4, strengths=STRENGTHS, components=2, adapters=5,
        samples=3, neighbors=2, rows=5,
    )  # fmt: skip
    made = build_view(
        model, space, title="Tiny", directions=[age], labels=labels,
        start=("model 2", space.scores[2]), settings=settings,
    )  # fmt: skip
    after = model.denoiser.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    return made


def painted(model, space, scores):
    """What a model paints that was changed for good."""
    own = copy.copy(model)
    own.denoiser = copy.deepcopy(model.denoiser)
    merge_(own.denoiser, space.adapter(scores))
    images = own.generate(own.embed(PROMPTS), (3, 8), guidance=2.0, steps=4)
    return images.permute(0, 2, 3, 1).numpy() * 255


def same(images, expected):
    return np.abs(images.astype(float) - expected).max() <= 0.51  # rounded to whole numbers


def test_every_picture_of_a_slider_is_painted_at_its_point(model, space, age, view):
    assert [each.name for each in view.traversals] == ["age", "component 1", "component 2"]
    assert [each.kind for each in view.traversals] == ["direction", "component", "component"]
    steps = [age.step(1.0).float(), *torch.diag(space.deviations)[:2]]
    for traversal, step in zip(view.traversals, steps, strict=True):
        for place, strength in enumerate(STRENGTHS):
            assert same(traversal.images[place], painted(model, space, space.scores[2] + strength * step))
        assert not same(traversal.images[0], traversal.images[-1].astype(float))
    assert same(view.traversals[0].images[1], view.traversals[1].images[1].astype(float))  # both at 0


def test_the_map_shows_models_where_they_are(model, space, view):
    shown = [0, 2, 3, 4, 6]  # five of seven, evenly
    assert list(view.points.names) == [f"model {number}" for number in shown]
    assert "5 of 7 are shown" in view.points.note
    scores = space.scores.double().numpy()
    deviations = scores.std(0, ddof=1)
    assert np.allclose(view.points.coordinates, (scores / deviations)[shown][:, :4], rtol=1e-4, atol=1e-6)
    assert view.points.labels["age"] == [1.0, 3.0, 4.0, None, 7.0]
    for place, number in enumerate(shown):
        assert same(view.points.thumbnails[place], painted(model, space, space.scores[number])[0])
    lengths = np.linalg.norm(scores[shown], axis=1)
    cosines = scores[shown] @ scores[shown].T / np.outer(lengths, lengths)
    np.fill_diagonal(cosines, -2)
    assert (view.points.neighbors.numbers == np.argsort(-cosines, 1)[:, :2]).all()
    assert np.allclose(view.points.neighbors.similarities, -np.sort(-cosines, 1)[:, :2], atol=1e-5)


def test_samples_and_facts_are_told(view):
    assert view.samples.images.shape == (3, 2, 8, 8, 3)
    assert view.samples.neighbors.numbers.shape == (3, 2)
    assert view.live is None
    assert "not a UNet2DConditionModel" in view.painted
    assert view.facts["sliders begin at"] == "model 2"
    assert "held-out R²" in view.traversals[0].note
    assert "of the variance" in view.traversals[1].note
    assert "The samples were drawn by a PairSampler" in render_view(view)


def test_what_cannot_be_shown_is_refused_before_painting(model, space, age):
    few = RenderSettings(prompts=PROMPTS, seeds=(3, 8), components=0)
    for changes, says in [
        ({"settings": few}, "no slider"),
        ({"start": ("nowhere", torch.zeros(2))}, "nowhere is not a point"),
        ({"start": ("nan", torch.full((space.components,), torch.nan))}, "nan is not a point"),
        ({"labels": Labels(("other",), {})}, "other adapters"),
    ]:
        with pytest.raises(UsageError, match=says):
            build_view(model, space, title="No", **changes)
    with pytest.raises(UsageError, match="2 prompts and 3 seeds"):
        RenderSettings(prompts=PROMPTS, seeds=(1, 2, 3))
    for wrong in ({"samples": -1}, {"adapters": 0}, {"seeds": ()}):
        with pytest.raises(UsageError, match=next(iter(wrong))):
            RenderSettings(**wrong)
