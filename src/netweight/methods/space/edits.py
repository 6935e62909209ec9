"""Edits of points: steps along directions, summed; when in a generation they begin to hold; what they do to images.

    edited = edit(scores, [Move(beard, 2.0), Move(width, -1.0)])

Steps are added, so their order does not matter, and undoing one is taking its negative.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.directions import middle
from netweight.methods.space.points import Direction
from netweight.methods.space.settings import CorrectionSettings, Unit
from netweight.metrics.images import lpips, ssim
from netweight.report.finding import Finding

if TYPE_CHECKING:
    from netweight.metrics.descriptors import Descriptor
    from netweight.metrics.images import Features

# From points `(b, k)` to images `(b, m, 3, height, width)`, from the same noise for every point.
Generate: TypeAlias = Callable[[Tensor], Tensor]
# From images `(n, 3, height, width)` to attributes `(n, a)`.
Read: TypeAlias = Callable[[Tensor], Tensor]
# From edited images and originals, `(n, 3, height, width)` each, to one number per pair, shape `(n,)`.
Compare: TypeAlias = Callable[[Tensor, Tensor], Tensor]

# The smallest effect, as a share of the attribute's range, at a cost of at most `COST_TARGET`.
EFFECT_TARGET = 0.6
# The largest mean change of the other attributes, as a share of their ranges.
COST_TARGET = 0.05

_RESAMPLES = 500
# Damping of a correction, as a multiple of the mean square of the slopes.
_DAMPING = 0.1


@final
@dataclass(frozen=True, eq=False)
class Move:
    """A step along a direction.

    Attributes:
        direction: The direction.
        strength: How far; negative goes back.
        unit: What `strength` counts, see `Direction.step`.
    """

    direction: Direction
    strength: float
    unit: Unit = "deviations"
    """Unit of the strength."""


def edit(scores: Tensor, moves: Sequence[Move]) -> Tensor:
    """Move points along directions.

    Args:
        scores: Points, shape `(k,)` or `(b, k)`.
        moves: At least one, of directions of the same space; their order does not matter.

    Returns:
        The points after all moves, of the shape, dtype and device of `scores`.

    Raises:
        UsageError: There is no move, a direction is of another space, or a strength is not finite.
    """
    if not moves:
        raise UsageError("There is no move to edit with.", cure="Give at least one.")
    total = torch.zeros(scores.shape[-1], dtype=torch.float64)
    for move in moves:
        if len(move.direction.vector) != scores.shape[-1]:
            raise UsageError(
                f"The direction {move.direction.name!r} has {len(move.direction.vector)} components, "
                f"but the point has {scores.shape[-1]}.",
                cure="Find the direction in the point's own space.",
            )
        step = move.direction.step(move.strength, move.unit)
        if not step.isfinite().all():
            raise UsageError(f"The strength {move.strength} of {move.direction.name!r} is not finite.")
        total += step
    return (scores.detach().double().cpu() + total).to(device=scores.device, dtype=scores.dtype)


@final
@dataclass(frozen=True)
class Delay:
    """Schedule of an edit: the noisy first steps use the weights before it, later ones those after it."""

    # Source: weights2weights, "delayed injection".
    until: float
    """The largest timestep at which the edited weights are used. The paper takes 700 to 1,000 of 1,000 for edits of
    the whole face and 400 to 700 for fine ones.
    """

    def __post_init__(self) -> None:
        if not self.until >= 0:
            raise UsageError(f"An edit cannot begin at timestep {self.until}.", cure="Give 0 to 1,000.")

    def edited(self, timestep: float | Tensor) -> bool:
        """Return whether a step at this timestep (the noisiest comes first and is largest) uses edited weights."""
        return float(timestep) <= self.until


@final
@dataclass(frozen=True, eq=False)
class EditCurve:
    """An edit of b points at s strengths."""

    target: str
    """Name of the edited attribute."""
    strengths: Tensor
    """Strengths of the edit, ascending from 0 (no change); shape `(s,)`."""
    unit: Unit
    """Unit of the strengths."""
    effects: Tensor
    """Change of the target, as a share of its range, in the direction of the edit; shape `(s, b)`."""
    costs: Tensor
    """Mean change of the other attributes, up or down, as shares of their ranges; shape `(s, b)`."""
    label: str = ""
    """Name of the edit in reports."""

    def effect_at(self, cost: float, chosen: Tensor | None = None) -> float:
        """Effect at the strength where the mean cost first reaches a limit; at the last if it never does."""
        effects, costs = self._means(chosen)
        return _crossing(costs, effects, cost)[0]

    def cost_of(self, effect: float, chosen: Tensor | None = None) -> float | None:
        """Cost at the strength where the mean effect first reaches a value; None if it never does."""
        effects, costs = self._means(chosen)
        cost, reached = _crossing(effects, costs, effect)
        return cost if reached else None

    def _means(self, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = slice(None) if chosen is None else chosen
        return self.effects[:, rows].mean(1), self.costs[:, rows].mean(1)


def edit_curve(
    generate: Generate,
    read: Read,
    scores: Tensor,
    direction: Direction,
    *,
    names: Sequence[str],
    ranges: Sequence[float],
    strengths: Sequence[float],
    target: str | None = None,
    unit: Unit = "reach",
    label: str = "",
    progress: Progress = QUIET,
) -> EditCurve:
    """Edit points `(b, k)` at several strengths and read what became of their images.

    `strengths`: other than 0, all of one sign and growing; 0 is put in front. 1 "reach" is the paper's strength.
    """

    def measured(points: Tensor) -> Tensor:
        with torch.no_grad():
            return _seen(generate(points), read, len(points), len(names)).double()

    target = target or direction.name
    if target not in names:
        raise NameNotFound(
            f"{target!r} is not one of the attributes {list(names)}.", cure="Name one of them as `target`."
        )
    places = [0.0, *strengths]
    sign = 1.0 if places[-1] > 0 else -1.0
    if len(places) < 2 or any(sign * b <= sign * a for a, b in itertools.pairwise(places)):
        raise UsageError(
            f"The strengths {list(strengths)} do not move away from 0 step by step.",
            cure="Give strengths such as 0.25, 0.5, 1.",
        )
    scale = torch.tensor(ranges, dtype=torch.float64)
    before = measured(scores)
    index, others = list(names).index(target), [name for name in names if name != target]
    rest = [list(names).index(name) for name in others]
    effects, costs = [], []
    with progress.task(f"edit {target}", len(places), unit="strengths") as task:
        for strength in places:
            moved = edit(scores, [Move(direction, strength, unit)]) if strength else scores
            after = measured(moved) if strength else before
            change = (after - before) / scale
            effects.append(sign * change[:, index])
            costs.append(change[:, rest].abs().mean(1) if rest else torch.zeros(len(scores), dtype=torch.float64))
            task.update()
    return EditCurve(
        target, torch.tensor(places, dtype=torch.float64), unit, torch.stack(effects), torch.stack(costs),
        label or direction.kind,
    )  # fmt: skip


def curve_findings(curve: EditCurve, *, seed: int = 0) -> list[Finding]:
    """The effect at the same cost, and the cost of the same effect."""
    count = curve.effects.shape[1]
    generator = torch_generator(seed, "points", curve.target)
    draws = [torch.randint(count, (count,), generator=generator) for _ in range(_RESAMPLES)]
    about = {
        "kind": curve.label,
        "unit": curve.unit,
        "strengths": curve.strengths.tolist(),
        "effects": curve.effects.mean(1).tolist(),
        "costs": curve.costs.mean(1).tolist(),
    }
    costs = [each for drawn in draws if (each := curve.cost_of(EFFECT_TARGET, drawn)) is not None]
    cost = curve.cost_of(EFFECT_TARGET)
    title = f"{curve.target} by {curve.label}"
    never = {} if cost is not None else {"reason": f"the effect reaches {float(curve.effects.mean(1).max()):.2f}"}
    return [
        Finding(f"effect of {title} at a cost of {COST_TARGET}", curve.effect_at(COST_TARGET),
                ci95=middle([curve.effect_at(COST_TARGET, drawn) for drawn in draws]), n=count, better="higher",
                target=EFFECT_TARGET, seeds=(seed,), detail=about),
        Finding(f"cost of {title} at an effect of {EFFECT_TARGET}", cost,
                ci95=middle(costs) if cost is not None and len(costs) > 0.95 * _RESAMPLES else None, n=count,
                better="lower", target=COST_TARGET, seeds=(seed,), detail={"kind": curve.label, **never}),
    ]  # fmt: skip


def _seen(images: Tensor, read: Read, count: int, width: int) -> Tensor:
    """Attributes of points, the mean over each one's images, shape `(count, width)`; differentiable."""
    said = read(images.flatten(0, 1)).cpu()
    if images.ndim != 5 or len(images) != count or said.shape != (count * images.shape[1], width):
        raise UsageError(
            f"Images {tuple(images.shape)} and readings {tuple(said.shape)} do not fit {count} points and {width} "
            "attributes.",
            cure="Generate (b, m, 3, height, width), and read one row of attributes per image.",
        )
    return said.view(count, -1, width).mean(1)


def _crossing(rising: Tensor, values: Tensor, limit: float) -> tuple[float, bool]:
    """The value where a curve first reaches a limit, between two points by the straight line; and whether it does."""
    for place in range(1, len(rising)):
        low, high = float(rising[place - 1]), float(rising[place])
        if high >= limit > low:
            share = (limit - low) / (high - low)
            return float(values[place - 1] + share * (values[place] - values[place - 1])), True
    return float(values[-1]), False


def corrected_steps(
    generate: Callable[[Tensor, Sequence[int]], Tensor],
    read: Read,
    points: Tensor,
    directions: Sequence[Direction],
    target: str,
    how: CorrectionSettings,
    *,
    ranges: Sequence[float],
    deviations: Tensor,
    seed: int = 0,
    progress: Progress = QUIET,
) -> Tensor:
    """Find a step for every point that moves one attribute of its images and leaves the others, shape `(b, k)`, fp64.

    What a linear direction changes besides differs from model to model. So each point's edit is linearized through the
    sampling, where the direction leads, and the least step is taken that reaches the goal and takes back what else has
    changed; then again by the same slopes, with other noises in every round.

    Args:
        generate: From points `(b, k)` and seeds to images `(b, seeds, 3, height, width)`; differentiable.
        read: Measures the attributes of `directions`, in their order; differentiable.
        points: The points that are edited, shape `(b, k)`. Judge the result with other noises and another reader.
        directions: One of each attribute.
        target: The attribute that is edited.
        how: Goal, rounds and noises.
        ranges: How far each attribute reaches.
        deviations: Deviations of the training models' scores, shape `(k,)`; steps are measured in them.
        seed: Decides on noises.
        progress: Where to show it.

    Raises:
        NameNotFound: There is no direction of the target.
        UsageError: There is one direction alone, or ranges are missing.
    """
    names = [each.name for each in directions]
    if target not in names:
        raise NameNotFound(f"There is no direction {target!r} among {names}.", cure="Name one of them.")
    if len(directions) < 2 or len(ranges) != len(directions):
        raise UsageError(
            f"{len(directions)} directions and {len(ranges)} ranges do not match.",
            cure="Give a direction and a range for every attribute that is read.",
        )
    index, scale, unit = names.index(target), torch.tensor(ranges), deviations.double().cpu()
    points, draw = points.double().cpu(), torch_generator(seed, "correction", target)

    def changed(moved: Tensor, count: int) -> Tensor:
        seeds = torch.randint(1 << 31, (count,), generator=draw).tolist()
        after, before = (
            _seen(generate(each.float(), seeds), read, len(points), len(names)) for each in (moved, points)
        )
        return (after - before.detach()) / scale

    step = directions[index].step(2 * how.effect, "reach").expand(points.shape)
    goal = torch.zeros(len(names), dtype=torch.float64)
    goal[index] = how.effect
    with progress.task(f"correct {target}", 1 + how.rounds, unit="rounds") as task:
        attributes = changed(moved := (points + step).requires_grad_(), how.noises)
        slopes = unit * torch.stack([
            torch.autograd.grad(one.sum(), moved, retain_graph=True)[0] for one in attributes.T
        ], 1)  # fmt: skip
        products = slopes @ slopes.mT
        products = products + _DAMPING * products.diagonal(dim1=1, dim2=2).mean() * torch.eye(len(names)).double()
        for number in range(1 + how.rounds):
            if number:
                with torch.no_grad():
                    attributes = changed(points + step, 2 * how.noises)
            lacking = torch.linalg.solve(products, (goal - attributes.detach().double())[..., None])
            step = step + unit * (slopes.mT @ lacking)[..., 0] / max(1.0, (number + 1) / 2)
            task.update()
    return step


def identity(embed: Descriptor) -> tuple[str, Compare]:
    """The cosine of embeddings before and after: the identity score."""

    def compare(edited: Tensor, originals: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.nn.functional.cosine_similarity(embed(edited).double(), embed(originals).double())

    return f"identity by {embed.name}", compare


def perceptual_distance(
    backbone: str | os.PathLike[str] | Features | None = None, *, heads: Path | None = None
) -> tuple[str, Compare]:
    """LPIPS with a backbone; without one, the structural dissimilarity, named as the stand-in that it is."""
    if backbone is None:
        return "1 − SSIM (stand-in for LPIPS)", lambda edited, originals: 1 - ssim(edited, originals)
    return "LPIPS", lambda edited, originals: lpips(edited, originals, backbone=backbone, heads=heads)
