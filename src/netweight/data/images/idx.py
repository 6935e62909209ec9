"""MNIST and Fashion-MNIST, and the idx format in which they and EMNIST are published: `…-ubyte`, mostly gzipped."""

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
