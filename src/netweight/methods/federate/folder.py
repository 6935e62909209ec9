"""The small convolutional networks of the HyperFL paper, as a feature extractor and a classifier."""

from __future__ import annotations

import dataclasses
import importlib
import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError

if TYPE_CHECKING:
    from torch import nn

    from netweight.data.images import Images
    from netweight.methods.federate import Federation, FedTask, LocalTraining, Method


@final
class SmallCNN(nn.Module):
    """The feature extractor: two convolutions for 28 × 28 images, three for 32 × 32, and a layer of 128 features."""

    # Source: HyperFL (arXiv 2412.07187), the networks for EMNIST and Fashion-MNIST, and for CIFAR-10 and CINIC-10.
    # `size`: height and width of an image, 28 or 32

    def __init__(self, channels: int = 1, size: int = 28) -> None:
        super().__init__()
        if size not in (28, 32):
            raise UsageError(f"The small CNN takes images of 28 or 32 pixels, not {size}.", cure="Resize the images.")
        self.conv1 = nn.Conv2d(channels, 16, 5)
        self.conv2 = nn.Conv2d(16, 32, 5, padding=1)
        self.conv3 = nn.Conv2d(32, 64, 3, padding=1) if size == 32 else None
        self.fc1 = nn.Linear(800 if size == 28 else 576, 128)

    def forward(self, images: Tensor) -> Tensor:
        """Return features, shape `(n, 128)`, of images, shape `(n, channels, size, size)`."""
        maps = images
        for convolution in (self.conv1, self.conv2, self.conv3):
            if convolution is not None:
                # Pooling first gives the same values, since leaky ReLU is monotone, for a quarter of the work.
                maps = F.leaky_relu(F.max_pool2d(convolution(maps), 2))
        return F.leaky_relu(self.fc1(maps.flatten(1)))


def small_cnn(channels: int = 1, size: int = 28, classes: int = 10, *, seed: int = 0) -> tuple[SmallCNN, nn.Linear]:
    """Return the feature extractor and its classifier with weights that depend on `seed` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SmallCNN(channels, size), nn.Linear(128, classes)


# Name of the settings' file in a run's folder.
PLAN_FILE = "federation.json"
# The seed with which the HyperFL paper's code splits data, whatever the seed of the model.
REFERENCE_SPLIT = 2022


@final
@dataclass(frozen=True)
class FederationPlan:
    """All that decides a federation.

    Attributes:
        data: A data set of `zoo.data.load`, or a folder of images with a subfolder per class.
        method: A method of `methods.federate.catalog`.
        clients: Number of clients.
        rounds: Number of rounds.
        until_plateau: Whether to end before the last round once accuracy has stopped rising.
        fraction: Share of clients asked in each round.
        seed: Of the model, batches and sampling.
        partition: "dominant-groups", "dirichlet" or "by-writer".
        alpha: Concentration of the Dirichlet partition.
        epochs: Local epochs of what is shared.
        batch_size: Examples per local step.
        lr: Learning rate of what is shared; None takes the method's own.
        epsilon: Privacy budget of differentially private methods over all rounds.
        delta: Its δ.
        drop_out: Share of clients that vanish from each round, to rehearse it.
        min_clients: A round with fewer sound updates is tried again.
        evaluate_every: Rounds between measurements of accuracy.
        noise: Noise that clients add to every value of their update, as a multiple of `clip`; 0 for none.
        clip: Largest norm of an update's change where there is noise.
        minimum_steps: Fewest local steps that clients agree to.
        refuse: Whether clients refuse abnormal hypernetworks.
        model: `"module:factory"`, which is called with channels, size and classes and returns `(body, head)`; None
            for the small CNN of the HyperFL paper.
    """

    data: str = "digits"
    method: str = "hyperfl"
    clients: int = 20
    rounds: int = 20
    until_plateau: bool = False
    fraction: float = 1.0
    seed: int = 520
    partition: str = "dominant-groups"
    alpha: float = 0.5
    epochs: int = 5
    batch_size: int = 50
    lr: float | None = None
    epsilon: float = 4.0
    delta: float = 1e-5
    drop_out: float = 0.0
    min_clients: int = 1
    evaluate_every: int = 1
    noise: float = 0.0
    clip: float = 1.0
    minimum_steps: int = 1
    refuse: bool = False
    model: str | None = None

    def images(self) -> Images:
        """Return the data set."""
        from netweight.data.images import NAMES, load, load_folder

        if self.data in NAMES:
            return load(self.data)
        if Path(self.data).is_dir():
            return load_folder(Path(self.data))
        near = ", ".join(nearest_names(self.data, NAMES))
        raise NameNotFound(f"{self.data!r} is neither a data set nor a folder.", cure=f"Nearest names: {near}.")

    def task(self) -> FedTask:
        """Return the network and every client's data."""
        from netweight.data.images import crop_and_flip
        from netweight.methods.federate import FedTask
        from netweight.methods.federate.partition import federated_images

        images = self.images()
        body, head = self._network(images)
        parts = federated_images(
            images,
            clients=self.clients,
            partition=self.partition,  # type: ignore[arg-type]  # refused there by name
            alpha=self.alpha,
            seed=REFERENCE_SPLIT,
        )
        natural = images.train[0].shape[1] == 3
        augment = partial(crop_and_flip, fill=images.black) if natural else None
        return FedTask(body, head, parts, augment=augment)

    def _network(self, images: Images) -> tuple[nn.Module, nn.Module]:
        _, channels, height, width = images.train[0].shape
        if self.model is not None:
            return _factory(self.model)(channels, height, len(images.classes))  # type: ignore[no-any-return]

        if height != width:
            raise UsageError(f"The small CNN takes square images, not {height} × {width}.", cure="Give a model.")
        return small_cnn(channels, height, len(images.classes), seed=self.seed)

    def training(self) -> LocalTraining | None:
        """Return how clients train; None for methods whose local training is of another kind."""
        from netweight.methods.federate.catalog import METHODS

        own = METHODS[self.method].training if self.method in METHODS else None
        if own is None:
            return None
        rate = own.lr if self.lr is None else self.lr
        return dataclasses.replace(own, epochs=self.epochs, batch_size=self.batch_size, lr=rate)

    def make_method(self, task: FedTask) -> Method:
        """Return the method, with the protections asked for around it."""
        from netweight.methods.federate.defenses import Hardened, RefusalLimits, UpdateNoise

        method = self._plain_method(task)
        if not (self.noise or self.refuse or self.minimum_steps > 1):
            return method
        noise = UpdateNoise(self.clip, self.noise) if self.noise else None
        return Hardened(method, noise, self.minimum_steps, RefusalLimits() if self.refuse else None)

    def _plain_method(self, task: FedTask) -> Method:
        """Return the method; a differentially private one with the noise that the budget asks of the schedule."""
        from netweight.methods.federate.catalog import METHODS, named_method

        training = self.training()
        if self.method not in METHODS or not METHODS[self.method].private:
            return named_method(self.method, training=training)
        from netweight.methods.federate.dp import noise_multiplier_for_all

        noise = noise_multiplier_for_all(
            self.epsilon,
            self.delta,
            sizes=[task.client(number).n for number in task.clients],
            batch_size=self.batch_size,
            epochs=self.epochs * self.rounds,
        )
        return named_method(self.method, training=training, noise_multiplier=noise)

    def settings(self) -> Federation:
        """Return rounds, sampling and seed."""
        from netweight.methods.federate import Federation

        return Federation(
            rounds=self.rounds,
            fraction=self.fraction,
            seed=self.seed,
            evaluate_every=self.evaluate_every,
            until_plateau=self.until_plateau,
            drop_out=self.drop_out,
            min_clients=self.min_clients,
        )

    def save(self, folder: Path) -> None:
        """Write the settings into a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / PLAN_FILE).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> FederationPlan:
        """Read the settings of a run."""
        path = folder / PLAN_FILE
        if not path.is_file():
            raise UsageError(
                f"{folder} holds no federation: there is no {PLAN_FILE}.", cure="Make one: netweight federate run."
            )
        return cls(**json.loads(path.read_text()))


def _factory(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(f"The model {name!r} cannot be imported: {error}.", cure='Give "module:factory".') from error
