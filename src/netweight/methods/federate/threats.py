"""Threat models: what the server of a federation is assumed to do and to see of one client."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, final

from netweight.errors import Unsupported, UsageError
from netweight.methods.federate.engine import TrainedFederation
from netweight.methods.federate.method import Method
from netweight.methods.federate.protections import HardenedMethod
from netweight.methods.federate.settings import LocalTraining

_SERVERS = {
    "honest": "", "imprint": ", server with imprint", "thresholds": ", server with thresholds",
    "fishing": ", server that fishes for one class",
}  # fmt: skip


@final
@dataclass(frozen=True)
class ThreatModel:
    """Assumptions about what the server sees."""

    batch_size: int = 1
    """Examples per local step."""
    local_steps: int = 1
    """Local steps that train what is shared, all on the same examples if there are no others."""
    examples: int | None = None
    """Examples that the client holds; None for as many as a batch."""
    summed_over: int = 1
    """Clients whose updates the server sees only as their average: 1 for none, more under secure aggregation."""
    server: Literal["honest", "imprint", "thresholds", "fishing"] = "honest"
    """"honest" sends what training gave; "imprint" sends a hypernetwork made to copy images into updates,
    "thresholds" one whose trunk separates the clients of a sum, "fishing" a classifier on which only one class
    has an effect.
    """
    queries: int = 1
    """Number of times that the same state is asked, where every answer has other noise."""
    knows_embeddings: bool = False
    """True if the server knows the clients' embeddings, from a round that it saw in the clear."""
    first_round: bool = False
    """Attack the first round, from the method's initial state, rather than one more round of the trained federation."""

    def __post_init__(self) -> None:
        """Check the values."""
        if min(self.batch_size, self.local_steps, self.summed_over, self.queries) < 1 or (self.examples or 1) < 1:
            raise UsageError(
                f"There is no such threat model: {self}.",
                cure="Use numbers of at least 1 (in a command: --threat BATCHxSTEPS[xCLIENTS]).",
            )

    @property
    def client_examples(self) -> int:
        """Number of examples that the client trains on."""
        return self.examples or self.batch_size

    @property
    def label(self) -> str:
        """In words, for tables."""
        steps = f"{self.local_steps} step{'s' * (self.local_steps > 1)} of batch {self.batch_size}"
        steps += f", sum of {self.summed_over} clients" if self.summed_over > 1 else ""
        steps += _SERVERS[self.server]
        steps += f", asked {self.queries} times" if self.queries > 1 else ""
        steps += ", embeddings known" if self.knows_embeddings else ""
        return steps + (", first round" if self.first_round else "")


def shortened(method: Method, threat: ThreatModel) -> Method:
    """Return the method with the threat model's batch size and steps, and without training of the head alone."""
    # The attacker may request fewer steps than the client agrees to.
    if isinstance(method, HardenedMethod):
        return dataclasses.replace(method, method=shortened(method.method, threat))
    per_epoch = -(-threat.client_examples // threat.batch_size)
    epochs, rest = divmod(threat.local_steps, per_epoch)
    if rest:
        raise UsageError(
            f"{threat.local_steps} steps of {threat.batch_size} are not whole passes over "
            f"{threat.client_examples} examples.",
            cure=f"Ask for a multiple of {per_epoch} steps (in a command: --threat {threat.batch_size}x{per_epoch}).",
        )
    training = getattr(method, "training", None)
    if not isinstance(training, LocalTraining):
        raise Unsupported(f"The local rounds of {method.name!r} cannot be shortened.")
    changes: dict[str, Any] = {"training": training.replace(epochs=epochs, head_epochs=0, batch_size=threat.batch_size)}
    if hasattr(method, "steps"):
        changes["steps"] = threat.local_steps
    if hasattr(method, "phases"):
        phases = [phase for phase in method.phases if phase.trains != "head"]
        changes["phases"] = tuple(phase.replace(epochs=epochs) for phase in phases)
    return dataclasses.replace(method, **changes)  # type: ignore[type-var]


def training_of(run: TrainedFederation) -> LocalTraining:
    training: LocalTraining = getattr(run.method, "training", LocalTraining())
    return training


def own_threat(run: TrainedFederation) -> ThreatModel:
    """Return the schedule that the run was trained with, as a threat model of its smallest client."""
    training = training_of(run)
    examples = min(run.task.client(number).n for number in run.task.clients)
    size = min(training.batch_size, examples)
    return ThreatModel(size, training.epochs * -(-examples // size), examples)
