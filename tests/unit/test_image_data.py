"""Image data sets that need no local data: the digits, a user's folder, `datasets` objects, and what is refused."""

import gzip
import struct
import warnings

import numpy as np
import pytest
import torch

from netweight.data import images as data
from netweight.data.images.images import measured_mean_std
from netweight.errors import CorruptBlob, MissingExtra, NameNotFound, UsageError


@pytest.fixture(autouse=True)
def nowhere(tmp_path_factory, monkeypatch):
    """No local data, no hub, a cache of its own."""
    monkeypatch.delenv("NETWEIGHT_DATA", raising=False)
    monkeypatch.setenv("NETWEIGHT_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True, raising=False)


def pictures(folder, counts, size=(6, 4), mode="RGB", ending="png", seed=0):
    """Write random pictures, `counts` per class, and return their pixels in the order of their names."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
    rng = np.random.default_rng(seed)
    written = {}
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        shape = (count, *size, 3) if mode == "RGB" else (count, *size)
        written[name] = rng.integers(0, 256, shape, dtype=np.uint8)
        for number, pixels in enumerate(written[name]):
            image.fromarray(pixels).save(folder / name / f"{number:03d}.{ending}")
    return written


def test_digits_are_the_package_s():
    sklearn = pytest.importorskip("sklearn.datasets", reason="scikit-learn is in the evidence extra")
    digits, original = data.load("digits"), sklearn.load_digits()
    labels = torch.cat([digits.train[1], digits.test[1]])
    assert torch.bincount(labels).tolist() == np.bincount(original.target).tolist()
    assert digits.shape == (1, 28, 28)
    assert [len(split[1]) for split in (digits.train, digits.test)] == [1501, 296]
    assert digits.digest == "xxh3-128:66589408a96117442073c0b1451ba4c6"
    assert (digits.mean, digits.std) == measured_mean_std(digits.train[0])
    # The first picture of the package is the first of the train split; torch resizes it by the same rule.
    large = torch.nn.functional.interpolate(
        torch.from_numpy(original.images[0] * 255 / 16)[None, None], size=(28, 28), mode="bilinear"
    )
    assert float((digits.train[0][0] - large[0]).abs().max()) <= 0.5


def test_normalized_images_are_invertible():
    digits = data.load("digits")
    inputs = digits.normalized(digits.test[0])
    assert inputs.dtype == torch.float32
    torch.testing.assert_close(digits.pixels(inputs) * 255, digits.test[0].float())
    assert float(digits.pixels(digits.black).abs().max()) < 1e-6
    expected = (digits.test[0].numpy() / 255 - digits.mean[0]) / digits.std[0]
    np.testing.assert_allclose(inputs.numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_folder_with_a_split(tmp_path):
    trained = pictures(tmp_path / "faces" / "train", {"ann": 3, "bob": 2})
    tested = pictures(tmp_path / "faces" / "test", {"bob": 2}, seed=1)
    found = data.load_folder(tmp_path / "faces")
    assert (found.name, found.classes) == (str(tmp_path / "faces"), ("ann", "bob"))
    assert found.train[1].tolist() == [0, 0, 0, 1, 1]
    assert found.test[1].tolist() == [1, 1]
    expected = np.concatenate([trained["ann"], trained["bob"]]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(found.train[0], expected)
    np.testing.assert_array_equal(found.test[0], tested["bob"].transpose(0, 3, 1, 2))
    np.testing.assert_allclose(found.mean, (expected / 255).mean((0, 2, 3)), atol=1e-4)
    np.testing.assert_allclose(found.std, (expected / 255).std((0, 2, 3)), atol=1e-4)


def test_a_folder_without_a_split_is_split_by_class(tmp_path):
    pictures(tmp_path, {"a": 10, "b": 20, "c": 2}, mode="L")
    found, again, other = (data.load_folder(tmp_path, seed=seed) for seed in (0, 0, 1))
    assert found.shape == (1, 6, 4)
    assert torch.bincount(found.test[1]).tolist() == [2, 4, 1]
    assert torch.bincount(found.train[1]).tolist() == [8, 16, 1]
    assert found.digest == again.digest != other.digest


def test_jpeg_pictures_of_several_sizes_are_resized_on_demand(tmp_path):
    pictures(tmp_path, {"a": 2}, size=(8, 6), ending="jpg")
    pictures(tmp_path, {"b": 2}, size=(9, 6), ending="JPEG")
    with pytest.raises(UsageError, match=r"2 sizes \(8×6, 9×6\).*size="):
        data.load_folder(tmp_path)
    assert data.load_folder(tmp_path, size=(7, 5)).shape == (3, 7, 5)


def test_transparency_becomes_white(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
    for number in range(2):
        (tmp_path / "a").mkdir(exist_ok=True)
        image.new("RGBA", (2, 2), (10, 20, 30, 0)).save(tmp_path / "a" / f"{number}.png")
    assert data.load_folder(tmp_path).train[0].unique().tolist() == [255]


def test_what_was_left_out_or_comes_twice_is_said(tmp_path):
    shades = [np.full((28, 28), value, np.uint8) for value in range(0, 240, 8)]
    image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
    for name, values in {"train/a": range(8), "train/b": range(8, 17), "test/a": [7, 20], "test/b": [8, 3]}.items():
        (tmp_path / name).mkdir(parents=True)
        for value in values:
            image.fromarray(shades[value]).save(tmp_path / name / f"{value}.png")
    image.fromarray(shades[0]).save(tmp_path / "train" / "stray.png")
    told = " ".join(data.load_folder(tmp_path).remarks)
    assert "outside of the folders of its classes, which were left out: 1, such as stray.png" in told
    assert "Of 4 test pictures, 3 are training pictures as well, such as" in told
    assert "The classes contain the same pictures, 1 in all, such as" in told


def test_one_picture_in_each_class_cannot_be_divided(tmp_path):
    pictures(tmp_path, {"a": 1, "b": 1})
    with pytest.raises(UsageError, match=r"has one picture, so that none can be held out .* a folder `test`"):
        data.load_folder(tmp_path)


def test_splits_may_number_their_classes_differently():
    datasets = pytest.importorskip("datasets", reason="datasets is in the federated extra")
    image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
    rows = {"image": [image.new("L", (4, 4), level) for level in (0, 1)], "label": ["cat", "dog"]}
    splits = [
        datasets.Dataset.from_dict(rows).cast_column("label", datasets.ClassLabel(names=names))
        for names in (["cat", "dog"], ["dog", "cat"])
    ]
    images = data.from_dataset(*splits)
    assert images.train[1].tolist() == images.test[1].tolist() == [0, 1]
    for odd in (None, [0, 1]):
        several = datasets.Dataset.from_dict({**rows, "label": [odd, odd]})
        with pytest.raises(UsageError, match="has a row whose label, in the column 'label', is"):
            data.from_dataset(several)


def test_folders_that_are_refused(tmp_path):
    with pytest.raises(UsageError, match="is not a folder"):
        data.load_folder(tmp_path / "missing")
    with pytest.raises(UsageError, match="contains no subfolder"):
        data.load_folder(tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no picture in \['empty'\]"):
        data.load_folder(tmp_path)
    (tmp_path / "empty" / "text.png").write_text("no picture")
    with pytest.raises(UsageError, match=r"text\.png is not a picture"):
        data.load_folder(tmp_path)
    pictures(tmp_path / "split" / "train", {"a": 2})
    pictures(tmp_path / "split" / "test", {"a": 1, "z": 1})
    with pytest.raises(UsageError, match=r"classes that .* does not have: \['z'\]"):
        data.load_folder(tmp_path / "split")
    whole = (tmp_path / "split" / "train" / "a" / "000.png").read_bytes()
    (tmp_path / "split" / "train" / "a" / "000.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "split" / "test" / "z" / "000.png").rename(tmp_path / "split" / "test" / "a" / "001.png")
    (tmp_path / "split" / "test" / "z").rmdir()
    with pytest.raises(UsageError, match=r"000\.png is not a picture"):
        data.load_folder(tmp_path / "split")


def test_folders_of_splits_are_told_from_classes(tmp_path):
    def remarks(name, **parts):
        for seed, (part, counts) in enumerate(parts.items()):
            pictures(tmp_path / name / part, counts, seed=seed)
        found = data.load_folder(tmp_path / name)
        return found.classes, len(found.train[1]), len(found.test[1]), " ".join(found.remarks)

    two = {"a": 4, "b": 4}
    assert remarks("kaggle", Training=two, Testing={"a": 1, "b": 1}) == (("a", "b"), 8, 2, "")
    assert remarks("alone", train={"a": 5, "b": 5})[:3] == (("a", "b"), 8, 2)
    classes, train, test, said = remarks("three", Train=two, test={"a": 1}, val={"a": 1, "b": 1})
    assert (classes, train, test) == (("a", "b"), 8, 1)
    assert "and not val" in said
    assert "1 of 2 classes have no test picture, such as 'b'" in said
    pictures(tmp_path / "vehicles", {"train": 4, "plane": 4})
    assert data.load_folder(tmp_path / "vehicles").classes == ("plane", "train")
    pictures(tmp_path / "tests" / "test", two)
    with pytest.raises(UsageError, match="has test and no folder of training pictures"):
        data.load_folder(tmp_path / "tests")


def rows_of(count, **columns):
    """A `datasets.Dataset` of random gray pictures."""
    datasets = pytest.importorskip("datasets", reason="datasets is in the federated extra")
    image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
    pixels = np.random.default_rng(count).integers(0, 256, (count, 5, 5), dtype=np.uint8)
    given = {"picture": [image.fromarray(own) for own in pixels], **columns}
    features = datasets.Features(
        {
            "picture": datasets.Image(),
            "kind": datasets.ClassLabel(names=["cat", "dog"])
            if isinstance(columns["kind"][0], int)
            else datasets.Value("string"),
            **({"who": datasets.Value("string")} if "who" in columns else {}),
        }
    )
    return datasets.Dataset.from_dict(given, features=features), pixels


def test_a_datasets_object_becomes_tensors():
    train, pixels = rows_of(4, kind=[0, 1, 1, 0], who=["z", "a", "z", "m"])
    test, _ = rows_of(3, kind=[1, 0, 1], who=["a", "z", "b"])
    found = data.from_dataset(train, test, "picture", "kind", writer_column="who", name="pets")
    assert found.classes == ("cat", "dog")
    assert found.train[1].tolist() == [0, 1, 1, 0]
    np.testing.assert_array_equal(found.train[0][:, 0], pixels)
    assert [writers.tolist() for writers in found.writers] == [[3, 0, 3, 2], [0, 3, 1]]


def test_labels_of_a_datasets_object_may_be_text_and_the_split_ours():
    train, _ = rows_of(10, kind=["x", "y"] * 5)
    found = data.from_dataset(train, None, "picture", "kind", size=(8, 8), test_share=0.4)
    assert found.classes == ("x", "y")
    assert found.shape == (1, 8, 8)
    assert torch.bincount(found.test[1]).tolist() == [2, 2]
    test, _ = rows_of(1, kind=["unheard"])
    with pytest.raises(UsageError, match=r"without a class: \['unheard'\]"):
        data.from_dataset(train, test, "picture", "kind")
    with pytest.raises(NameNotFound, match=r"no column 'image'.*picture"):
        data.from_dataset(train)
    with pytest.raises(UsageError, match="share of test images"):
        data.from_dataset(train, None, "picture", "kind", test_share=1.0)


def idx(array, number=None):
    """Bytes of an idx file."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *(number or array.shape)) + array.tobytes()


def idx_files(folder, prefixes, labels=(0, 1, 2), packed=True, turned=False):
    """Write the files of two splits; images are vertical strokes, unless turned."""
    folder.mkdir(parents=True)
    images = np.zeros((len(labels), 28, 28), np.uint8)
    images[:, 4:24, 13:15] = 200
    images = images.transpose(0, 2, 1) if turned else images
    for prefix in prefixes:
        for kind, array in (("images-idx3", images), ("labels-idx1", np.array(labels, np.uint8))):
            content = idx(np.ascontiguousarray(array))
            name = f"{prefix}-{kind}-ubyte"
            (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(content) if packed else content)
    return images


@pytest.mark.parametrize("packed", [True, False])
def test_idx_files_wherever_they_lie(tmp_path, monkeypatch, packed):
    images = idx_files(tmp_path / "mnist" / "MNIST" / "raw", ("train", "t10k"), packed=packed)
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    found = data.load("mnist")
    np.testing.assert_array_equal(found.train[0][:, 0], images)
    assert found.test[1].tolist() == [0, 1, 2]
    assert (found.mean, found.std) == ((0.1307,), (0.3081,))


@pytest.mark.parametrize("turned", [True, False])
def test_characters_come_out_upright_whichever_way_they_lie(tmp_path, monkeypatch, turned):
    prefixes = ("emnist-byclass-train", "emnist-byclass-test")
    idx_files(tmp_path / "emnist_byclass" / "gzip", prefixes, labels=(0, 1, 61), turned=turned)
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    found = data.load("emnist-byclass")
    assert found.classes[61] == "z"
    assert len(found.classes) == 62
    assert bool((found.train[0][0, 0, 4:24, 13:15] == 200).all())


def test_damaged_idx_files_are_named(tmp_path, monkeypatch):
    folder = tmp_path / "mnist"
    idx_files(folder, ("train", "t10k"))
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    file = folder / "t10k-labels-idx1-ubyte.gz"
    whole = file.read_bytes()
    damages = {
        "is damaged": whole[:-6],
        "not an idx file": gzip.compress(b"text"),
        r"\[4\] values": gzip.compress(idx(np.zeros(3, np.uint8), number=(4,))),
    }
    for message, content in damages.items():
        file.write_bytes(content)
        with pytest.raises(CorruptBlob, match=rf"t10k-labels-idx1-ubyte\.gz .*{message}"):
            data.load("mnist")


def test_names_that_do_not_exist():
    with pytest.raises(NameNotFound, match=r"'fashion'.*fashion-mnist"):
        data.load("fashion")


@pytest.mark.parametrize("name", [name for name in data.NAMES if name != "digits"])
def test_what_is_nowhere_is_an_error_with_a_cure(tmp_path, monkeypatch, name):
    folder = name.replace("-", "_")
    with pytest.raises(MissingExtra, match=rf"{name} was not found: NETWEIGHT_DATA is not set.*{folder}/.*digits"):
        data.load(name)
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    with pytest.raises(MissingExtra, match=rf"\({tmp_path}\) contains no {folder}/"):
        data.load(name)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sklearn.datasets", None)
    with pytest.raises(MissingExtra, match=r"sklearn.*netweight\[evidence\]"):
        data.load("digits")


def test_lossless_cifar_is_read_from_its_binary_version(tmp_path, monkeypatch):
    folder = tmp_path / "cifar10" / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    names = [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]
    records = {name: rng.integers(0, 10, (3, 3073), dtype=np.uint8) for name in names}
    for name, content in records.items():
        (folder / name).write_bytes(content.tobytes())
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    found = data.load("cifar10")
    train = np.concatenate([records[name] for name in names[:5]])
    assert found.name == "cifar10"
    np.testing.assert_array_equal(found.train[0], train[:, 1:].reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(found.train[1], train[:, 0])
    np.testing.assert_array_equal(found.test[1], records["test_batch.bin"][:, 0])
    (folder / "test_batch.bin").write_bytes(b"0" * 3000)
    with pytest.raises(CorruptBlob, match=r"test_batch\.bin"):
        data.load("cifar10")


def test_cinic_is_read_from_its_folders_and_cached(tmp_path, monkeypatch):
    root = tmp_path / "data" / "cinic10"
    classes = {"airplane": 2, "automobile": 1, "truck": 1}
    written = pictures(root / "train", classes, size=(32, 32))
    pictures(root / "test", classes, size=(32, 32), seed=1)
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("NETWEIGHT_CACHE", str(tmp_path / "cache"))
    found = data.load("cinic10")
    assert found.train[1].tolist() == [0, 0, 1, 9]
    np.testing.assert_array_equal(found.train[0][:2], written["airplane"].transpose(0, 3, 1, 2))
    (kept,) = (tmp_path / "cache").iterdir()
    assert data.load("cinic10").digest == found.digest
    kept.write_bytes(kept.read_bytes()[:50])
    with pytest.warns(UserWarning, match="is damaged and is written again"):
        assert data.load("cinic10").digest == found.digest
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert data.load("cinic10").digest == found.digest
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("NETWEIGHT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.warns(UserWarning, match="could not be stored"):
        assert data.load("cinic10").digest == found.digest


def test_omniglot_is_read_from_its_release(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
    root = tmp_path / "omniglot" / "images_background"
    for alphabet in ("Greek", "Korean"):
        for character in (1, 2):
            folder = root / alphabet / f"character{character:02d}"
            folder.mkdir(parents=True)
            for drawer in (1, 4, 5):
                picture = image.new("1", (105, 105), 1)
                picture.paste(0, (0, 0, 15 * drawer, 105))
                picture.save(folder / f"{character:04d}_{drawer:02d}.png")
    monkeypatch.setenv("NETWEIGHT_DATA", str(tmp_path))
    found = data.load("omniglot")
    assert found.classes == tuple(f"{a}/character0{c}" for a in ("Greek", "Korean") for c in (1, 2))
    assert found.writers[0].tolist() == [0, 3, 0, 3, 20, 23, 20, 23]
    assert found.writers[1].tolist() == [4, 4, 24, 24]
    assert found.test[1].tolist() == [0, 1, 2, 3]
    assert found.test[0][0, 0, :, :20].unique().tolist() == [255]
    assert found.test[0][0, 0, :, 20:].unique().tolist() == [0]
    (root / "Greek" / "character01" / "other.png").write_bytes(
        (root / "Greek" / "character01" / "0001_01.png").read_bytes()
    )
    with pytest.raises(UsageError, match=r"other\.png does not end in the number of its drawer"):
        data.load("omniglot")


def test_the_hub_s_rows_become_the_data_set(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="datasets is in the federated extra")
    image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    asked = []

    def fetch(repository, split):
        asked.append((repository, split))
        own = pixels[:4] if split == "train" else pixels[4:]
        rows = {"img": [image.fromarray(one) for one in own], "label": list(range(len(own)))}
        classes = datasets.ClassLabel(names=[str(n) for n in range(10)])
        return datasets.Dataset.from_dict(rows, datasets.Features({"img": datasets.Image(), "label": classes}))

    monkeypatch.setattr("datasets.load_dataset", fetch)
    found = data.load("cifar10")
    assert asked == [("uoft-cs/cifar10", "train"), ("uoft-cs/cifar10", "test")]
    assert found.classes[0] == "airplane"
    np.testing.assert_array_equal(found.train[0], pixels[:4].transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(found.test[0], pixels[4:].transpose(0, 3, 1, 2))


PIXELS, LABELS = torch.zeros(2, 1, 3, 3, dtype=torch.uint8), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": (PIXELS.float(), LABELS)}, "train split of x has images of torch.float32"),
        ({"test": (PIXELS[0], LABELS)}, r"test split of x has images .* \(1, 3, 3\)"),
        ({"test": (PIXELS[:, :, :2], LABELS)}, "shapes"),
        ({"train": (PIXELS, LABELS[:1])}, r"labels of torch.int64 and shape \(1,\) for 2"),
        ({"train": (PIXELS[:0], LABELS[:0])}, "empty"),
        ({"train": (PIXELS, LABELS + 1)}, "from 1 to 2 and there are 2 classes"),
        ({"mean": (0.0, 0.0)}, "1 channels"),
        ({"std": (0.0,)}, "positive"),
        ({"writers": (LABELS, LABELS[:1])}, "one writer for each image"),
    ],
)
def test_parts_that_do_not_fit_are_refused(changes, message):
    parts = {"train": (PIXELS, LABELS), "test": (PIXELS, LABELS), "classes": ("a", "b"), "mean": (0.5,), "std": (1.0,)}
    assert data.Images("x", **parts).digest.startswith("xxh3-128:")
    with pytest.raises(UsageError, match=message):
        data.Images("x", **(parts | changes))
