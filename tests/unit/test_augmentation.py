"""Crops and mirror images: every one is a shift of its image, mirrored or not, and all of them occur."""

import pytest
import torch
import torch.nn.functional as F

from netweight.data.images import crop_and_flip
from netweight.errors import UsageError


def possible(image, padding, fill):
    """All shifts of an image by up to the padding, each as it is and mirrored."""
    *_, height, width = image.shape
    padded = torch.stack([F.pad(plane, [padding] * 4, value=float(f)) for plane, f in zip(image, fill, strict=True)])
    shifts = range(2 * padding + 1)
    crops = [padded[:, y : y + height, x : x + width] for y in shifts for x in shifts]
    return [crop.flip(-1) if mirror else crop for crop in crops for mirror in (False, True)]


@pytest.mark.parametrize(
    ("dtype", "fill"), [(torch.uint8, (0, 0, 0)), (torch.float32, (-2.5, 0.0, 1.0)), (torch.float64, (0, 0, 0))]
)
def test_every_shift_and_mirror_occurs_and_nothing_else(dtype, fill):
    generator = torch.Generator().manual_seed(0)
    image = torch.randint(1, 255, (3, 5, 7), generator=generator).to(dtype)
    known = torch.stack(possible(image, 2, fill))
    batch = image.expand(2000, -1, -1, -1).clone()
    result = crop_and_flip(batch, generator, padding=2, fill=torch.tensor(fill).view(3, 1, 1))
    assert torch.equal(batch, image.expand_as(batch))
    assert result.dtype == dtype
    same = (result[:, None] == known[None]).flatten(2).all(2)
    assert same.sum(1).tolist() == [1] * 2000
    assert same.any(0).all()


def test_the_generator_decides():
    images = torch.rand(16, 3, 32, 32)
    first, second, third = (crop_and_flip(images, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, second)
    assert not torch.equal(first, third)


def test_no_padding_mirrors_only():
    images = torch.rand(64, 1, 8, 8)
    result = crop_and_flip(images, torch.Generator().manual_seed(0), padding=0)
    kept = (result == images).flatten(1).all(1)
    assert 0 < int(kept.sum()) < 64
    assert torch.equal(result[~kept], images[~kept].flip(-1))


def test_other_shapes_are_refused():
    with pytest.raises(UsageError, match=r"\(3, 8, 8\)"):
        crop_and_flip(torch.rand(3, 8, 8), torch.Generator())
