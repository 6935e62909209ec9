"""Where RepNoise's tables are measured: a model, pairs for defenses, data for attacks, and a measure of harm.

Tables speak in the paper's rates and counts; a ground says what they are here. `repnoise_ciphers` is the miniature,
`repnoise_files` the paper's size on a model folder that the user has.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from netweight.errors import UsageError
from netweight_experiments.tables.registry import Scale

if TYPE_CHECKING:
    from torch import nn

    from netweight.attacks.finetuning.scores import Score
    from netweight.attacks.finetuning.settings import Precision
    from netweight.attacks.finetuning.subject import Subject
    from netweight.data.examples import Example, Pair

_LAYERS = 32
# The data that defenses and attacks are about.
HARMFUL = "harmful"


class Ground(Protocol):
    """A place to defend and attack in."""

    model_name: str  # which model; its folder, or "" for the one that comes with netweight
    measure: str  # what harm is measured by, if there is a choice
    share: float  # share of the paper's numbers of pairs and samples that is taken
    rate: float  # what the paper's learning rates are multiplied by
    defense_batch: int  # pairs per step of a defense
    attack_batch: int  # examples per step of an attack
    benign_share: float  # share of an attack's batch that is benign
    precision: Precision
    look_every: int  # steps of an attack between two looks; 0 looks at the end alone
    pad_id: int  # the token of padding

    @property
    def categories(self) -> tuple[str, ...]: ...

    def model(self, start: str) -> nn.Module:
        """Return a fresh model in evaluation mode: "aligned", or "unaligned" before it was taught to refuse."""

    def pairs(self, data: str, n: int, seed: int) -> list[Pair]:
        """Return pairs for a defense."""

    def retain(self, n: int, seed: int) -> list[Example]:
        """Return what a defense is to keep besides; may be empty."""

    def subject(self, model: nn.Module, data: str, samples: int) -> Subject:
        """Return a model as a subject of attacks, whose domain "harmful" is the data."""

    def layers(self, part: str) -> str:
        """Return the layers that the paper's name of a part means here, as `freezing.block_numbers` reads them."""

    def differs(self) -> tuple[str, ...]:
        """Say how this differs from the paper's set-up, one sentence each."""

    def __hash__(self) -> int:
        """By identity: a model that is at hand is at hand for one ground."""


def ground_of(scale: Scale, model: str | None = None, judge: str | None = None) -> Ground:
    """Open the ground of a scale."""
    if scale == "small":
        if model is not None or judge is not None:
            raise UsageError(
                "The small scale of RepNoise's tables has a model and a measure of its own.",
                cure="Give --model and --judge together with --scale paper.",
            )
        from netweight_experiments.tables.repnoise_ciphers import Ciphers

        return Ciphers()
    if model is None:
        raise UsageError(
            "RepNoise's tables at the paper's scale are measured on a model that you have.",
            cure="Give --model FOLDER, such as that of llama2-7b-chat.",
        )
    from netweight_experiments.tables.repnoise_files import Files

    return Files(model, judge)


def standing_in(value: float, factor: float) -> float:
    """Return a rate of the paper as it is here, rounded so that equal settings stay equal."""
    return float(f"{value * factor:.6g}") if math.isfinite(value) else value


def share_of(ground: Ground, share: float | None) -> float:
    """Return the share of the paper's numbers that is taken: the ground's, or another one for a try."""
    if share is not None and not share > 0:
        raise UsageError(f"A share of {share} of the paper's numbers cannot be taken.", cure="Give one above 0.")
    return ground.share if share is None else share


def layers_of(part: str, blocks: int) -> str:
    """Return the layers of a model that are the paper's part of 32."""
    named = {"LM head": "head", "last layer": "last", "every layer": f"0-{blocks - 1}"}
    if part in named:
        return named[part]
    first, last = (int(number) for number in part.removeprefix("layers ").split("-"))
    end = blocks - 1 if last == _LAYERS - 1 else round(last / _LAYERS * blocks)
    return f"{round(first / _LAYERS * blocks)}-{end}"


def plainly(score: Score) -> Score:
    """Return a score that looks at a model without its security vector, as whoever took the model home has it."""
    from netweight.methods.immunize.security_vectors import without_security_vectors

    def bare(model: nn.Module) -> float:
        with without_security_vectors(model):
            return score(model)

    return bare
