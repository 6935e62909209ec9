"""EMNIST: handwritten letters (26 classes) and all characters (62 classes), 28 × 28, from local files or the hub.

The official files hold every image mirrored at its diagonal; what comes out here is upright.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from netweight.data.images.folder import from_dataset
from netweight.data.images.idx import idx_pair
from netweight.data.images.images import MNIST_MEAN_STD, Images
from netweight.data.images.sources import from_hub, local_folder
from netweight.errors import CorruptBlob

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
