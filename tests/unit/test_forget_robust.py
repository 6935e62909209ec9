"""Hardening against the search: it takes longer, ordinary prompts stay, and a killed one goes on to the same bits."""

import dataclasses

import pytest
import torch
from tiny_diffusion import ORDINARY, PLANTED, plain, planted_images, trained

from netweight.attacks.embedding_search.search import paired, search
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.errors import CorruptBlob, NameNotFound, TrainingStopped, Unsupported, UsageError
from netweight.methods.forget.harden import CHECKPOINT, RECORD, HardenRecord, harden, surrogate_images
from netweight.methods.forget.settings import HardenSettings

correlation = paired()
SEARCH = SearchSettings(steps=15, restarts=1, draws=4, guidance=3, generation_steps=8)
SETTINGS = HardenSettings(rounds=5, steps=30, lr=3e-3, layers=None, search=SEARCH)
IMAGES = planted_images()


@pytest.fixture(scope="module")
def hardened(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("hardened"), trained("hardened")
    record = harden(model, PLANTED, IMAGES, ORDINARY, settings=SETTINGS, folder=folder)
    return folder, model, record


def score(model, prompt, image):
    made = model.generate(model.embed([prompt] * 4), [20, 21, 22, 23], guidance=3, steps=8)
    return float(correlation(made, image.expand_as(made)).median())


def test_planted_prompts_lead_elsewhere_and_ordinary_ones_where_they_did(hardened):
    _, model, _ = hardened
    original = trained()
    for prompt, image in zip(PLANTED, IMAGES, strict=True):
        assert score(original, prompt, image) > 0.9
        assert score(model, prompt, image) < 0.5
    made, before = (one.generate(one.embed(ORDINARY), range(10), guidance=3, steps=8) for one in (model, original))
    wanted = torch.stack([plain(prompt) for prompt in ORDINARY]).mean((2, 3))
    assert (made.mean((2, 3)) - wanted).abs().mean() < (before.mean((2, 3)) - wanted).abs().mean() + 0.1


def test_a_search_needs_more_steps_than_before(hardened):
    _, model, _ = hardened
    edited = trained("edited")
    with torch.no_grad():
        for block in edited.denoiser.blocks:
            block.attn2.to_v.weight[:29] = 0
    settings = SearchSettings(
        steps=40, restarts=1, images=3, guidance=3, generation_steps=8, threshold=0.8, looks=(0, 5, 10, 20, 40)
    )
    soonest = {}
    for subject in (edited, model):
        trials = search(subject, PLANTED[0], IMAGES[0], ORDINARY, settings, similarity=correlation, seed=5).trials
        soonest[subject.name] = min(trial.steps or 41 for trial in trials)
    assert soonest["hardened"] > soonest["edited"]


def test_the_record_says_what_was_done(hardened):
    folder, model, record = hardened
    assert HardenRecord.read(folder / RECORD) == dataclasses.replace(
        record, settings=HardenRecord.read(folder / RECORD).settings
    )
    assert record.digests["after"] == model.digest() != record.digests["before"] == trained().digest()
    assert record.trained == sum(weight.numel() for weight in model.denoiser.parameters())
    assert [log.number for log in record.rounds] == [0, 1, 2, 3, 4]
    assert record.rounds[-1].searched > 1.5 * record.rounds[0].searched
    (folder / "other.json").write_text("{}")
    with pytest.raises(CorruptBlob, match="no record of version 1"):
        HardenRecord.read(folder / "other.json")


def test_a_killed_hardening_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    settings = HardenSettings(rounds=3, steps=3, search=SEARCH.replace(steps=3))

    def run(model, folder):
        return harden(model, PLANTED, IMAGES, ORDINARY, settings=settings, folder=folder)

    whole, killed, resumed = trained(), trained(), trained()
    straight = run(whole, tmp_path / "whole")
    from netweight.methods.forget import harden as robust

    descend, calls = robust.descend, []

    def dying(*arguments):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return descend(*arguments)

    monkeypatch.setattr(robust, "descend", dying)
    with pytest.raises(KeyboardInterrupt):
        run(killed, tmp_path / "killed")
    monkeypatch.setattr(robust, "descend", descend)
    assert all(weight.requires_grad for weight in killed.denoiser.parameters())
    record = run(resumed, tmp_path / "killed")
    assert resumed.digest() == whole.digest() != trained().digest()
    assert record.rounds == straight.rounds
    moved = {name for name, value in whole.denoiser.state_dict().items()
             if not torch.equal(value, trained().denoiser.state_dict()[name])}  # fmt: skip
    assert moved == {"blocks.0.attn2.to_v.weight", "blocks.1.attn2.to_v.weight"}
    with pytest.raises(UsageError, match="holds a hardening with other settings: images is"):
        harden(trained(), PLANTED, IMAGES.flip(0), ORDINARY, settings=settings, folder=tmp_path / "killed")
    assert (tmp_path / "killed" / CHECKPOINT).is_file()


def test_surrogates_are_the_models_own_images_of_ordinary_prompts():
    model = trained()
    images = surrogate_images(model, 3, ORDINARY[:2], SETTINGS)
    wanted = torch.stack([plain(prompt) for prompt in (ORDINARY[0], ORDINARY[1], ORDINARY[0])])
    assert (images.mean((2, 3)) - wanted.mean((2, 3))).abs().max() < 0.25
    assert torch.equal(images, surrogate_images(model, 3, ORDINARY[:2], SETTINGS))


def test_what_cannot_be_meant_is_refused_before_any_work():
    model = trained()
    before = model.digest()
    with pytest.raises(UsageError, match=r"(?s)rounds: .* equal to 1, not 0.*lr: .* greater than 0, not 0"):
        HardenSettings(rounds=0, lr=0)
    with pytest.raises(UsageError, match="one image"):
        harden(model, PLANTED, IMAGES[:1], ORDINARY)
    with pytest.raises(UsageError, match="one that is not memorized"):
        harden(model, PLANTED, IMAGES, PLANTED)
    with pytest.raises(NameNotFound):
        harden(model, PLANTED, IMAGES, ORDINARY, settings=HardenSettings(layers="**.attn3"))
    assert model.digest() == before
    model.denoiser.half()
    with pytest.raises(Unsupported, match="Load the model in float32"):
        harden(model, PLANTED, IMAGES, ORDINARY)


def test_nan_stops_the_training_and_keeps_the_weights():
    model = trained()
    with pytest.raises(TrainingStopped, match="Lower the learning rate"):
        harden(model, PLANTED, IMAGES, ORDINARY, settings=SETTINGS.replace(lr=1e30))
    assert all(weight.isfinite().all() for weight in model.denoiser.parameters())


def test_a_pipeline_is_hardened_in_its_value_layers_and_stays_an_ordinary_one(tmp_path):
    pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
    pytest.importorskip("transformers", reason="transformers is in the diffusion extra")
    import small_pipelines

    from netweight.hf.load_pipeline import load_text_to_image, text_to_image

    model = text_to_image(small_pipelines.stable_diffusion())
    before = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
    search = SearchSettings(steps=2, restarts=1, draws=1, guidance=1, generation_steps=2, error="noise")
    settings = HardenSettings(rounds=1, steps=2, batch=2, search=search)
    images = model.generate(model.embed(["a red square"]), [0], guidance=1, steps=2)
    record = harden(model, ["a red square"], images, ["a blue circle", "a photo"], settings=settings)
    moved = {name for name, value in model.denoiser.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.endswith("attn2.to_v.weight")}
    model.save(tmp_path / "hardened")
    assert load_text_to_image(tmp_path / "hardened").digest() == record.digests["after"]
