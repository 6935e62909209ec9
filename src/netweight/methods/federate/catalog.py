"""All federated methods by the names that the command line and the tables call them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import final

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound, UsageError
from netweight.methods.federate.direct import centaur, dp_fedavg, fedavg, fedavg_private_head, local_only, ppsgd
from netweight.methods.federate.hyperfl import HyperFL
from netweight.methods.federate.method import Method
from netweight.methods.federate.pfedhn import pfedhn, pfedhn_pc
from netweight.methods.federate.settings import LocalTraining


@final
@dataclass(frozen=True)
class Entry:
    """A method in the catalog."""

    # Returns the method; takes `training`, and a private one takes the noise multiplier before it.
    make: Callable[..., Method]
    # Its local training; None where that is not HyperFL's with other numbers but of another kind.
    training: LocalTraining | None = LocalTraining()
    private: bool = False  # whether its local training is differentially private


# A step moves a weight that a code m generates (1 + |m|²) times as far as it would move the weight itself, about 25
# times at the start, while weight decay pulls no harder. A quarter of the paper's rate with forty times its decay keeps
# the training loss above 0, and so local training worth its while, to the last round.
_GENTLE = LocalTraining(lr=0.005, weight_decay=0.02)


METHODS: Mapping[str, Entry] = {
    "hyperfl": Entry(HyperFL),
    "hyperfl-body": Entry(partial(HyperFL, start_from="body", joint_head=True, name="hyperfl-body")),
    "hyperfl-whole": Entry(partial(HyperFL, start_from="body", private_head=False, name="hyperfl-whole"), _GENTLE),
    "fedavg": Entry(fedavg),
    "fedavg-private-head": Entry(fedavg_private_head),
    "local": Entry(local_only),
    "pfedhn": Entry(pfedhn, None),
    "pfedhn-pc": Entry(pfedhn_pc, None),
    "dp-fedavg": Entry(dp_fedavg, private=True),
    "centaur": Entry(centaur, private=True),
    "ppsgd": Entry(ppsgd, private=True),
}


def named_method(name: str, *, training: LocalTraining | None = None, noise_multiplier: float | None = None) -> Method:
    """Return a method by its name."""
    if name not in METHODS:
        near = ", ".join(nearest_names(name, METHODS))
        raise NameNotFound(f"There is no method {name!r}.", cure=f"Nearest names: {near}.")
    entry = METHODS[name]
    if entry.private and noise_multiplier is None:
        raise UsageError(
            f"{name} is differentially private and needs noise.",
            cure="Give a noise multiplier; netweight.methods.federate.dp.noise_multiplier_for_all turns an ε into one.",
        )
    if not entry.private and noise_multiplier is not None:
        raise UsageError(f"{name} adds no noise.", cure="Leave the noise multiplier out, or choose a private method.")
    noise = () if noise_multiplier is None else (noise_multiplier,)
    training = training or entry.training
    return entry.make(*noise, **({} if training is None else {"training": training}))
