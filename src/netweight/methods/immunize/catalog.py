"""All defenses by the names that the command line and the tables call them, with the paper's hyper-parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from netweight.core.names import nearest_names
from netweight.errors import NameNotFound
from netweight.methods.immunize.baselines import AdversarialLoss, GradientAscent, RandomWeights, SafetyTraining, Vaccine
from netweight.methods.immunize.defense import Defense
from netweight.methods.immunize.repnoise import RepNoise
from netweight.methods.immunize.security_vectors import SecurityVectors
from netweight.methods.immunize.settings import RepNoiseConfig, Settings


@final
@dataclass(frozen=True)
class Entry:
    """A defense in the catalog."""

    defense: Defense  # with its own settings
    settings: Settings = Settings()  # how it is trained


DEFENSES: Mapping[str, Entry] = {
    "repnoise": Entry(RepNoise()),
    "repnoise-reference": Entry(RepNoise(RepNoiseConfig.reference())),
    "security-vectors": Entry(SecurityVectors(), Settings(lr=1e-3)),
    "vaccine": Entry(Vaccine(rho=1.0)),
    "vaccine-rho10": Entry(Vaccine(rho=10.0)),
    "safety-training": Entry(SafetyTraining()),
    "gradient-ascent": Entry(GradientAscent()),
    "adversarial-loss": Entry(AdversarialLoss(), Settings(lr=1e-5)),
    "random-weights": Entry(RandomWeights()),
}


def named_defense(name: str) -> Entry:
    """Return a defense by its name."""
    if name not in DEFENSES:
        near = ", ".join(nearest_names(name, DEFENSES))
        raise NameNotFound(f"There is no defense {name!r}.", cure=f"Nearest names: {near}.")
    return DEFENSES[name]
