"""Images before and after an edit: painted once, counted by hand, told without a word too much; copies by region."""

import json

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("scipy", reason="scipy is in the evidence extra")

from tiny_diffusion import ORDINARY, PLANTED, picture, planted_images, trained

from netweight.errors import CorruptBlob, UsageError
from netweight.methods.forget.images import GeneratedImages, generate_images
from netweight.methods.forget.report import (
    TREATMENT,
    ImagesConfig,
    image_findings,
    images,
    verdicts,
)
from netweight.methods.forget.settings import GenerationSettings
from netweight.metrics.copies import MemorizedImage
from netweight.metrics.region_copies import foreground_by_color, region_copies, region_findings
from netweight.report.audit import audits_of, missing_audits

SETTINGS = GenerationSettings(seeds=(3, 4), guidance=3, steps=4)


def test_the_treatment_names_its_audits_and_all_are_written():
    assert list(audits_of(TREATMENT)) == ["detection", "membership", "neurons", "images"]  # the search is an attack's
    assert missing_audits(TREATMENT, ["detection", "membership", "neurons", "images"]) == ("embedding search",)
    assert audits_of(TREATMENT)["images"] is images


def test_images_are_painted_once_whatever_the_batch_and_a_second_call_takes_them_from_the_folder(tmp_path, monkeypatch):
    model = trained()
    prompts = [*PLANTED, *ORDINARY[:3]]
    straight = generate_images(model, prompts, SETTINGS)
    expected = model.generate(model.embed([PLANTED[1]] * 2), [3, 4], guidance=3, steps=4)
    assert (straight[PLANTED[1]] - expected).abs().max() <= 0.5 / 255 + 1e-6
    calls, generate = [], model.generate
    monkeypatch.setattr(model, "generate", lambda text, *a, **k: calls.append(len(text)) or generate(text, *a, **k))
    small = GenerationSettings(seeds=(3, 4), guidance=3, steps=4, rows=3)
    first = generate_images(model, prompts[:2], small, folder=tmp_path)
    assert calls == [2, 2]  # one prompt at a time: three rows hold two seeds of one
    again = generate_images(model, prompts, small, folder=tmp_path)
    assert calls == [2] * 5
    assert list(again) == prompts
    for prompt in prompts:
        assert torch.allclose(again[prompt], straight[prompt], atol=1.01 / 255)
    assert all(torch.equal(again[prompt], first[prompt]) for prompt in first)
    generate_images(model, prompts[:1], small, setting="neurons off", folder=tmp_path)
    assert len(calls) == 6
    for file in (tmp_path / "images").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    with pytest.raises(CorruptBlob):
        generate_images(model, prompts, small, folder=tmp_path)


def painted_by_hand():
    """Two prompts of three images: one is suppressed and diverted once, the other is copied once more."""
    one, two = planted_images()
    other = picture(7)
    memorized = [MemorizedImage(PLANTED[0], "verbatim", one), MemorizedImage(PLANTED[1], "verbatim", two)]
    before = {PLANTED[0]: torch.stack([one] * 3), PLANTED[1]: torch.stack([two, two, other])}
    after = {PLANTED[0]: torch.stack([other, two, other]), PLANTED[1]: torch.stack([two, other, other])}
    plain = {"a red": torch.stack([picture(11)] * 3), "a blue": torch.stack([picture(12)] * 3)}
    changed = {"a red": plain["a red"], "a blue": torch.stack([picture(11), picture(12), picture(12)])}
    return GeneratedImages(memorized, list(plain), before | plain, after | changed, {"random neurons": before})


class ByBrightness:
    name = "brightness"

    def alignment(self, images, prompts):
        assert len(images) == len(prompts)
        return images.mean((1, 2, 3))


def test_findings_hold_what_was_counted_by_hand():
    made = painted_by_hand()
    findings = image_findings(made, ImagesConfig(alignment=ByBrightness()), seed=0)
    found = {finding.name: finding for finding in findings}
    assert (found["prompts suppressed"].value, found["prompts suppressed"].n) == (1, 2)
    own = found["NCC, seeds that copy the training image, verbatim"]
    assert (own.value, own.baseline, own.n) == (pytest.approx(1 / 6), pytest.approx(5 / 6), 6)
    assert found["NCC, seeds that copy any memorized image, verbatim"].value == pytest.approx(2 / 6)
    control = found["NCC, seeds that copy the training image, verbatim, random neurons"]
    assert (control.value, control.better) == (pytest.approx(5 / 6), None)
    assert found["NCC, ordinary prompts, to the unedited generation"].value == pytest.approx(1)
    assert found["NCC, ordinary prompts, images that copy any memorized image"].value == 0
    aligned = found["brightness, memorized prompts, alignment"]
    assert aligned.value == pytest.approx(float(torch.cat([made.edited[p] for p in PLANTED]).mean()), abs=1e-5)
    assert aligned.baseline == pytest.approx(float(torch.cat([made.original[p] for p in PLANTED]).mean()), abs=1e-5)
    assert not any(finding.passed is False for finding in findings)
    json.dumps([finding.to_json() for finding in findings])


def test_verdicts_say_suppressed_for_this_prompt_and_never_erased():
    told = verdicts(painted_by_hand(), ImagesConfig())
    assert told[PLANTED[0]] == (
        "holds",
        "Suppressed for this prompt: 0 of 3 images copy it, 3 before; 1 of 3 images copy another memorized one.",
    )
    assert told[PLANTED[1]] == ("broken", "Not suppressed: 1 of 3 images copy it, 2 before.")
    nothing = painted_by_hand()
    never = GeneratedImages(nothing.memorized, (), nothing.edited, nothing.edited)
    assert verdicts(never, ImagesConfig())[PLANTED[0]][1].startswith("Not copied before the edit")


# ---- regions ----


@given(top=st.integers(1, 5), left=st.integers(1, 5), seed=st.integers(0, 99))
def test_an_object_on_a_plain_ground_is_the_foreground(top, left, seed):
    image = torch.full((3, 12, 12), 0.5)
    drawn = torch.rand(3, 5, 5, generator=torch.Generator().manual_seed(seed)) * 0.1
    image[:, top : top + 5, left : left + 5] = drawn
    mask = foreground_by_color(image)
    expected = numpy.zeros((12, 12), bool)
    expected[top : top + 5, left : left + 5] = True
    assert numpy.array_equal(mask.numpy(), expected)


def with_object(object_seed, ground_seed):
    """A textured object on a ground of little texture."""
    image = 0.9 + 0.05 * torch.rand(3, 12, 12, generator=torch.Generator().manual_seed(ground_seed))
    image[:, 3:9, 3:9] = 0.4 * torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(object_seed))
    return image


def test_a_copied_foreground_on_another_ground_is_seen():
    own = MemorizedImage("one", "verbatim", with_object(1, 2))
    made = torch.stack([own.image, with_object(1, 3), with_object(4, 2), with_object(5, 6)])
    found = region_copies(own, made)
    assert found.share == pytest.approx(36 / 144)
    assert found.copies() == {"both": 1, "foreground alone": 1, "background alone": 1, "neither": 1}
    inside = found.foreground[1], found.foreground[3]
    pixels = [image[:, 3:9, 3:9].flatten().double().numpy() for image in (own.image, made[1], made[3])]
    assert inside == pytest.approx([numpy.corrcoef(pixels[0], other)[0, 1] for other in pixels[1:]], abs=1e-6)
    fore, back = region_findings([found])
    assert (fore.name, fore.value, fore.n) == ("NCC, images that copy the foreground, verbatim", 0.5, 4)
    assert back.value == 0.5
    whole = MemorizedImage("flat", "verbatim", torch.full((3, 12, 12), 0.5))
    alone = region_findings([region_copies(whole, made)])
    assert [finding.value for finding in alone] == [None, None]
    mixed = region_findings([found, region_copies(whole, made)])[0]
    assert (mixed.n, mixed.detail["without two regions"]) == (4, ["flat"])
    given_mask = torch.zeros(12, 12, dtype=torch.bool)
    given_mask[:6] = True
    assert region_copies(own, made, foreground=given_mask).share == 0.5


def test_nonsense_is_refused():
    with pytest.raises(UsageError, match="has no foreground"):
        foreground_by_color(torch.zeros(12, 12))
    with pytest.raises(UsageError, match="No prompt was measured"):
        region_findings([])
    with pytest.raises(UsageError, match="does not fit an image"):
        region_copies(MemorizedImage("one", "verbatim", with_object(1, 2)), torch.zeros(1, 3, 12, 12),
                      foreground=torch.ones(5, 5))  # fmt: skip
    with pytest.raises(UsageError, match="are not different"):
        GenerationSettings(seeds=(1, 1))
    with pytest.raises(UsageError, match="no prompt"):
        generate_images(trained(), [], SETTINGS)
