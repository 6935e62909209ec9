"""Banks of people: resumed group by group, grown, labeled; and what comes with the package draws whom it should."""

import functools
import json

import pytest
import torch

pytest.importorskip("diffusers", reason="adapters of pipelines")

from netweight.core.engines import in_process
from netweight.errors import TrainingStopped, UsageError
from netweight.hf.load_pipeline import text_to_image
from netweight.methods.space.labels import read_labels
from netweight.nn.train_lora import AdapterRecipe
from netweight.store.bank.bank import AdapterBank
from netweight.toys.diffusion import training_record
from netweight.toys.drawn_pictures import ATTRIBUTES, identities
from netweight.toys.faces_pipeline import FACES_BANK, FACES_FOLDER, FaceBank, faces_pipeline
from netweight_experiments.toys import face_bank as face_bank_training
from netweight_experiments.toys.drawn_worlds import FacesWorld, faces_drawn, identity_fidelity, person_name
from netweight_experiments.toys.face_bank import excerpt, train_bank
from netweight_experiments.toys.faces_diffusion import population, train_faces
from netweight_experiments.toys.fitting import DenoiserRecipe

BANK = FaceBank(people=5, recipe=AdapterRecipe(steps=2), images=4, each=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    said = {"r_squared": {}}
    monkeypatch.setattr(face_bank_training, "identity_fidelity", lambda model, stack, people, world: said)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole") / "bank"
    train_bank(folder, BANK, at_once=2, engine=in_process)
    return folder


def people_of(folder):
    labels = read_labels(folder / "labels.csv", AdapterBank.open(folder / "bank").names)
    return torch.stack([labels[name].values for name in ATTRIBUTES], 1).float()


def test_a_bank_and_its_labels(whole):
    bank = AdapterBank.open(whole / "bank")
    assert bank.names == [person_name(number) for number in range(5)]
    assert len(bank.modules) == 48
    torch.testing.assert_close(people_of(whole), identities(5, BANK.seed), atol=1e-5, rtol=0)
    record = json.loads((whole / "training.json").read_text())
    assert record["outcome"]["people"] == 5
    assert record["outcome"]["digest"] == bank.digest
    assert {path.name for path in whole.iterdir()} == {"bank", "labels.csv", "training.json"}


def test_an_excerpt_is_the_first_people_rounded(whole, tmp_path):
    excerpt(whole, tmp_path / "small", 3)
    bank, small = AdapterBank.open(whole / "bank"), AdapterBank.open(tmp_path / "small" / "bank")
    assert small.names == bank.names[:3]
    assert torch.equal(people_of(tmp_path / "small"), people_of(whole)[:3])
    for name, value in small.stack(0, 3).up.items():
        assert torch.equal(value, bank.stack(0, 3).up[name].bfloat16())
    with pytest.raises(UsageError, match="6 of 5 people"):
        excerpt(whole, tmp_path / "large", 6)


def test_the_bank_of_the_package_draws_its_people():
    bank = AdapterBank.open(FACES_BANK)
    assert len(bank) >= 200
    bank.verify()
    model, count = text_to_image(faces_pipeline()), 12
    stack = bank.stack(0, count)
    found = identity_fidelity(model, stack, people_of(FACES_BANK.parent)[:count], samples=4, steps=10)
    assert found["strong"] > 0.75
    assert found["ground"] > 0.95


def test_training_goes_on_where_it_was_stopped_and_a_bank_grows(whole, tmp_path, monkeypatch):
    train_group, done = face_bank_training._train_group, []

    @functools.wraps(train_group)  # a ledger belongs to one function
    def counted(group, **given):
        if len(done) == 1 and power_fails:
            raise ValueError("the power is out")
        done.append(group.numbers)
        return train_group(group, **given)

    folder, power_fails = tmp_path / "bank", True
    smaller = FaceBank(people=4, recipe=BANK.recipe, images=4, each=2)
    monkeypatch.setattr(face_bank_training, "_train_group", counted)
    with pytest.raises(TrainingStopped, match=r"person-00002 could not be trained(.|\n)*the power is out"):
        train_bank(folder, smaller, at_once=2, engine=in_process)
    power_fails = False
    with monkeypatch.context() as now:  # stopped when all was trained and written
        now.setattr(face_bank_training, "identity_fidelity", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train_bank(folder, smaller, at_once=2, engine=in_process)
    train_bank(folder, smaller, at_once=2, engine=in_process)
    assert done == [(0, 1), (2, 3)]
    train_bank(folder, BANK, at_once=2, engine=in_process)
    assert done[2:] == [(4,)]
    grown, other = AdapterBank.open(folder / "bank"), AdapterBank.open(whole / "bank")
    assert grown.names == other.names
    for name, factors in grown.stack(0, 5).up.items():
        torch.testing.assert_close(factors, other.stack(0, 5).up[name], atol=1e-5, rtol=1e-3)
    with pytest.raises(UsageError, match="trained otherwise"):
        train_bank(folder, FaceBank(people=4, images=4, each=2), engine=in_process)


def test_pictures_of_all_adapters_at_once_are_those_of_each(whole):
    model, stack = text_to_image(faces_pipeline()), AdapterBank.open(whole / "bank").stack(0, 3)
    pictures = faces_drawn(model, stack, samples=2, steps=2)
    assert pictures.shape == (3, 2, 3, 32, 32)
    torch.testing.assert_close(
        faces_drawn(model, stack.adapter(2), samples=2, steps=2)[0], pictures[2], atol=1e-4, rtol=0
    )
    dense = {name: change.dense() for name, change in stack.adapter(1).factors.items()}
    torch.testing.assert_close(faces_drawn(model, dense, samples=2, steps=2)[0], pictures[1], atol=1e-4, rtol=0)


def test_the_pipeline_draws_the_grounds_that_prompts_name_and_all_kinds_of_people(monkeypatch):
    draws = training_record(FACES_FOLDER)["outcome"]["draws"]
    assert draws["agreement"]["ground"] >= 0.99
    assert min(draws["spread"][name] for name in ATTRIBUTES[:5]) > 0.65
    monkeypatch.setattr("netweight_experiments.toys.faces_diffusion._DRAWN", 24)
    monkeypatch.setattr("netweight_experiments.toys.faces_diffusion.STEPS", 10)
    found = population(FACES_FOLDER, FacesWorld())
    assert found["agreement"]["ground"] == 1.0
    assert min(found["spread"][name] for name in ATTRIBUTES[:5]) > 0.4


def test_a_pipeline_is_trained_from_a_seed(tmp_path, monkeypatch):
    monkeypatch.setattr("netweight_experiments.toys.faces_diffusion._DRAWN", 4)
    monkeypatch.setattr("netweight_experiments.toys.faces_diffusion.STEPS", 1)
    recipe = DenoiserRecipe(steps=2, batch=4, warmup=1, value_penalty=0.0, keep_every=1)
    outcome = train_faces(tmp_path / "one", recipe=recipe)
    again = train_faces(tmp_path / "two", recipe=recipe)
    assert outcome["digests"] == again["digests"]
    assert next(faces_pipeline(tmp_path / "one").unet.parameters()).dtype == torch.float32
    assert train_faces(tmp_path / "one", recipe=recipe) == outcome
