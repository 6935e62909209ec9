"""The catalog of federated methods by name; adding one takes a file in `algorithms` and a line here."""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from netweight.core.names import not_found
from netweight.errors import UsageError
from netweight.methods.federate.settings import LocalTraining

if TYPE_CHECKING:
    from netweight.methods.federate.method import Method


@final
@dataclass(frozen=True)
class CatalogEntry:
    """A method of the catalog."""

    home: str
    """Module and name of what makes the method."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the constructor."""
    training: LocalTraining | None = LocalTraining()
    """Settings of local training; None if they are of another kind than HyperFL's."""
    private: bool = False
    """True if local training is differentially private and takes a noise multiplier."""
    has_epsilon: bool = True
    """True if some ε holds for a private method."""


# A step moves a weight that a code m generates (1 + |m|²) times as far as it would move the weight itself, about 25
# times at the start, while weight decay pulls no harder. A quarter of the paper's rate with forty times its decay keeps
# the training loss above 0, and so local training worth its while, to the last round.
_GENTLE = LocalTraining(lr=0.005, weight_decay=0.02)
_FROM_BODY = {"start_from": "body"}

METHODS: Mapping[str, CatalogEntry] = {
    "hyperfl": CatalogEntry("hyperfl:HyperFL"),
    "hyperfl-body": CatalogEntry("hyperfl:HyperFL", {**_FROM_BODY, "joint_head": True, "name": "hyperfl-body"}),
    "hyperfl-whole": CatalogEntry(
        "hyperfl:HyperFL", {**_FROM_BODY, "private_head": False, "name": "hyperfl-whole"}, _GENTLE
    ),
    "fedavg": CatalogEntry("direct:fedavg"),
    "fedavg-private-head": CatalogEntry("direct:fedavg_private_head"),
    "fedrep": CatalogEntry("direct:fedavg_private_head", {"name": "fedrep"}),
    "fedprox": CatalogEntry("fedprox:fedprox"),
    "ditto": CatalogEntry("ditto:ditto"),
    "fedbn": CatalogEntry("fedbn:fedbn"),
    "scaffold": CatalogEntry("scaffold:scaffold", training=LocalTraining(momentum=0.0)),
    "local": CatalogEntry("direct:local_only"),
    "pfedhn": CatalogEntry("pfedhn:pfedhn", training=None),
    "pfedhn-pc": CatalogEntry("pfedhn:pfedhn_pc", training=None),
    "dp-fedavg": CatalogEntry("private_sgd:dp_fedavg", private=True),
    "centaur": CatalogEntry("private_sgd:centaur", private=True, has_epsilon=False),
    "ppsgd": CatalogEntry("private_sgd:ppsgd", private=True, has_epsilon=False),
}


def entry_of(name: str) -> CatalogEntry:
    """Look a method up."""
    if name not in METHODS:
        raise not_found(f"There is no method {name!r}.", name, METHODS)
    return METHODS[name]


def named_method(
    name: str,
    *,
    training: LocalTraining | None = None,
    noise_multiplier: float | None = None,
    clip: float | None = None,
) -> Method:
    """Make a method by the name that commands and tables use.

    Args:
        name: A key of `METHODS`.
        training: Local training; the method's own by default.
        noise_multiplier: Noise of a differentially private method, which
            `accounting.noise_multiplier_for_all` computes from a budget; for no other.
        clip: Norm to which a differentially private method clips the gradient of each example; its default if None,
            and for no other method.

    Raises:
        NameNotFound: There is no such method.
        UsageError: Noise is missing, or noise or a norm is given to a method that adds none.
    """
    entry = entry_of(name)
    if entry.private and noise_multiplier is None:
        raise UsageError(
            f"{name} is differentially private and needs noise.",
            cure="Give noise_multiplier; `accounting.noise_multiplier_for_all` computes it for an ε. In a Flower app, "
            "give `apps` a function that makes the method, such as dp_fedavg(noise_multiplier=9.1).",
        )
    if not entry.private and (noise_multiplier is not None or clip is not None):
        raise UsageError(
            f"{name} adds no noise to gradients.", cure="Leave out noise_multiplier and clip, or choose dp-fedavg."
        )
    training = training or entry.training
    given = {"training": training, "noise_multiplier": noise_multiplier, "clip": clip}
    make = pkgutil.resolve_name(f"netweight.methods.federate.algorithms.{entry.home}")
    method: Method = make(**entry.fixed, **{key: value for key, value in given.items() if value is not None})
    return method
