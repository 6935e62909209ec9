"""Edits of points: steps along directions, summed, and when in the making of an image they begin to hold.

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
from netweight.methods.space.directions import Direction, Unit, direction_of
from netweight.metrics.images import lpips, ssim
from netweight.report.finding import Finding

if TYPE_CHECKING:
    from netweight.metrics.copies import Descriptor
    from netweight.metrics.images import Features


@final
@dataclass(frozen=True, eq=False)
class Move:
    """A step along a direction.

    Attributes:
        direction: Where to.
        strength: How far; negative goes back.
        unit: What `strength` counts, see `Direction.step`.
    """

    direction: Direction
    strength: float
    unit: Unit = "deviations"


def edit(scores: Tensor, moves: Sequence[Move]) -> Tensor:
    """Return points after all moves.

    Args:
        scores: Shape `(k,)` or `(b, k)`.
        moves: At least one, of directions of the same space.

    Returns:
        Of the same shape, dtype and device.

    Raises:
        UsageError: There is no move, a direction has another number of components, or a strength is not finite.
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
    """When an edit begins to hold: the noisy first steps are made with the weights before it, later ones after it.

    An image's layout is settled early, so the later an edit begins the more of the image stays, and the less changes.

    Attributes:
        until: The largest timestep that is made with edited weights. The paper takes 700 to 1,000 of 1,000 for edits of
            the whole face and 400 to 700 for fine ones.

    Raises:
        UsageError: `until` is negative.

    Source: weights2weights, "delayed injection".
    """

    until: float

    def __post_init__(self) -> None:
        """Refuse what is no timestep."""
        if not self.until >= 0:
            raise UsageError(f"An edit cannot begin to hold at timestep {self.until}.", cure="Give 0 to 1,000.")

    def edited(self, timestep: float | Tensor) -> bool:
        """Whether a step at this timestep (the noisiest come first and are largest) is made with edited weights."""
        return float(timestep) <= self.until


EFFECT_TARGET = 0.6
"""Least effect, as a share of the attribute's range, at no more than `COST_TARGET`."""
COST_TARGET = 0.05
"""Most mean change of the other attributes, as a share of their ranges."""
KEPT_TARGET = 0.99
"""Least share of images that keep their prompt."""

Paint: TypeAlias = Callable[[Tensor], Tensor]
"""From points `(b, k)` to images `(b, m, 3, height, width)`, from the same noise for every point."""
Read: TypeAlias = Callable[[Tensor], Tensor]
"""From images `(n, 3, height, width)` to attributes `(n, a)`."""

_RESAMPLES = 500


@final
@dataclass(frozen=True, eq=False)
class EditCurve:
    """An edit of b points at s strengths.

    Attributes:
        target: The attribute that is edited.
        strengths: Rising from 0, where nothing is changed, shape `(s,)`.
        unit: What strengths count.
        effects: Change of the target, as a share of its range, in the direction of the edit; shape `(s, b)`.
        costs: Mean change of the other attributes, up or down, as shares of their ranges; shape `(s, b)`.
        compared: Name → mean over a point's images, shape `(s, b)`.
        label: What reports call the edit.
    """

    target: str
    strengths: Tensor
    unit: Unit
    effects: Tensor
    costs: Tensor
    compared: Mapping[str, Tensor] = field(default_factory=dict)
    label: str = ""

    def effect_at(self, cost: float, chosen: Tensor | None = None) -> float:
        """Return the effect at the strength where the mean cost first reaches a limit; at the last if it never does.

        Args:
            cost: The limit.
            chosen: Numbers of the points to look at; all by default.
        """
        effects, costs = self._means(chosen)
        return _crossing(costs, effects, cost)[0]

    def cost_of(self, effect: float, chosen: Tensor | None = None) -> float | None:
        """Return the cost at the strength where the mean effect first reaches a value; None if it never does.

        Args:
            effect: In the unit of the effects.
            chosen: Rows of the points to take, int64; None for all.
        """
        effects, costs = self._means(chosen)
        found, reached = _crossing(effects, costs, effect)
        return found if reached else None

    def compared_at(self, name: str, cost: float) -> float:
        """Return a comparison's mean at the strength where the mean cost first reaches a limit.

        Args:
            name: Of the comparison.
            cost: The limit.
        """
        return _crossing(self._means(None)[1], self.compared[name].mean(1), cost)[0]

    def _means(self, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        rows = slice(None) if chosen is None else chosen
        return self.effects[:, rows].mean(1), self.costs[:, rows].mean(1)


def edit_curve(
    paint: Paint,
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
    """Edit points at several strengths and read what became of their images.

    Args:
        paint: Makes images of points.
        read: Reads attributes of images.
        scores: Points, shape `(b, k)`.
        direction: Of the edit.
        names: Of the attributes that `read` returns.
        ranges: Of each attribute, largest less least value.
        strengths: Other than 0, all of one sign and growing; 0 is put in front.
        target: The attribute; the direction's name by default.
        unit: What strengths count: 1 "reach" is the paper's strength.
        compare: Name → comparison of edited images with the originals, see `comparisons`.
        label: What reports call it; by default the direction's kind.
        progress: Told of every strength.

    Raises:
        NameNotFound: The target is none of the attributes.
        UsageError: Numbers do not fit, or strengths do not grow.
    """
    target = target or direction.name
    if target not in names:
        raise NameNotFound(f"{target!r} is none of the attributes {list(names)}.", cure="Say `target`.")
    places = [0.0, *strengths]
    sign = 1.0 if places[-1] > 0 else -1.0
    if len(places) < 2 or any(sign * b <= sign * a for a, b in itertools.pairwise(places)):
        raise UsageError(f"The strengths {list(strengths)} do not grow from 0.", cure="Give such as 0.25, 0.5, 1.")
    scale = torch.tensor(ranges, dtype=torch.float64)
    originals, before = _look(paint, read, scores, len(names))
    index, others = list(names).index(target), [name for name in names if name != target]
    rest = [list(names).index(name) for name in others]
    effects, costs = [], []
    compared: dict[str, list[Tensor]] = {name: [] for name in compare or {}}
    with progress.task(f"edit {target}", len(places), unit="strengths") as task:
        for strength in places:
            moved = edit(scores, [Move(direction, strength, unit)]) if strength else scores
            images, after = _look(paint, read, moved, len(names)) if strength else (originals, before)
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
    """Return the effect at the same cost, the cost of the same effect, and what is left of the images there.

    Args:
        curve: The curve.
        seed: Of the bootstrap over points.
        kept: The comparison that says whether the prompt was kept, which has a target.

    Returns:
        Shares of the attributes' ranges, with intervals over points.
    """
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
                ci95=_middle([curve.effect_at(COST_TARGET, drawn) for drawn in draws]), n=count, better="higher",
                target=EFFECT_TARGET, seeds=(seed,), detail=about),
        Finding(f"cost of {title} at an effect of {EFFECT_TARGET}", cost,
                ci95=_middle(costs) if cost is not None and len(costs) > 0.95 * _RESAMPLES else None, n=count,
                better="lower", target=COST_TARGET, seeds=(seed,), detail={"kind": curve.label, **never}),
    ]  # fmt: skip
    for name in curve.compared:
        wanted = {"better": "higher", "target": KEPT_TARGET} if name == kept else {}
        value = curve.compared_at(name, COST_TARGET)
        found.append(Finding(f"{name}, {title} at that cost", value, n=count, **wanted))  # type: ignore[arg-type]
    return found


def _look(paint: Paint, read: Read, scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Images of points, and attributes, the mean over each point's images, shape `(b, a)`."""
    with torch.no_grad():
        images = paint(scores)
        said = read(images.flatten(0, 1)).double().cpu()
    if images.ndim != 5 or len(images) != len(scores) or said.shape != (images.shape[0] * images.shape[1], width):
        raise UsageError(
            f"Images {tuple(images.shape)} and readings {tuple(said.shape)} do not fit {len(scores)} points and "
            f"{width} attributes.",
            cure="Paint (b, m, 3, height, width), and read one row of attributes per image.",
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


def _middle(values: Sequence[float]) -> tuple[float, float]:
    ends = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(ends[0]), float(ends[1])


Compare: TypeAlias = Callable[[Tensor, Tensor], Tensor]
"""From edited images and originals, `(n, 3, height, width)` each, to one number per pair, shape `(n,)`."""


def identity(embed: Descriptor) -> tuple[str, Compare]:
    """Return the cosine of embeddings before and after: the identity score.

    Args:
        embed: From images to vectors: a face recognition network that the user brings, such as a TorchScript file by
            path and digest (`metrics.copies.TorchScriptDescriptor`). Its name goes into that of the score.
    """

    def compare(edited: Tensor, originals: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.nn.functional.cosine_similarity(embed(edited).double(), embed(originals).double())

    return f"identity by {embed.name}", compare


def perceptual_distance(
    backbone: str | os.PathLike[str] | Features | None = None, *, heads: Path | None = None
) -> tuple[str, Compare]:
    """Return LPIPS with a backbone; without one, the structural dissimilarity, named as the stand-in that it is.

    Args:
        backbone: See `metrics.images.lpips`.
        heads: See `metrics.images.lpips`.
    """
    if backbone is None:
        return "1 − SSIM (stand-in for LPIPS)", lambda edited, originals: 1 - ssim(edited, originals)
    return "LPIPS", lambda edited, originals: lpips(edited, originals, backbone=backbone, heads=heads)


def agreement(read: Callable[[Tensor], Tensor], name: str) -> tuple[str, Compare]:
    """Return whether a reader says the same of both: 1 or 0.

    Args:
        read: From images to whole numbers, shape `(n,)`, such as which of the prompt's words is seen.
        name: Of what is to stay.
    """
    return f"{name} kept", lambda edited, originals: (read(edited) == read(originals)).double()


def alignment(score: Callable[[Tensor], Tensor], name: str) -> tuple[str, Compare]:
    """Return how well edited images follow the words of the edit, by CLIP or by a stand-in whose name says so.

    Args:
        score: From images to numbers, shape `(n,)`, such as `lambda images: clip.alignment(images, prompts)`.
        name: Of the score.
    """
    return name, lambda edited, originals: score(edited)


def calibrated(
    paint: Paint,
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
    """Correct a direction by the others, until its edit leaves other attributes where they were on average.

    Every other direction is tried alone, one standard deviation far, to see what it changes. Then, in each round, the
    edit is tried at its working strength, and what it changed beside the target is taken back by the combination of
    the others that does so best.

    Args:
        paint: Makes images of points.
        read: Reads attributes of images, in the order of `directions`.
        points: Points to try edits on, shape `(b, k)`; some dozen. Audit the result on others.
        training: Scores of the training models, shape `(n, k)`.
        directions: One for each attribute that is read, named after it.
        target: The one that is corrected.
        ranges: Of each attribute, largest less least value.
        strength: The working strength.
        unit: What it counts.
        rounds: How often the edit is tried and corrected.
        progress: Told of every trial.

    Returns:
        The corrected direction. Its length, and so what a strength means, is measured anew; its findings are empty.

    Raises:
        NameNotFound: No direction is named after the target.
        UsageError: Readings and directions differ in number, or there is no other direction.
    """
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
        before = _means(paint, read, points, scale)
        task.update()

        def change(step: Tensor) -> Tensor:
            moved = (points.double() + step.to(points.device)).to(points.dtype)
            found = (_means(paint, read, moved, scale) - before)[others]
            task.update()
            return found

        responses = torch.stack([change(step) for step in steps])
        edit = directions[index].step(strength, unit)
        for _ in range(rounds):
            taken_back = torch.linalg.lstsq(responses.T, change(edit)[:, None], driver="gelsd").solution[:, 0]
            edit = edit - taken_back @ steps
    kind = directions[index].kind
    return direction_of(training, edit, name=target, kind="encoder" if kind == "reference" else kind)


def _means(paint: Paint, read: Read, points: Tensor, scale: Tensor) -> Tensor:
    """Mean attributes of the points' images, as shares of their ranges."""
    with torch.no_grad():
        said = read(paint(points).flatten(0, 1)).double().cpu()
    if said.shape[1:] != scale.shape:
        raise UsageError(
            f"Readings of shape {tuple(said.shape)} came with {len(scale)} directions.",
            cure="Give a direction for every attribute that is read.",
        )
    return (said / scale).mean(0)
