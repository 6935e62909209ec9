"""Labelled image data sets as plain tensors: `load` by name, `load_folder` and `from_dataset` for a user's own.

Files come from the folder that `NETWEIGHT_DATA` names, else from the Hugging Face hub; `digits` needs neither. One
module per data set; `images` holds the type that they all return, `augmentation` what is done to a batch in training.
"""

from __future__ import annotations

from collections.abc import Callable

from netweight.core.names import nearest_names
from netweight.data.images import cifar as cifar10
from netweight.data.images import cifar as cinic10
from netweight.data.images import emnist
from netweight.data.images import idx as fashion_mnist
from netweight.data.images import idx as mnist
from netweight.data.images import small as digits
from netweight.data.images import small as omniglot
from netweight.data.images.cifar import crop_and_flip
from netweight.data.images.folder import from_dataset, load_folder
from netweight.data.images.images import Images
from netweight.errors import NameNotFound

__all__ = ["NAMES", "Images", "crop_and_flip", "from_dataset", "load", "load_folder"]

_LOADERS: dict[str, Callable[[], Images]] = {
    "digits": digits.digits,
    "fashion-mnist": fashion_mnist.fashion_mnist,
    "mnist": mnist.mnist,
    "emnist-letters": emnist.emnist_letters,
    "emnist-byclass": emnist.emnist_byclass,
    "cifar10": cifar10.cifar10,
    "cinic10": cinic10.cinic10,
    "omniglot": omniglot.omniglot,
}
# What `load` knows.
NAMES = tuple(_LOADERS)


def load(name: str) -> Images:
    """Load a data set by name."""
    if name not in _LOADERS:
        raise NameNotFound(
            f"There is no data set {name!r}.", cure=f"Did you mean {nearest_names(name, NAMES, 2)}? All: {NAMES}."
        )
    return _LOADERS[name]()
