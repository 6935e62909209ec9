"""Small worlds as subjects of fine-tuning attacks: the aligned model, a defended one, and the controls.

The guarded domain is the harmful one, the kept domain is the utility, and the new domain is the benign task. Sweeps
name `cipher_subject` for the undefended model and the controls, and `defended_cipher_subject` for what
`defend_ciphers` made.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from netweight.attacks.finetuning.subject import Domain, Subject
from netweight.core.names import nearest_names
from netweight.core.progress import QUIET, Progress
from netweight.errors import NameNotFound
from netweight.methods.immunize.record import Record
from netweight.methods.immunize.settings import Settings
from netweight.methods.immunize.training import immunize
from netweight.zoo.ciphers import cipher_world
from netweight.zoo.small_llama import opened, write_weights
from netweight.zoo.small_world import SmallWorld

if TYPE_CHECKING:
    from torch import nn
    from transformers import LlamaForCausalLM

__all__ = [
    "DEFENSE",
    "DEFENSE_ROWS",
    "DEFENSE_SETTINGS",
    "cipher_subject",
    "defend_ciphers",
    "defended_cipher_subject",
    "subject_of_world",
]

DEFENSE = "repnoise"
"""The defense of the ciphers that the tour shows."""
DEFENSE_SETTINGS = Settings(lr=1e-3, batch_size=24)
"""How it is trained: a model this small takes a larger rate than the paper's."""
DEFENSE_ROWS = 300 * 24
"""Pairs, and as many rows of the kept cipher."""

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

    return Subject(
        model,
        {"harmful": domain(harmful), "task": domain("new")},
        world.pad_id,
        benign=world.examples("keep", samples, seed),
        reference_utility=reference_utility,
        kept=world.held_out("keep", held_out, seed),
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


def defend_ciphers(
    file: str | Path, *, defense: str = DEFENSE, seed: int = 42, rows: int | None = None, progress: Progress = QUIET
) -> tuple[LlamaForCausalLM, Record]:
    """Train a defense into the ciphers' model, as `DEFENSE_SETTINGS` says, and write its weights in bf16.

    Args:
        file: Where the weights go; what is there is replaced.
        defense: Its name in the catalog.
        seed: Of the pairs drawn and of the training.
        rows: How many pairs, and rows to keep; `DEFENSE_ROWS` by default.
        progress: Where progress is shown.

    Returns:
        The model as it was written, and the record of what was done.

    Raises:
        NameNotFound: There is no such defense.
        TrainingStopped: The loss diverged.
        MissingExtra: transformers is not installed.
    """
    world, count = cipher_world(), rows or DEFENSE_ROWS
    model = world.base()
    record = immunize(
        model,
        world.pairs(count, seed),
        world.examples("keep", count, seed, share="defense"),
        defense=defense,
        settings=replace(DEFENSE_SETTINGS, seed=seed),
        pad_id=world.pad_id,
        progress=progress,
    )
    write_weights(model, Path(file))
    return opened(world.language.shape, Path(file)), record


def defended_cipher_subject(
    file: str, *, samples: int = 4096, held_out: int = 64, reference_utility: float | None = None, seed: int = 0
) -> Subject:
    """Make a subject of what `defend_ciphers` wrote: a factory for sweeps.

    Args:
        file: The weights.
        samples: See `subject_of_world`.
        held_out: See `subject_of_world`.
        reference_utility: See `Subject`.
        seed: Of the draws.

    Raises:
        UsageError: There are no such weights.
        MissingExtra: transformers is not installed.
    """
    world = cipher_world()
    victim = opened(world.language.shape, Path(file))
    return subject_of_world(
        world, victim, samples=samples, held_out=held_out, reference_utility=reference_utility, seed=seed
    )
