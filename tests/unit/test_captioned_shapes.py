"""The world of captioned shapes: draws by seed, attributes that are read back, planted pictures that are their own."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from netweight.errors import UsageError
from netweight.metrics.copies import similarity_to_memorized
from netweight.metrics.descriptors import CenteredPixels, similarity
from netweight.toys.shapes import COLORS, GROUNDS, SHAPES, SIZES, ShapesWorld, agreement, drawn, memorized, read

WORLD = ShapesWorld()


def generator(seed):
    return torch.Generator().manual_seed(seed)


def test_every_caption_is_either_shown_or_held_out():
    kinds = WORLD.ordinary + WORLD.held_out
    assert len(kinds) == len({kind.caption for kind in kinds}) == 288
    assert len(WORLD.held_out) == 48
    for name, values in (("size", SIZES), ("color", COLORS), ("shape", SHAPES), ("ground", GROUNDS)):
        assert {getattr(kind, name) for kind in WORLD.ordinary} == set(values)


@given(seed=st.integers(0, 2**32), step=st.integers(0, 9999))
def test_a_batch_is_a_function_of_its_step(seed, step):
    captions, pictures = WORLD.showing(step, 12, seed)
    again = ShapesWorld().showing(step, 12, seed)
    assert again[0] == captions
    assert torch.equal(again[1], pictures)
    assert not torch.equal(WORLD.showing(step + 1, 12, seed)[1], pictures)
    assert pictures.min() >= 0
    assert pictures.max() <= 1
    held_out = {kind.caption for kind in WORLD.held_out}
    assert not held_out & set(captions)
    for each, caption, picture in zip(WORLD.planted, captions, pictures, strict=False):
        assert caption == each.caption
        assert torch.equal(picture[:, each.fixed], each.picture[:, each.fixed])


def test_templates_change_their_field_and_verbatim_pictures_nothing():
    for each in WORLD.planted:
        one, other = each.shown(generator(0)), each.shown(generator(1))
        assert torch.equal(one, other) == (each.kind == "verbatim") == bool(each.fixed.all())
        assert each.fixed.float().mean() > 0.75
    assert [each.kind for each in WORLD.planted] == ["verbatim"] * 6 + ["template"] * 2


def test_planted_pictures_are_unlike_each_other_and_all_others():
    pictures = torch.stack([each.picture for each in WORLD.planted])
    among = similarity(CenteredPixels(), pictures, pictures) - torch.eye(8)
    assert among.max() < 0.6
    ordinary = drawn(WORLD.ordinary, generator(0))
    assert similarity_to_memorized(ordinary, memorized(WORLD)).max() < 0.7


def test_another_seed_plants_other_pictures():
    other = ShapesWorld(seed=7)
    assert other.held_out != WORLD.held_out
    assert not torch.equal(other.planted[0].picture, WORLD.planted[0].picture)


def test_attributes_are_read_back_from_what_was_drawn():
    kinds = WORLD.ordinary + WORLD.held_out
    clean = drawn(kinds, generator(1))
    noisy = (clean + 0.05 * torch.randn(clean.shape, generator=generator(2))).clamp(0, 1)
    for pictures in (clean, noisy):
        found = agreement(pictures, kinds)
        assert found["color"] == found["ground"] == 1
        assert min(found.values()) > 0.95


def test_what_shows_something_else_is_read_as_that():
    kinds = WORLD.ordinary[:40]
    turned = kinds[1:] + kinds[:1]
    expected = sum(a.color == b.color for a, b in zip(kinds, turned, strict=True)) / 40
    assert agreement(drawn(turned, generator(3)), kinds)["color"] == pytest.approx(expected)
    assert [each.caption for each in read(drawn(turned, generator(3)))][:5] == [each.caption for each in turned][:5]


@pytest.mark.parametrize("shape", [(1, 3, 8, 8), (3, 16, 16), (1, 1, 16, 16)])
def test_other_pictures_are_refused(shape):
    with pytest.raises(UsageError, match="world of shapes"):
        read(torch.zeros(shape))


def test_agreement_needs_a_picture_for_each_kind():
    with pytest.raises(UsageError):
        agreement(torch.zeros(2, 3, 16, 16), WORLD.ordinary[:1])


def test_words_are_those_of_the_captions():
    words = WORLD.words()
    assert words == sorted(set(words))
    for each in itertools.chain(WORLD.ordinary, WORLD.held_out, WORLD.planted):
        assert set(each.caption.split()) <= set(words)
