"""Edits of points: steps along directions, summed; when in a generation they begin to hold; what they do to images.

    edited = edit(scores, [Move(beard, 2.0), Move(width, -1.0)])

Steps are added, so their order does not matter, and undoing one is taking its negative.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.directions import direction_of, middle
from netweight.methods.space.points import Direction
from netweight.methods.space.settings import Unit
from netweight.metrics.images import lpips, ssim
from netweight.report.finding import Finding

if TYPE_CHECKING:
    from netweight.metrics.copies import Descriptor
    from netweight.metrics.images import Features

# From points `(b, k)` to images `(b, m, 3, height, width)`, from the same noise for every point.
Generate: TypeAlias = Callable[[Tensor], Tensor]
# From images `(n, 3, height, width)` to attributes `(n, a)`.
Read: TypeAlias = Callable[[Tensor], Tensor]
# From edited images and originals, `(n, 3, height, width)` each, to one number per pair, shape `(n,)`.
Compare: TypeAlias = Callable[[Tensor, Tensor], Tensor]

EFFECT_TARGET = 0.6  # least effect, as a share of the attribute's range, at no more than `COST_TARGET`
COST_TARGET = 0.05  # most mean change of the other attributes, as a share of their ranges
KEPT_TARGET = 0.99  # least share of images that keep their prompt

_RESAMPLES = 500


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
                f"the point {scores.shape[-1]}.",
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
    """When an edit begins to hold: the noisy first steps are made with the weights before it, later ones after it."""

    # Source: weights2weights, "delayed injection".
    # The largest timestep that is made with edited weights. The paper takes 700 to 1,000 of 1,000 for edits of the
    # whole face and 400 to 700 for fine ones.
    until: float

    def __post_init__(self) -> None:
        if not self.until >= 0:
            raise UsageError(f"An edit cannot begin to hold at timestep {self.until}.", cure="Give 0 to 1,000.")

    def edited(self, timestep: float | Tensor) -> bool:
        """Whether a step at this timestep (the noisiest come first and are largest) is made with edited weights."""
        return float(timestep) <= self.until


@final
@dataclass(frozen=True, eq=False)
class EditCurve:
    """An edit of b points at s strengths."""

    target: str  # the attribute that is edited
    strengths: Tensor  # rising from 0, where nothing is changed, shape `(s,)`
    unit: Unit  # what strengths count
    effects: Tensor  # change of the target, as a share of its range, in the direction of the edit; shape `(s, b)`
    costs: Tensor  # mean change of the other attributes, up or down, as shares of their ranges; shape `(s, b)`
    compared: Mapping[str, Tensor] = field(default_factory=dict)  # name → mean over a point's images, shape `(s, b)`
    label: str = ""  # what reports call the edit

    def effect_at(self, cost: float, chosen: Tensor | None = None) -> float:
        """Effect at the strength where the mean cost first reaches a limit; at the last if it never does."""
        effects, costs = self._means(chosen)
        return _crossing(costs, effects, cost)[0]

    def cost_of(self, effect: float, chosen: Tensor | None = None) -> float | None:
        """Cost at the strength where the mean effect first reaches a value; None if it never does."""
        effects, costs = self._means(chosen)
        found, reached = _crossing(effects, costs, effect)
        return found if reached else None

    def compared_at(self, name: str, cost: float) -> float:
        """A comparison's mean at the strength where the mean cost first reaches a limit."""
        return _crossing(self._means(None)[1], self.compared[name].mean(1), cost)[0]

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
    compare: Mapping[str, Compare] | None = None,
    label: str = "",
    progress: Progress = QUIET,
) -> EditCurve:
    """Edit points `(b, k)` at several strengths and read what became of their images."""
    # `strengths`: other than 0, all of one sign and growing; 0 is put in front. 1 "reach" is the paper's strength.
    target = target or direction.name
    if target not in names:
        raise NameNotFound(f"{target!r} is none of the attributes {list(names)}.", cure="Say `target`.")
    places = [0.0, *strengths]
    sign = 1.0 if places[-1] > 0 else -1.0
    if len(places) < 2 or any(sign * b <= sign * a for a, b in itertools.pairwise(places)):
        raise UsageError(f"The strengths {list(strengths)} do not grow from 0.", cure="Give such as 0.25, 0.5, 1.")
    scale = torch.tensor(ranges, dtype=torch.float64)
    originals, before = _seen(generate, read, scores, len(names))
    index, others = list(names).index(target), [name for name in names if name != target]
    rest = [list(names).index(name) for name in others]
    effects, costs = [], []
    compared: dict[str, list[Tensor]] = {name: [] for name in compare or {}}
    with progress.task(f"edit {target}", len(places), unit="strengths") as task:
        for strength in places:
            moved = edit(scores, [Move(direction, strength, unit)]) if strength else scores
            images, after = _seen(generate, read, moved, len(names)) if strength else (originals, before)
            change = (after - before) / scale
            effects.append(sign * change[:, index])
            costs.append(change[:, rest].abs().mean(1) if rest else torch.zeros(len(scores), dtype=torch.float64))
            for name, function in (compare or {}).items():
                pairs = function(images.flatten(0, 1), originals.flatten(0, 1)).double().cpu()
                compared[name].append(pairs.reshape(images.shape[:2]).mean(1))
            task.update()
    return EditCurve(
        target, torch.tensor(places, dtype=torch.float64), unit, torch.stack(effects), torch.stack(costs),
        {name: torch.stack(values) for name, values in compared.items()}, label or direction.kind,
    )  # fmt: skip


def curve_findings(curve: EditCurve, *, seed: int = 0, kept: str | None = None) -> list[Finding]:
    """The effect at the same cost, the cost of the same effect, and what is left of the images there."""
    count = curve.effects.shape[1]
    generator = torch_generator(seed, "points", curve.target)
    draws = [torch.randint(count, (count,), generator=generator) for _ in range(_RESAMPLES)]
    about = {
        "kind": curve.label,
        "unit": curve.unit,
        "strengths": curve.strengths.tolist(),
        "effects": curve.effects.mean(1).tolist(),
        "costs": curve.costs.mean(1).tolist(),
        **{name: values.mean(1).tolist() for name, values in curve.compared.items()},
    }
    costs = [each for drawn in draws if (each := curve.cost_of(EFFECT_TARGET, drawn)) is not None]
    cost = curve.cost_of(EFFECT_TARGET)
    title = f"{curve.target} by {curve.label}"
    never = {} if cost is not None else {"reason": f"the effect reaches {float(curve.effects.mean(1).max()):.2f}"}
    found = [
        Finding(f"effect of {title} at a cost of {COST_TARGET}", curve.effect_at(COST_TARGET),
                ci95=middle([curve.effect_at(COST_TARGET, drawn) for drawn in draws]), n=count, better="higher",
                target=EFFECT_TARGET, seeds=(seed,), detail=about),
        Finding(f"cost of {title} at an effect of {EFFECT_TARGET}", cost,
                ci95=middle(costs) if cost is not None and len(costs) > 0.95 * _RESAMPLES else None, n=count,
                better="lower", target=COST_TARGET, seeds=(seed,), detail={"kind": curve.label, **never}),
    ]  # fmt: skip
    for name in curve.compared:
        wanted = {"better": "higher", "target": KEPT_TARGET} if name == kept else {}
        value = curve.compared_at(name, COST_TARGET)
        found.append(Finding(f"{name}, {title} at that cost", value, n=count, **wanted))  # type: ignore[arg-type]
    return found


def _seen(generate: Generate, read: Read, scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Images of points, and attributes, the mean over each point's images, shape `(b, a)`."""
    with torch.no_grad():
        images = generate(scores)
        said = read(images.flatten(0, 1)).double().cpu()
    if images.ndim != 5 or len(images) != len(scores) or said.shape != (images.shape[0] * images.shape[1], width):
        raise UsageError(
            f"Images {tuple(images.shape)} and readings {tuple(said.shape)} do not fit {len(scores)} points and "
            f"{width} attributes.",
            cure="Generate (b, m, 3, height, width), and read one row of attributes per image.",
        )
    return images, said.reshape(*images.shape[:2], width).mean(1)


def _crossing(rising: Tensor, values: Tensor, limit: float) -> tuple[float, bool]:
    """The value where a curve first reaches a limit, between two points by the straight line; and whether it does."""
    for place in range(1, len(rising)):
        low, high = float(rising[place - 1]), float(rising[place])
        if high >= limit > low:
            share = (limit - low) / (high - low)
            return float(values[place - 1] + share * (values[place] - values[place - 1])), True
    return float(values[-1]), False


def calibrated(
    generate: Generate,
    read: Read,
    points: Tensor,
    training: Tensor,
    directions: Sequence[Direction],
    target: str,
    *,
    ranges: Sequence[float],
    strength: float = 2.0,
    unit: Unit = "reach",
    rounds: int = 2,
    progress: Progress = QUIET,
) -> Direction:
    """Correct a direction by the others, until its edit leaves other attributes where they were on average."""
    # `read` gives attributes in the order of `directions`. `points`: some dozen to try edits on; audit the result on
    # others. `training`: scores of the training models.
    names = [each.name for each in directions]
    if target not in names:
        raise NameNotFound(f"There is no direction {target!r} among {names}.", cure="Name one of them.")
    if len(directions) < 2 or len(ranges) != len(directions) or rounds < 1:
        raise UsageError(
            f"{len(directions)} directions, {len(ranges)} ranges and {rounds} rounds correct nothing.",
            cure="Give a direction and a range for every attribute that is read, and at least one round.",
        )
    index = names.index(target)
    others = [place for place in range(len(names)) if place != index]
    scale = torch.tensor(ranges, dtype=torch.float64)
    steps = torch.stack([directions[place].step(1.0) for place in others])
    with progress.task(f"calibrate {target}", len(others) + rounds + 1, unit="trials") as task:
        before = _means(generate, read, points, scale)
        task.update()

        def change(step: Tensor) -> Tensor:
            moved = (points.double() + step.to(points.device)).to(points.dtype)
            found = (_means(generate, read, moved, scale) - before)[others]
            task.update()
            return found

        responses = torch.stack([change(step) for step in steps])
        edit = directions[index].step(strength, unit)
        for _ in range(rounds):
            taken_back = torch.linalg.lstsq(responses.T, change(edit)[:, None], driver="gelsd").solution[:, 0]
            edit = edit - taken_back @ steps
    kind = directions[index].kind
    return direction_of(training, edit, name=target, kind="encoder" if kind == "reference" else kind)


def _means(generate: Generate, read: Read, points: Tensor, scale: Tensor) -> Tensor:
    """Mean attributes of the points' images, as shares of their ranges."""
    return _seen(generate, read, points, len(scale))[1].mean(0) / scale


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


def agreement(read: Callable[[Tensor], Tensor], name: str) -> tuple[str, Compare]:
    """Whether a classifier of images, such as of the prompt's words, gives both the same class: 1 or 0."""
    return f"{name} kept", lambda edited, originals: (read(edited) == read(originals)).double()


def alignment(score: Callable[[Tensor], Tensor], name: str) -> tuple[str, Compare]:
    """How well edited images follow the words of the edit: `lambda images: clip.alignment(images, prompts)`."""
    return name, lambda edited, originals: score(edited)
