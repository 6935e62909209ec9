"""Directions corrected by what they do to images: whatever else an edit changed on average is taken back.

Labels say what goes with an attribute in weights; images say what an edit really changes, and the two differ: networks
are not linear, and labels are noisy. A few painted points tell the difference.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from netweight.core.progress import QUIET, Progress
from netweight.errors import NameNotFound, UsageError
from netweight.methods.space.directions import Direction, Unit, direction_of
from netweight.methods.space.edit_curves import Paint, Read

__all__ = ["calibrated"]


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
