"""A data set split among clients: sizes, mixtures, normalization, and what is refused."""

import pytest
import torch

from netweight.data import images as data
from netweight.errors import UsageError
from netweight.methods.federate.partition import client_sizes, federated_images, groups_of
from netweight.methods.federate.plan import FederationPlan


def numbered(count=400, classes=10, name="numbered", writers=None):
    """Images that hold their own number in two pixels, so that they are known after a split."""
    labels = torch.arange(count) % classes
    pixels = torch.zeros(count, 1, 2, 2, dtype=torch.uint8)
    pixels[:, 0, 0, 0], pixels[:, 0, 0, 1] = torch.arange(count) // 256, torch.arange(count) % 256
    splits = ((pixels, labels), (pixels, labels))
    names = tuple(str(n) for n in range(classes))
    return data.Images(name, *splits, names, writers=writers, mean=(0.25,), std=(0.5,))


def numbers(images, inputs):
    pixels = (images.pixels(inputs) * 255).round().long()
    return pixels[:, 0, 0, 0] * 256 + pixels[:, 0, 0, 1]


@pytest.mark.parametrize("partition", ["dominant-groups", "dirichlet"])
def test_clients_hold_normalized_images_with_their_labels(partition):
    images = numbered()
    clients = federated_images(images, clients=4, partition=partition)
    again = federated_images(images, clients=4, partition=partition)
    other = federated_images(images, clients=4, partition=partition, seed=1)
    assert len(clients) == 4
    for client, same in zip(clients, again, strict=True):
        for (inputs, labels), (inputs_again, _) in zip(
            (client.train, client.test), (same.train, same.test), strict=True
        ):
            assert (inputs.dtype, labels.dtype) == (torch.float32, torch.int64)
            assert torch.equal(numbers(images, inputs) % 10, labels)
            assert torch.equal(inputs, inputs_again)
    found, others = (torch.cat([numbers(images, c.train[0]) for c in all_]) for all_ in (clients, other))
    assert not torch.equal(found, others)
    if partition == "dirichlet":
        assert torch.equal(found.sort().values, torch.arange(400))
    else:
        assert [len(c.train[1]) for c in clients] == [len(c.test[1]) for c in clients] == [100] * 4
        assert torch.bincount(clients[1].test[1]).tolist() == [2, 2, 29, 29, 28, 2, 2, 2, 2, 2]


def test_by_writer_gives_a_client_train_and_test_images_of_its_writers():
    train, test = torch.arange(400) % 8, torch.arange(400) % 4 * 2  # even writers are in both splits
    images = numbered(writers=(train, test))
    clients = federated_images(images, clients=4, partition="by-writer")
    assert [sorted(set((numbers(images, c.train[0]) % 8).tolist())) for c in clients] == [[0], [2], [4], [6]]
    assert [sorted(set((numbers(images, c.test[0]) % 4 * 2).tolist())) for c in clients] == [[0], [2], [4], [6]]
    pairs = federated_images(images, clients=3, partition="by-writer", writers_per_client=2)
    assert [sorted(set((numbers(images, c.train[0]) % 8).tolist())) for c in pairs] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(UsageError, match="for 4 clients of 1 writers each, not for 5"):
        federated_images(images, clients=5, partition="by-writer")


def test_the_paper_s_sizes_and_starts():
    assert client_sizes(numbered(name="fashion-mnist"), 100) == (600, 600)
    assert client_sizes(numbered(name="emnist-letters"), 20) == (1000, 600)
    assert client_sizes(numbered(name="cifar10"), 20) == client_sizes(numbered(name="cinic10"), 20) == (600, 300)
    assert client_sizes(numbered(), 20) == (20, 20)
    cifar, other = numbered(10_000, name="cifar10-jpeg"), numbered(10_000, name="cinic10")
    first, second = (federated_images(images, clients=1)[0] for images in (cifar, other))
    # CIFAR's clients begin at later samples of each class; the partition is otherwise the same.
    assert torch.bincount(first.train[1]).tolist() == torch.bincount(second.train[1]).tolist()
    assert not torch.equal(numbers(cifar, first.test[0]), numbers(other, second.test[0]))


def test_groups_for_any_number_of_classes():
    assert groups_of(10)[4] == (8, 9, 0)
    assert [len(group) for group in groups_of(62)] == [10, 26, 26]
    assert [len(group) for group in groups_of(26)] == [9, 9, 8]
    assert groups_of(2) == ((0,), (1,))


def test_fashion_mnist_split_like_the_paper(data_folder, monkeypatch):
    if not (data_folder / "fashion_mnist").is_dir():
        pytest.skip("NETWEIGHT_DATA contains no fashion_mnist")
    monkeypatch.setenv("NETWEIGHT_DATA", str(data_folder))
    images = data.load("fashion-mnist")
    clients = federated_images(images, clients=20)
    for number, client in enumerate(clients):
        dominant = [(2 * number + step) % 10 for step in range(3)]
        for inputs, labels in (client.train, client.test):
            assert inputs.shape == (600, 1, 28, 28)
            assert torch.bincount(labels).tolist() == [172 if label in dominant else 12 for label in range(10)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clients": 4, "partition": "dirichlett"}, "no partition 'dirichlett'"),
        ({"clients": 401}, "401 clients"),
        ({"clients": 0}, "0 clients"),
        ({"clients": 2, "partition": "by-writer"}, "does not name the writers of its images"),
        ({"clients": 2, "partition": "dirichlet", "minimum": 300}, "at least 300"),
        ({"clients": 2, "groups": [(0, 10)]}, r"\(0, 10\)"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(UsageError, match=message):
        federated_images(numbered(), **options)


def test_folders_that_a_federation_cannot_learn_from_are_refused_with_options_as_the_cure(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="Pillow is in the federated extra")
    for name, count in (("wrapped/set/a", 9), ("wrapped/set/b", 9), ("uneven/a", 40), ("uneven/b", 5), ("uneven/c", 1)):
        (tmp_path / name).mkdir(parents=True)
        for number in range(count):
            image.new("L", (28, 28), 3 * number).save(tmp_path / name / f"{number}.png")
    with pytest.raises(UsageError, match=r"one subfolder, 'set', with the subfolders a, b: .*: .*wrapped/set"):
        FederationPlan(data=str(tmp_path / "wrapped"), clients=2).task()
    with pytest.raises(UsageError, match=r"needs .* samples of class .*--partition dirichlet"):
        FederationPlan(data=str(tmp_path / "uneven"), clients=3).task()
    task = FederationPlan(data=str(tmp_path / "uneven"), clients=2, partition="dirichlet").task()
    assert sum(task.client(client).n for client in task.clients) == 37
    assert "1 of 3 classes have no test picture, such as 'c'" in " ".join(task.remarks)
