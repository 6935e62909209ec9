"""Drawn faces are what their attributes say, by pixels and by the reader that comes with the package."""

from dataclasses import replace

import pytest
import torch

from netweight.errors import NameNotFound, UsageError
from netweight.toys.drawn_pictures import (
    ATTRIBUTES,
    BINARY,
    FACES,
    GROUNDS,
    NUISANCES,
    STRONG,
    caption,
    drawn,
    identities,
    nuisances,
    people,
    photographs,
)  # fmt: skip
from netweight.toys.faces_pipeline import READER_FOLDER, embed, read_faces
from netweight_experiments.toys.drawn_worlds import FacesWorld, r_squared, reading_record


def noise(seed=0):
    return torch.Generator().manual_seed(seed)


def plain(count=1, **looks):
    """People of middling looks without beard and glasses, save what is said."""
    faces = torch.zeros(count, len(ATTRIBUTES))
    for name in BINARY:
        faces[:, ATTRIBUTES.index(name)] = -1
    for name, value in looks.items():
        faces[:, ATTRIBUTES.index(name)] = torch.as_tensor(value)
    return drawn(faces, torch.zeros(count, dtype=torch.int64), torch.zeros(count, len(NUISANCES)))


def test_a_person_is_the_same_whoever_else_is_drawn():
    assert torch.equal(identities(5, 3)[2:], identities(3, 3, first=2))
    assert not torch.equal(identities(1, 3), identities(1, 4))


def test_people_are_spread_evenly_and_two_attributes_go_together():
    crowd = people(4000, noise())
    assert crowd.abs().max() <= 1
    for number, name in enumerate(ATTRIBUTES):
        if name in BINARY:
            assert set(crowd[:, number].tolist()) == {-1.0, 1.0}
        else:
            assert float(crowd[:, number].std()) == pytest.approx(3**-0.5, abs=0.02)  # of even values
    correlations = crowd.T.corrcoef() - torch.eye(len(ATTRIBUTES))
    beard, length = ATTRIBUTES.index("beard"), ATTRIBUTES.index("hair_length")
    assert float(correlations[beard, length]) == pytest.approx(-0.44, abs=0.05)
    correlations[beard, length] = correlations[length, beard] = 0
    assert correlations.abs().max() < 0.06


def test_attributes_change_the_pixels_that_they_are_about():
    low, high = plain(skin=-1.0)[0], plain(skin=1.0)[0]
    assert (low[:, 16:20, 14:18] - high[:, 16:20, 14:18]).min() > 0.2  # a dark nose
    red, blue = plain(hair_hue=-1.0)[0], plain(hair_hue=1.0)[0]
    assert (red - blue)[0, 6, 16] > 0.5
    assert (blue - red)[2, 6, 16] > 0.5
    ground = torch.tensor(GROUNDS["green"])[:, None, None]
    covered = [int(((plain(width=width)[0] - ground).abs().sum(0) > 0.05).sum()) for width in (-1.0, 0.0, 1.0)]
    assert covered[0] < covered[1] < covered[2]
    for name in STRONG[3:]:
        assert (plain(**{name: 1.0}) - plain(**{name: -1.0})).abs().max() > 0.3
    for name in ATTRIBUTES[5:]:
        assert (plain(**{name: 1.0}) - plain(**{name: -1.0})).abs().max() > 0.2


def test_photographs_show_the_grounds_in_turn_and_differ():
    captions, pictures = photographs(identities(1, 0)[0], 6, noise())
    assert captions == [caption(list(GROUNDS)[number % 4]) for number in range(6)]
    assert pictures.shape == (6, 3, 32, 32)
    assert 0 <= float(pictures.min()) <= float(pictures.max()) <= 1
    assert (pictures[0] - pictures[4]).abs().max() > 0.1  # one ground, two photographs


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(UsageError, match=r"Faces \(2, 7\)"):
        drawn(torch.zeros(2, 7), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4))
    with pytest.raises(UsageError, match="not images of faces of this world"):
        read_faces(torch.zeros(1, 3, 8, 8))
    with pytest.raises(UsageError, match="contains no reader"):
        read_faces(torch.zeros(1, 3, 32, 32), folder=READER_FOLDER.parent)


def test_the_reader_reads_people_it_never_saw():
    crowd, changes = people(600, noise(77)), nuisances(600, noise(78))
    grounds = torch.arange(600) % 4
    pictures = drawn(crowd, grounds, changes)
    found = read_faces(pictures)
    truth, said = torch.cat([crowd, changes], 1), torch.cat([found.attributes, found.nuisances], 1)
    explained = dict(zip(ATTRIBUTES + NUISANCES, r_squared(truth, said).tolist(), strict=True))
    known = reading_record()["held_out"]["r_squared"]
    assert min(explained[name] for name in STRONG) > 0.97
    smile = explained.pop("smile")  # hard to see under beards
    assert smile > 0.3
    assert all(explained[name] == pytest.approx(known[name], abs=0.02) for name in explained)
    assert torch.equal(found.ground, grounds)
    assert embed(pictures).shape == (600, 80)


def test_explained_variance_is_that_of_scikit_learn():
    metrics = pytest.importorskip("sklearn.metrics")
    truth, said = torch.randn(50, 3, generator=noise()), torch.randn(50, 3, generator=noise(1))
    expected = metrics.r2_score(truth.numpy(), said.numpy(), multioutput="raw_values")
    torch.testing.assert_close(r_squared(truth, said), torch.from_numpy(expected).double(), atol=1e-6, rtol=0)


def test_the_world_shows_someone_new_each_time_and_knows_its_captions():
    world = FacesWorld()
    captions, pictures = world.showing(3, 12, 5)
    again = world.showing(3, 12, 5)
    assert captions == again[0]
    assert torch.equal(pictures, again[1])
    assert not torch.equal(pictures, world.showing(4, 12, 5)[1])
    assert set(captions) <= set(world.ordinary_captions)
    assert {word for text in captions for word in text.split()} <= set(world.words())
    assert world.agreement(captions, pictures) == {"ground": 1.0}
    assert FacesWorld(drawing=replace(FACES, side=32)).showing(3, 2, 5)[1].shape == (2, 3, 32, 32)
    with pytest.raises(NameNotFound, match="'a dog'"):
        world.agreement(["a dog"], pictures[:1])
