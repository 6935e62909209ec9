"""MNIST: 60,000 and 10,000 handwritten digits, 28 × 28, from the four official files or the hub."""

from __future__ import annotations

from netweight.zoo.data.fashion_mnist import idx_or_hub
from netweight.zoo.data.images import Images

__all__ = ["mnist"]


def mnist() -> Images:
    """Return MNIST.

    Raises:
        MissingExtra: It is neither below `NETWEIGHT_DATA`/mnist nor on the hub.
        CorruptBlob: A file is damaged.

    Source: LeCun, Cortes, Burges.
    """
    return idx_or_hub("mnist", "mnist", "ylecun/mnist", tuple("0123456789"))
