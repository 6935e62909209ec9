"""scikit-learn's handwritten digits: real data that comes with a package, so that nothing needs to be downloaded."""

from __future__ import annotations

import numpy as np
import torch

from netweight.zoo.data.images import Images
from netweight.zoo.data.sources import module

__all__ = ["digits"]

_MEAN_STD = ((0.3051,), (0.3248,))  # of the 1,501 train images, as resized here
_EVERY = 6  # of each class, every sixth image tests


def digits() -> Images:
    """Return the 1,797 digits, 8 × 8 with 17 shades, as images of 28 × 28.

    A shade s of 0 to 16 becomes s · 255 / 16; the image is resized bilinearly (corners not aligned) and rounded. Of
    each class every sixth image, in the order of the package, is a test image.

    Raises:
        MissingExtra: scikit-learn is not installed.

    Source: Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI 1998; its test part.
    """
    loaded = module("sklearn.datasets", "The data set digits", "evidence").load_digits()
    weights = _fourteenths()
    sums = weights @ loaded.images.astype(np.int64) @ weights.T  # 14² times the resized shades
    pixels = (2 * 255 * sums + 16 * 14**2) // (2 * 16 * 14**2)
    images, labels = torch.from_numpy(pixels.astype(np.uint8)).unsqueeze(1), torch.from_numpy(loaded.target).long()
    tests = torch.zeros(len(labels), dtype=torch.bool)
    for digit in range(10):
        tests[(labels == digit).nonzero().flatten()[_EVERY - 1 :: _EVERY]] = True
    mean, std = _MEAN_STD
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
