"""What an edit changes and what it costs, strength by strength: effect on the target against everything else.

Two kinds of edits compared at one strength prove nothing, for the stronger one does more of both. The curve tells the
effect at the same cost, and the cost of the same effect.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.core.seeds import torch_generator
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.comparisons import Compare
from netweight.methods.space.directions import Direction, Unit
from netweight.methods.space.edits import Move, edit
from netweight.report.finding import Finding

__all__ = ["COST_TARGET", "EFFECT_TARGET", "EditCurve", "Paint", "Read", "curve_findings", "edit_curve"]

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
