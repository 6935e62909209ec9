"""What copies are measured by: against numpy, scipy and torchmetrics, and on images whose answer is known."""

import hashlib

import numpy
import pytest
import scipy.linalg
import torch
from hypothesis import given
from hypothesis import strategies as st

from netweight.errors import UnsafeInput, UsageError
from netweight.metrics.copies import (
    MemorizedImage,
    copies_of_prompt,
    copy_findings,
    diversity,
    similarity_to_memorized,
)
from netweight.metrics.descriptors import CenteredPixels, TorchScriptDescriptor, described, similarity, sscd
from netweight.metrics.images import frechet_distance, kernel_distance


def images(n, seed=0, side=6):
    return torch.rand(n, 3, side, side, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 999), n=st.integers(1, 4), m=st.integers(1, 4))
def test_similarity_of_pixels_is_numpys_correlation(seed, n, m):
    a, b = images(n, seed), images(m, seed + 1)
    found = similarity(CenteredPixels(), a, b)
    both = numpy.corrcoef(a.flatten(1).double().numpy(), b.flatten(1).double().numpy())
    assert found.numpy() == pytest.approx(numpy.atleast_2d(both)[:n, n:], abs=1e-9)


@given(seed=st.integers(0, 999), gain=st.floats(0.1, 1), shift=st.floats(-0.5, 0.5))
def test_brightness_and_contrast_do_not_hide_a_copy(seed, gain, shift):
    image = images(1, seed)
    assert float(similarity(CenteredPixels(), image * gain + shift, image)) == pytest.approx(1, abs=1e-5)


def test_a_mask_looks_at_its_part_alone():
    where = torch.zeros(6, 6, dtype=torch.bool)
    where[:3] = True
    image, other = images(2)
    mixed = torch.where(where, image, other)
    assert float(similarity(CenteredPixels(where), mixed[None], image[None])) == pytest.approx(1)
    assert float(similarity(CenteredPixels(), mixed[None], image[None])) < 0.9
    assert CenteredPixels(where).name != CenteredPixels().name
    with pytest.raises(UsageError, match="mask"):
        CenteredPixels(where)(images(1, side=8))


def test_an_image_of_one_color_is_like_nothing():
    flat = torch.full((1, 3, 6, 6), 0.25)
    assert similarity(CenteredPixels(), torch.cat([flat, images(1)]), flat).tolist() == [[0], [0]]


@given(seed=st.integers(0, 999), n=st.integers(2, 6))
def test_diversity_is_the_median_of_pairs(seed, n):
    drawn = images(n, seed)
    both = numpy.corrcoef(drawn.flatten(1).double().numpy())
    pairs = [both[i, j] for i in range(n) for j in range(i)]
    assert diversity(CenteredPixels(), drawn) == pytest.approx(numpy.median(pairs), abs=1e-9)


def planted():
    a, b, c = images(3, seed=7)
    where = torch.ones(6, 6, dtype=torch.bool)
    where[2:4, 2:4] = False
    return [
        MemorizedImage("one", "verbatim", a),
        MemorizedImage("two", "verbatim", b),
        MemorizedImage("three", "template", c, where),
    ]


def test_a_prompt_that_is_diverted_to_another_picture_is_no_copy_of_its_own_but_a_match():
    one, two, three = planted()
    drawn = torch.stack([one.image, two.image, images(1, seed=9)[0]])
    found = copies_of_prompt(one, drawn, [one, two, three], unedited=torch.stack([one.image] * 3))
    assert found.to_image[0] == pytest.approx(1)
    assert found.to_unedited == pytest.approx(found.to_image)
    assert found.nearest_prompt[:2] == ("one", "two")
    assert (found.copies(), found.any_match()) == (1, 2)
    assert found.diversity == pytest.approx(diversity(CenteredPixels(), drawn))


def test_a_template_is_compared_where_it_stays():
    three = planted()[2]
    recolored = torch.where(three.where, three.image, torch.tensor([1.0, 0, 0])[:, None, None])
    found = copies_of_prompt(three, recolored[None], planted())
    assert found.to_image[0] == pytest.approx(1)
    assert found.diversity is None


def test_findings_keep_kinds_apart_and_count_seeds():
    everything = planted()
    rows = [copies_of_prompt(each, torch.stack([each.image, images(1, seed=3)[0]]), everything) for each in everything]
    found = {each.name: each for each in copy_findings(rows, measure="NCC")}
    assert not any("unedited" in name for name in found)
    verbatim = found["NCC, seeds that copy the training image, verbatim"]
    assert (verbatim.value, verbatim.n, verbatim.detail["copies"]) == (0.5, 4, 2)
    assert verbatim.ci95[0] < 0.5 < verbatim.ci95[1]
    assert found["NCC, seeds that copy the training image, template"].n == 2
    middle = found["NCC, to the training image, verbatim"]
    expected = [float(numpy.median(row.to_image)) for row in rows[:2]]
    assert middle.value == pytest.approx(numpy.median(expected))
    assert middle.detail["MAD"] == pytest.approx(numpy.median(numpy.abs(expected - numpy.median(expected))))


@pytest.mark.parametrize(
    "call",
    [
        lambda: copy_findings([], measure="NCC"),
        lambda: similarity_to_memorized(images(1), []),
        lambda: diversity(CenteredPixels(), images(1)),
        lambda: copies_of_prompt(planted()[0], images(2), [], unedited=images(3)),
        lambda: similarity(CenteredPixels(), images(1), images(1, side=8)),
        lambda: described(CenteredPixels(), torch.full((1, 3, 2, 2), torch.nan)),
        lambda: described(CenteredPixels(), torch.zeros(3, 2, 2)),
        lambda: frechet_distance(torch.zeros(1, 2), torch.zeros(5, 2)),
        lambda: kernel_distance(torch.zeros(2, 2), torch.zeros(5, 2)),
        lambda: frechet_distance(torch.zeros(5, 2), torch.full((5, 2), torch.inf)),
    ],
)
def test_nonsense_is_refused_with_its_cure(call):
    with pytest.raises(UsageError) as caught:
        call()
    assert caught.value.cure


class Means(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean((2, 3))


@pytest.fixture
def network(tmp_path):
    path = tmp_path / "means.pt"
    torch.jit.trace(Means(), torch.zeros(1, 3, 320, 320)).save(str(path))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_network_is_opened_by_its_digest_alone(network, tmp_path):
    path, sha256 = network
    copying = sscd(path, sha256.upper())
    assert (copying.name, copying.sha256) == ("SSCD", sha256)
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    gray = torch.full((2, 3, 16, 16), 0.5)
    torch.testing.assert_close(copying(gray), ((0.5 - mean) / deviation).expand(2, 3))
    other = TorchScriptDescriptor(path, sha256, name="means", side=8, mean=(0, 0, 0), deviation=(1, 1, 1))
    torch.testing.assert_close(other(gray), torch.full((2, 3), 0.5))
    with pytest.raises(UnsafeInput, match="not opened"):
        sscd(path, "0" * 64)
    with pytest.raises(UsageError, match="no TorchScript file"):
        sscd(tmp_path / "nowhere.pt", sha256)
    text = tmp_path / "text.pt"
    text.write_text("no network")
    with pytest.raises(UsageError, match="TorchScript"):
        sscd(text, hashlib.sha256(b"no network").hexdigest())


def features(n, width, seed, shift=0.0):
    return shift + torch.randn(n, width, generator=torch.Generator().manual_seed(seed))


@given(seed=st.integers(0, 999), n=st.integers(9, 14), m=st.integers(9, 14), width=st.integers(1, 5))
def test_frechet_distance_is_the_formula_with_scipys_root(seed, n, m, width):
    a, b = features(n, width, seed).double().numpy(), features(m, width, seed + 1, 0.3).double().numpy()
    one, other = (numpy.cov(values, rowvar=False).reshape(width, width) for values in (a, b))
    root = scipy.linalg.sqrtm(one @ other)
    expected = numpy.sum((a.mean(0) - b.mean(0)) ** 2) + numpy.trace(one + other - 2 * numpy.real(root))
    assert frechet_distance(torch.tensor(a), torch.tensor(b)) == pytest.approx(expected, abs=1e-6)


def test_distances_are_torchmetrics():
    fid = pytest.importorskip("torchmetrics.image.fid", reason="torchmetrics is in the evidence extra")
    kid = pytest.importorskip("torchmetrics.image.kid")

    class Given(torch.nn.Module):
        num_features = 4

        def forward(self, batch):
            return batch.flatten(1)[:, :4]

    a, b = features(40, 4, 0), features(50, 4, 1, 0.5)
    metric = fid.FrechetInceptionDistance(feature=Given(), normalize=True, input_img_size=(1, 2, 2))
    for values, real in ((a, True), (b, False)):
        metric.update(values.reshape(-1, 1, 2, 2), real=real)
    assert frechet_distance(a, b) == pytest.approx(float(metric.compute()), rel=1e-4)
    expected = kid.poly_mmd(a.double(), features(40, 4, 2).double())
    assert kernel_distance(a, features(40, 4, 2)).estimate == pytest.approx(float(expected), abs=1e-9)


def test_the_frechet_distance_of_a_set_to_itself_is_zero_with_few_images_too():
    few = features(4, 9, 0)
    assert frechet_distance(few, few) == pytest.approx(0, abs=1e-6)


def test_kernel_distance_and_its_jackknife_by_hand():
    a, b = features(6, 3, 0), features(5, 3, 1, 0.5)

    def kernel(x, y):
        return (float(x.double() @ y.double()) / 3 + 1) ** 3

    def estimate(x, y):
        within = [sum(kernel(p, q) for p in z for q in z if p is not q) / (len(z) * (len(z) - 1)) for z in (x, y)]
        return sum(within) - 2 * sum(kernel(p, q) for p in x for q in y) / (len(x) * len(y))

    left, right = list(a), list(b)
    found = kernel_distance(a, b)
    assert found.estimate == pytest.approx(estimate(left, right))
    gone_left = [estimate(left[:i] + left[i + 1 :], right) for i in range(6)]
    gone_right = [estimate(left, right[:i] + right[i + 1 :]) for i in range(5)]
    deviation = (5 * numpy.var(gone_left) + 4 * numpy.var(gone_right)) ** 0.5
    assert found.high - found.estimate == pytest.approx(1.959964 * deviation, rel=1e-5)


def test_the_kernel_distances_interval_covers():
    covered = sum(
        (found := kernel_distance(features(40, 4, seed), features(40, 4, 1000 + seed))).low <= 0 <= found.high
        for seed in range(100)
    )
    assert covered >= 88
