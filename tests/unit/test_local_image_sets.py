"""The real data sets below NETWEIGHT_DATA, against facts that were read from their files in another way."""

import gzip

import numpy as np
import pytest
import torch

from netweight.data import images as data


@pytest.fixture
def local(data_folder, monkeypatch, request):
    """Skips where the folder of this data set is not there."""
    monkeypatch.setenv("NETWEIGHT_DATA", str(data_folder))

    def need(folder):
        if not (data_folder / folder).is_dir():
            pytest.skip(f"NETWEIGHT_DATA contains no {folder}")
        return data_folder / folder

    return need


def raw(file, offset):
    return np.frombuffer(gzip.open(file).read(), np.uint8, offset=offset)


def test_fashion_mnist_is_the_official_one(local):
    folder = local("fashion_mnist") / "FashionMNIST" / "raw"
    found = data.load("fashion-mnist")
    assert found.digest == "xxh3-128:378006e1a205825f88321694af1af9d1"
    for split, prefix, count in ((found.train, "train", 60_000), (found.test, "t10k", 10_000)):
        assert split[0].shape == (count, 1, 28, 28)
        assert np.array_equal(split[0].flatten(), raw(folder / f"{prefix}-images-idx3-ubyte.gz", 16))
        np.testing.assert_array_equal(split[1], raw(folder / f"{prefix}-labels-idx1-ubyte.gz", 8))
        assert torch.bincount(split[1]).tolist() == [count // 10] * 10
    assert found.classes[found.test[1][0]] == "Ankle boot"


def test_emnist_letters_are_upright_and_counted_from_0(local):
    folder = local("emnist_letters")
    found = data.load("emnist-letters")
    assert [torch.bincount(labels).tolist() for _, labels in (found.train, found.test)] == [[4800] * 26, [800] * 26]
    with np.load(folder / "test.npz") as arrays:
        assert np.array_equal(found.test[0][:, 0], arrays["image"])
        np.testing.assert_array_equal(found.test[1] + 1, arrays["label"])
    assert found.digest == "xxh3-128:3788c4c075adb2ade16703f61d288cb0"


def test_jpeg_cifar_is_decoded_kept_and_called_by_its_name(local, tmp_path, monkeypatch):
    folder = local("cifar10_jpeg")
    parquet = pytest.importorskip("pyarrow.parquet", reason="pyarrow is in the federated extra")
    image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
    few = {"train": tmp_path / "cifar10_jpeg" / "train-0.parquet", "test": tmp_path / "cifar10_jpeg" / "test-0.parquet"}
    few["train"].parent.mkdir()
    for split, file in few.items():
        source = sorted(folder.glob(f"{split}-*.parquet"))[0]
        parquet.write_table(parquet.read_table(source).slice(0, 200), file)
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    monkeypatch.setenv("NETWEIGHT_CACHE", str(tmp_path / "cache"))
    found = data.load("cifar10")
    assert found.name == "cifar10-jpeg"
    assert torch.bincount(found.train[1]).tolist() == [20] * 10
    rows = parquet.read_table(few["test"]).to_pylist()
    (tmp_path / "picture.jpg").write_bytes(rows[7]["img"]["bytes"])
    np.testing.assert_array_equal(
        found.test[0][7].permute(1, 2, 0), np.asarray(image.open(tmp_path / "picture.jpg").convert("RGB"))
    )
    assert found.classes[found.test[1][7]] == rows[7]["img"]["path"].split("/")[1]
    monkeypatch.setattr("netweight.data.images.public.decode_pictures", None)  # what is kept is not decoded again
    assert data.load("cifar10").digest == found.digest


def test_omniglot_has_its_writers(local):
    file = local("omniglot_small") / "omniglot_small.npz"
    found = data.load("omniglot")
    assert (len(found.train[1]), len(found.test[1]), len(found.classes)) == (3872, 968, 242)
    assert torch.bincount(found.train[1]).tolist() == [16] * 242
    assert torch.bincount(found.test[1]).tolist() == [4] * 242
    assert len(torch.cat(found.writers).unique()) == 160
    with np.load(file) as arrays:
        assert set(arrays["drawer"][:20]) == set(range(1, 21))
        assert arrays["class_names"].tolist() == list(found.classes)
        ink = np.unpackbits(arrays["image_packed"], axis=-1)[..., :105].mean()
    pixels = torch.cat([found.train[0], found.test[0]]).double().mean() / 255
    assert float(pixels) == pytest.approx(ink, rel=0.05)  # resizing moves ink, and takes none away
    assert found.digest == "xxh3-128:02104e352f7787930ab5e82c40e27966"
