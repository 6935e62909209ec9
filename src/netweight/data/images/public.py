"""Published data sets: MNIST, Fashion-MNIST, EMNIST, scikit-learn's digits, Omniglot; CIFAR-10 and CINIC-10 in color.

MNIST and its relatives are published in the idx format: `…-ubyte`, mostly gzipped. EMNIST's official files hold every
image mirrored at its diagonal; what comes out here is upright. The digits come with a package and need no download.
A JPEG copy of CIFAR-10 is good for training and attacks, but models trained on the original lose accuracy on it; what
is loaded from one is called "cifar10-jpeg".
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.core.digests import digest_file
from netweight.core.lazy import library
from netweight.data.images.images import (
    MNIST_MEAN_STD,
    Images,
    cached,
    from_dataset,
    from_hub,
    local_folder,
    measured_mean_std,
    missing,
    pictures_below,
)
from netweight.data.images.pictures import decode_pictures
from netweight.errors import CorruptBlob, UsageError


def read_idx(path: Path) -> Tensor:
    """Read a file of unsigned bytes in the idx format."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorruptBlob(f"{path} is damaged: {error}.", cure="Fetch it again.") from error
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each dimension as a big-endian integer.
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise CorruptBlob(f"{path} is not an idx file of unsigned bytes.", cure="Fetch it again.")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], dtype=">u4").astype(np.int64)
    if len(shape) != content[3] or int(shape.prod()) != len(content) - start:
        raise CorruptBlob(
            f"{path} does not have the {shape.tolist()} values that its header states.", cure="Fetch it again."
        )
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape.tolist())


def idx_pair(folder: Path, prefix: str) -> tuple[Tensor, Tensor] | None:
    """Read the images and labels of one split, wherever below a folder they lie."""
    files_by_kind = [sorted(folder.rglob(f"{prefix}-{kind}-ubyte*")) for kind in ("images-idx3", "labels-idx1")]
    if not all(files_by_kind):
        return None
    images, labels = (read_idx(files[0]) for files in files_by_kind)
    return images.unsqueeze(1), labels.long()


def mnist() -> Images:
    """Return MNIST.

    Source: LeCun, Cortes, Burges.
    """
    return idx_or_hub("mnist", "mnist", "ylecun/mnist", tuple("0123456789"))


_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def fashion_mnist() -> Images:
    """Return Fashion-MNIST, normalized by MNIST's mean and deviation as the paper does.

    Source: Xiao, Rasul, Vollgraf, arXiv 1708.07747; MIT license.
    """
    return idx_or_hub("fashion-mnist", "fashion_mnist", "zalando-datasets/fashion_mnist", _CLASSES)


def idx_or_hub(name: str, folder: str, repository: str, classes: tuple[str, ...]) -> Images:
    """Load a data set in the form of MNIST: four idx files, or columns `image` and `label` on the hub."""
    mean, std = MNIST_MEAN_STD
    local = local_folder(folder)
    splits = [idx_pair(local, prefix) for prefix in ("train", "t10k")] if local else [None]
    if all(splits):
        train, test = (split for split in splits if split is not None)
        return Images(name, train, test, classes, mean=mean, std=std)
    holding = "train-images-idx3-ubyte.gz and the three files beside it"
    train_rows, test_rows = from_hub(repository, "train", "test", name=name, folder=folder, holding=holding)
    return from_dataset(train_rows, test_rows, name=name, classes=classes, mean_std=MNIST_MEAN_STD)


_UPPER = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_LOWER = tuple("abcdefghijklmnopqrstuvwxyz")


def emnist_letters() -> Images:
    """Return EMNIST letters: 124,800 and 20,800 images; upper and lower case are one class.

    Source: Cohen, Afshar, Tapson, van Schaik, arXiv 1702.05373.
    """
    return _emnist("letters", _UPPER, "tanganke/emnist_letters", tall="I")


def emnist_byclass() -> Images:
    """Return EMNIST byclass: 697,932 and 116,323 images of digits, upper case and lower case letters.

    Source: Cohen, Afshar, Tapson, van Schaik, arXiv 1702.05373.
    """
    return _emnist("byclass", (*"0123456789", *_UPPER, *_LOWER), "Royc30ne/emnist-byclass", tall="1")


def _emnist(kind: str, classes: tuple[str, ...], repository: str, *, tall: str) -> Images:
    """Load one of the two; `tall` is a class whose upright images are higher than wide."""
    name, folder = f"emnist-{kind}", f"emnist_{kind}"
    mean, std = MNIST_MEAN_STD
    local = local_folder(folder)
    splits: list[tuple[Tensor, Tensor] | None] = [None]
    if local:
        splits = [_local_split(local, kind, split) for split in ("train", "test")]
    if not all(splits):
        holding = f"emnist-{kind}-train-images-idx3-ubyte.gz and the three files beside it"
        train_rows, test_rows = from_hub(repository, "train", "test", name=name, folder=folder, holding=holding)
        fetched = from_dataset(train_rows, test_rows, name=name, mean_std=MNIST_MEAN_STD)
        splits = [fetched.train, fetched.test]
    train, test = (_upright(*split, classes.index(tall)) for split in splits if split is not None)
    return Images(name, train, test, classes, mean=mean, std=std)


def _local_split(folder: Path, kind: str, split: str) -> tuple[Tensor, Tensor] | None:
    """Read a split from idx files or npz files with the keys image and label; None if neither is there."""
    pair = idx_pair(folder, f"emnist-{kind}-{split}")
    files = sorted(folder.glob(f"{split}*.npz"))
    if pair is not None or not files:
        return pair
    parts: list[tuple[Tensor, Tensor]] = []
    for file in files:
        try:
            with np.load(file, allow_pickle=False) as arrays:
                images, labels = arrays["image"], arrays["label"]
        except (ValueError, KeyError, EOFError, OSError) as error:
            raise CorruptBlob(f"{file} is damaged: {error}.", cure="Fetch it again.") from error
        parts.append((torch.from_numpy(images).unsqueeze(1), torch.from_numpy(labels.astype(np.int64))))
    return torch.cat([images for images, _ in parts]), torch.cat([labels for _, labels in parts])


def _upright(images: Tensor, labels: Tensor, tall: int) -> tuple[Tensor, Tensor]:
    """Turn images upright that are mirrored at the diagonal, and make labels count from 0."""
    # Copies of EMNIST differ in both and do not say so; a class of vertical strokes tells which way images lie.
    labels = labels - labels.min()
    ink = images[labels == tall].double().sum((0, 1))
    place = torch.arange(ink.shape[-1], dtype=torch.float64)

    def spread(profile: Tensor) -> float:
        mean = (profile * place).sum() / profile.sum()
        return float((profile * (place - mean).square()).sum() / profile.sum())

    lying = spread(ink.sum(0)) > spread(ink.sum(1))
    return (images.transpose(2, 3).contiguous() if lying else images), labels


# Mean and deviation of the 1,501 training images in the size used here.
_DIGITS_MEAN_STD = ((0.3051,), (0.3248,))
# Every sixth image of each class is for tests.
_EVERY = 6


def digits() -> Images:
    """Return the 1,797 digits, 8 × 8 with 17 shades, as images of 28 × 28.

    A shade s of 0 to 16 becomes s · 255 / 16; the image is resized bilinearly (corners not aligned) and rounded. Of
    each class every sixth image, in the order of the package, is a test image.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998; its test part.
    """
    loaded = library("sklearn.datasets", "The data set digits", "evidence").load_digits()
    weights = _fourteenths()
    # These sums are 14² times the resized shades.
    sums = weights @ loaded.images.astype(np.int64) @ weights.T
    pixels = (2 * 255 * sums + 16 * 14**2) // (2 * 16 * 14**2)
    images, labels = torch.from_numpy(pixels.astype(np.uint8)).unsqueeze(1), torch.from_numpy(loaded.target).long()
    tests = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        tests[(labels == digit).nonzero().flatten()[_EVERY - 1 :: _EVERY]] = True
    mean, std = _DIGITS_MEAN_STD
    splits = [(images[part], labels[part]) for part in (~tests, tests)]
    return Images("digits", splits[0], splits[1], tuple("0123456789"), mean=mean, std=std)


def _fourteenths() -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Return the bilinear weights from 8 to 28 places as whole fourteenths, so that resizing is exact everywhere."""
    weights = np.zeros((28, 8), np.int64)
    for place in range(28):
        # The pixel is at (4 · place − 5) / 14 of the small image.
        left, part = divmod(4 * place - 5, 14)
        weights[place, min(max(left, 0), 7)] += 14 - part
        weights[place, min(max(left + 1, 0), 7)] += part
    return weights


# People who drew each alphabet; every fifth of them tests.
DRAWERS = 20
_SIDE = 105


def omniglot() -> Images:
    """Return Omniglot at 28 × 28: bright ink on black, each pixel the mean of the ink below it.

    Every drawer drew a character once, so the split is by drawer: of each alphabet drawers 5, 10, 15 and 20 test.
    Writers are numbered `20 · alphabet + drawer − 1`; a client of five writers in a row has four to train and one to
    test.

    Source: Lake, Salakhutdinov, Tenenbaum, Science 350, 2015; MIT license.
    """
    packed, official = local_folder("omniglot_small"), local_folder("omniglot")
    if packed is not None and (packed / "omniglot_small.npz").is_file():
        name, (ink, labels, writers, classes) = "omniglot-small", _packed(packed / "omniglot_small.npz")
    elif official is not None:
        name, (ink, labels, writers, classes) = "omniglot", _official(official)
    else:
        raise missing("omniglot", "omniglot", "the official images_background, unpacked")
    images = F.adaptive_avg_pool2d(ink, 28).mul(255).round().to(torch.uint8)
    tests = writers % 5 == 4
    mean, std = measured_mean_std(images[~tests])
    splits = [(images[part], labels[part]) for part in (~tests, tests)]
    return Images(name, splits[0], splits[1], classes, writers=(writers[~tests], writers[tests]), mean=mean, std=std)


# Ink in [0, 1] of shape `(n, 1, 105, 105)`, labels, writers, classes.
Parts = tuple[Tensor, Tensor, Tensor, tuple[str, ...]]


def _packed(file: Path) -> Parts:
    """Read the npz file: bits packed along the last axis, alphabets, drawers from 1, labels."""
    try:
        with np.load(file, allow_pickle=False) as arrays:
            bits = np.unpackbits(arrays["image_packed"], axis=-1)[:, None, :, :_SIDE]
            writers = arrays["alphabet"].astype(np.int64) * DRAWERS + arrays["drawer"] - 1
            labels, classes = arrays["label"].astype(np.int64), tuple(str(name) for name in arrays["class_names"])
    except (ValueError, KeyError, EOFError, OSError) as error:
        raise CorruptBlob(f"{file} is damaged: {error}.", cure="Fetch it again.") from error
    return torch.from_numpy(bits).float(), torch.from_numpy(labels), torch.from_numpy(writers), classes


def _official(folder: Path) -> Parts:
    """Read the pictures of the official release, black ink on white."""
    files = sorted(folder.glob("images_*/*/character*/*.png"))
    if not files:
        raise missing("omniglot", "omniglot", "the official images_background, unpacked")
    alphabets = sorted({file.parts[-3] for file in files})
    classes = sorted({"/".join(file.parts[-3:-1]) for file in files})
    number = {name: index for index, name in enumerate(classes)}
    drawers = [file.stem.rpartition("_")[2] for file in files]
    bad = [str(file) for file, drawer in zip(files, drawers, strict=True) if drawer not in _DRAWER_NAMES]
    if bad:
        raise UsageError(
            f"{bad[0]} does not end in the number of its drawer, 01 to 20.", cure="Unpack the official release again."
        )
    writers = [alphabets.index(f.parts[-3]) * DRAWERS + int(d) - 1 for f, d in zip(files, drawers, strict=True)]
    pictures = decode_pictures([[(str(file), file) for file in files]], of="omniglot").splits[0]
    labels = [number["/".join(file.parts[-3:-1])] for file in files]
    return 1 - pictures.float() / 255, torch.tensor(labels), torch.tensor(writers), tuple(classes)


_DRAWER_NAMES = {f"{drawer:02d}" for drawer in range(1, DRAWERS + 1)}


CIFAR_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CIFAR_MEAN_STD = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
# A label and the three planes of an image.
_RECORD = 1 + 3 * 32 * 32


def cifar10() -> Images:
    """Return CIFAR-10: lossless if a lossless copy is at hand, else as JPEG.

    Looked for below `NETWEIGHT_DATA`: cifar10 (the official binary version, `data_batch_1.bin` and so on), then
    cifar10_jpeg (parquet files with columns img and label); then on the hub. Decoded pictures are cached.

    Source: Krizhevsky, Learning Multiple Layers of Features from Tiny Images, 2009.
    """
    mean, std = CIFAR_MEAN_STD
    binary, parquet = local_folder("cifar10"), local_folder("cifar10_jpeg")
    if binary is not None and len(files := sorted(binary.rglob("*_batch*.bin"))) == 6:
        train, test = _binary(files[:5]), _binary(files[5:])
        return Images("cifar10", train, test, CIFAR_CLASSES, mean=mean, std=std)
    if parquet is not None:
        return _parquet(parquet)
    holding = "the official binary version, data_batch_1.bin to data_batch_5.bin and test_batch.bin"
    splits = from_hub("uoft-cs/cifar10", "train", "test", name="cifar10", folder="cifar10", holding=holding)
    return from_rows("cifar10", splits[0], splits[1], "img")


def from_rows(
    name: str,
    train: Any,
    test: Any,
    image_column: str,
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] = CIFAR_MEAN_STD,
) -> Images:
    """Decode splits of the hub with the classes of CIFAR-10, through the cache."""
    # The names of the files of a data set in the hub's cache hold its revision; what lies in memory has none.
    key = [[file["filename"] for file in split.cache_files] for split in (train, test)]
    feature = library("datasets", f"Decoding {name}", "federated").Image(decode=False)
    splits = [split.cast_column(image_column, feature) for split in (train, test)]
    encoded = [(list(split[image_column]), list(split["label"])) for split in splits]
    return decoded(name, key if all(key) else None, encoded[0], encoded[1], mean_std)


def decoded(
    name: str,
    key: Any,
    train: tuple[list[Any], list[int]],
    test: tuple[list[Any], list[int]],
    mean_std: tuple[tuple[float, ...], tuple[float, ...]] = CIFAR_MEAN_STD,
) -> Images:
    """Decode encoded pictures, or take them from the cache."""

    def make() -> dict[str, Tensor]:
        numbered = [[(f"Image {n} of {name}", item) for n, item in enumerate(part[0])] for part in (train, test)]
        images = list(decode_pictures(numbered, of=name).splits)
        return {"train": images[0].contiguous(), "test": images[1].contiguous()}

    tensors = make() if key is None else cached(name, key, make)
    labels = [torch.tensor(part[1], dtype=torch.int64) for part in (train, test)]
    splits = [(tensors["train"], labels[0]), (tensors["test"], labels[1])]
    return Images(name, splits[0], splits[1], CIFAR_CLASSES, mean=mean_std[0], std=mean_std[1])


def _parquet(folder: Path) -> Images:
    """Read the parquet files of a JPEG copy."""
    parquet = library("pyarrow.parquet", "Reading CIFAR-10 from parquet files", "federated")
    files = [sorted(folder.glob(f"{split}-*.parquet")) for split in ("train", "test")]
    if not all(files):
        raise CorruptBlob(f"{folder} lacks train-*.parquet or test-*.parquet.", cure="Put the missing files there.")
    splits = []
    for split in files:
        tables = [parquet.read_table(file, columns=["img", "label"]).to_pydict() for file in split]
        splits.append(([row for t in tables for row in t["img"]], [label for t in tables for label in t["label"]]))
    return decoded("cifar10-jpeg", [[digest_file(file) for file in split] for split in files], splits[0], splits[1])


def _binary(files: list[Path]) -> tuple[Tensor, Tensor]:
    """Read files of the official binary version."""
    for file in files:
        if file.stat().st_size % _RECORD:
            raise CorruptBlob(f"{file} is not made of records of {_RECORD} bytes.", cure="Fetch it again.")
    records = torch.from_numpy(np.concatenate([np.fromfile(file, np.uint8) for file in files]).reshape(-1, _RECORD))
    return records[:, 1:].reshape(-1, 3, 32, 32).contiguous(), records[:, 0].long()


_CINIC_MEAN_STD = ((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587))


def cinic10() -> Images:
    """Return CINIC-10, its train and test splits; the validation split is left out.

    Looked for below `NETWEIGHT_DATA`/cinic10 (the official release, unpacked: train/airplane/….png), then on the hub.
    Decoded pictures are cached.

    Source: Darlow, Crowley, Antoniou, Storkey, arXiv 1810.03505; mean and deviation are theirs.
    """
    folder = local_folder("cinic10")
    if folder is None or not all((folder / split).is_dir() for split in ("train", "test")):
        holding = "the official release, unpacked: train/airplane/….png"
        splits = from_hub("flwrlabs/cinic10", "train", "test", name="cinic10", folder="cinic10", holding=holding)
        return from_rows("cinic10", splits[0], splits[1], "image", _CINIC_MEAN_STD)
    key: list[list[list[str | int]]] = []
    parts: list[tuple[list[Any], list[int]]] = []
    for split in ("train", "test"):
        by_class, _ = pictures_below(folder / split)
        files = [file for own in by_class.values() for file in own]
        key.append([[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in files])
        parts.append((files, [CIFAR_CLASSES.index(name) for name, own in by_class.items() for _ in own]))
    return decoded("cinic10", key, parts[0], parts[1], _CINIC_MEAN_STD)


def crop_and_flip(
    images: Tensor, generator: torch.Generator, *, padding: int = 4, fill: Tensor | float = 0.0
) -> Tensor:
    """Shift every image at random by up to `padding` pixels each way and mirror every other one, left to right.

    Source: HyperFL (arXiv 2412.07187) for CIFAR-10 and CINIC-10; the usual augmentation since ResNet.
    """
    if images.ndim != 4 or padding < 0:
        raise UsageError(
            f"Images of shape {tuple(images.shape)} cannot be cropped with padding {padding}.",
            cure="Give shape (n, channels, height, width) and a padding of at least 0.",
        )
    count, channels, height, width = images.shape
    value = torch.as_tensor(fill, dtype=images.dtype, device=images.device)
    padded = F.pad(images, [padding] * 4)
    if bool((value != 0).any()):
        inside = F.pad(torch.ones(1, 1, height, width, dtype=torch.bool, device=images.device), [padding] * 4)
        padded = torch.where(inside, padded, value.expand(channels, 1, 1))
    draw = torch.randint(0, 2 * padding + 1, (2, count), generator=generator, device=generator.device)
    flip = torch.rand(count, generator=generator, device=generator.device) < 0.5
    draw, flip = draw.to(images.device), flip.to(images.device)
    windows = padded.unfold(2, height, 1).unfold(3, width, 1)
    crops = windows[torch.arange(count, device=images.device), :, draw[0], draw[1]]
    return torch.where(flip.view(-1, 1, 1, 1), crops.flip(-1), crops)
