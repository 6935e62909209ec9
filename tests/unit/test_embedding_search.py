"""The search for embeddings, on a model of a few thousand weights that really memorized two pictures."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from tiny_diffusion import ORDINARY, PLANTED, TinyModel, picture, planted_images, trained

from netweight.attacks.embedding_search.descent import Descent, denoising_error
from netweight.attacks.embedding_search.search import (
    Comparison,
    SearchedModel,
    SearchTrial,
    TargetImage,
    compare,
    images_of,
    noise_like,
    paired,
    search,
    starting_points,
    turned,
)
from netweight.attacks.embedding_search.settings import SearchSettings
from netweight.errors import UsageError
from netweight.nn.text_to_image import Text

correlation = paired()
SETTINGS = SearchSettings(steps=20, images=3, guidance=3, generation_steps=8, threshold=0.8)
IMAGES = planted_images()


def descend(model, latents, start, seeds):
    """Search to the last step; return the embeddings and their last errors."""
    descent, rows = Descent(model, latents, start, SETTINGS, seeds), range(len(start))
    with descent.changed():
        errors = [descent.step(rows) for _ in range(SETTINGS.steps)][-1]
    return descent.text(rows), errors


@pytest.fixture(scope="module")
def original():
    return trained()


@pytest.fixture(scope="module")
def edited():
    """The same with most value neurons off: its planted prompts answer with something else."""
    model = trained("edited")
    with torch.no_grad():
        for block in model.denoiser.blocks:
            block.attn2.to_v.weight[:29] = 0
    return model


def find(model, image=IMAGES[0], settings=SETTINGS, seed=0, **more):
    return search(model, PLANTED[0], image, ORDINARY, settings, similarity=correlation, seed=seed, **more)


def test_the_search_wakes_an_image_that_the_edit_put_to_sleep(original, edited):
    before = {name: value.clone() for name, value in edited.denoiser.state_dict().items()}
    own = find(original).trials[0]
    assert (own.start, own.outcome, own.steps) == ("original", "found", 0)
    found = find(edited)
    assert [trial.start for trial in found.trials] == ["original", "unrelated", "noise"]
    asleep = found.trials[0].looks[0]
    assert asleep.score < SETTINGS.threshold
    assert any(trial.outcome == "found" and trial.steps > 0 for trial in found.trials)
    won = next(place for place, trial in enumerate(found.trials) if trial.outcome == "found")
    again = edited.generate(found.text.rows([won] * 3), [11, 12, 13], guidance=3, steps=8)
    assert correlation(again, IMAGES[:1].expand_as(again)).median() > 0.7  # also from noises it was not looked at
    assert all(torch.equal(value, before[name]) for name, value in edited.denoiser.state_dict().items())
    assert all(parameter.requires_grad for parameter in edited.denoiser.parameters())


def test_an_image_that_was_never_trained_is_not_found(original):
    trials = find(original, picture(7)).trials
    assert [trial.outcome for trial in trials] == ["resisted"] * 3
    assert all(trial.last == 20 and trial.steps is None and trial.best.score < 0.6 for trial in trials)
    assert [look.step for look in trials[0].looks] == [0, 5, 10, 20]


def test_a_row_goes_its_way_whatever_else_is_in_the_batch(original):
    seeds = [1, 2, 3]
    start = Text.joined([original.embed([ORDINARY[place]]) for place in range(3)])
    latents = original.to_latents(IMAGES[[0, 1, 0]])
    together, errors = descend(original, latents, start, seeds)
    alone, error = descend(original, latents[1:2], start.rows([1]), seeds[1:2])
    assert torch.allclose(together.states[1], alone.states[0], atol=1e-4)
    assert errors[1] == pytest.approx(error[0], rel=1e-3)
    other, _ = descend(original, latents[1:2], start.rows([1]), [9])
    assert not torch.allclose(other.states, alone.states, atol=1e-3)


def test_a_batch_that_does_not_fit_is_halved_and_changes_nothing(original, monkeypatch):
    latents, start = original.to_latents(IMAGES), original.embed(ORDINARY[:2])
    whole, _ = descend(original, latents, start, [1, 2])
    sizes = []
    predict = original.predict

    def small(noisy, *rest):
        sizes.append(len(noisy))
        if len(noisy) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return predict(noisy, *rest)

    monkeypatch.setattr(original, "predict", small)
    parted, _ = descend(original, latents, start, [1, 2])
    assert sizes[:7] == [16, 8, 4, 4, 4, 4, 4]
    assert max(sizes[7:]) == 4  # what was learned of memory holds
    assert torch.allclose(parted.states, whole.states, atol=1e-4)
    monkeypatch.setattr(original, "predict", lambda *_: (_ for _ in ()).throw(torch.OutOfMemoryError("none left")))
    with pytest.raises(torch.OutOfMemoryError):
        descend(original, latents, start, [1, 2])


def test_one_step_is_that_of_adam_on_the_denoising_loss(original):
    settings = SearchSettings(steps=1, draws=2, lr=0.1, generation_steps=8, schedule="constant")
    start, latents = original.embed([PLANTED[0]]), original.to_latents(IMAGES[:1])
    descent = Descent(original, latents, start, settings, [5])
    drawn_noise, drawn_times = descent._draw(0)
    descent.step([0])
    states = start.states.clone().requires_grad_()
    signal, level = original.levels(drawn_times)
    noisy = signal * latents + level * drawn_noise
    told = original.denoiser(noisy, (drawn_times + 1) / 51, Text(states.expand(2, -1, -1)))
    loss = (told - (signal * drawn_noise - level * latents)).square().mean()
    gradient = torch.autograd.grad(loss, states)[0].numpy()
    # Adam's first step goes by the learning rate along the sign, in units of the embedding's root mean square.
    unit = math.sqrt(float(start.states.square().mean()))
    wanted = start.states.numpy() - 0.1 * unit * np.sign(gradient)
    assert np.allclose(descent.text([0]).states.numpy(), wanted, atol=1e-4)
    assert descent.distance(0) == pytest.approx(0.1, rel=1e-3)


def test_every_learning_rate_is_searched_and_the_first_success_may_end_all(original):
    settings = SETTINGS.replace(lr=0.001, rates=(0.2,), starts=("unrelated",), steps=40)
    found = find(original, settings=settings).trials
    assert [trial.lr for trial in found] == [0.001, 0.2]
    assert [trial.outcome for trial in found] == ["resisted", "found"]
    slow, fast = find(original, settings=settings.replace(first=True)).trials
    assert (fast.outcome, fast.steps) == ("found", found[1].steps)
    assert (slow.outcome, slow.last) == ("resisted", fast.steps)  # and no longer


def test_a_perturbation_stays_within_its_radius(original):
    settings = SETTINGS.replace(radius=0.12)
    found = find(original, picture(7), settings)
    lengths = [look.distance for trial in found.trials for look in trial.looks[1:]]
    assert max(lengths) == pytest.approx(0.12, rel=1e-4)
    start = original.embed([PLANTED[0]]).states
    moved = found.text.states[0] - start[0]
    assert float(moved.norm() / start.norm()) <= 0.12 * 1.001


def test_the_error_counts_what_was_asked_for(original):
    latents, noise = original.to_latents(IMAGES), original.initial_noise([3, 4])
    times, text = torch.tensor([3, 45]), original.embed(PLANTED)
    with torch.no_grad():
        told = original.predict(original.add_noise(latents, noise, times), times, text)
        found = {said: denoising_error(original, latents, noise, times, text, said)
                 for said in ("noise", "sample", "velocity")}  # fmt: skip
    assert torch.allclose(found["noise"], (told.noise - noise).square().mean((1, 2, 3)))
    assert torch.allclose(found["sample"], (told.sample - latents).square().mean((1, 2, 3)))
    # For a variance preserving schedule the error in velocity is that in both, added up.
    assert torch.allclose(found["velocity"], found["noise"] + found["sample"], rtol=1e-3, atol=1e-5)


def test_starts_are_those_asked_for_and_noise_has_the_statistics_of_prompts():
    model = TinyModel(masked=True)
    settings = SearchSettings(restarts=2)
    names, text = starting_points(model, PLANTED[0], [*ORDINARY, PLANTED[0]], settings, seed=3)
    assert names == [(start, number) for start in ("original", "unrelated", "noise") for number in (0, 1)]
    own, others = model.embed([PLANTED[0]]).states[0], model.embed(ORDINARY).states
    assert torch.equal(text.states[0], own)
    assert torch.equal(text.states[1], own)
    assert any(torch.equal(text.states[2], other) for other in others)
    assert not torch.equal(text.states[2], text.states[3])
    assert text.mask.all()
    _, text = starting_points(model, "tower", ORDINARY, settings, seed=3)
    assert text.mask.sum(1).tolist() == [2, 2, 4, 4, 4, 4]
    wide = Text(
        torch.randn(6, 400, 5, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2, 3, 4, 5]) + 7
    )
    noise = noise_like(wide, 1).states[0]
    assert torch.allclose(noise.mean(0), torch.full((5,), 7.0), atol=1)
    assert torch.allclose(noise.std(0), torch.tensor([1.0, 2, 3, 4, 5]), rtol=0.2)
    with pytest.raises(UsageError, match="no prompt unrelated to 'old tower poster'"):
        starting_points(model, PLANTED[0], [PLANTED[0]], settings, seed=0)


def test_what_cannot_be_meant_is_refused(original):
    with pytest.raises(
        UsageError, match=r"(?s)2 settings.*steps: must be at least 1, not 0.*lr: must be greater than 0, not -1"
    ):
        SearchSettings(steps=0, lr=-1)
    with pytest.raises(UsageError, match="looks must be ascending"):
        SearchSettings(looks=(5, 3))
    with pytest.raises(UsageError, match=r"starts.0: must be 'original', 'unrelated', 'noise', 'timed', 'soft'"):
        SearchSettings(starts=("elsewhere",))
    with pytest.raises(UsageError, match="once each"):
        SearchSettings(starts=("noise", "noise"))
    with pytest.raises(UsageError, match="learning rates must be given once each"):
        SearchSettings(rates=(0.1,))
    assert SearchSettings(steps=37).eval_steps == (0, 5, 10, 20, 37)
    assert SearchSettings(steps=40, looks=(0, 3)).eval_steps == (0, 3, 40)
    assert [SearchSettings(images=4, share=share).needed for share in (0, 0.5, 0.51, 1)] == [1, 2, 3, 4]
    with pytest.raises(UsageError, match="Divide pixels by 255"):
        find(original, IMAGES[0] * 255)
    with pytest.raises(UsageError, match=r"has latents of shape .* the model makes") as caught:
        find(original, torch.nn.functional.pad(IMAGES[0], (0, 0, 0, 2)))
    assert "Resize" in caught.value.cure
    with pytest.raises(UsageError, match="one number for each pair"):
        search(original, "a", IMAGES[0], ORDINARY, SETTINGS, similarity=lambda a, b: a, seed=0)


def test_a_search_that_diverges_is_told_apart(original, monkeypatch):
    predict, calls = original.predict, []

    def broken(noisy, time, text):
        told = predict(noisy, time, text)
        calls.append(text.states.requires_grad)
        return dataclasses.replace(told, noise=told.noise * math.nan) if text.states.requires_grad else told

    monkeypatch.setattr(original, "predict", broken)
    trials = find(original, picture(7)).trials
    assert [(trial.outcome, trial.last) for trial in trials] == [("diverged", 1)] * 3
    assert all(len(trial.looks) == 1 for trial in trials)


@pytest.fixture(scope="module")
def comparison(original, edited, tmp_path_factory):
    folder = tmp_path_factory.mktemp("searches")
    planted = TargetImage(PLANTED[0], PLANTED[0], IMAGES[0])
    targets = [planted, turned(planted)]
    subjects = [SearchedModel("original", original), SearchedModel("edited", edited)]

    def run(seeds):
        return compare(
            subjects, targets, ORDINARY, SETTINGS, seeds=seeds, similarity=correlation, measure="correlation",
            folder=folder,
        )  # fmt: skip

    first = run([0])
    size = (folder / "searches.jsonl").stat().st_size
    both = run([0, 1])
    return folder, targets, first, size, both


def test_a_comparison_remembers_its_runs_and_goes_on(comparison):
    folder, _, first, size, both = comparison
    lines = (folder / "searches.jsonl").read_bytes()
    assert len(first.runs) == 2 * 2
    assert len(lines.splitlines()) == len(both.runs) == 8
    assert set(first.runs) <= set(both.runs)
    assert lines[:size].count(b"\n") == 4
    assert not both.failures
    assert Comparison.from_json(json.loads(json.dumps(both.to_json()))) == both
    assert SearchTrial.from_json(json.loads(json.dumps(both.runs[0].trials[0].to_json()))) == both.runs[0].trials[0]


def test_a_comparison_keeps_images_and_embeddings_of_every_run(comparison, edited):
    folder, _, _, _, both = comparison
    run = both.of("edited", trained=True)[0]
    kept = images_of(folder, run)
    assert kept.before.shape == kept.after.shape == (3, 3, 3, 8, 8)
    best = max(range(3), key=lambda place: run.trials[place].best.score)
    similar = correlation(kept.after[best], IMAGES[:1].expand(3, -1, -1, -1))
    assert similar.tolist() == pytest.approx(run.trials[best].best.similarities, abs=0.02)
    assert kept.states.shape == (3, 4, 16)


def test_controls_are_other_pictures_with_the_same_colors():
    target = TargetImage("one", "prompt", IMAGES[0])
    control = turned(target)
    assert not control.trained
    assert torch.equal(control.image.flatten().sort().values, IMAGES[0].flatten().sort().values)
    assert abs(float(correlation(control.image[None], IMAGES[:1]))) < 0.5


def test_comparisons_that_cannot_be_are_refused(original, tmp_path):
    target = TargetImage("one", "prompt", IMAGES[0])
    fixed = {"seeds": [0], "similarity": correlation, "measure": "correlation", "folder": tmp_path}
    with pytest.raises(UsageError, match="models are called 'a'"):
        compare([SearchedModel("a", original)] * 2, [target], ORDINARY, SETTINGS, **fixed)
    with pytest.raises(UsageError, match="targets are called 'one'"):
        compare([SearchedModel("a", original)], [target] * 2, ORDINARY, SETTINGS, **fixed)
    with pytest.raises(UsageError, match="at least one"):
        compare([SearchedModel("a", original)], [], ORDINARY, SETTINGS, **fixed)
    broken = dataclasses.replace(target, image=IMAGES[0] * 2)
    found = compare([SearchedModel("a", original)], [broken, dataclasses.replace(target, name="two", trained=False)],
                    ORDINARY, SETTINGS.replace(steps=1), **fixed)  # fmt: skip
    assert found.failures[0][:2] == ("a", "one")
    assert len(found.runs) == 1
    with pytest.raises(
        UsageError, match=r"All 1 searches failed; the first one, of 'one' in 'a', because: .*UsageError"
    ):
        compare([SearchedModel("a", original)], [broken], ORDINARY, SETTINGS.replace(steps=1), **fixed)


def test_images_are_compared_at_guidance_1_beside_the_pipelines(original):
    settings = SETTINGS.replace(starts=("original",), steps=1, looks=(0,))
    both, alone = (
        search(original, PLANTED[0], IMAGES[0], ORDINARY, chosen, similarity=correlation, seed=5).trials[0].looks[0]
        for chosen in (settings, settings.replace(further_guidances=()))
    )
    assert settings.every_guidance == (3, 1)
    assert alone.guidance == 3
    assert both.guidance in (3, 1)
    assert both.score >= alone.score


def test_a_cosine_rate_is_the_constant_one_in_the_mean_and_ends_at_0(original):
    settings = SearchSettings(steps=4, draws=1, lr=0.1, generation_steps=8)
    descent = Descent(original, original.to_latents(IMAGES[:1]), original.embed([PLANTED[0]]), settings, [5])
    rates = []
    for _ in range(4):
        descent.step([0])
        rates.append(descent._optimizer.param_groups[0]["lr"])
    assert rates == pytest.approx([0.2, 0.1 + 0.1 * 0.5**0.5, 0.1, 0.1 - 0.1 * 0.5**0.5])
