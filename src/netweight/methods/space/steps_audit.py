"""The audits of a space made step by step: of its fit, of points drawn or moved, and of adapters written.

Importing this module declares the treatments `space-fit`, `space-sample`, `space-edit` and `space-export` and registers
their audits, which look at weights. Each of the last three also names `images`, which no recipe runs: what points look
like is read from pictures by readers that users bring, see `methods.space.audit`, so reports show it as left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from netweight.core.progress import Progress
from netweight.generate.adapter import Adapter, combined
from netweight.methods.space.accuracy import Accuracy
from netweight.methods.space.audit import direction_findings
from netweight.methods.space.directions import Direction
from netweight.methods.space.diversity import neighbor_findings
from netweight.report.audit import register_audit, register_treatment
from netweight.report.finding import Finding

__all__ = [
    "EDIT", "EXPORT", "FIT", "SAMPLE", "WrittenSubject", "drawn_points", "fitted_space", "moved_points",
    "written_adapters",
]  # fmt: skip

FIT, SAMPLE, EDIT, EXPORT = "space-fit", "space-sample", "space-edit", "space-export"
"""The treatments."""
LEAST_AUDITED = 5
"""Points that are needed to say how they lie among models."""
EXACT = 1e-4
"""Largest relative error of an adapter that was written at its own rank: that of fp32."""

register_treatment(FIT, audits=("fit",))
register_treatment(SAMPLE, audits=("neighbors", "images"))
register_treatment(EDIT, audits=("directions", "images"))
register_treatment(EXPORT, audits=("files", "images"))


@final
@dataclass(frozen=True, eq=False)
class WrittenSubject:
    """Adapters that were written, beside the points that they are of.

    Attributes:
        points: Name → the point as an adapter, exactly.
        written: Name → what its file holds.
        rank: That they were cut to; None for their own.
    """

    points: Mapping[str, Adapter]
    written: Mapping[str, Adapter]
    rank: int | None = None


@register_audit(FIT, "fit")
def fitted_space(subject: Accuracy, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how much of the adapters' variance the components hold, of seen adapters and of others.

    Args:
        subject: What the fit knows of itself.
        config: Not looked at.
        seed: Not used: nothing is drawn.
        progress: Not used.
    """
    found = [Finding("captured share of variance", subject.captured, better="higher", detail={"by": subject.solver})]
    if subject.halves is not None:
        halves = subject.halves
        found.append(
            Finding("the same of adapters that a fit to half of them had not seen", halves.held_out, better="higher",
                    baseline=halves.fitted, detail={"components": halves.components}),
        )  # fmt: skip
    return found


@register_audit(SAMPLE, "neighbors")
def drawn_points(subject: tuple[Tensor, Tensor], config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return whether drawn points lie where models lie without being copies of them.

    Args:
        subject: Scores of the points and of the models, each with a row per point. Shapes `(b, k)` and `(n, k)`.
        config: Not looked at.
        seed: Not used.
        progress: Not used.
    """
    points, models = subject
    if min(len(points), len(models)) < LEAST_AUDITED:
        why = f"{len(points)} points and {len(models)} models are fewer than {LEAST_AUDITED}"
        return [Finding("distance to the nearest training model, relative", None, detail={"reason": why})]
    return neighbor_findings(points, models)


@register_audit(EDIT, "directions")
def moved_points(subject: Sequence[Direction], config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Return how well the directions of moves tell held-out models apart; see `methods.space.audit`.

    Args:
        subject: The directions.
        config: Not looked at.
        seed: Not used.
        progress: Where progress is shown.
    """
    return direction_findings(subject, config, seed=seed, progress=progress)


@register_audit(EXPORT, "files")
def written_adapters(subject: WrittenSubject, config: object, *, seed: int, progress: Progress) -> list[Finding]:
    """Read adapters back and return how far they are from the points that they were written of.

    Args:
        subject: Points and what was read from their files.
        config: Not looked at.
        seed: Not used.
        progress: Not used.

    Returns:
        The largest relative error: norm of the difference over the norm of the whole change. Where ranks were not cut
        it is to be at most `EXACT`.
    """
    errors = {name: _error(point, subject.written[name]) for name, point in subject.points.items()}
    worst = max(errors, key=lambda name: errors[name])
    return [
        Finding("largest relative error of a written adapter", errors[worst], n=len(errors), better="lower",
                target=EXACT if subject.rank is None else None, detail={"point": worst, "rank": subject.rank}),
    ]  # fmt: skip


def _error(point: Adapter, written: Adapter) -> float:
    """Norm of the difference of two adapters' changes over that of the first; in fp64, from the factors."""
    return combined([point, written], [1.0, -1.0]).norm() / (point.norm() or 1.0)
