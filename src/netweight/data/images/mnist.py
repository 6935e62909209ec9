"""MNIST, Fashion-MNIST and EMNIST (letters, 26 classes, and all characters, 62), 28 × 28, from local files or the hub.

They are published in the idx format: `…-ubyte`, mostly gzipped. EMNIST's official files hold every image mirrored at
its diagonal; what comes out here is upright.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from netweight.data.images.folder import from_dataset
from netweight.data.images.images import MNIST_MEAN_STD, Images
from netweight.data.images.sources import from_hub, local_folder
from netweight.errors import CorruptBlob


def read_idx(path: Path) -> Tensor:
    """Read a file of unsigned bytes in the idx format."""
    try:
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CorruptBlob(f"{path} is damaged: {error}.", cure="Fetch it again.") from error
    # Two zero bytes, 8 for unsigned bytes, the number of dimensions; then each dimension as a big-endian integer.
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise CorruptBlob(f"{path} is no idx file of unsigned bytes.", cure="Fetch it again.")
    start = 4 + 4 * content[3]
    shape = np.frombuffer(content[4:start], dtype=">u4").astype(np.int64)
    if len(shape) != content[3] or int(shape.prod()) != len(content) - start:
        raise CorruptBlob(f"{path} has not the {shape.tolist()} values that its header states.", cure="Fetch it again.")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape.tolist())


def idx_pair(folder: Path, prefix: str) -> tuple[Tensor, Tensor] | None:
    """Read the images and labels of one split, wherever below a folder they lie."""
    found = [sorted(folder.rglob(f"{prefix}-{kind}-ubyte*")) for kind in ("images-idx3", "labels-idx1")]
    if not all(found):
        return None
    images, labels = (read_idx(files[0]) for files in found)
    return images.unsqueeze(1), labels.long()


def mnist() -> Images:
    """Return MNIST."""
    # Source: LeCun, Cortes, Burges.
    return idx_or_hub("mnist", "mnist", "ylecun/mnist", tuple("0123456789"))


_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def fashion_mnist() -> Images:
    """Return Fashion-MNIST, normalized by MNIST's mean and deviation as the paper does."""
    # Source: Xiao, Rasul, Vollgraf, arXiv 1708.07747; MIT license.
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
    """Return EMNIST letters: 124,800 and 20,800 images; upper and lower case are one class."""
    # Source: Cohen, Afshar, Tapson, van Schaik, arXiv 1702.05373.
    return _emnist("letters", _UPPER, "tanganke/emnist_letters", tall="I")


def emnist_byclass() -> Images:
    """Return EMNIST byclass: 697,932 and 116,323 images of digits, upper case and lower case letters."""
    # Source: Cohen, Afshar, Tapson, van Schaik, arXiv 1702.05373.
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
