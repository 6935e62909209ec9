"""Image metrics against scikit-image, brute force and a plain reading of their definitions; PNG files read back."""

import itertools

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from netweight.errors import MissingExtra, UnsafeInput, UsageError
from netweight.metrics.images import image_findings, lpips, match_images, psnr, ssim, write_png


def pictures(n, c=1, h=16, w=13, seed=0, noise=0.1):
    generator = torch.Generator().manual_seed(seed)
    references = torch.rand(n, c, h, w, generator=generator)
    return (references + noise * torch.randn(n, c, h, w, generator=generator)).clamp(0, 1), references


@given(seed=st.integers(0, 1000), c=st.sampled_from([1, 3]), noise=st.sampled_from([0.0, 0.01, 0.5]))
def test_psnr_and_ssim_are_scikit_images(seed, c, noise):
    metrics = pytest.importorskip("skimage.metrics", reason="scikit-image is in the evidence extra")
    images, references = pictures(3, c, seed=seed, noise=noise)
    found = zip(psnr(images, references), ssim(images, references), strict=True)
    arrays = zip(images.double().numpy(), references.double().numpy(), strict=True)
    for (image, reference), (decibels, likeness) in zip(arrays, found, strict=True):
        if noise:
            assert float(decibels) == pytest.approx(metrics.peak_signal_noise_ratio(reference, image, data_range=1))
        else:
            assert decibels == torch.inf
        expected = metrics.structural_similarity(
            reference,
            image,
            data_range=1,
            channel_axis=0,
            gaussian_weights=True,
            sigma=1.5,
            use_sample_covariance=False,
        )
        assert float(likeness) == pytest.approx(expected, abs=1e-9)


def test_values_outside_the_range_are_cut_off():
    black = torch.zeros(1, 1, 12, 12)
    assert psnr(black - 3, black).tolist() == [torch.inf]
    assert psnr(black + 7, black).tolist() == [0.0]


@pytest.mark.parametrize("measure", [psnr, ssim, match_images])
def test_images_that_cannot_be_compared_are_refused(measure):
    images, references = pictures(2)
    with pytest.raises(UsageError, match=r"\(2, 1, 16, 12\) cannot be compared with those of \(2, 1, 16, 13\)"):
        measure(images[..., :12], references)
    with pytest.raises(UsageError, match="contains NaN or infinity"):
        measure(images.log().log(), references)
    with pytest.raises(UsageError, match="at least 11 pixels"):
        ssim(images[:, :, :5], references[:, :, :5])


@given(n=st.integers(1, 5), seed=st.integers(0, 1000))
def test_matching_is_the_best_of_all_orders(n, seed):
    pytest.importorskip("scipy", reason="scipy is in the evidence extra")
    images, references = pictures(n, h=3, w=3, seed=seed, noise=1)
    found = match_images(images, references)
    assert sorted(found.tolist()) == list(range(n))
    totals = [float(psnr(images[list(order)], references).sum()) for order in itertools.permutations(range(n))]
    assert float(psnr(images[found], references).sum()) == pytest.approx(max(totals))


def test_a_shuffled_batch_is_put_back():
    pytest.importorskip("scipy", reason="scipy is in the evidence extra")
    _, references = pictures(6)
    order = torch.tensor([4, 2, 0, 5, 1, 3])
    assert torch.equal(references[order][match_images(references[order], references)], references)


ALEX = [(64, 3, 11, 4, 2), (192, 64, 5, 1, 2), (384, 192, 3, 1, 1), (256, 384, 3, 1, 1), (256, 256, 3, 1, 1)]


@pytest.fixture(scope="module")
def alexnet():
    """AlexNet's convolutions as torchvision lays them out, with random weights: numbers 0, 3, 6, 8 and 10."""
    torch.manual_seed(0)
    layers = []
    for number, (out, into, kernel, stride, padding) in enumerate(ALEX):
        layers += [nn.Conv2d(into, out, kernel, stride, padding), nn.ReLU()]
        layers += [nn.MaxPool2d(3, 2)] if number in (0, 1) else []
    return nn.Sequential(*layers)


@pytest.fixture(scope="module")
def files(tmp_path_factory, alexnet):
    folder = tmp_path_factory.mktemp("lpips")
    weights = {f"features.{name}": tensor for name, tensor in alexnet.state_dict().items()}
    save_file(weights, folder / "alex.safetensors")
    torch.save(weights, folder / "alex.pth")
    random = torch.Generator().manual_seed(0)
    heads = {
        f"alex.lin{number}.model.1.weight": torch.rand(1, shape[0], 1, 1, generator=random)
        for number, shape in enumerate(ALEX)
    }
    save_file(heads, folder / "heads.safetensors")
    return folder, heads


def test_lpips_is_what_its_definition_says(alexnet, files):
    folder, heads = files
    images, references = pictures(2, 3, 70, 66)
    shift, scale = (torch.tensor(v).reshape(3, 1, 1) for v in ((-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)))
    maps = [[], []]
    for found, batch in zip(maps, (images, references), strict=True):
        values = (batch * 2 - 1 - shift) / scale
        for layer in alexnet:
            values = layer(values).detach()
            if isinstance(layer, nn.ReLU):
                found.append(values.numpy())
    expected = numpy.zeros(2)
    for a, b, head in zip(*maps, heads.values(), strict=True):
        a, b = (part / numpy.sqrt((part**2).sum(1, keepdims=True)) for part in (a, b))
        expected += ((a - b) ** 2 * head.numpy()).sum(1).mean((1, 2))
    for name in ("alex.safetensors", "alex.pth"):
        found = lpips(images, references, backbone=folder / name, heads=folder / "heads.safetensors")
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-4)


def test_lpips_of_small_gray_images_is_a_distance(files):
    folder, _ = files
    images, references = pictures(2, 1, 28, 28)
    further = pictures(2, 1, 28, 28, noise=0.5)[0]
    given_ = {"backbone": folder / "alex.safetensors", "heads": folder / "heads.safetensors"}
    assert lpips(references, references, **given_).tolist() == [0, 0]
    near, far = lpips(images, references, **given_), lpips(further, references, **given_)
    assert (0 < near).all()
    assert (near < far).all()
    assert lpips(references, images, **given_).tolist() == pytest.approx(near.tolist())


def test_lpips_with_the_published_heads(data_folder, files):
    images, references = pictures(2, 3, 64, 64)
    found = lpips(images, references, backbone=files[0] / "alex.safetensors")
    assert (found > 0).all()


def test_without_what_it_needs_there_is_no_lpips(files, tmp_path, monkeypatch):
    folder, heads = files
    images, references = pictures(5, 1, 28, 28)
    monkeypatch.delenv("NETWEIGHT_DATA", raising=False)
    with pytest.raises(MissingExtra, match="LPIPS needs a file with its heads"):
        lpips(images, references, backbone=folder / "alex.safetensors")
    with pytest.raises(UsageError, match="There is no backbone"):
        lpips(images, references, backbone=tmp_path / "none.pth")
    save_file({"features.0.weight": torch.zeros(64, 3, 3, 3)}, tmp_path / "vgg.safetensors")
    with pytest.raises(UsageError, match="neither the convolutions of AlexNet"):
        lpips(images, references, backbone=tmp_path / "vgg.safetensors")
    torch.save({"features.0.weight": object()}, tmp_path / "code.pth")
    with pytest.raises(UnsafeInput, match="contains more than tensors"):
        lpips(images, references, backbone=tmp_path / "code.pth")
    with pytest.raises(UsageError, match="no LPIPS heads for feature maps of"):
        lpips(images, references, backbone=lambda batch: [batch])
    save_file(dict(list(heads.items())[:2]), tmp_path / "two.safetensors")
    with pytest.raises(UsageError, match=r"does not contain 'alex.lin2"):
        lpips(images, references, backbone=folder / "alex.safetensors", heads=tmp_path / "two.safetensors")
    findings = {finding.name: finding for finding in image_findings(images, references, seed=0)}
    assert findings["LPIPS"].value is None
    assert findings["LPIPS"].detail["reason"] == "unavailable: no backbone was given"


@pytest.mark.parametrize("n", [1, 3, 6])
def test_findings_are_means_with_intervals(n, files):
    pytest.importorskip("scipy", reason="scipy is in the evidence extra")
    folder, _ = files
    images, references = pictures(n, 1, 28, 28)
    found = image_findings(
        images, references, backbone=folder / "alex.safetensors", heads=folder / "heads.safetensors", seed=0
    )
    assert [finding.name for finding in found] == ["PSNR", "SSIM", "LPIPS"]
    assert found[0].value == pytest.approx(float(psnr(images, references).mean()))
    for finding in found:
        assert finding.n == n
        assert (finding.ci95 is None) == (n == 1)
        if n > 1:
            assert finding.ci95[0] < finding.value < finding.ci95[1]
    small = image_findings(images[..., :8], references[..., :8], seed=0)
    assert small[1].value is None
    assert "more than the images" in small[1].detail["reason"]


@pytest.mark.parametrize("c", [1, 3])
def test_png_files_hold_the_image(c, tmp_path):
    io = pytest.importorskip("skimage.io", reason="scikit-image is in the evidence extra")
    image = pictures(1, c)[1][0]
    image[0, 0, :3] = torch.tensor([2.0, -1.0, torch.nan])
    write_png(tmp_path / "a.png", image)
    pixels = io.imread(tmp_path / "a.png")
    assert pixels.shape == ((16, 13) if c == 1 else (16, 13, 3))
    expected = (image.nan_to_num(0).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    assert (pixels.reshape(expected.shape) == expected).all()
    with pytest.raises(UsageError, match="cannot contain an image"):
        write_png(tmp_path / "b.png", image[:, :, 0])
