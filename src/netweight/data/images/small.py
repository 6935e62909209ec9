"""scikit-learn's handwritten digits, which come with a package and need no download; and Omniglot, by writer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from netweight.data.images.images import Images, measured_mean_std
from netweight.data.images.sources import decode_splits, local_folder, missing, module
from netweight.errors import CorruptBlob, UsageError

_DIGITS_MEAN_STD = ((0.3051,), (0.3248,))  # of the 1,501 train images, as resized here
_EVERY = 6  # of each class, every sixth image tests


def digits() -> Images:
    """Return the 1,797 digits, 8 × 8 with 17 shades, as images of 28 × 28."""
    # A shade s of 0 to 16 becomes s · 255 / 16; the image is resized bilinearly (corners not aligned) and rounded. Of
    # each class every sixth image, in the order of the package, is a test image.
    # Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998; its test part.
    loaded = module("sklearn.datasets", "The data set digits", "evidence").load_digits()
    weights = _fourteenths()
    sums = weights @ loaded.images.astype(np.int64) @ weights.T  # 14² times the resized shades
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
        left, part = divmod(4 * place - 5, 14)  # place is at (4 · place − 5) / 14 of the small image
        weights[place, min(max(left, 0), 7)] += 14 - part
        weights[place, min(max(left + 1, 0), 7)] += part
    return weights


# People who drew each alphabet; every fifth of them tests.
DRAWERS = 20
_SIDE = 105


def omniglot() -> Images:
    """Return Omniglot at 28 × 28: bright ink on black, each pixel the mean of the ink below it."""
    # Every drawer drew a character once, so the split is by drawer: of each alphabet drawers 5, 10, 15 and 20 test.
    # Writers are numbered `20 · alphabet + drawer − 1`; a client of five writers in a row has four to train and one to
    # test.
    # Source: Lake, Salakhutdinov, Tenenbaum, Science 350, 2015; MIT license.
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
        raise UsageError(f"{bad[0]} does not end in its drawer, 01 to 20.", cure="Unpack the official release again.")
    writers = [alphabets.index(f.parts[-3]) * DRAWERS + int(d) - 1 for f, d in zip(files, drawers, strict=True)]
    pictures = decode_splits([[(str(file), file) for file in files]], of="omniglot")[0]
    labels = [number["/".join(file.parts[-3:-1])] for file in files]
    return 1 - pictures.float() / 255, torch.tensor(labels), torch.tensor(writers), tuple(classes)


_DRAWER_NAMES = {f"{drawer:02d}" for drawer in range(1, DRAWERS + 1)}
