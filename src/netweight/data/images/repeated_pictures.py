"""Pictures that a data set holds several times: among its training and its test pictures, or in several classes.

A test picture that a model was trained on says nothing about new pictures, and one picture in two classes cannot be
learned. Both come from copies that were made before a data set was divided.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor


def repeated_pictures(
    pixels: Sequence[Tensor], labels: Sequence[Tensor], names: Sequence[Sequence[str]], classes: Sequence[str]
) -> list[str]:
    """Describe pictures that a data set holds several times, pixel for pixel.

    Args:
        pixels: Training pictures and test pictures, uint8 of shape `(n, channels, height, width)`.
        labels: Their class numbers, shape `(n,)`.
        names: Their names.
        classes: Name of each class.

    Returns:
        At most two sentences: about test pictures that are training pictures as well, and about pictures in several
        classes.
    """
    first: dict[bytes, tuple[str, int, int]] = {}
    learned, torn = [], []
    for part, (own, targets, called) in enumerate(zip(pixels, labels, names, strict=True)):
        for picture, label, name in zip(own, targets.tolist(), called, strict=True):
            digest = hashlib.blake2b(picture.contiguous().numpy().tobytes(), digest_size=16).digest()
            other, there, whose = first.setdefault(digest, (name, part, label))
            if there != part:
                learned.append((name, other))
            if whose != label:
                torn.append((name, other, classes[label], classes[whose]))
    remarks = []
    if learned:
        remarks.append(
            f"Of {len(pixels[1])} test pictures, {len(learned)} are training pictures as well, such as "
            f"{learned[0][0]}, the same as {learned[0][1]}: the accuracy is partly measured on pictures that were "
            "learned."
        )
    if torn:
        name, other, own_class, others_class = torn[0]
        remarks.append(
            f"The classes contain the same pictures, {len(torn)} in all, such as {name} ({own_class!r}), the same as "
            f"{other} ({others_class!r}): at most one of the classes can be right."
        )
    return remarks
