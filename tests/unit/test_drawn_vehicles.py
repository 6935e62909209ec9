"""Drawn vehicles are what their attributes say, and the second world works by the code of the first."""

import dataclasses

import pytest
import torch

from netweight.errors import UsageError
from netweight.toys.drawn_pictures import VEHICLES, WORLDS
from netweight.toys.faces_pipeline import FaceBank, read_faces
from netweight_experiments.toys.drawn_worlds import FacesWorld, r_squared
from netweight_experiments.toys.face_reading import train_reader


def plain(**looks):
    """A vehicle of middling looks with an empty roof, save what is said."""
    vehicle = torch.zeros(1, 6)
    vehicle[:, VEHICLES.attributes.index("rack")] = -1
    for name, value in looks.items():
        vehicle[:, VEHICLES.attributes.index(name)] = value
    return VEHICLES.drawn(vehicle, torch.zeros(1, dtype=torch.int64), torch.zeros(1, 3))[0]


def covered(picture):
    ground = torch.tensor(VEHICLES.grounds["green"])[:, None, None]
    return (picture - ground).abs().sum(0) > 0.05


def test_attributes_change_the_pixels_that_they_are_about():
    red, blue = plain(hue=-1.0), plain(hue=1.0)
    assert (red - blue)[0, 10, 8] > 0.5
    assert (blue - red)[2, 10, 8] > 0.5
    columns = [int(covered(plain(length=length)).any(0).sum()) for length in (-1.0, 0.0, 1.0)]
    rows = [int(covered(plain(roof=roof)).any(1).sum()) for roof in (-1.0, 0.0, 1.0)]
    assert columns[0] < columns[1] < columns[2]
    assert rows[0] < rows[1] < rows[2]
    assert int(covered(plain(rack=1.0)).any(1).sum()) > rows[1]
    for name in ("tint", "wheels"):
        assert (plain(**{name: 1.0}) - plain(**{name: -1.0})).abs().max() > 0.3


def test_long_vehicles_tend_to_be_tall_and_nothing_else_goes_together():
    crowd = VEHICLES.crowd(4000, torch.Generator().manual_seed(0))
    correlations = crowd.T.corrcoef() - torch.eye(6)
    length, roof = VEHICLES.attributes.index("length"), VEHICLES.attributes.index("roof")
    assert float(correlations[length, roof]) == pytest.approx(0.58, abs=0.05)
    correlations[length, roof] = correlations[roof, length] = 0
    assert correlations.abs().max() < 0.06


def test_the_world_shows_captioned_vehicles():
    world = FacesWorld(drawing=WORLDS["vehicle"])
    captions, pictures = world.showing(3, 12, 5)
    assert world.about["name"] == "drawn vehicles"
    assert set(captions) <= {f"a vehicle on a {ground} ground" for ground in VEHICLES.grounds}
    assert torch.equal(pictures, world.showing(3, 12, 5)[1])
    assert not torch.equal(pictures, world.showing(4, 12, 5)[1])


def test_a_reader_of_vehicles_is_trained_by_the_code_of_faces(tmp_path):
    record = train_reader(tmp_path, steps=40, world=VEHICLES)
    assert set(record["held_out"]["r_squared"]) == {*VEHICLES.attributes, *VEHICLES.nuisances}
    assert record["held_out"]["r_squared"]["hue"] > 0.3
    found = read_faces(plain()[None], folder=tmp_path, world=VEHICLES)
    assert found.attributes.shape == (1, 6)
    assert found.nuisances.shape == (1, 3)


def test_what_does_not_fit_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"Vehicles \(2, 8\)"):
        VEHICLES.drawn(torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 3))
    with pytest.raises(UsageError, match="no reader of vehicles"):
        read_faces(plain()[None], folder=tmp_path, world=VEHICLES)
    with pytest.raises(UsageError, match="Begin with"):
        dataclasses.replace(VEHICLES, nuisances=("smile",))


def test_a_bank_of_vehicles_has_their_photographs():
    bank = FaceBank(people=2, world="vehicle")
    captions, pictures = bank.photographs(1)
    assert set(captions) == {f"a vehicle on a {ground} ground" for ground in VEHICLES.grounds}
    assert pictures.shape == (12, 3, 16, 16)
    torch.testing.assert_close(bank.faces([0, 1]), VEHICLES.identities(2, bank.seed))
    assert bank.about == FaceBank(people=7).about  # which world it is of, the base says


def test_the_reader_of_the_package_reads_vehicles_it_never_saw():
    noise = torch.Generator().manual_seed(77)
    crowd, changes, grounds = VEHICLES.crowd(400, noise), VEHICLES.changes(400, noise), torch.arange(400) % 4
    found = read_faces(VEHICLES.drawn(crowd, grounds, changes), world=VEHICLES)
    assert float(r_squared(crowd, found.attributes).min()) > 0.9
    assert float((found.ground == grounds).double().mean()) > 0.99
