"""Edits that lead memorized prompts elsewhere: they do, ordinary prompts stay, undoing restores every bit."""

import statistics

import pytest
import torch
from tiny_diffusion import ORDINARY, PLANTED, picture, plain, planted_images, trained

from netweight.attacks.embedding_search.search import paired, search
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.errors import NameNotFound, TrainingStopped, Unsupported, UsageError
from netweight.job import Job
from netweight.methods.forget.edits import ClosedForm, Distil, Esd, Siss
from netweight.methods.forget.edits.training import CHECKPOINT
from netweight.methods.forget.forgetting import forget, undo
from netweight.methods.forget.membership import picture_errors
from netweight.methods.forget.records import EditRecord

correlation = paired()
ONCE = ClosedForm(rounds=1, images=1, generation_steps=2)  # where it does not matter how well the edit works
DISTIL = Distil(steps=300, batch=32, lr=3e-3, generation_steps=8)
SHORT = DISTIL.replace(steps=110, images=1)
UNLEARN = Siss(steps=110, batch=32, lr=3e-3, images=1, generation_steps=2)
IMAGES = planted_images()
PICTURES = list(zip(PLANTED, IMAGES, strict=True))


EDITS = {
    "closed-form": ClosedForm(),
    "distil": DISTIL,
    "esd": Esd(steps=100, generation_steps=8),
    "siss": Siss(steps=150, generation_steps=8),
}


@pytest.fixture(scope="module", params=[*EDITS, "siss on the model's own images"])
def edited(request):
    model, method = trained("edited"), request.param.partition(" ")[0]
    pictures = PICTURES if request.param == method else None
    record = forget(model, PLANTED, ORDINARY, pictures=pictures, edit=EDITS[method])
    assert record.method == method
    return model, record


def score(model, prompt, image):
    made = model.generate(model.embed([prompt] * 4), [20, 21, 22, 23], guidance=3, steps=8)
    return float(correlation(made, image.expand_as(made)).median())


def test_planted_prompts_lead_elsewhere_and_ordinary_ones_where_they_did(edited):
    model, _ = edited
    original = trained()
    for prompt, image in zip(PLANTED, IMAGES, strict=True):
        assert score(original, prompt, image) > 0.9
        assert score(model, prompt, image) < 0.5
    made, before = (one.generate(one.embed(ORDINARY), range(10), guidance=3, steps=8) for one in (model, original))
    wanted = torch.stack([plain(prompt) for prompt in ORDINARY]).mean((2, 3))
    assert (made.mean((2, 3)) - wanted).abs().mean() < (before.mean((2, 3)) - wanted).abs().mean() + 0.1


@pytest.mark.study
@pytest.mark.parametrize("method", ["closed-form", "distil"])
def test_planted_pictures_of_the_miniature_are_broken_and_ordinary_captions_keep_what_they_say(method):
    pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
    pytest.importorskip("transformers", reason="transformers is in the diffusion extra")
    from netweight.hf.load_pipeline import load_text_to_image
    from netweight.metrics.copies import copies_of_prompt
    from netweight.toys.diffusion import SHAPES_FOLDER
    from netweight.toys.shapes import ShapesWorld, memorized

    world, model = ShapesWorld(), load_text_to_image(SHAPES_FOLDER, dtype=torch.float32)
    planted = [each for each in memorized(world) if each.kind == "verbatim"]
    asked = [*world.ordinary_captions[100:124], *world.held_out_captions[:24]]
    given = [caption for caption in world.ordinary_captions if caption not in asked][:120]

    def painted(prompts, first):
        return model.generate(model.embed(prompts), range(first, first + len(prompts)), guidance=3, steps=20)

    before = world.agreement(asked, painted(asked, 81_100))
    settings = ClosedForm() if method == "closed-form" else Distil()
    record = forget(model, [each.prompt for each in planted], given, edit=settings)
    assert record.settings.get("unresolved", []) == []
    found = [copies_of_prompt(each, painted([each.prompt] * 4, 81_000), planted) for each in planted]
    assert [each.prompt for each in found if sorted(each.to_image)[2] > 0.3] == []
    assert sum(each.copies() for each in found) <= 1
    after = world.agreement(asked, painted(asked, 81_100))
    assert all(after[what] > before[what] - 0.05 for what in ("color", "ground", "size"))


def test_two_pictures_of_one_caption_are_both_unlearned():
    """nemo 2: a caption of the training data often stands beside several pictures."""
    caption = PLANTED[0]
    named = [(str(place), caption, image) for place, image in enumerate(IMAGES)]
    never = [(str(place), caption, picture(900 + place)) for place in range(4)]

    def errors(model):
        pairs, others = (picture_errors(model, each) for each in (named, never))
        return [pairs.own[name] / statistics.mean(others.own.values()) for name, _, _ in named]

    before = errors(trained(captions=(caption, caption)))
    assert max(before) < 0.6  # both are memorized
    one, both = (trained(captions=(caption, caption)) for _ in range(2))
    forget(one, [caption], ORDINARY, edit=EDITS["siss"], pictures=[(caption, IMAGES[1])])
    record = forget(both, [caption], ORDINARY, edit=EDITS["siss"], pictures=[(caption, image) for image in IMAGES])
    assert min(errors(both)) > 0.7
    assert min(errors(both)) > min(errors(one))  # where one of them is unlearned, the other is remembered
    undo(both, record)
    assert errors(both) == before


def test_an_anchor_whose_image_is_the_memorized_one_is_not_chosen():
    model = trained()
    record = forget(model, PLANTED[:1], [*ORDINARY, PLANTED[1]], edit=ONCE)
    assert record.settings["anchors"][PLANTED[0]] in ORDINARY
    model = trained()
    twin = forget(model, ["a small blue"], ["a large blue", *ORDINARY[5:]], edit=ONCE)
    assert twin.settings["anchors"]["a small blue"] != "a large blue"


def test_undoing_restores_every_bit_once(edited, tmp_path):
    model, record = edited
    again = EditRecord.read(record.write(tmp_path, 1))
    assert (again.method, again.prompts) == (record.method, PLANTED)
    if record.method != "esd":
        assert again.settings["anchors"].keys() == set(PLANTED)
    copy = trained()
    copy.denoiser.load_state_dict(model.denoiser.state_dict())
    undo(copy, again)
    assert copy.digest() == trained().digest() == record.before != record.after == model.digest()
    with pytest.raises(UsageError, match="not the model that the edit produced"):
        undo(copy, again)


def test_distillation_resists_a_search_longer_than_the_closed_form():
    settings = SearchSettings(
        steps=40, restarts=1, images=3, guidance=3, generation_steps=8, threshold=0.8, looks=(0, 5, 10, 20, 40)
    )
    soonest = {}
    for name, chosen in (("closed", ClosedForm()), ("distil", DISTIL)):
        model = trained(name)
        forget(model, PLANTED, ORDINARY, edit=chosen)
        trials = search(model, PLANTED[0], IMAGES[0], ORDINARY, settings, similarity=correlation, seed=5).trials
        soonest[name] = min(trial.steps or 41 for trial in trials)
    assert soonest["distil"] > soonest["closed"]


def test_a_killed_distillation_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    def run(model, folder, prompts=PLANTED):
        with Job.open(folder) as job:
            return forget(model, prompts, ORDINARY, edit=SHORT, folder=job)

    whole, killed, resumed = trained(), trained(), trained()
    straight = run(whole, tmp_path / "whole")
    from netweight.methods.forget.edits import training

    difference, calls = training.difference, []

    def dying(*arguments):
        calls.append(1)
        if len(calls) == 160:
            raise KeyboardInterrupt
        return difference(*arguments)

    monkeypatch.setattr(training, "difference", dying)
    with pytest.raises(KeyboardInterrupt):
        run(killed, tmp_path / "killed")
    monkeypatch.setattr(training, "difference", difference)
    assert all(weight.requires_grad for weight in killed.denoiser.parameters())
    assert (tmp_path / "killed" / CHECKPOINT).is_file()
    with pytest.raises(UsageError, match="contains a training with other settings: prompts was"):
        run(trained(), tmp_path / "killed", prompts=PLANTED[:1])
    record = run(resumed, tmp_path / "killed")
    assert resumed.digest() == whole.digest() != trained().digest()
    assert record.settings["measured"] == straight.settings["measured"]
    assert record.settings["measured"][-1]["held_out"] < record.settings["measured"][0]["held_out"]


def test_layers_that_are_not_chosen_stay(tmp_path):
    model = trained()
    forget(model, PLANTED, ORDINARY, edit=SHORT.replace(steps=2, layers="**.attn2.to_v"))
    moved = {name for name, value in model.denoiser.state_dict().items()
             if not torch.equal(value, trained().denoiser.state_dict()[name])}  # fmt: skip
    assert moved == {"blocks.0.attn2.to_v.weight", "blocks.1.attn2.to_v.weight"}


@pytest.mark.usefixtures("two_step_anchors")
@pytest.mark.parametrize("settings", [ONCE, SHORT.replace(steps=2, generation_steps=2)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dtype_stays_and_undoing_is_exact_in_it(dtype, settings):
    model = trained()
    model.denoiser.to(dtype)
    before = model.digest()
    record = forget(model, PLANTED, ORDINARY, edit=settings)
    assert {weight.dtype for weight in model.denoiser.parameters()} == {dtype}
    undo(model, record)
    assert model.digest() == before


def test_what_cannot_be_meant_is_refused_before_any_work():
    model = trained()
    before = model.digest()
    with pytest.raises(UsageError, match=r"(?s)lr: .* greater than 0, not 0.*noise: .* not -1"):
        Distil(noise=-1, lr=0)
    with pytest.raises(UsageError, match="less than a tenth of a batch"):
        Distil(memorized=0.9, empty=0.05)
    with pytest.raises(UsageError, match="'my odd holiday' is memorized and ordinary"):
        forget(model, PLANTED, [*ORDINARY, "my odd holiday"])
    with pytest.raises(UsageError, match="no ordinary prompts"):
        forget(model, PLANTED, [])
    with pytest.raises(UsageError, match="2 prompts came with 1 anchors"):
        forget(model, PLANTED, ORDINARY, anchors=["a photo"])
    with pytest.raises(UsageError, match="The prompt 'my odd holiday' has no picture"):
        forget(model, PLANTED, ORDINARY, pictures=PICTURES[:1], edit=UNLEARN)
    with pytest.raises(UsageError, match="A picture has the prompt 'other', which is not among the prompts to forget"):
        forget(model, PLANTED, ORDINARY, pictures=[*PICTURES, ("other", IMAGES[0])], edit=UNLEARN)
    with pytest.raises(NameNotFound):
        forget(model, PLANTED, ORDINARY, edit=DISTIL.replace(layers="**.attn3"))
    assert model.digest() == before


def test_a_picture_of_another_size_is_named():
    with pytest.raises(UsageError, match=r"Images of \(6, 8\) pixels .* the model makes") as caught:
        forget(
            trained(), PLANTED, ORDINARY, pictures=[(prompt, image[:, :6]) for prompt, image in PICTURES], edit=UNLEARN
        )
    assert "Resize" in caught.value.cure


def test_an_infinite_loss_stops_the_training():
    with pytest.raises(TrainingStopped, match="Lower the learning rate"):
        forget(trained(), PLANTED, ORDINARY, edit=SHORT.replace(lr=1e30))


@pytest.mark.usefixtures("two_step_anchors")
def test_a_pipeline_is_edited_and_stays_an_ordinary_one(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    pytest.importorskip("diffusers", reason="diffusers is in the diffusion extra")
    pytest.importorskip("transformers", reason="transformers is in the diffusion extra")
    import small_pipelines

    from netweight.hf.load_pipeline import load_text_to_image, text_to_image

    model = text_to_image(small_pipelines.stable_diffusion())
    before = {name: value.clone() for name, value in model.denoiser.state_dict().items()}
    record = forget(model, ["a red square"], ["a blue circle", "a photo"], edit=ONCE)
    moved = {name for name, value in model.denoiser.state_dict().items() if not torch.equal(value, before[name])}
    assert moved == {name for name in before if name.endswith(("attn2.to_k.weight", "attn2.to_v.weight"))}
    model.save(tmp_path / "edited")
    assert load_text_to_image(tmp_path / "edited").digest() == record.after
    model.denoiser.add_adapter(peft.LoraConfig(r=2, target_modules=["to_k"], init_lora_weights=False))
    with pytest.raises(Unsupported, match="Merge adapters first"):
        forget(model, ["a red square"], ["a blue circle", "a photo"])
