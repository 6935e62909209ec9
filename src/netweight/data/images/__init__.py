"""Labelled image data sets as plain tensors: `load` by name, `load_folder` and `from_dataset` for a user's own.

Files come from the folder that `NETWEIGHT_DATA` names, else from the Hugging Face hub; `digits` needs neither. All
loaders return `Images` (`images.py`); `crop_and_flip` augments a batch in training.
"""

from __future__ import annotations

from collections.abc import Callable

from netweight.core.names import not_found
from netweight.data.images.images import Images as Images
from netweight.data.images.images import from_dataset as from_dataset
from netweight.data.images.images import load_folder as load_folder
from netweight.data.images.public import (
    cifar10,
    cinic10,
    digits,
    emnist_byclass,
    emnist_letters,
    fashion_mnist,
    mnist,
    omniglot,
)
from netweight.data.images.public import crop_and_flip as crop_and_flip

_LOADERS: dict[str, Callable[[], Images]] = {
    "digits": digits, "fashion-mnist": fashion_mnist, "mnist": mnist, "emnist-letters": emnist_letters,
    "emnist-byclass": emnist_byclass, "cifar10": cifar10, "cinic10": cinic10, "omniglot": omniglot,
}  # fmt: skip
# What `load` knows.
NAMES = tuple(_LOADERS)


def load(name: str) -> Images:
    """Load a data set by name."""
    if name not in _LOADERS:
        raise not_found(f"There is no data set {name!r}.", name, NAMES, f"All: {', '.join(NAMES)}.")
    return _LOADERS[name]()
