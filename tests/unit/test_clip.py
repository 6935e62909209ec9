"""CLIP on a small random model: what transformers itself computes, and refusals."""

import pytest
import torch

pytest.importorskip("transformers", reason="CLIP is read with transformers")

import transformers
from small_clip import small_clip

from netweight import compress_folder
from netweight.errors import UsageError
from netweight.metrics.descriptors import Clip
from netweight.metrics.images import frechet_distance

PROMPTS = ["a red circle", "a blue square on gray ground"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_clip(tmp_path_factory.mktemp("clip") / "small-clip", PROMPTS)


def test_alignment_is_what_the_model_says_of_images_and_prompts(folder):
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]
    model = transformers.CLIPModel.from_pretrained(folder)
    given = transformers.CLIPTokenizer.from_pretrained(folder)(PROMPTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        said = model(pixel_values=(images - mean) / deviation, **given)
    clip = Clip(folder)
    assert clip.name == "CLIP small-clip"
    found = clip.alignment(images, PROMPTS)
    torch.testing.assert_close(found, (said.image_embeds * said.text_embeds).sum(1), atol=1e-5, rtol=1e-4)


def test_a_compressed_folder_says_the_same(folder, tmp_path):
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    compress_folder(folder, tmp_path / "net")
    assert torch.equal(Clip(tmp_path / "net").alignment(images, PROMPTS), Clip(folder).alignment(images, PROMPTS))


def test_wide_images_lose_their_margins_and_large_ones_shrink(folder):
    clip = Clip(folder)
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(1))
    wide = torch.nn.functional.pad(images, (5, 5, 0, 0))
    torch.testing.assert_close(clip(wide), clip(images))
    flat = torch.full((1, 3, 16, 16), 0.3)
    torch.testing.assert_close(clip(flat.repeat(1, 1, 3, 3)), clip(flat), atol=1e-5, rtol=1e-4)


def test_its_features_measure_distances(folder):
    images = torch.rand(9, 3, 16, 16, generator=torch.Generator().manual_seed(2))
    clip = Clip(folder)
    assert clip.name == "CLIP small-clip"
    assert frechet_distance(clip(images), clip(images * 0.5)) > 0


def test_refusals(folder, tmp_path):
    with pytest.raises(UsageError, match=r"config\.json"):
        Clip(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match="cannot be opened"):
        Clip(tmp_path)
    clip = Clip(folder)
    with pytest.raises(UsageError, match="prompts"):
        clip.alignment(torch.zeros(1, 3, 16, 16), PROMPTS)
    with pytest.raises(UsageError, match="no prompt"):
        clip.texts([])
