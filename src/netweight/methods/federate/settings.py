"""The settings of local training, frozen and checked. Methods and engines call it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from netweight.errors import UsageError


@final
@dataclass(frozen=True)
class Privacy:
    """Differentially private SGD: each example's gradient is clipped, their sum gets Gaussian noise.

    Attributes:
        noise_multiplier: Standard deviation of the noise as a multiple of `clip`; at least 0.
            `netweight.integrations.opacus` turns an ε into one. Clients of different sizes need different noise for
            one ε, and this is for all of them.
        clip: Largest norm of one example's gradient, above 0.
        sampling: "poisson" draws each example on its own, which accountants assume; "shuffled" goes through the
            examples in turn as the reference does, and then the ε that an accountant states is not valid.

    Raises:
        UsageError: A number is out of its range, or there is no such sampling.

    Source: Abadi et al. (arXiv 1607.00133), algorithm 1; HyperFL's baselines clip at 0.04.
    """

    # Source: Abadi et al. (arXiv 1607.00133), algorithm 1; HyperFL's baselines clip at 0.04.

    noise_multiplier: float  # standard deviation of the noise as a multiple of `clip`; at least 0
    clip: float = 0.04  # largest norm of one example's gradient, above 0
    # "poisson" draws each example on its own, which accountants assume; "shuffled" goes through the examples in turn as
    # the reference does, and then the ε that an accountant states is not valid.
    sampling: Literal["poisson", "shuffled"] = "poisson"

    def __post_init__(self) -> None:
        """Check the values."""
        if self.noise_multiplier < 0 or self.clip <= 0:
            raise UsageError(
                f"Noise {self.noise_multiplier} and clip {self.clip} cannot be.", cure="Give 0 or more, above 0."
            )
        if self.sampling not in ("poisson", "shuffled"):
            raise UsageError(f"There is no sampling {self.sampling!r}.", cure='Use "poisson" or "shuffled".')


@final
@dataclass(frozen=True)
class Phase:
    """A stretch of local training with a fresh optimizer.

    Attributes:
        trains: Which half learns: "head" (the body is then in evaluation mode), "body" or "both".
        epochs: Passes over the client's training examples, at least 1.
        lr: Learning rate of SGD.
        privacy: Make the gradients differentially private; None for plain SGD.
        head_lr: Learning rate of a plain step of the head before every private step of the body; None for no such
            step.

    Raises:
        UsageError: A number is out of its range, or `head_lr` does not go with what is trained.
    """

    # Which half learns: "head" (the body is then in evaluation mode), "body" or "both".
    trains: Literal["head", "body", "both"]
    epochs: int  # passes over the client's training examples, at least 1
    lr: float  # learning rate of SGD
    privacy: Privacy | None = None  # make the gradients differentially private; None for plain SGD
    # Learning rate of a plain step of the head before every private step of the body; None for no such step.
    head_lr: float | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        if self.epochs < 1 or self.lr <= 0:
            raise UsageError(f"A phase cannot have {self.epochs} epochs at learning rate {self.lr}.")
        if self.head_lr is not None and (self.trains != "body" or self.privacy is None or self.head_lr <= 0):
            raise UsageError("head_lr, above 0, goes with a phase that trains the body privately.")


@final
@dataclass(frozen=True)
class LocalTraining:
    """How a client trains in one round.

    Attributes:
        epochs: Passes over its examples that train what is shared (and, for some methods, the head).
        lr: Learning rate of these.
        head_epochs: Passes before them that train the head alone, for methods with a private head; 0 for none.
        head_lr: Learning rate of these.
        batch_size: Examples per step.
        momentum: Of SGD; the optimizer is fresh in every phase of every round.
        weight_decay: Of SGD.
        clip: Largest norm of a hypernetwork's gradient, and of its embedding's, in one step.

    Raises:
        UsageError: A value is out of its range.

    Source: HyperFL (arXiv 2412.07187): 5 epochs at 0.02 after 1 of the head at 0.1, batches of 50.
    """

    epochs: int = 5
    lr: float = 0.02
    head_epochs: int = 1
    head_lr: float = 0.1
    batch_size: int = 50
    momentum: float = 0.5
    weight_decay: float = 5e-4
    clip: float = 50.0

    def __post_init__(self) -> None:
        """Check the values."""
        if min(self.epochs, self.batch_size) < 1 or self.head_epochs < 0:
            raise UsageError(
                f"Local training cannot have {self.epochs} and {self.head_epochs} epochs, batches of {self.batch_size}."
            )
        if min(self.lr, self.head_lr, self.clip) <= 0 or not 0 <= self.momentum < 1 or self.weight_decay < 0:
            raise UsageError(
                f"Local training cannot have learning rates {self.lr}, {self.head_lr}, clip {self.clip}, momentum "
                f"{self.momentum}, weight decay {self.weight_decay}.",
                cure="Learning rates and clip are above 0, momentum is in [0, 1), weight decay at least 0.",
            )
