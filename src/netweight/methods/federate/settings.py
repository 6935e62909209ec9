"""Settings of local training, of privacy and of a federation's rounds. No torch, so that commands read them quickly."""

from __future__ import annotations

from typing import Annotated, Literal, final

from pydantic import Field

from netweight.errors import UsageError
from netweight.methods.federate.aggregator import AggregatorSettings
from netweight.methods.federate.aggregators import AGGREGATORS
from netweight.settings import Cli, Settings

Trains = Literal["head", "body", "both"]
Sampling = Literal["poisson", "shuffled"]
Lie = Literal[
    "scaled",
    "sign-flipped",
    "label-flipped",
    "constant",
    "claimed",
    "colluding",
    "late",
    "free-rider",
    "backdoor",
    "knowing",
    "alie",
    "minmax",
    "inner-product",
    "late-sybils",
    "hidden-backdoor",
]


@final
class Privacy(Settings):
    """Differentially private SGD: each example's gradient is clipped, and their sum gets Gaussian noise.

    Source: Abadi et al. (arXiv 1607.00133), algorithm 1; HyperFL's baselines clip at 0.04.
    """

    noise_multiplier: float = Field(ge=0, description="Standard deviation of the noise as a multiple of `clip`.")
    clip: float = Field(default=0.04, gt=0, description="Largest norm of one example's gradient.")
    sampling: Sampling = Field(
        default="poisson",
        description="`poisson` draws each example on its own, as accountants assume; `shuffled` takes the examples in "
        "turn, as the reference does, and then no ε that an accountant states is valid.",
    )


@final
class Budget(Settings):
    """Privacy budget of all answers of a client together."""

    epsilon: float = Field(
        gt=0,
        description="Largest ε over all answers, for what the noise protects: one example (added or removed) or all "
        "data of the client (replaced). An answer that would exceed it is refused.",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="δ of the budget.")


@final
class Phase(Settings):
    """A phase of local training with a new optimizer."""

    trains: Trains = Field(
        description="Half of the model that is trained; a body that is not trained is in evaluation mode."
    )
    epochs: int = Field(ge=1, description="Passes over the client's training examples.")
    lr: float = Field(gt=0, description="Learning rate of SGD.")
    privacy: Privacy | None = Field(default=None, description="Settings of differentially private gradients.")
    head_lr: float | None = Field(
        default=None,
        gt=0,
        description="Learning rate of a plain step of the head before every private step of the body.",
    )

    def check(self) -> None:
        """Refuse steps of the head where nothing trains the body privately."""
        if self.head_lr is not None and (self.trains != "body" or self.privacy is None):
            raise UsageError("head_lr has an effect only in a phase that trains the body privately.")


@final
class LocalTraining(Settings):
    """Settings of a client's training in one round.

    Source: HyperFL (arXiv 2412.07187): 5 epochs at 0.02 after 1 of the head at 0.1, batches of 50.
    """

    epochs: int = Field(default=5, ge=1, description="Passes over the examples that train the shared weights.")
    lr: float = Field(default=0.02, gt=0, description="Learning rate of the shared weights.")
    head_epochs: int = Field(
        default=1,
        ge=0,
        description="Passes over the examples that train a private head alone, before the shared weights.",
    )
    head_lr: float = Field(default=0.1, gt=0, description="Learning rate of the private head.")
    batch_size: int = Field(default=50, ge=1, description="Examples per step.")
    momentum: float = Field(default=0.5, ge=0, lt=1, description="Momentum of SGD, which begins anew in every phase.")
    weight_decay: float = Field(default=5e-4, ge=0, description="Weight decay of SGD.")
    clip: float = Field(
        default=50.0, gt=0, description="Largest norm of a hypernetwork's gradient, and of its embedding's."
    )


class Federation(Settings):
    """The rounds of a federation."""

    rounds: int = Field(default=200, ge=1, description="Number of rounds.")
    fraction: float = Field(
        default=1.0, gt=0, le=1, description="Share of the clients that train in each round; at least one client does."
    )
    seed: int = Field(default=520, description="Seed of everything except the split of the data.")
    evaluate_every: int = Field(default=1, ge=1, description="Rounds between two measurements of accuracy.")
    drop_out: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of the clients whose update is lost in each round, to simulate failures.",
    )
    min_clients: int = Field(
        default=1, ge=1, description="Fewest valid updates of a round; a round with fewer is repeated."
    )
    retries: Annotated[int, Cli(own=False)] = Field(
        default=3,
        ge=0,
        description="Number of times that a round is repeated before the federation stops, with its state saved.",
    )
    until_plateau: bool = Field(default=False, description="Stop once the accuracy no longer rises.")
    aggregator: Annotated[AggregatorSettings, AGGREGATORS] = Field(
        "bounded-mean", validate_default=True, description="Aggregation rule for the clients' updates."
    )
    most_norm: Annotated[float, Cli(own=False)] = Field(
        default=3.0,
        ge=1,
        description="Largest product of weight and length of an update, as a multiple of the round's median; longer "
        "changes are shortened (bounded-mean and clipped-mean: to the median itself) and their clients named.",
    )
    most_examples: Annotated[float, Cli(own=False)] = Field(
        default=3.0,
        ge=1,
        description="Largest number of examples that a client may claim in the plain mean, as a multiple of the "
        "round's median; the other rules ignore claims.",
    )

    def sampled(self, clients: int) -> int:
        """Return how many of `clients` a round asks: the share `fraction`, rounded down, and at least one."""
        # The addend is needed because 0.29 of 100 is 28.999… in binary.
        return max(int(self.fraction * clients + 1e-9), 1)

    def most_answers(self) -> int | None:
        """Return how often one client may answer, attempts included; None for no limit."""
        return None

    def evaluates(self, round: int) -> bool:
        """Return whether accuracy is measured in the round of number `round`, counted from 1."""
        return round % self.evaluate_every == 0 or round == self.rounds
