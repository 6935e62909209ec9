"""Small worlds as subjects of fine-tuning attacks: the aligned model, a defended one, and the controls.

The guarded domain is the harmful one, the kept domain is the utility, and the new domain is the benign task. Sweeps
name `cipher_subject`; for a defended model wrap `subject_of_world` in a factory of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from netweight.attacks.finetuning.scores import token_accuracy
from netweight.attacks.finetuning.subject import Domain, Subject
from netweight.core.names import nearest_names
from netweight.errors import NameNotFound
from netweight.zoo.ciphers import cipher_world
from netweight.zoo.small_world import SmallWorld

if TYPE_CHECKING:
    from torch import nn

__all__ = ["cipher_subject", "subject_of_world"]

Control = Literal["aligned", "random weights", "relearn ceiling"]


def subject_of_world(
    world: SmallWorld,
    model: nn.Module,
    *,
    harmful: Literal["guard", "new"] = "guard",
    samples: int = 4096,
    held_out: int = 64,
    reference_utility: float | None = None,
    seed: int = 0,
) -> Subject:
    """Make a subject of a model that lives in a small world.

    Args:
        world: The world.
        model: The aligned model, or one made from it.
        harmful: The domain that is attacked; "new", which was never learned, makes the relearn ceiling.
        samples: Examples that an attacker has.
        held_out: Examples that are looked at, of each domain; no attack and no defense ever sees them.
        reference_utility: See `Subject`.
        seed: Of the draws.

    Returns:
        A subject with the domains "harmful" and "task".
    """

    def domain(name: Literal["guard", "new"]) -> Domain:
        return Domain(world.examples(name, samples, seed), world.held_out(name, held_out, seed))

    kept = world.held_out("keep", held_out, seed)
    return Subject(
        model,
        {"harmful": domain(harmful), "task": domain("new")},
        world.pad_id,
        benign=world.examples("keep", samples, seed),
        utility=token_accuracy(kept, pad_id=world.pad_id),
        reference_utility=reference_utility,
    )


def cipher_subject(model: Control = "aligned", *, samples: int = 4096, held_out: int = 64, seed: int = 0) -> Subject:
    """Make an undefended subject or a control of the ciphers that come with netweight: a factory for sweeps.

    Args:
        model: "aligned", before any defense; "random weights", which must learn everything; or "relearn ceiling", the
            aligned model attacked with the domain that it never knew.
        samples: See `subject_of_world`.
        held_out: See `subject_of_world`.
        seed: Of the draws and of random weights.

    Raises:
        NameNotFound: There is no such model.
        MissingExtra: transformers is not installed.
    """
    known = ("aligned", "random weights", "relearn ceiling")
    if model not in known:
        raise NameNotFound(
            f"There is no model {model!r}.", cure=f"The nearest is {nearest_names(model, known, 1)[0]!r}."
        )
    world = cipher_world()
    victim = world.random_model(seed) if model == "random weights" else world.base()
    harmful: Literal["guard", "new"] = "new" if model == "relearn ceiling" else "guard"
    return subject_of_world(world, victim, harmful=harmful, samples=samples, held_out=held_out, seed=seed)
