"""Fashion-MNIST: 60,000 and 10,000 gray pictures of clothes, 28 × 28, from the four official files or the hub."""

from __future__ import annotations

from netweight.zoo.data.dataset import from_dataset
from netweight.zoo.data.idx import idx_pair
from netweight.zoo.data.images import MNIST_MEAN_STD, Images
from netweight.zoo.data.sources import from_hub, local_folder

__all__ = ["fashion_mnist", "idx_or_hub"]

_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def fashion_mnist() -> Images:
    """Return Fashion-MNIST, normalized by MNIST's mean and deviation as the paper does.

    Raises:
        MissingExtra: It is neither below `NETWEIGHT_DATA`/fashion_mnist nor on the hub.
        CorruptBlob: A file is damaged.

    Source: Xiao, Rasul, Vollgraf, arXiv 1708.07747; MIT license.
    """
    return idx_or_hub("fashion-mnist", "fashion_mnist", "zalando-datasets/fashion_mnist", _CLASSES)


def idx_or_hub(name: str, folder: str, repository: str, classes: tuple[str, ...]) -> Images:
    """Load a data set in the form of MNIST: four idx files, or columns `image` and `label` on the hub.

    Args:
        name: Our name of it.
        folder: Its folder below `NETWEIGHT_DATA`; the files may lie in subfolders, packed or not.
        repository: Where the hub has it.
        classes: Names of the classes.

    Raises:
        MissingExtra: It is in neither place.
        CorruptBlob: A file is damaged.
    """
    mean, std = MNIST_MEAN_STD
    local = local_folder(folder)
    splits = [idx_pair(local, prefix) for prefix in ("train", "t10k")] if local else [None]
    if all(splits):
        train, test = (split for split in splits if split is not None)
        return Images(name, train, test, classes, mean=mean, std=std)
    holding = "train-images-idx3-ubyte.gz and the three files beside it"
    train_rows, test_rows = from_hub(repository, "train", "test", name=name, folder=folder, holding=holding)
    return from_dataset(train_rows, test_rows, name=name, classes=classes, mean_std=MNIST_MEAN_STD)
