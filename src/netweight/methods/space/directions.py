"""Directions in a space of models that change one attribute: found from labels, made independent of others.

direction = fit_direction(space.scores, labels, "beard", confounders=["hair length"])
edited = scores + direction.step(2.0)          # two standard deviations of the training models

Three kinds. An *encoder* asks how models change with the attribute: scores are regressed on labels, on all given ones
jointly. A *difference* is the same for one label alone: of two classes the difference of their means. A *decoder* asks
how the attribute can be read off a model: labels are regressed on scores. Decoders weigh components by the inverse of
their spread, so they read best and, for the same length, edit least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor

from netweight.core import digest
from netweight.errors import CorruptBlob, UsageError
from netweight.report.finding import Finding

__all__ = ["Direction", "DirectionKind", "Unit", "decorrelated", "direction_of", "scores_digest"]

DirectionKind: TypeAlias = Literal["encoder", "decoder", "difference", "reference"]
Unit: TypeAlias = Literal["deviations", "reach", "raw"]

_LEAST_REST = 1e-6


@final
@dataclass(frozen=True, eq=False)
class Direction:
    """A direction of scores, and how far the training models spread along it.

    Attributes:
        name: The attribute.
        kind: How it was found.
        vector: Shape `(k,)`, fp64, of length 1; that of the reference has the length that its code gives it.
        deviation: Standard deviation of the training models along the direction, in scores.
        reach: How far from their mean the farthest training model lies along it, in scores: the paper's strength.
        space: Digest of the first training scores; None if unknown.
        findings: How well held-out models were told apart by it.
    """

    name: str
    kind: DirectionKind
    vector: Tensor
    deviation: float
    reach: float
    space: str | None = None
    findings: tuple[Finding, ...] = field(default=())

    @property
    def length(self) -> float:
        """Length of `vector`."""
        return float(self.vector.norm())

    def step(self, strength: float, unit: Unit = "deviations") -> Tensor:
        """Return what is added to scores, shape `(k,)`, fp64.

        Args:
            strength: How far, negative to go back.
            unit: Standard deviations of the training models along the direction; multiples of `reach`; or of the
                vector as it is, as the reference counts.

        Raises:
            UsageError: There is no such unit.
        """
        lengths = {"deviations": self.deviation / self.length, "reach": self.reach / self.length, "raw": 1.0}
        if unit not in lengths:
            raise UsageError(f"Strengths have no unit {unit!r}.", cure=f"Use one of {', '.join(lengths)}.")
        return strength * lengths[unit] * self.vector

    def cosine(self, other: Direction) -> float:
        """Return the cosine of the angle between two directions of one space.

        Args:
            other: Of the same space.
        """
        return float(self.vector @ other.vector) / (self.length * other.length)

    def check(self, scores: Tensor) -> None:
        """Refuse a direction that was found in another space.

        Args:
            scores: The training scores of the space at hand, shape `(n, k)`.

        Raises:
            UsageError: It was.
        """
        if len(self.vector) != scores.shape[-1] or self.space not in (None, scores_digest(scores)):
            raise UsageError(
                f"The direction {self.name!r} was found in another space, of {len(self.vector)} components.",
                cure="Find it again in this one: netweight space direction.",
            )

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON value; numbers come back bit for bit."""
        return {
            "name": self.name,
            "kind": self.kind,
            "vector": self.vector.tolist(),
            "deviation": self.deviation,
            "reach": self.reach,
            "space": self.space,
            "findings": [finding.to_json() for finding in self.findings],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Direction:
        """Return the direction that `to_json` wrote.

        Args:
            data: JSON values.

        Raises:
            CorruptBlob: It is none.
        """
        try:
            vector = torch.tensor(data["vector"], dtype=torch.float64)
            findings = tuple(Finding.from_json(each) for each in data["findings"])
            found = cls(**{**data, "vector": vector, "findings": findings})
        except (KeyError, TypeError, ValueError, UsageError) as error:
            raise CorruptBlob(f"This is no direction: {error}.", cure="Find it again.") from None
        if vector.ndim != 1 or not vector.isfinite().all() or not found.length > 0:
            raise CorruptBlob("The vector of this direction is no finite vector.", cure="Find it again.")
        return found


def direction_of(
    scores: Tensor, vector: Tensor, *, name: str, kind: DirectionKind, findings: Sequence[Finding] = ()
) -> Direction:
    """Make a direction of a vector of any length, measuring the training models along it.

    Args:
        scores: Of the training models, shape `(n, k)`.
        vector: Shape `(k,)`; scaled to length 1, but for that of the reference.
        name: The attribute.
        kind: How it was found.
        findings: What is known of it.

    Raises:
        UsageError: The vector is 0.
    """
    vector = vector.double()
    length = float(vector.norm())
    if not length > 0:
        raise UsageError(f"The direction {name!r} has length 0: nothing in the scores goes with it.")
    along = (scores.double() - scores.double().mean(0)) @ (vector / length)
    kept = vector if kind == "reference" else vector / length
    return Direction(
        name, kind, kept, float(along.std()), float(along.max()), scores_digest(scores), tuple(findings)
    )  # fmt: skip


def decorrelated(scores: Tensor, direction: Direction, confounders: Sequence[Direction]) -> Direction:
    """Take out of a direction whatever lies along others, by one solve, so that their order does not matter.

    Args:
        scores: Of the training models, shape `(n, k)`.
        direction: The one that is kept.
        confounders: Those it is to be orthogonal to. Give decoders: then what they read stays as it is.

    Returns:
        A direction without findings, for it is another one.

    Raises:
        UsageError: Nothing is left: the direction is a combination of the others.
    """
    if not confounders:
        return direction
    others = torch.stack([each.vector / each.length for each in confounders])
    _, sizes, axes = torch.linalg.svd(others, full_matrices=False)
    axes = axes[sizes > sizes[0] * 1e-10]  # confounders may repeat each other
    rest = direction.vector - axes.T @ (axes @ direction.vector)
    rest = rest - axes.T @ (axes @ rest)  # once more, for what rounding left
    if float(rest.norm()) <= _LEAST_REST * direction.length:
        names = ", ".join(repr(each.name) for each in confounders)
        raise UsageError(
            f"The direction {direction.name!r} is a combination of {names}: without them nothing is left.",
            cure="Name fewer confounders.",
        )
    return direction_of(scores, rest, name=direction.name, kind=direction.kind)


def scores_digest(scores: Tensor) -> str:
    """Return the digest that ties directions to a space: of its first scores, which stay when models are appended.

    Args:
        scores: Shape `(n, k)`.
    """
    return digest.of_config([scores.shape[-1], digest.of_tensor(scores[:8].detach().float())])
