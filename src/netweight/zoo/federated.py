"""A labelled image data set split among clients: what engines and the Flower app train on.

The partitions themselves are in `netweight.methods.federate.partition`; here they meet data and its normalization.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from netweight.core.seeds import derive
from netweight.errors import UsageError
from netweight.methods.federate.partition import (
    EMNIST_BYCLASS_GROUPS,
    TEN_CLASS_GROUPS,
    by_writer,
    dirichlet,
    dominant_groups,
    matching_test,
)
from netweight.methods.federate.task import ClientData
from netweight.zoo.data.images import Images

__all__ = ["Partition", "client_sizes", "federated_images", "groups_of"]

Partition = Literal["dominant-groups", "dirichlet", "by-writer"]

_REFERENCE_SIZES = {
    "emnist-byclass": (1000, 600),
    "emnist-letters": (1000, 600),
    "fashion-mnist": (600, 600),
    "mnist": (600, 600),
    "cifar10": (600, 300),
    "cifar10-jpeg": (600, 300),
    "cinic10": (600, 300),
}
_REFERENCE_STARTS = {"cifar10": (2000, 500), "cifar10-jpeg": (2000, 500)}


def federated_images(
    images: Images,
    *,
    clients: int,
    partition: Partition = "dominant-groups",
    seed: int = 2022,
    per_client: tuple[int, int] | None = None,
    groups: Sequence[Sequence[int]] | None = None,
    uniform: float = 0.2,
    alpha: float = 0.5,
    minimum: int = 10,
    writers_per_client: int = 1,
) -> list[ClientData]:
    """Split a data set among clients.

    Args:
        images: The data set; train images go to train data, test images to test data.
        clients: Number of clients, at least 1.
        partition: "dominant-groups" is the HyperFL paper's; "dirichlet" divides every train image, with test images of
            the same mixture; "by-writer" makes a client of each writer.
        seed: Decides on the split and nothing else.
        per_client: Train and test images of each client; `client_sizes` by default. "dirichlet" and "by-writer" have
            as many train images as there are, and "by-writer" as many test images.
        groups: For "dominant-groups": classes of each group; `groups_of` by default.
        uniform: For "dominant-groups": the share of a client's images that is spread over all classes.
        alpha: For "dirichlet": concentration.
        minimum: For "dirichlet": least train images of a client.
        writers_per_client: For "by-writer": writers of one client, who need both train and test images between them.

    Returns:
        Per client normalized images, float32, and labels, int64.

    Raises:
        UsageError: A number is out of range, images or writers are too few, or writers are not known.
    """
    if partition == "by-writer":
        parts = _writers(images, clients, writers_per_client)
    elif partition in ("dominant-groups", "dirichlet"):
        train_size, test_size = per_client or client_sizes(images, clients)
        starts = _REFERENCE_STARTS.get(images.name, (0, 0))
        seeds = derive(seed, "train"), derive(seed, "test")
        (_, labels), (_, test_labels) = images.train, images.test
        if partition == "dirichlet":
            train = dirichlet(labels, clients=clients, alpha=alpha, seed=seeds[0], minimum=minimum)
            test = matching_test(labels, train, test_labels, per_client=test_size, seed=seeds[1])
        else:
            groups = groups_of(len(images.classes)) if groups is None else groups
            train, test = (
                dominant_groups(
                    own, clients=clients, per_client=size, groups=groups, uniform=uniform, seed=split, start=start
                )
                for own, size, split, start in zip(
                    (labels, test_labels), (train_size, test_size), seeds, starts, strict=True
                )
            )
        parts = list(zip(train, test, strict=True))
    else:
        raise UsageError(f"There is no partition {partition!r}.", cure="Use dominant-groups, dirichlet or by-writer.")
    return [ClientData(_take(images, images.train, a), _take(images, images.test, b)) for a, b in parts]


def client_sizes(images: Images, clients: int) -> tuple[int, int]:
    """Train and test images of each client: the HyperFL paper's, or for other data sets an equal share of all.

    Args:
        images: The data set, known by its name.
        clients: Number of clients.

    Raises:
        UsageError: There are fewer images than clients.
    """
    if images.name in _REFERENCE_SIZES:
        return _REFERENCE_SIZES[images.name]
    smallest = min(len(images.train[1]), len(images.test[1]))
    if not 1 <= clients <= smallest:
        raise UsageError(
            f"{images.name} cannot be split among {clients} clients.", cure=f"Use 1 to {smallest} clients."
        )
    return len(images.train[1]) // clients, len(images.test[1]) // clients


def groups_of(classes: int) -> tuple[tuple[int, ...], ...]:
    """Dominant classes of each group: the HyperFL paper's for 10 and 62 classes, else thirds of all classes.

    Args:
        classes: Number of classes; fewer than three make as many groups.
    """
    if classes == 10:
        return TEN_CLASS_GROUPS
    if classes == 62:
        return EMNIST_BYCLASS_GROUPS
    return tuple(tuple(part.tolist()) for part in torch.arange(classes).tensor_split(min(3, classes)))


def _writers(images: Images, clients: int, writers_per_client: int) -> list[tuple[Tensor, Tensor]]:
    """Split by writer: train and test images of the same writers."""
    if images.writers is None:
        raise UsageError(f"{images.name} does not say who wrote what.", cure="Use another partition, or omniglot.")
    train = len(images.writers[0])
    found = by_writer(torch.cat(images.writers), writers_per_client=writers_per_client)
    parts = [(own[own < train], own[own >= train] - train) for own in found]
    whole = [part for part in parts if all(len(own) for own in part)]
    if not 1 <= clients <= len(whole):
        raise UsageError(
            f"{images.name} makes {len(whole)} clients of {writers_per_client} writers that have train and test images,"
            f" not {clients}.",
            cure="Ask for fewer clients, or change writers_per_client (5 for omniglot).",
        )
    return whole[:clients]


def _take(images: Images, split: tuple[Tensor, Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return some images of a split as a model sees them, and their labels."""
    pixels, labels = split
    return images.normalized(pixels[indices]), labels[indices]
