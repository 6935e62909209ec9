"""Partitions: which samples of one data set belong to which client, as plain functions of labels or writers.

They hold no data. Indices are int64 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from netweight.core.seeds import derive, numpy_generator, torch_generator
from netweight.data.images.images import Images
from netweight.errors import UsageError
from netweight.methods.federate.task import ClientData

# Dominant classes of HyperFL's clients for data sets of ten classes.
TEN_CLASS_GROUPS: tuple[tuple[int, ...], ...] = ((0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (8, 9, 0))
# The same for EMNIST byclass: digits, upper case, lower case.
EMNIST_BYCLASS_GROUPS: tuple[tuple[int, ...], ...] = (tuple(range(10)), tuple(range(10, 36)), tuple(range(36, 62)))

# Draws of a Dirichlet partition that leaves a client with too few samples, at most.
_MOST_DRAWS = 1000


def dominant_groups(
    labels: Tensor, *, clients: int, per_client: int, groups: Sequence[Sequence[int]], uniform: float = 0.2,
    seed: int, start: int = 0, classes: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Give each client a share of all classes and, for the rest, only its group's dominant classes.

    Client i has group `i % len(groups)`. From each class the clients take runs of its samples one behind the other; a
    run that would pass the end of a class starts again at its beginning, so that clients may share samples. Where a
    share cannot be divided evenly, the first classes get one sample more.

    Source: HyperFL (arXiv 2412.07187) section 5.1, as its authors' code does it (theirs follows FedPAC).
    """
    order = _class_order(labels, seed, classes)
    _check_groups(groups, len(order))
    if clients < 1 or per_client < 1 or not 0 <= uniform <= 1 or start < 0:
        raise UsageError(
            f"Samples cannot be divided with clients={clients}, per_client={per_client}, uniform={uniform} and "
            f"start={start}.",
            cure="Use counts of at least 1, a uniform share in [0, 1], and a start of at least 0.",
        )
    even = int(per_client * uniform)
    shares = []
    for client in range(clients):
        group = torch.tensor(list(groups[client % len(groups)]))
        counts = _evenly(even, len(order))
        counts[group] += _evenly(per_client - even, len(group))
        shares.append(counts)
    return _take_runs(order, shares, start)


def dirichlet(
    labels: Tensor, *, clients: int, alpha: float, seed: int, minimum: int = 10, classes: int | None = None
) -> list[Tensor]:
    """Divide each class among the clients in proportions that are drawn from a symmetric Dirichlet distribution.

    Source: Hsu, Qi, Brown, arXiv 1909.06335; with a minimum as Li et al., arXiv 2102.02079.
    """
    if clients < 1 or not alpha > 0 or minimum < 0 or clients * minimum > len(labels):
        raise UsageError(
            f"{len(labels)} samples cannot be divided among {clients} clients with at least {minimum} samples each and "
            f"alpha {alpha}.",
            cure="Give fewer --clients, or in Python a smaller minimum; --alpha is greater than 0.",
        )
    order = _class_order(labels, seed, classes)
    generator = numpy_generator(seed, "dirichlet")
    for _ in range(_MOST_DRAWS):
        shares = generator.dirichlet(np.full(clients, alpha), size=len(order))
        parts = _divide(order, torch.from_numpy(shares))
        if min(len(part) for part in parts) >= minimum:
            return [part.sort().values for part in parts]
    raise UsageError(
        f"In each of {_MOST_DRAWS} random partitions with alpha {alpha}, at least one of the {clients} clients has "
        f"fewer than {minimum} samples.",
        cure="Give a larger --alpha or fewer --clients, or in Python a smaller minimum.",
    )


def by_writer(writers: Tensor, *, writers_per_client: int = 1) -> list[Tensor]:
    """Make a client of each writer, or of several in a row."""
    people = torch.unique(writers)
    if not 1 <= writers_per_client <= len(people):
        raise UsageError(
            f"A client cannot have {writers_per_client} of {len(people)} writers.",
            cure="Use a number from 1 to the number of writers.",
        )
    groups = torch.split(people, writers_per_client)
    return [torch.isin(writers, group).nonzero().flatten() for group in groups if len(group) == writers_per_client]


def matching_test(
    labels: Tensor, parts: Sequence[Tensor], test_labels: Tensor, *, per_client: int, seed: int,
    classes: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Give each client test samples with the same mixture of classes as its train samples.

    Classes without test samples have no part in the mixture.
    """
    order = _class_order(test_labels, seed, classes or int(labels.max()) + 1)
    if per_client < 1 or not all(len(part) for part in parts):
        raise UsageError(
            f"{per_client} test samples cannot be drawn to match the training samples of every client.",
            cure="Give every client a training sample, and use per_client of at least 1.",
        )
    available = torch.tensor([len(own) for own in order])
    shares = []
    for client, part in enumerate(parts):
        counts = torch.bincount(labels[part], minlength=len(order)) * (available > 0)
        if not int(counts.sum()):
            raise UsageError(
                f"No test sample has a class of client {client}, so that its accuracy cannot be measured.",
                cure="Give fewer --clients, or more test pictures of each class.",
            )
        shares.append(_apportion(counts, per_client).minimum(available))
    return _take_runs(order, shares, 0)


def _class_order(labels: Tensor, seed: int, classes: int | None = None) -> list[Tensor]:
    """List each class's samples, in an order that the seed decides on; classes without samples may be the last ones."""
    # The reference sorts by label with a sort that keeps no order within a class, so any order is as faithful.
    if labels.ndim != 1 or labels.dtype != torch.int64 or not len(labels) or int(labels.min()) < 0:
        raise UsageError(
            f"Labels of {labels.dtype} and shape {tuple(labels.shape)} cannot be divided.",
            cure="Give int64 of shape (n,), at least one, counted from 0.",
        )
    shuffled = torch.randperm(len(labels), generator=torch_generator(seed, "partition"))
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    return list(torch.split(by_class, torch.bincount(labels, minlength=classes or 0).tolist()))


def _check_groups(groups: Sequence[Sequence[int]], classes: int) -> None:
    """Check that every group names classes that are there, each once."""
    for group in groups:
        if not group or len(set(group)) != len(group) or not 0 <= min(group) <= max(group) < classes:
            raise UsageError(
                f"A group cannot have the dominant classes {tuple(group)}: the labels have {classes} classes.",
                cure=f"Name different classes from 0 to {classes - 1}.",
            )
    if not groups:
        raise UsageError("There are no groups of dominant classes.", cure="Give at least one group.")


def _evenly(total: int, parts: int) -> Tensor:
    """Divide a total into whole parts that differ by at most 1, the larger ones first."""
    return torch.tensor([(total + parts - 1 - part) // parts for part in range(parts)])


def _apportion(counts: Tensor, total: int) -> Tensor:
    """Scale counts to a total in whole numbers: by the largest remainders, the first class first."""
    exact = counts.double() * total / counts.sum()
    whole = exact.floor().long()
    remainder = (exact - whole).argsort(descending=True, stable=True)
    whole[remainder[: total - int(whole.sum())]] += 1
    return whole


def _take_runs(order: Sequence[Tensor], shares: Sequence[Tensor], start: int) -> list[Tensor]:
    """Take, client after client, runs of each class's samples, each class from its own running place."""
    place = [start] * len(order)
    taken = []
    for client, counts in enumerate(shares):
        runs = []
        for label, count in enumerate(counts.tolist()):
            if count > len(order[label]):
                raise UsageError(
                    f"Client {client} needs {count} samples of class {label}, which has {len(order[label])}.",
                    cure="Give --partition dirichlet, which divides classes of any size, or more --clients, each of "
                    "which then has fewer samples.",
                )
            if place[label] + count > len(order[label]):
                place[label] = 0
            runs.append(order[label][place[label] : place[label] + count])
            place[label] += count
        taken.append(torch.cat(runs))
    return taken


def _divide(order: Sequence[Tensor], shares: Tensor) -> list[Tensor]:
    """Cut each class's samples at its cumulative shares; shares has shape `(classes, clients)`."""
    parts: list[list[Tensor]] = [[] for _ in range(shares.shape[1])]
    for own, share in zip(order, shares, strict=True):
        cuts = (share.cumsum(0) * len(own)).round().long().clamp(0, len(own))
        cuts[-1] = len(own)
        for client, piece in enumerate(own.tensor_split(cuts[:-1])):
            parts[client].append(piece)
    return [torch.cat(pieces) for pieces in parts]


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
    images: Images, *, clients: int, partition: Partition = "dominant-groups", seed: int = 2022,
    per_client: tuple[int, int] | None = None, groups: Sequence[Sequence[int]] | None = None, uniform: float = 0.2,
    alpha: float = 0.5, minimum: int = 10, writers_per_client: int = 1,
) -> list[ClientData]:  # fmt: skip
    """Split a data set among clients."""
    if partition == "by-writer":
        parts = _writers(images, clients, writers_per_client)
    elif partition in ("dominant-groups", "dirichlet"):
        train_size, test_size = per_client or client_sizes(images, clients)
        starts = _REFERENCE_STARTS.get(images.name, (0, 0))
        seeds = derive(seed, "train"), derive(seed, "test")
        (_, labels), (_, test_labels) = images.train, images.test
        if partition == "dirichlet":
            classes = len(images.classes)
            train = dirichlet(labels, clients=clients, alpha=alpha, seed=seeds[0], minimum=minimum, classes=classes)
            test = matching_test(labels, train, test_labels, per_client=test_size, seed=seeds[1], classes=classes)
        else:
            groups = groups_of(len(images.classes)) if groups is None else groups
            train, test = (
                dominant_groups(
                    own,
                    clients=clients,
                    per_client=size,
                    groups=groups,
                    uniform=uniform,
                    seed=split,
                    start=start,
                    classes=len(images.classes),
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
    """Train and test images of each client: the HyperFL paper's, or for other data sets an equal share of all."""
    if images.name in _REFERENCE_SIZES:
        return _REFERENCE_SIZES[images.name]
    smallest = min(len(images.train[1]), len(images.test[1]))
    if not 1 <= clients <= smallest:
        raise UsageError(
            f"{images.name} cannot be split among {clients} clients.", cure=f"Give 1 to {smallest} --clients."
        )
    return len(images.train[1]) // clients, len(images.test[1]) // clients


def groups_of(classes: int) -> tuple[tuple[int, ...], ...]:
    """Dominant classes of each group: the HyperFL paper's for 10 and 62 classes, else thirds of all classes."""
    if classes == 10:
        return TEN_CLASS_GROUPS
    if classes == 62:
        return EMNIST_BYCLASS_GROUPS
    return tuple(tuple(part.tolist()) for part in torch.arange(classes).tensor_split(min(3, classes)))


def _writers(images: Images, clients: int, writers_per_client: int) -> list[tuple[Tensor, Tensor]]:
    """Split by writer: train and test images of the same writers."""
    if images.writers is None:
        raise UsageError(
            f"{images.name} does not name the writers of its images.",
            cure="Give --partition dirichlet, or --data omniglot.",
        )
    train = len(images.writers[0])
    rows_by_client = by_writer(torch.cat(images.writers), writers_per_client=writers_per_client)
    parts = [(own[own < train], own[own >= train] - train) for own in rows_by_client]
    whole = [part for part in parts if all(len(own) for own in part)]
    if not 1 <= clients <= len(whole):
        raise UsageError(
            f"{images.name} has train and test images for {len(whole)} clients of {writers_per_client} writers each, "
            f"not for {clients}.",
            cure="Give fewer --clients, or in Python other writers_per_client (5 for omniglot).",
        )
    return whole[:clients]


def _take(images: Images, split: tuple[Tensor, Tensor], indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return some images of a split as a model sees them, and their labels."""
    pixels, labels = split
    return images.normalized(pixels[indices]), labels[indices]
