"""Findings that attacks have in common: steps until half of the runs succeeded, and runs that could not be made."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from netweight.metrics.survival import Survival
from netweight.report.finding import Finding

__all__ = ["failures_finding", "steps_finding"]


def steps_finding(
    title: str,
    curve: Survival | None,
    *,
    base: Survival | None,
    why_none: str,
    seeds: Sequence[int],
    detail: Mapping[str, Any],
) -> Finding:
    """Return the median steps of an attack, with the interval that its curve has.

    Args:
        title: The finding's name.
        curve: Of runs that count; None if there is none.
        base: Of the model that it is compared with; None leaves the baseline out.
        why_none: What is said if there is no curve.
        seeds: Of the runs.
        detail: What else is to be known; a note on the median is added.
    """
    if curve is None:
        return Finding(title, None, unit="steps", detail={"reason": why_none})
    return Finding(
        title,
        curve.median,
        ci95=(curve.median_low, curve.median_high),
        n=curve.n,
        unit="steps",
        better="higher",
        baseline=None if base is None else base.median,
        seeds=tuple(seeds),
        detail={
            **detail,
            "longest run": curve.last,
            "note": "the median, as far as looks resolve it; infinite if fewer than half of the runs succeeded",
        },
    )


def failures_finding(title: str, failures: Sequence[tuple[str, str, str]]) -> list[Finding]:
    """Return a finding that fails if there are failures; none if there are not.

    Args:
        title: The finding's name.
        failures: Of each: the model, what was done to it, and the reason.
    """
    if not failures:
        return []
    reasons = [f"{subject}, {what}: {reason}" for subject, what, reason in failures]
    return [Finding(title, len(reasons), better="lower", target=0, detail={"reasons": reasons})]
