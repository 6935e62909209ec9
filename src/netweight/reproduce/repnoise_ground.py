"""Where RepNoise's tables are measured: a model, pairs for defenses, data for attacks, and a measure of harm.

Tables speak in the paper's rates and counts; a ground says what they are here. `repnoise_ciphers` is the miniature,
`repnoise_files` the paper's size on a model folder that the user has.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from netweight.errors import UsageError
from netweight.reproduce.registry import Scale

if TYPE_CHECKING:
    from torch import nn

    from netweight.attacks.finetuning.settings import Precision
    from netweight.attacks.finetuning.subject import Score, Subject
    from netweight.data.examples import Example, Pair

__all__ = ["HARMFUL", "Ground", "ground_of", "layers_of", "plainly", "share_of", "standing_in"]

_LAYERS = 32
HARMFUL = "harmful"
"""The data that defenses and attacks are about."""


class Ground(Protocol):
    """A place to defend and attack in.

    Attributes:
        model_name: Which model; its folder, or "" for the one that comes with netweight.
        measure: What harm is measured by, if there is a choice.
        share: Share of the paper's numbers of pairs and samples that is taken.
        rate: What the paper's learning rates are multiplied by.
        defense_batch: Pairs per step of a defense.
        attack_batch: Examples per step of an attack.
        benign_share: Share of an attack's batch that is benign.
        precision: Of an attack.
        look_every: Steps of an attack between two looks; 0 looks at the end alone.
        pad_id: The token of padding.
        categories: Names of kinds of harmful data, that a defense can be trained without.
    """

    model_name: str
    measure: str
    share: float
    rate: float
    defense_batch: int
    attack_batch: int
    benign_share: float
    precision: Precision
    look_every: int
    pad_id: int

    @property
    def categories(self) -> tuple[str, ...]: ...

    def model(self, start: str) -> nn.Module:
        """Return a fresh model in evaluation mode: "aligned", or "unaligned" before it was taught to refuse."""

    def pairs(self, data: str, n: int, seed: int) -> list[Pair]:
        """Return pairs for a defense.

        Args:
            data: "harmful"; "toxic", the paper's second domain; "other", a domain other than that; "without NAME" for
                all but one category.
            n: How many.
            seed: Of the draw, where there is one.
        """

    def retain(self, n: int, seed: int) -> list[Example]:
        """Return what a defense is to keep besides; may be empty."""

    def subject(self, model: nn.Module, data: str, samples: int) -> Subject:
        """Return a model as a subject of attacks, whose domain "harmful" is the data.

        Args:
            model: It is not copied.
            data: "harmful"; "toxic"; "only NAME" for one category; "task", a benign domain; "after task", the
                harmful one where benign examples are of the task too.
            samples: Examples that the attacker has, and as many benign ones.
        """

    def layers(self, part: str) -> str:
        """Return the layers that the paper's name of a part means here, as `freezing.block_numbers` reads them."""

    def differs(self) -> tuple[str, ...]:
        """Say how this differs from the paper's set-up, one sentence each."""

    def __hash__(self) -> int:
        """By identity: a model that is at hand is at hand for one ground."""


def ground_of(scale: Scale, model: str | None = None, judge: str | None = None) -> Ground:
    """Open the ground of a scale.

    Args:
        scale: "small" for the miniature, "paper" for a model of the user's.
        model: A folder of transformers, for "paper".
        judge: "MODULE:FUNCTION" of a judge of harm, for "paper".

    Raises:
        UsageError: A model is missing at "paper", or given at "small".
        MissingExtra: transformers is not installed.
    """
    if scale == "small":
        if model is not None or judge is not None:
            raise UsageError(
                "The small scale of RepNoise's tables has a model and a measure of its own.",
                cure="Give --model and --judge together with --scale paper.",
            )
        from netweight.reproduce.repnoise_ciphers import Ciphers

        return Ciphers()
    if model is None:
        raise UsageError(
            "RepNoise's tables at the paper's scale are measured on a model that you have.",
            cure="Give --model FOLDER, such as that of llama2-7b-chat.",
        )
    from netweight.reproduce.repnoise_files import Files

    return Files(model, judge)


def standing_in(value: float, factor: float) -> float:
    """Return a rate of the paper as it is here, rounded so that equal settings stay equal."""
    return float(f"{value * factor:.6g}") if math.isfinite(value) else value


def share_of(ground: Ground, share: float | None) -> float:
    """Return the share of the paper's numbers that is taken: the ground's, or another one for a try.

    Raises:
        UsageError: It is not above 0.
    """
    if share is not None and not share > 0:
        raise UsageError(f"A share of {share} of the paper's numbers cannot be taken.", cure="Give one above 0.")
    return ground.share if share is None else share


def layers_of(part: str, blocks: int) -> str:
    """Return the layers of a model that are the paper's part of 32.

    Args:
        part: "LM head", "last layer", "every layer" or "layers 10-20".
        blocks: How many blocks the model has.
    """
    named = {"LM head": "head", "last layer": "last", "every layer": f"0-{blocks - 1}"}
    if part in named:
        return named[part]
    first, last = (int(number) for number in part.removeprefix("layers ").split("-"))
    end = blocks - 1 if last == _LAYERS - 1 else round(last / _LAYERS * blocks)
    return f"{round(first / _LAYERS * blocks)}-{end}"


def plainly(score: Score) -> Score:
    """Return a score that looks at a model without its security vector, as whoever took the model home has it."""
    from netweight.methods.immunize.baselines import without_security_vectors

    def bare(model: nn.Module) -> float:
        with without_security_vectors(model):
            return score(model)

    return bare
